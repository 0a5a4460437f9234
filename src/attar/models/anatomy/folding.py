"""Folding: scales that move from one weight into another without changing the function.

    y = W x = (W diag(s)) (diag(1/s) x)

diag(s) goes into the columns of every Linear that reads x (the consumers), diag(1/s) into the module that
computes x (the producer): a norm's weight and bias, the rows of v before o, the rows of up before down.
Nothing here knows a family: a fold exists where a probe (:mod:`attar.models.anatomy.probe`) shows that
multiplying the producer's output by 1/s multiplies the consumers' inputs by 1/s and changes nothing else. So
a norm whose output is also the residual stream (BERT), or an activation between up and down that is not
homogeneous (GELU), is found by its effect. Where a KV head serves several query heads, several columns of o
come from one row of v and share its scale: ``source`` is the map.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attar.models.anatomy.parts import Attention, Block, Mixture, Mlp, NonAttentionMixer
from attar.models.anatomy.probe import BlockProbe, BlockResponse, alike
from attar.models.anatomy.roles import is_linear
from attar.models.surgery.rebuild import named_config

__all__ = ["Fold", "Foldable", "Rescale", "foldable", "rescaled", "rescales"]


@dataclass(frozen=True)
class Fold:
    """Where a scale s (K,) can be folded: one number for each input channel of the consumers.

    Attributes:
        kind: ``"norm"``, ``"v"`` (into o) or ``"up"`` (into down).
        producer: module name of the norm or the Linear that takes 1/s.
        consumers: module names of the Linears that take s in their columns, in forward order.
        source: channel to the producer's stored row (a norm's weight counts as rows).
        offset: what a norm adds to its weight (1 in Gemma).
    """

    kind: str
    producer: str
    consumers: tuple[str, ...]
    source: tuple[int, ...]
    offset: float = 0.0

    @property
    def repeat(self) -> int:
        """How many channels share a scale (the query heads of a KV head)."""
        return len(self.source) // len(set(self.source))

    def share(self, values: Tensor, how: str = "amax") -> Tensor:
        """Values (K,) made equal over the channels of one source, by their ``"amax"`` or ``"mean"``."""
        if self.repeat == 1:
            return values
        source = torch.tensor(self.source, device=values.device)
        shared = values.new_zeros(int(source.max()) + 1)
        return shared.scatter_reduce(0, source, values, how, include_self=False)[source]


@dataclass(frozen=True)
class Foldable:
    """The result of :func:`foldable`.

    Attributes:
        folds: in the order of the blocks.
        left: every other Linear of the blocks by module name, with the reason.
    """

    folds: tuple[Fold, ...]
    left: dict[str, str]


@dataclass(frozen=True)
class Rescale:
    """Factors on one module. A missing one is 1.

    Attributes:
        rows: (N,) on the outputs: of a Linear its rows and bias, of a norm its weight and bias.
        columns: (K,) on the inputs of a Linear.
        offset: what a norm adds to its weight.
        transposed: the weight is stored (K, N).
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    offset: float = 0.0
    transposed: bool = False

    def apply(self, leaf: str, tensor: Tensor) -> Tensor:
        """The module's parameter ``leaf`` (``weight`` or ``bias``) rescaled, float32. Does not modify it."""
        value = tensor.float()
        if value.dim() == 1:
            offset = self.offset if leaf == "weight" else 0.0
            return value if self.rows is None else (value + offset) * self.rows - offset
        value = value.T if self.transposed else value
        if self.rows is not None:
            value = value * self.rows[:, None]
        if self.columns is not None:
            value = value * self.columns
        return (value.T if self.transposed else value).contiguous()


def foldable(model: Any) -> Foldable:
    """Where scales can be folded.

    Args:
        model: a transformers model, or a parsed config.json; weights are neither needed nor read.
    """
    probe = BlockProbe(model if isinstance(model, Mapping) else named_config(model))
    folds: list[Fold] = []
    left: dict[str, str] = {}
    for block in probe.anatomy.blocks:
        base = probe.run(block)
        block_folds = [
            fold
            for fold in (
                *(norm_fold(probe, block, base, norm) for norm in block.norms),
                v_fold(probe, block, base),
                _up_fold(probe, block, base),
            )
            if fold is not None
        ]
        folds += sorted(block_folds, key=lambda fold: block.linears.index(fold.consumers[0]))
        done = [name for fold in block_folds for name in fold.consumers]
        left |= {name: _why(block, name) for name in block.linears if name not in done}
    return Foldable(tuple(folds), left)


def rescales(model: nn.Module, chosen: Iterable[tuple[Fold, Tensor]]) -> dict[str, Rescale]:
    """What folding does to each module it touches, by module name.

    Args:
        model: the model whose modules the folds name; on meta or not. Not changed.
        chosen: folds with their scales s (K,), positive, equal over the channels of one source.
    """
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    offsets: dict[str, float] = {}
    for fold, scale in chosen:
        scale = scale.float().cpu()
        factors = rows.setdefault(fold.producer, torch.ones(_outputs(model.get_submodule(fold.producer))))
        factors[torch.tensor(fold.source)] /= scale
        offsets[fold.producer] = fold.offset
        for name in fold.consumers:
            columns[name] = columns[name] * scale if name in columns else scale
    return {
        name: Rescale(
            rows.get(name),
            columns.get(name),
            offsets.get(name, 0.0),
            not isinstance(model.get_submodule(name), nn.Linear),
        )
        for name in dict.fromkeys([*rows, *columns])
    }


def rescaled(state: Mapping[str, Tensor], changes: Mapping[str, Rescale]) -> dict[str, Tensor]:
    """A state dict with scales folded in; what is not touched is the same tensor. Does not modify its input.

    Args:
        state: by parameter name.
        changes: from :func:`rescales`.
    """
    result = dict(state)
    for name, change in changes.items():
        for leaf in ("weight", "bias"):
            full = f"{name}.{leaf}"
            if full in state:
                result[full] = change.apply(leaf, state[full]).to(state[full].dtype)
    return result


def _outputs(module: Any) -> int:
    """Rows of a Linear or Conv1D, entries of a norm's weight."""
    return int(module.weight.shape[1 if is_linear(module) and not isinstance(module, nn.Linear) else 0])


def norm_fold(probe: BlockProbe, block: Block, base: BlockResponse, norm: str) -> Fold | None:
    """The fold of a norm, where all that its output reaches are Linears."""
    module, width = probe.model.get_submodule(norm), probe.anatomy.hidden_size
    offset = norm_offset(module)
    if offset is None or _outputs(module) != width:  # not over the residual stream: Mamba 2's
        return None
    factor = _factors(width)
    seen = probe.run(block, {norm: lambda x: x * factor})
    consumers = _reached(block, base, seen, factor)
    return Fold("norm", norm, consumers, tuple(range(width)), offset) if consumers else None


def v_fold(probe: BlockProbe, block: Block, base: BlockResponse) -> Fold | None:
    """The fold of v into o, where the block has plain self-attention."""
    attention = block.mixer
    if not isinstance(attention, Attention):
        return None
    rows, source = attention.v.stored_rows(), _v_source(attention)
    fold = Fold("v", attention.v.name, (attention.o.name,), source)
    return fold if _confirmed(probe, block, base, fold, rows) else None


def _v_source(attention: Attention) -> tuple[int, ...]:
    """Column of o to stored row of v: query head h reads KV head h // (heads / kv_heads)."""
    rows, width = attention.v.stored_rows(), attention.head_dim
    repeat = attention.heads // attention.kv_heads
    return tuple(
        rows[head // repeat * width + column] for head in range(attention.heads) for column in range(width)
    )


def _up_fold(probe: BlockProbe, block: Block, base: BlockResponse) -> Fold | None:
    """The fold of up into down, where the block has a dense MLP and the activation between them is
    homogeneous."""
    mlp = block.feed_forward
    if not isinstance(mlp, Mlp):
        return None
    rows = mlp.up.stored_rows()
    fold = Fold("up", mlp.up.name, (mlp.down.name,), tuple(rows))
    return fold if _confirmed(probe, block, base, fold, rows) else None


def _confirmed(probe: BlockProbe, block: Block, base: BlockResponse, fold: Fold, rows: Sequence[int]) -> bool:
    """Whether factors on these rows of the producer arrive as factors on the consumer's columns, and nowhere
    else."""
    factor = torch.ones(_outputs(probe.model.get_submodule(fold.producer)))
    factor[list(rows)] = _factors(len(rows))
    seen = probe.run(block, {fold.producer: lambda x: x * factor})
    return _reached(block, base, seen, factor[list(fold.source)]) == fold.consumers


def _reached(block: Block, base: BlockResponse, seen: BlockResponse, factor: Tensor) -> tuple[str, ...]:
    """The Linears whose inputs were multiplied by the factor; none of them if anything else changed."""
    names = []
    for name in block.linears:
        before, after = base.inputs[name], seen.inputs[name]
        if not before.numel() and not after.numel():  # an expert without tokens
            continue
        if before.shape[-1] == len(factor) and alike(after, before * factor):
            names.append(name)
        elif not alike(after, before):
            return ()
    if block.mixture is not None and not set(names).isdisjoint(block.mixture.linears):
        return ()  # the router reads what its experts read, and a probe may not move its choice
    return tuple(names) if alike(seen.output, base.output) else ()


def _factors(count: int) -> Tensor:
    """Positive numbers around 1, none of them 1, fixed."""
    index = torch.arange(count, dtype=torch.float32)
    return torch.where(index % 2 == 0, 1.3, 0.6) + 0.2 * torch.sin(index)


def norm_offset(norm: Any) -> float | None:
    """c of a norm that computes n(x) * (c + weight) + bias: 0, in Gemma 1; None for any other norm."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    arguments = inspect.signature(norm.forward).parameters.values()
    if sum(argument.default is argument.empty for argument in arguments) != 1:  # a gate is needed too
        return None
    x = torch.linspace(-1.0, 2.0, weight.numel())[None, None] + 0.1
    bias = getattr(norm, "bias", None)
    added = bias.detach() if isinstance(bias, Tensor) else 0.0
    with torch.no_grad(), _TemporaryValues(norm, weight=torch.zeros_like(weight)):
        at_zero = norm(x) - added
    with torch.no_grad(), _TemporaryValues(norm, weight=torch.ones_like(weight)):
        at_one = norm(x) - added
    if at_one.abs().max() > 0 and float(at_zero.abs().max()) <= 1e-6:
        return 0.0
    return 1.0 if alike(at_one, 2.0 * at_zero) else None


class _TemporaryValues:
    """Other values in a module's parameters inside a context."""

    def __init__(self, module: nn.Module, **values: Tensor) -> None:
        self.module, self.values = module, values
        self.originals = {leaf: module.get_parameter(leaf) for leaf in values}

    def __enter__(self) -> None:
        for leaf, value in self.values.items():
            setattr(self.module, leaf, nn.Parameter(value, requires_grad=False))

    def __exit__(self, *_: object) -> None:
        for leaf, parameter in self.originals.items():
            setattr(self.module, leaf, parameter)


def _why(block: Block, name: str) -> str:
    """Why no scale can be folded before a Linear."""
    mixer, mlp = block.mixer, block.feed_forward
    if not isinstance(mixer, NonAttentionMixer) and name == mixer.o.name:
        values = mixer.v.name if isinstance(mixer, Attention) else mixer.kv_b.name
        return f"{values} does not reach it channel by channel"
    if isinstance(mlp, Mlp) and name == mlp.down.name:
        return f"the activation {mlp.activation} after {mlp.up.name} is not homogeneous"
    if isinstance(mlp, Mixture) and name in mlp.linears:
        return "the router reads the same norm, and experts are not scaled one by one"
    return "no norm of the block feeds Linears alone: its input is the residual stream too"
