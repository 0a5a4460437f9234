"""What one pass of a model gives to the losses: its predictions, and its intermediate values where losses
compare them.

Letters: B rows a batch, S tokens a row, n predictions, H hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.fused import head_loss
from attar.distillation.learner import student_of
from attar.distillation.objectives.chunked import ChunkLoss, mean_of_chunks
from attar.models.anatomy.qkv import QKV, recording_qkv
from attar.models.head import Head, product_type, without_logits
from attar.models.inputs import model_inputs


@dataclass(frozen=True)
class Intermediates:
    """The intermediate values of a model that a pass records.

    Attributes:
        states: hidden states of every layer.
        attentions: attention weights of every layer; the model computes them by its eager attention.
        qkv: queries, keys and values of every layer.
        tokens: which positions are compared: all (that are real), predicted, first.
    """

    states: bool = False
    attentions: bool = False
    qkv: bool = False
    tokens: str = "all"

    @classmethod
    def all_of(cls, parts: Iterable[Intermediates]) -> Intermediates:
        """What all of them ask for together; all compare the same positions."""
        requested = list(parts)
        return cls(
            states=any(part.states for part in requested),
            attentions=any(part.attentions for part in requested),
            qkv=any(part.qkv for part in requested),
            tokens=requested[0].tokens if requested else "all",
        )

    def compared(self, batch: Examples) -> Tensor:
        """bool (B, S)."""
        if self.tokens == "predicted":
            return batch.predicted
        if self.tokens == "first":
            return batch.mask & (batch.mask.cumsum(1) == 1)
        return batch.mask


NOTHING = Intermediates()


@dataclass(frozen=True)
class ModelOutputs:
    """A pass over a batch.

    Attributes:
        predictions: (n, H) the states that the head reads, or without a head (n, V) logits.
        head: makes the logits; None: the predictions are logits.
        mask: bool (B, S), True where there is a token.
        compared: bool (B, S), where intermediates are compared.
        states: L + 1 of (B, S, H): the embeddings, and what each block puts out; empty unless asked for.
        attentions: L of (B, heads, S, S); empty unless asked for.
        qkv: of L layers; empty unless asked for.
        seed: of draws among its tokens; depends on the batch alone.
    """

    predictions: Tensor
    head: Head | None
    mask: Tensor
    compared: Tensor
    states: tuple[Tensor, ...] = ()
    attentions: tuple[Tensor, ...] = ()
    qkv: tuple[QKV, ...] = ()
    seed: int = 0

    @property
    def depth(self) -> int:
        """L, where the states are there."""
        return len(self.states) - 1

    def logits(self, part: slice = slice(None)) -> Tensor:
        """(c, V) of some predictions, in their own float type."""
        chosen = self.predictions[part]
        return chosen if self.head is None else self.head.logits(chosen)

    def mean(self, chunk_loss: ChunkLoss, *, unchunked: bool = False) -> Tensor:
        """The mean of a loss over the predictions, differentiable; with a head the logits never exist at
        once.

        Args:
            unchunked: the loss takes all predictions in one chunk; they are logits then.
        """
        if self.head is not None:
            return head_loss(self.predictions, self.head, chunk_loss)
        return mean_of_chunks(chunk_loss, self.predictions, len(self.predictions) if unchunked else None)


def run_model(
    model: Any, batch: Examples, intermediates: Intermediates = NOTHING, head: Head | None = None
) -> ModelOutputs:
    """Run a model over a batch.

    Args:
        model: of transformers, or what wraps it (peft, DDP, :class:`attar.distillation.learner.Learner`).
        head: of the model (:func:`attar.models.head.head_of`): then the pass makes no logits.
    """
    batch = batch.trimmed()
    arguments = model_inputs(student_of(model), batch)
    if intermediates.states:
        arguments["output_hidden_states"] = True
    if intermediates.attentions:
        arguments["output_attentions"] = True
    with ExitStack() as recorders:
        qkv = recorders.enter_context(recording_qkv(student_of(model))) if intermediates.qkv else []
        head_inputs = [] if head is None else recorders.enter_context(without_logits(model))
        outputs = model(**arguments)
    if head is None:
        predictions = batch.at_predictions(outputs.logits)
    else:
        predictions, head = batch.at_predictions(head_inputs[-1]), head.of(model)
        if not torch.is_grad_enabled():  # products as the pass would have made them, here and now
            dtype = product_type(predictions)
            predictions, head = predictions.to(dtype), head.to(dtype)
    return ModelOutputs(
        predictions,
        head,
        batch.mask,
        intermediates.compared(batch),
        tuple(outputs.hidden_states or ()) if intermediates.states else (),
        tuple(outputs.attentions or ()) if intermediates.attentions else (),
        tuple(qkv),
        0 if intermediates == NOTHING else batch.seed,
    )
