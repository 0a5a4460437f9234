"""The residual stream: which modules read and write it, and whether it can be rotated.

A block that only adds to the residual stream, and reads it only through norms, does not depend on its basis:
with h -> h R in embeddings and writers, and R^T before the readers, the function stays, for a norm whose
weight is moved into its readers is the same in every orthonormal basis. LayerNorm subtracts the mean first,
and so asks for an R that leaves the vector of ones where it is. Found by probes
(:mod:`attar.models.anatomy.probe`), not by a table of families: a block's input and writers are reflected,
and everything must come out reflected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attar.errors import ModelError
from attar.models.anatomy.folding import norm_fold, norm_offset, v_fold
from attar.models.anatomy.parts import Block
from attar.models.anatomy.probe import BlockProbe, BlockResponse, OutputChange, alike
from attar.models.surgery.rebuild import named_config

__all__ = ["HeadValues", "NormRead", "Residual", "residual"]


@dataclass(frozen=True)
class NormRead:
    """A norm over the residual stream and the Linears that read it.

    Attributes:
        readers: Linears that read its output, and nothing else does.
        offset: what it adds to its weight.
    """

    name: str
    readers: tuple[str, ...]
    offset: float


@dataclass(frozen=True)
class HeadValues:
    """v and o of a block: the values of each head may be rotated on their way.

    Attributes:
        v: module name; ``v_rows`` are its stored rows, head after head.
        o: module name.
    """

    v: str
    v_rows: tuple[int, ...]
    o: str
    head_dim: int


@dataclass(frozen=True)
class Residual:
    """The readers and writers of a residual stream that can be rotated: h -> h R.

    Attributes:
        norms: the norms before the Linears that read it, the final norm last (its reader is the head).
        writers: Linears that add to it.
        embeddings: module names of the token embedding and of learned positions.
        values: one for each block whose heads' values can be rotated.
        centred: the norms subtract the mean, so that R must leave the vector of ones where it is.
        tied: the head's weight is the embedding's.
    """

    norms: tuple[NormRead, ...]
    writers: tuple[str, ...]
    embeddings: tuple[str, ...]
    values: tuple[HeadValues, ...]
    centred: bool
    tied: bool


def residual(model: Any) -> Residual:
    """How the residual stream can be rotated.

    Args:
        model: a transformers model, or a parsed config.json; weights are neither needed nor read.

    Raises:
        ModelError: it cannot: norms after the Linears, no head, or another module in between.
    """
    probe = BlockProbe(model if isinstance(model, Mapping) else named_config(model))
    anatomy = probe.anatomy
    if anatomy.head is None or anatomy.final_norm is None:
        missing = "head" if anatomy.head is None else "final norm"
        raise _refusal(anatomy.family, f"the model has no {missing}")
    norms: list[NormRead] = []
    values: list[HeadValues] = []
    for block in anatomy.blocks:
        base = probe.run(block)
        norms += _readers(probe, block, base)
        fold = v_fold(probe, block, base)
        if fold is not None:
            a = block.attention
            values.append(HeadValues(a.v.name, tuple(a.v.stored_rows()), a.o.name, a.head_dim))
    final = _final(probe)
    read = [*norms, NormRead(anatomy.final_norm, (anatomy.head,), final)]
    _check_outside(probe)
    return Residual(
        norms=tuple(read),
        writers=tuple(name for block in anatomy.blocks for name in _writers(block)),
        embeddings=tuple(name for name in (anatomy.embedding, anatomy.positions) if name is not None),
        values=tuple(values),
        centred=_is_centred(probe, norms),
        tied=anatomy.tied,
    )


def _refusal(family: str, why: str) -> ModelError:
    return ModelError(
        f"{family}: the residual stream cannot be rotated: {why}",
        hint="smoothing (awq, smoothquant) works on more families",
    )


def _writers(block: Block) -> tuple[str, str]:
    return block.attention.o.name, block.mlp.down.name


def _readers(probe: BlockProbe, block: Block, base: BlockResponse) -> list[NormRead]:
    """The norms of a block, each with its readers; every Linear but the writers is one's reader."""
    reads = []
    for norm in block.norms:
        fold = norm_fold(probe, block, base, norm)
        if fold is None:
            raise _refusal(
                probe.anatomy.family, f"{norm} does not feed Linears alone (a norm after its layer)"
            )
        reads.append(NormRead(norm, fold.consumers, fold.offset))
    read = [name for norm in reads for name in norm.readers]
    for name in block.linears:
        if name not in read and name not in _writers(block):
            raise _refusal(probe.anatomy.family, f"{name} reads something else than a norm's output")
    return reads


def _final(probe: BlockProbe) -> float:
    """The final norm's offset; gives it plain numbers."""
    name = probe.anatomy.final_norm
    assert name is not None
    norm = probe.model.get_submodule(name)
    for leaf, parameter in list(norm.named_parameters()):
        setattr(norm, leaf, nn.Parameter(torch.zeros(parameter.shape), requires_grad=False))
    offset = norm_offset(norm)
    if offset is None:
        raise _refusal(probe.anatomy.family, f"{name} is not a norm with one weight per channel")
    return offset


def _check_outside(probe: BlockProbe) -> None:
    """Refuse modules with weights outside the blocks, except embeddings, final norm and head."""
    anatomy = probe.anatomy
    known = (anatomy.embedding, anatomy.positions, anatomy.final_norm, anatomy.head, anatomy.blocks_name)
    for name, _ in probe.model.named_parameters():
        if not any(part and name.startswith(f"{part}.") for part in known):
            raise _refusal(anatomy.family, f"{name} stands between the embedding and the blocks")


def _is_centred(probe: BlockProbe, norms: Sequence[NormRead]) -> bool:
    """Whether only rotations that keep the mean leave the blocks alone. Tried on every block and on the final
    norm, with the weights of all norms set to one.

    Raises:
        ModelError: not even those do.
    """
    final = probe.anatomy.final_norm
    assert final is not None
    every = [*((norm.name, norm.offset) for norm in norms), (final, _final(probe))]
    for name, offset in every:
        _plain(probe.model.get_submodule(name), offset)
    read = {name for norm in norms for name in norm.readers}
    for centred in (False, True):
        turn = _reflection(probe.anatomy.hidden_size, centred)
        norm = probe.model.get_submodule(final)
        with torch.no_grad():
            same = alike(norm(turn(probe.hidden())), turn(norm(probe.hidden())))
        if same and all(_turns(probe, block, turn, read) for block in probe.anatomy.blocks):
            return centred
    raise _refusal(probe.anatomy.family, "a block does more with it than norms and sums")


def _plain(norm: nn.Module, offset: float) -> None:
    """Weight one, bias zero."""
    for leaf, parameter in list(norm.named_parameters()):
        value = 1.0 - offset if leaf == "weight" else 0.0
        setattr(norm, leaf, nn.Parameter(torch.full(parameter.shape, value), requires_grad=False))


def _turns(probe: BlockProbe, block: Block, turn: OutputChange, read: Iterable[str]) -> bool:
    """Whether a block whose input and writers are turned gives its readers turned inputs, and a turned
    output."""
    base = probe.run(block)
    seen = probe.run(block, dict.fromkeys(_writers(block), turn), turn(probe.hidden()))
    turned = set(read)
    return alike(seen.output, turn(base.output)) and all(
        alike(seen.inputs[name], turn(x) if name in turned else x) for name, x in base.inputs.items()
    )


def _reflection(width: int, centred: bool) -> OutputChange:
    """x -> x - 2 (x . u) u: an orthogonal map that mixes up to 64 channels strongly; ``centred``: one that
    keeps the mean."""
    u = torch.zeros(width)
    channels = torch.linspace(0, width - 1, min(width, 64)).long()
    u[channels] = torch.cos(torch.arange(len(channels)) * 2.4)
    u[channels] -= u[channels].mean()
    u /= u.norm()
    if not centred:
        u = (u + width**-0.5) / 2**0.5
    return lambda x: x - 2.0 * (x @ u)[..., None] * u
