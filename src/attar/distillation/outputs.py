"""What one pass of a model gives to the losses: its predictions, and its insides where they are compared.

Letters: B rows a batch, S tokens a row, n predictions, H hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.fused import head_loss
from attar.distillation.objectives.chunked import ChunkLoss, mean_of_chunks
from attar.models.head import Head, without_logits


@dataclass(frozen=True)
class Insides:
    """What of a model's inside is asked for.

    Attributes:
        states: hidden states of every layer.
        attentions: attention weights of every layer; the model computes them by its eager attention.
    """

    states: bool = False
    attentions: bool = False


NOTHING = Insides()


@dataclass(frozen=True)
class ModelOutputs:
    """A pass over a batch.

    Attributes:
        predictions: (n, H) the states that the head reads, or without a head (n, V) logits.
        head: makes the logits; None: the predictions are logits.
        mask: bool (B, S), True where there is a token.
        states: L + 1 of (B, S, H): the embeddings, and what each block puts out; empty unless asked for.
        attentions: L of (B, heads, S, S); empty unless asked for.
    """

    predictions: Tensor
    head: Head | None
    mask: Tensor
    states: tuple[Tensor, ...] = ()
    attentions: tuple[Tensor, ...] = ()

    def logits(self, part: slice = slice(None)) -> Tensor:
        """(c, V) of some predictions, in their own float type."""
        chosen = self.predictions[part]
        if self.head is None:
            return chosen
        W, b = self.head.weight.to(chosen.dtype), self.head.bias
        bias = None if b is None else b.to(chosen.dtype)
        return Head(W, bias, self.head.scale, self.head.softcap).logits(chosen)

    def mean(self, chunk_loss: ChunkLoss) -> Tensor:
        """The mean of a loss over the predictions, differentiable; with a head the logits never exist at
        once."""
        if self.head is not None:
            return head_loss(self.predictions, self.head, chunk_loss)
        return mean_of_chunks(chunk_loss, self.predictions)


def run_model(
    model: Any, batch: Examples, insides: Insides = NOTHING, head: Head | None = None
) -> ModelOutputs:
    """Run a model over a batch.

    Args:
        model: of transformers, or what wraps it (peft, DDP, :class:`attar.distillation.learner.Learner`).
        head: of the model (:func:`attar.models.head.head_of`): then the pass makes no logits.
    """
    asked: dict[str, Any] = {"input_ids": batch.inputs}
    if insides.states:
        asked["output_hidden_states"] = True
    if insides.attentions:
        asked["output_attentions"] = True
    mask = batch.mask
    if not bool(mask.all()):
        asked["attention_mask"] = mask.long()
    if head is None:
        outputs = model(**asked)
        predictions = outputs.logits[batch.predicted]
    else:
        with without_logits(model) as states:
            outputs = model(**asked)
        predictions = states[-1][batch.predicted]
    return ModelOutputs(
        predictions,
        head,
        mask,
        tuple(outputs.hidden_states) if insides.states else (),
        tuple(outputs.attentions) if insides.attentions else (),
    )
