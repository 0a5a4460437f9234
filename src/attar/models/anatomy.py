"""Anatomy: which module is a block, a projection, a norm, the embedding, the head.

No model class is named here. The blocks are the longest list of modules of one class. Inside a block, module
names propose which projection is which (:func:`role_of`); shapes and config must confirm it. What is not
found, or does not fit, is an error that names it: a wrong guess would only show as bad output later. Works
on models whose parameters are on the meta device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from attar.errors import ModelError
from attar.models.parts import Anatomy, Attention, Block, Mlp, Projection


def discover(model: Any) -> Anatomy:
    """Find the parts of a transformer.

    Args:
        model: a transformers model, causal or encoder, with or without a head; its weights may be on meta.

    Raises:
        ModelError: a part was not found or its shape contradicts the config; the message names the part,
            where it was looked for, and what is there.
    """
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{config.model_type} is an encoder-decoder model", hint=HINT)
    stack_name, stack = _find_blocks(model, config)
    blocks = tuple(read_block(config, i, f"{stack_name}.{i}", block) for i, block in enumerate(stack))
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    hidden = blocks[0].attention.o.out_features
    agree(config, "hidden_size", hidden, "the attention output is {} wide")
    return Anatomy(
        family=config.model_type,
        causal=_is_causal(config, blocks[0]),
        blocks=blocks,
        blocks_name=stack_name,
        embedding=_path_of(model, embedding),
        positions=_find_positions(model, embedding),
        final_norm=_find_final_norm(model, stack_name),
        head=None if head is None else _path_of(model, head),
        tied=head is not None and head.weight is embedding.weight,
        hidden_size=hidden,
        vocab_size=embedding.weight.shape[0],
    )


def text_config(model: Any) -> Any:
    """The config of the language model (the model's own, or the text part of a multimodal one)."""
    return model.config.get_text_config()


def _find_blocks(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList]:
    """The longest list of same-class modules with linear layers; one of the config's length goes first."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len({type(child) for child in module}) == 1
        and any(is_linear(part) for part in module[0].modules())
    ]
    outer = [  # not lists inside a block, of experts say
        (name, module)
        for name, module in lists
        if not any(name.startswith(other + ".") for other, _ in lists)
    ]
    if not outer:
        seen = ", ".join(name for name, _ in model.named_modules() if 1 <= name.count(".") + 1 <= 2 and name)
        raise ModelError(
            f"{config.model_type}: blocks were not found: no ModuleList in the model holds modules of one "
            f"class with linear layers; seen there: {seen}",
            hint=HINT,
        )
    layers = getattr(config, "num_hidden_layers", None)
    embedding = _path_of(model, model.get_input_embeddings())
    name, stack = max(  # a vision tower's blocks are not near the text embedding
        outer, key=lambda item: (len(item[1]) == layers, len(common_parent(item[0], embedding)), len(item[1]))
    )
    agree(config, "num_hidden_layers", len(stack), f"{name} has {{}} blocks")
    return name, stack


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _is_causal(config: Any, block: Block) -> bool:
    """``is_causal`` of the attention modules; where they have none, the auto class that lists the config."""
    flags = [
        module.is_causal
        for module in block.module.modules()
        if isinstance(getattr(module, "is_causal", None), bool)
    ]
    if flags:
        return bool(flags[0])
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING


def _find_positions(model: nn.Module, embedding: nn.Module) -> str | None:
    """A second embedding, named after positions."""
    for name, module in model.named_modules():
        leaf = str(name).rpartition(".")[2]
        if isinstance(module, nn.Embedding) and module is not embedding and ("pos" in leaf or leaf == "wpe"):
            return str(name)
    return None


def _find_final_norm(model: nn.Module, stack_name: str) -> str | None:
    """The last norm next to the list of blocks, except an embedding's norm."""
    parent = stack_name.rpartition(".")[0]
    names = [
        str(name)
        for name, child in model.get_submodule(parent).named_children()
        if is_norm(child) and "embed" not in name.lower()
    ]
    return ".".join(filter(None, [parent, names[-1]])) if names else None


ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size")
NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "d_ff", "ffn_hidden_size")
HINT = "attar takes apart transformers with one self-attention and one dense MLP in each block"


@dataclass(frozen=True)
class BlockHalf:
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
    """Width of one head: the attention module's, else the config's, else columns over heads."""
    for source in (attention, config):
        for key in HEAD_WIDTHS:
            value = getattr(source, key, None)
            if isinstance(value, int) and value > 0:
                return value
    return columns // int(config.num_attention_heads)


def agree(config: Any, key: str, count: int, what: str) -> None:
    """Raise where the config's number for ``key`` is not the model's."""
    configured = getattr(config, key, None)
    if isinstance(configured, int) and configured != count:
        raise ModelError(
            f"{config.model_type}: {what.format(count)}, but the config's {key} is {configured}", hint=HINT
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


# Endings of module paths. The longest that fits wins, so "output.dense" is tried before "dense".
ATTENTION_ROLES = {
    "q": ("q_proj", "query", "q_lin", "wq", "query_proj", "q"),
    "k": ("k_proj", "key", "k_lin", "wk", "key_proj", "k"),
    "v": ("v_proj", "value", "v_lin", "wv", "value_proj", "v"),
    "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv"),
    "o": ("o_proj", "out_proj", "out_lin", "c_proj", "dense", "wo", "Wo", "o"),
}
MLP_ROLES = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "fc1", "c_fc", "dense_h_to_4h", "intermediate.dense", "lin1", "w3", "fc_in"),
    "gate_up": ("gate_up_proj", "Wi"),
    "down": ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "output.dense", "lin2", "w2", "fc_out", "Wo"),
}

# Fused weights in which q, k and v of one KV group are adjacent, group after group (GPT-NeoX, BLOOM,
# Falcon). Any other fused weight holds all of q, then all of k, then all of v (Phi-3, GPT-2).
ALTERNATING = ("query_key_value",)


def in_attention(path: str) -> bool:
    """Whether a path inside a block goes through self-attention (cross-attention is not meant)."""
    steps = path.lower().split(".")
    return any(("attn" in step or "attention" in step) and "cross" not in step for step in steps[:-1])


def in_cross_attention(path: str) -> bool:
    """Whether a path inside a block belongs to attention over another sequence."""
    return any("cross" in step.lower() for step in path.split("."))


def role_of(path: str) -> str | None:
    """Role of the module at ``path`` inside its block, or None for an unknown name."""
    if in_cross_attention(path):
        return None
    table = ATTENTION_ROLES if in_attention(path) else MLP_ROLES
    fits = [
        (len(ending), role)
        for role, endings in table.items()
        for ending in endings
        if path == ending or path.endswith("." + ending)
    ]
    return max(fits)[1] if fits else None
