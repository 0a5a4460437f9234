"""Medusa-2: the model learns together with its heads (Cai et al. 2024, arXiv 2401.10774, section 2.2.2).

    L = L_model + w s(t) L_heads              L_heads: Medusa-1's (medusa.py), through the model's states
    L_model   self   KL(p_0 || p) of the next token: the model stays what it was, p_0 (section 2.3.2)
              text   CE(p, next token)
    s(t) = sin(pi t / 2)                      t from 0 to 1 along the steps that they learn together

The heads' learning rate is that of the settings; the model's is a part of it, 1/4 as in the paper. Held-out
losses have s = 1, so that those of a run can be compared.

Letters: B rows, S tokens a row, H hidden size, w weight of the heads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.fused import head_loss
from attar.distillation.head_settings import MedusaSettings
from attar.distillation.heads import medusa_loss as medusa
from attar.distillation.heads.target_pass import TargetPass
from attar.distillation.objectives import forward_kl, hard
from attar.distillation.objectives.chunked import blockwise
from attar.models.draft_heads.medusa_module import MedusaHeads
from attar.models.head import Head, without_logits
from attar.models.inputs import model_inputs

FinalStates = Callable[[Examples], Tensor]
HEADS_WEIGHT = 0.2  # w
MODEL_RATE = 0.25  # learning rate of the model, by that of the heads
ROUNDING = 1e-6  # of a sum of parts of a step


class JointLearner(nn.Module):  # type: ignore[misc]
    """A model and its heads; the forward pass is their loss (``HeadLearner``).

    Args:
        base: of transformers, or with adapters over it; what of it is trained has ``requires_grad``.
        own: the model's own head.
        steps: that they learn together.
        original: final states (B, S, H) of the model before its first step, and its head; None with base_loss
            text.
        passes: of this process in a step.
    """

    def __init__(
        self,
        base: Any,
        heads: MedusaHeads,
        target_head: Head,
        options: MedusaSettings,
        steps: int,
        original: tuple[FinalStates, Head] | None,
        passes: int = 1,
    ) -> None:
        super().__init__()
        self.base, self.heads, self.target_head, self.options = base, heads, target_head, options
        self.steps, self.passes, self.original = steps, passes, original
        # where a killed run is, with any number of processes
        self.register_buffer("step", torch.zeros((), dtype=torch.float64))

    def forward(self, batch: Examples) -> Tensor:
        """The loss of a batch."""
        batch, weight = batch.trimmed(), HEADS_WEIGHT
        if self.training:
            weight *= schedule(int(self.step + ROUNDING) / self.steps)
            self.step += 1 / self.passes
        final = final_states(self.base, batch)
        embedding = self.base.get_input_embeddings().weight
        target = TargetPass(batch, final[:, :, None], final, self.target_head, embedding)
        heads = medusa.loss(self.heads, target, self.options)
        return self._model_loss(batch, final) + weight * heads

    def _model_loss(self, batch: Examples, final: Tensor) -> Tensor:
        """The mean over the tokens that count."""
        if self.original is None:
            return text_loss(final, batch, self.target_head)
        where, (states, head) = batch.targets != PADDING, self.original
        with torch.no_grad():
            wanted = states(batch)[where]

        def divergence(z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            logits = head.logits(wanted[part].to(head.weight.dtype))
            return blockwise(forward_kl.loss_and_grad, z, logits, out=z)

        return head_loss(final[where], self.target_head, divergence)

    def output_weights(self) -> Iterator[Tensor]:
        """Matrices that make logits, which the optimizers treat as a head."""
        yield self.target_head.weight
        yield from self.heads.output_weights()

    def rate_scales(self) -> dict[int, float]:
        """Learning rates by those of the settings, of parameters by ``id``."""
        return {id(parameter): MODEL_RATE for parameter in self.base.parameters()}

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Compute the model's activations again in the backward pass."""
        self.base.gradient_checkpointing_enable(**options)


def text_loss(final: Tensor, batch: Examples, target_head: Head) -> Tensor:
    """The mean cross-entropy of the next tokens, of final states (B, S, H)."""
    where = batch.targets != PADDING
    labels = batch.targets[where]
    return head_loss(
        final[where], target_head, lambda z, part: blockwise(hard.loss_and_grad, z, labels[part], out=z)
    )


def schedule(t: float) -> float:
    """s(t)."""
    return math.sin(math.pi / 2 * min(t, 1.0))


def final_states(model: Any, batch: Examples) -> Tensor:
    """What the model's head reads (B, S, H), differentiable."""
    with without_logits(model) as states:
        model(**model_inputs(model, batch))
    return states[-1]


def original_of(base: Any, target_head: Head, adapted: bool) -> tuple[FinalStates, Head]:
    """The model as it is now: with its adapters off, or a copy."""
    if adapted:

        def without_adapters(batch: Examples) -> Tensor:
            with base.disable_adapter():
                return final_states(base, batch)

        return without_adapters, target_head
    frozen = copy.deepcopy(base).requires_grad_(False).eval()
    head = frozen.get_output_embeddings()
    return lambda batch: final_states(frozen, batch), Head(
        head.weight, head.bias, target_head.scale, target_head.softcap
    )
