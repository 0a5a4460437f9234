"""Queries, keys and values of every layer: what the three projections put out during a run of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Projection


class QKV(NamedTuple):
    """Of one layer, each (B, S, heads * head_dim), before position embeddings and norms of heads."""

    q: Tensor
    k: Tensor
    v: Tensor


@contextmanager
def recording_qkv(model: Any) -> Iterator[list[QKV]]:
    """Within it, the projections of a run are kept; the list gets one item a layer when it ends.

    Args:
        model: of transformers, not wrapped; run once.

    Raises:
        ModelError: its projections were not found.
    """
    blocks = discover(model).blocks
    parts = [(block.attention.q, block.attention.k, block.attention.v) for block in blocks]
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            outputs[name] = output

        return hook

    names = dict.fromkeys(part.name for layer in parts for part in layer)
    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    layers = list[QKV]()
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()
    layers.extend(QKV(*(_columns(part, outputs[part.name]) for part in layer)) for layer in parts)


def _columns(part: Projection, output: Tensor) -> Tensor:
    """The outputs of one projection among those of its module."""
    return output[..., part.stored_rows()] if part.fused else output
