"""Block drafters of tiny models with large random weights, so that every part of them matters."""

import torch

from attar.distillation.head_settings import BlockSettings, DSparkSettings
from attar.distillation.heads import block_loss as block
from attar.models.head import head_of


def options_of(kind, **changes):
    settings = {"dflash": BlockSettings, "dspark": DSparkSettings}[kind]
    return settings(**{"drafts": 3, "anchors": 5, "context_layers": 2, **changes})


def drafter_of(model, kind, *, chosen=None, seed=0, **changes):
    """A drafter of a model, random weights of about the size of their inputs."""
    drafter = block.make(model, head_of(model), options_of(kind, **changes), chosen)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name == "lm_head.weight":
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 * (3.0 if "markov" in name else 1.0))
            else:
                parameter.add_(0.3 * noise)
    return drafter
