"""What one pass of a model gives to the losses: its predictions, and its insides where they are compared.

Letters: B rows a batch, S tokens a row, n predictions, H hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.data.examples import Examples


@dataclass(frozen=True)
class Insides:
    """What of a model's inside is asked for.

    Attributes:
        states: hidden states of every layer.
        attentions: attention weights of every layer; the model computes them by its eager attention.
    """

    states: bool = False
    attentions: bool = False


@dataclass(frozen=True)
class ModelOutputs:
    """A pass over a batch.

    Attributes:
        logits: (n, V) of the predictions.
        mask: bool (B, S), True where there is a token.
        states: L + 1 of (B, S, H): the embeddings, and what each block puts out; empty unless asked for.
        attentions: L of (B, heads, S, S); empty unless asked for.
    """

    logits: Tensor
    mask: Tensor
    states: tuple[Tensor, ...] = ()
    attentions: tuple[Tensor, ...] = ()


def run_model(model: Any, batch: Examples, insides: Insides = Insides()) -> ModelOutputs:
    """Run a model over a batch.

    Args:
        model: of transformers, or what wraps it (peft, DDP, :class:`attar.distillation.learner.Learner`).
    """
    asked: dict[str, Any] = {"input_ids": batch.inputs}
    if insides.states:
        asked["output_hidden_states"] = True
    if insides.attentions:
        asked["output_attentions"] = True
    mask = batch.mask
    if not bool(mask.all()):
        asked["attention_mask"] = mask.long()
    given = model(**asked)
    logits = given.logits[batch.predicted]
    states = tuple(given.hidden_states) if insides.states else ()
    attentions = tuple(given.attentions) if insides.attentions else ()
    return ModelOutputs(logits, mask, states, attentions)
