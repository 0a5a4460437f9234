"""Reading one block: its attention, its MLP, its norms, by names that shapes and config must confirm."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from attar.errors import ModelError
from attar.models.parts import Attention, Block, Mlp, Projection
from attar.models.roles import ALTERNATING, in_attention, role_of

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size")
NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "d_ff", "ffn_hidden_size")
HINT = "attar takes apart transformers with one self-attention and one dense MLP in each block"


@dataclass(frozen=True)
class BlockHalf:
    """The attention or the MLP of a block while it is read: its linear layers, by path from the model."""

    family: str
    where: str
    linears: dict[str, nn.Module]

    def paths(self, role: str) -> list[str]:
        """Paths whose name says this role."""
        return [path for path in self.linears if role_of(self._inside(path)) == role]

    def only(self, role: str) -> Projection:
        """The one projection with this role."""
        paths = self.paths(role)
        if len(paths) == 1:
            return measure(paths[0], self.linears[paths[0]])
        problem = f"could be {' or '.join(paths)}" if paths else "was not found"
        shapes = (
            f"{self._inside(path)} {list(module.weight.shape)}" for path, module in self.linears.items()
        )
        raise self.error(
            f"{role} projection {problem} in {self.where}; "
            f"seen there: {', '.join(shapes) or 'no linear layer'}"
        )

    def error(self, text: str) -> ModelError:
        """An error about this half."""
        return ModelError(f"{self.family}: {text}", hint=HINT)

    def _inside(self, path: str) -> str:
        return path.removeprefix(self.where.rpartition(" ")[2] + ".")


def read_block(config: Any, index: int, name: str, block: nn.Module) -> Block:
    """The parts of the block at path ``name``.

    Raises:
        ModelError: a part was not found, or shapes and config contradict each other.
    """
    linears = {path: module for path, module in block.named_modules() if is_linear(module)}
    halves = [
        BlockHalf(
            config.model_type,
            f"the {part} of {name}",
            {f"{name}.{path}": module for path, module in linears.items() if in_attention(path) == wanted},
        )
        for part, wanted in (("attention", True), ("MLP", False))
    ]
    attention = read_attention(config, name, block, halves[0])
    if any("expert" in path for path, _ in block.named_modules()):
        raise halves[1].error(f"{name} has a mixture of experts instead of a dense MLP")
    mlp = read_mlp(config, halves[1])
    known = [attention.q, attention.k, attention.v, attention.o, mlp.gate, mlp.up, mlp.down]
    order = [part.name for part in known if part is not None] + [f"{name}.{path}" for path in linears]
    norms = [f"{name}.{path}" for path, module in block.named_modules() if is_norm(module)]
    return Block(
        index=index,
        name=name,
        module=block,
        attention=attention,
        mlp=mlp,
        norms=tuple(norm for norm in norms if norm not in attention.norms),
        linears=tuple(dict.fromkeys(order)),
    )


def read_attention(config: Any, name: str, block: nn.Module, half: BlockHalf) -> Attention:
    """q, k, v, o and the numbers of heads; q, k and v may share one module."""
    o = half.only("o")
    fused = half.only("qkv") if half.paths("qkv") else None
    holder = (fused or half.only("q")).name.rpartition(".")[0]
    width = head_width(config, block.get_submodule(holder.removeprefix(name).lstrip(".")), o.in_features)
    q, k, v = split(fused, o.in_features, width) if fused else (half.only(role) for role in "qkv")
    heads, kv_heads = o.in_features // width, k.out_features // width
    q_fits = q.out_features == heads * width == o.in_features
    kv_fits = k.out_features == v.out_features == kv_heads * width and kv_heads > 0
    if not q_fits or not kv_fits or heads % kv_heads:
        raise half.error(
            f"{half.where} does not add up: q, k, v have {q.out_features}, {k.out_features}, "
            f"{v.out_features} rows and o has {o.in_features} columns, with heads of {width}"
        )
    agree(config, "num_attention_heads", heads, f"{half.where} has {{}} heads")
    if kv_heads != heads:  # families without groups of heads may carry the number without a meaning
        agree(config, "num_key_value_heads", kv_heads, f"{half.where} has {{}} KV heads")
    norms = tuple(
        f"{name}.{path}"
        for path, module in block.named_modules()
        if is_norm(module) and path.rpartition(".")[2].startswith(("q_", "k_"))
    )
    return Attention(holder, q, k, v, o, heads, kv_heads, width, norms)


def read_mlp(config: Any, half: BlockHalf) -> Mlp:
    """up, gate and down; gate and up may share one module, gate first."""
    down = half.only("down")
    n = down.in_features
    gate: Projection | None = None
    if half.paths("gate_up"):
        whole = half.only("gate_up")
        rest = whole.out_features - n
        gate = Projection(whole.name, whole.kind, n, whole.in_features, rows=(0, n))
        up = Projection(whole.name, whole.kind, rest, whole.in_features, rows=(n, whole.out_features))
    else:
        up = half.only("up")
        gate = half.only("gate") if half.paths("gate") else None
    for part in (up, gate):
        if part is not None and part.out_features != n:
            raise half.error(f"{half.where} does not add up: {part.name} misses the {n} columns of down")
    sizes = [getattr(config, key, None) for key in NEURONS]
    if any(isinstance(size, int) for size in sizes) and n not in sizes:
        raise half.error(f"{half.where} has {n} neurons, but the config says otherwise")
    names = [getattr(config, key, None) for key in ACTIVATIONS]
    activation = next((name for name in names if isinstance(name, str)), "unknown")
    return Mlp(common_parent(up.name, down.name), up, gate, down, n, activation)


def split(whole: Projection, q_rows: int, width: int) -> tuple[Projection, Projection, Projection]:
    """q, k and v inside a fused weight: q has as many rows as o has columns, k and v share the rest."""
    kv_rows = (whole.out_features - q_rows) // 2
    alternating = whole.name.rpartition(".")[2] in ALTERNATING
    groups = max(kv_rows // width, 1) if alternating else 1
    period = whole.out_features // groups if groups > 1 else None
    parts, start = [], 0
    for rows in (q_rows, kv_rows, kv_rows):
        run = (start, start + rows // groups)
        parts.append(Projection(whole.name, whole.kind, rows, whole.in_features, rows=run, period=period))
        start = run[1]
    return parts[0], parts[1], parts[2]


def measure(path: str, module: nn.Module) -> Projection:
    """A projection that has a module to itself."""
    conv = isinstance(module, Conv1D)
    rows, columns = reversed(module.weight.shape) if conv else module.weight.shape
    return Projection(path, "conv1d" if conv else "linear", rows, columns)


def head_width(config: Any, attention: nn.Module, columns: int) -> int:
    """Width of one head: what the attention module says, else the config, else columns over heads."""
    for source in (attention, config):
        for key in HEAD_WIDTHS:
            value = getattr(source, key, None)
            if isinstance(value, int) and value > 0:
                return value
    return columns // int(config.num_attention_heads)


def agree(config: Any, key: str, found: int, what: str) -> None:
    """Raise where the config has a number for ``key`` and the model another."""
    said = getattr(config, key, None)
    if isinstance(said, int) and said != found:
        raise ModelError(
            f"{config.model_type}: {what.format(found)}, but the config's {key} is {said}", hint=HINT
        )


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix applied to its input: Linear or Conv1D."""
    return isinstance(module, (nn.Linear, Conv1D))


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class name (every family brings its own RMSNorm)."""
    return "norm" in type(module).__name__.lower()


def common_parent(first: str, second: str) -> str:
    """Path of the innermost module that holds both."""
    steps = zip(first.split("."), second.split("."), strict=False)
    return ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], steps))
