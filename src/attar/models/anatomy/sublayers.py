"""The two sublayers of a block: plain self-attention, and a dense MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from attar.errors import ModelError
from attar.models.anatomy.parts import Attention, Mlp, Projection
from attar.models.anatomy.roles import ALTERNATING, HINT, agree, common_parent, is_norm, measure, role_of

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size")
NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "d_ff", "ffn_hidden_size")
DENSE_NEURONS = "intermediate_size_mlp"  # of dense layers between mixtures (Llama 4)


@dataclass(frozen=True)
class Sublayer:
    """The attention or the MLP of a block: its linear layers, by path from the model."""

    family: str
    where: str
    linears: dict[str, nn.Module]

    def paths(self, role: str) -> list[str]:
        """Paths with a name of this role."""
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
        """An error about this sublayer."""
        return ModelError(f"{self.family}: {text}", hint=HINT)

    def _inside(self, path: str) -> str:
        return path.removeprefix(self.where.rpartition(" ")[2] + ".")


def read_attention(config: Any, name: str, block: nn.Module, sublayer: Sublayer) -> Attention:
    """q, k, v, o and the numbers of heads; q, k and v may share one module."""
    o = sublayer.only("o")
    fused = sublayer.only("qkv") if sublayer.paths("qkv") else None
    holder = (fused or sublayer.only("q")).name.rpartition(".")[0]
    width = head_width(config, block.get_submodule(holder.removeprefix(name).lstrip(".")), o.in_features)
    q, k, v = split(fused, o.in_features, width) if fused else (sublayer.only(role) for role in "qkv")
    heads, kv_heads = o.in_features // width, k.out_features // width
    q_fits = q.out_features == heads * width == o.in_features
    kv_fits = k.out_features == v.out_features == kv_heads * width and kv_heads > 0
    if not q_fits or not kv_fits or heads % kv_heads:
        raise sublayer.error(
            f"{sublayer.where} does not add up: q, k, v have {q.out_features}, {k.out_features}, "
            f"{v.out_features} rows and o has {o.in_features} columns, with heads of {width}"
        )
    agree(config, "num_attention_heads", heads, f"{sublayer.where} has {{}} heads")
    if kv_heads != heads:  # families without groups of heads may carry the number without a meaning
        agree(config, "num_key_value_heads", kv_heads, f"{sublayer.where} has {{}} KV heads")
    norms = tuple(
        f"{name}.{path}"
        for path, module in block.named_modules()
        if is_norm(module) and path.rpartition(".")[2].startswith(("q_", "k_"))
    )
    inside = block.get_submodule(holder.removeprefix(name).lstrip("."))
    sinks = f"{holder}.sinks" if isinstance(getattr(inside, "sinks", None), nn.Parameter) else None
    return Attention(holder, q, k, v, o, heads, kv_heads, width, norms, sinks)


def read_mlp(config: Any, sublayer: Sublayer, *, sized: bool = True) -> Mlp:
    """up, gate and down; gate and up may share one module, gate first.

    Args:
        sized: the config must name its number of neurons, where it names any.
    """
    down = sublayer.only("down")
    n = down.in_features
    gate: Projection | None = None
    if sublayer.paths("gate_up"):
        fused = sublayer.only("gate_up")
        up_rows = fused.out_features - n
        gate = Projection(fused.name, fused.kind, n, fused.in_features, rows=(0, n))
        up = Projection(fused.name, fused.kind, up_rows, fused.in_features, rows=(n, fused.out_features))
    else:
        up = sublayer.only("up")
        gate = sublayer.only("gate") if sublayer.paths("gate") else None
    for part in (up, gate):
        if part is not None and part.out_features != n:
            raise sublayer.error(
                f"{sublayer.where} does not add up: {part.name} misses the {n} columns of down"
            )
    # LFM2 rounds its config's number, some blocks of Gemma 4 are twice as wide
    keys = ("block_auto_adjust_ff_dim", "use_double_wide_mlp")
    sized = sized and not any(getattr(config, key, False) for key in keys)
    sizes = [getattr(config, key, None) for key in (*NEURONS, DENSE_NEURONS)]
    if sized and any(isinstance(size, int) for size in sizes) and n not in sizes:
        raise sublayer.error(f"{sublayer.where} has {n} neurons, but the config says otherwise")
    names = [getattr(config, key, None) for key in ACTIVATIONS]
    activation = next((name for name in names if isinstance(name, str)), "unknown")
    return Mlp(common_parent(up.name, down.name), up, gate, down, n, activation)


def split(fused: Projection, q_rows: int, width: int) -> tuple[Projection, Projection, Projection]:
    """q, k and v inside a fused weight: q has as many rows as o has columns, k and v share the rest."""
    kv_rows = (fused.out_features - q_rows) // 2
    alternating = fused.name.rpartition(".")[2] in ALTERNATING
    groups = max(kv_rows // width, 1) if alternating else 1
    period = fused.out_features // groups if groups > 1 else None
    parts, start = [], 0
    for rows in (q_rows, kv_rows, kv_rows):
        run = (start, start + rows // groups)
        parts.append(Projection(fused.name, fused.kind, rows, fused.in_features, rows=run, period=period))
        start = run[1]
    return parts[0], parts[1], parts[2]


def head_width(config: Any, attention: nn.Module, columns: int) -> int:
    """Width of one head: the attention module's, else the config's, else columns over heads."""
    for source in (attention, config):
        for key in HEAD_WIDTHS:
            value = getattr(source, key, None)
            if isinstance(value, int) and value > 0:
                return value
    return columns // int(config.num_attention_heads)
