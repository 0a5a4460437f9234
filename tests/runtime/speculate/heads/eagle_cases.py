"""Heads of EAGLE with random weights, for tests of drafting."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from attar.models.draft_heads.decoder_layer import DraftLayerShape
from attar.models.draft_heads.eagle3_module import Eagle3Config, Eagle3Head
from attar.models.draft_heads.eagle_module import EagleConfig, EagleHead
from attar.models.draft_heads.vocabulary import set_vocabulary
from attar.runtime.speculate.heads.eagle_proposer import EagleDrafter
from attar.runtime.speculate.heads.own_tensors import OwnTensors
from tests import tiny_models

HIDDEN = 24
SHAPE = DraftLayerShape(depth=1, heads=6, kv_heads=2, head_dim=6, intermediate=20, head_norms=False)


def random_head(kind, vocabulary=40, seed=0, **changes):
    common = {"hidden": HIDDEN, "vocabulary": vocabulary, "drafts": 4, "shape": SHAPE}
    if kind == "eagle":
        head = EagleHead(EagleConfig(layers=(2,), **{**common, **changes}))
    else:
        head = Eagle3Head(Eagle3Config(layers=(0, 1, 2), **{**common, **changes}))
        if size := changes.get("draft_vocabulary"):
            set_vocabulary(head, torch.arange(size) * 2 + 1)
    return tiny_models.randomize(head, seed).eval().requires_grad_(False)


def drafter(head, seed=1, spread=1.0):
    """With a target of random embedding and head; logits are ``spread`` times those of unit weights."""
    generator = torch.Generator().manual_seed(seed)
    embedding, matrix = torch.randn(2, head.config.vocabulary, HIDDEN, generator=generator)
    matrix = spread * matrix / HIDDEN**0.5
    dtype = next(head.parameters()).dtype
    return EagleDrafter(head, OwnTensors(embedding, lambda x: F.linear(x, matrix.to(dtype))))


def context(head, length, seed=2):
    """Tokens of a sequence, and the target's states (length - 1, m, H) of all but the last."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(head.config.vocabulary, (length,), generator=generator).tolist()
    return tokens, torch.randn(length - 1, len(head.config.layers), HIDDEN, generator=generator)
