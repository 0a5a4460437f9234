"""A GGUF file's metadata as a config of transformers, and the placements of its tensors.

    config = hf_config(file.metadata, file.tensors, file.load)
    for placement in file_placements(config, pieces(infos)):
        tensor = placement.undo(file.load(placement.gguf))          under the name placement.stored

Files of llama.cpp's converter are read as well as attar's own; what a file leaves out has llama.cpp's
default. ``llama`` is the architecture of Llama, of Mistral and of Mixtral: a file with a sliding window, or
whose width is no multiple of its heads (which Llama's config refuses), becomes a Mistral, one with experts a
Mixtral. ``deepseek2`` is DeepSeek V3's where the router's function is the sigmoid, else V2's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.architecture import (
    NEXTN,
    Architecture,
    ConfigCount,
    ConfigRule,
    Sizes,
    key_of,
    shortest,
    usual_pattern,
)
from attar.formats.gguf.families import ARCHITECTURES, MISTRAL
from attar.formats.gguf.placement import Placement
from attar.formats.gguf.rope import TENSORS, rope_config
from attar.formats.gguf.tensor_map import expected_placements, query_scalar
from attar.formats.gguf.tokenizer.special_tokens import stored_ids

DAMAGED = "the file is incomplete or damaged; get it again"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BLOCK = re.compile(r"blk\.(\d+)\.")
COUNTS_FROM_0 = ("dense", "experts", "used", "per_layer", "shared_kv")
"""Numbers that are 0, and not null, in a config of a file that has none."""
OPTIONAL = ("groups", "used_groups", "shared")
"""Numbers that a file may leave out where they are 1."""


class ArchitectureMetadata:
    """Checked access to the keys of a file's architecture, ``<architecture>.*``."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.arch = str(metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key without the architecture's prefix; floats with as few digits as float32 needs.

        Raises:
            CheckpointError: it is no finite number, but ``default`` is one.
        """
        value = self.metadata.get(f"{self.arch}.{key}", default)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if isinstance(default, int | float) and not is_number:
            problem = f"{value!r}, not a number" if f"{self.arch}.{key}" in self.metadata else "missing"
            raise CheckpointError(f"GGUF: {self.arch}.{key} is {problem}", hint=DAMAGED)
        return shortest(value) if isinstance(value, float) else value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            CheckpointError: it is missing, or differs from block to block.
        """
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value and all(number == value[0] for number in value):
            value = value[0]
        if isinstance(value, list):
            raise CheckpointError(
                f"GGUF: {self.arch}.{key} differs from block to block",
                hint="a config of transformers has one number for all",
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problem = "missing" if value is None else f"{value!r}, not a whole number above 0"
            raise CheckpointError(f"GGUF: {self.arch}.{key} is {problem}", hint=DAMAGED)
        return value


def hf_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    load: Callable[[str], Tensor] | None = None,
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        tensors: by name, each with a ``shape`` (rows first) and perhaps a ``kind``.
        load: reads a tensor; None: ``tensors`` are the tensors themselves.

    Raises:
        ModelError: an architecture that attar does not know.
        CheckpointError: a key is missing, or has another value in each block.
    """
    keys = ArchitectureMetadata(metadata)
    arch = _family(keys)
    plain = {f"{keys.arch}.{key}": value for key, value in arch.plain_keys(keys.get).items()}
    measured = _sizes(ArchitectureMetadata({**metadata, **plain}), arch, tensors)
    factors = {name: load(name) if load else tensors[name] for name in TENSORS if name in tensors}
    return {
        "model_type": arch.family,
        "architectures": [arch.model_class],
        "dtype": _dtype(tensors),
        **_numbers(keys, arch, measured),
        "tie_word_embeddings": "output.weight" not in tensors,
        **{rule.key: _ruled(rule) for rule in arch.rules if rule.allowed and rule.stated},
        **_biases(arch, tensors),
        **_extras(keys, arch),
        **arch.stated,
        **_layer_types(keys, arch),
        **_window(keys, arch, measured),
        **arch.more_config(keys.get, measured, tensors),
        **({arch.nextn.key: measured.nextn} if arch.nextn and measured.nextn else {}),
        **rope_config(keys.get, arch, measured, factors),
        **_tokens(metadata),
    }


def knows_nextn(metadata: Mapping[str, Any]) -> bool:
    """Whether attar reads the blocks of a file that predict further tokens."""
    return _family(ArchitectureMetadata(metadata)).nextn is not None


def nextn_tensors(metadata: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The tensors of the blocks that predict further tokens."""
    keys = ArchitectureMetadata(metadata)
    count = keys.get(NEXTN, 0)
    first = keys.positive("block_count") - count if count else math.inf
    blocks = {name: block for name in names if (block := _BLOCK.match(name))}
    return [name for name, block in blocks.items() if int(block[1]) >= first]


def _family(keys: ArchitectureMetadata) -> Architecture:
    """The family of a file."""
    known = [family for family in ARCHITECTURES.values() if family.arch == keys.arch]
    if not known:
        names = sorted({family.arch for family in ARCHITECTURES.values()})
        raise ModelError(
            f"attar cannot read GGUF's architecture {keys.arch!r}", hint=f"it can read {', '.join(names)}"
        )
    experts = keys.get("expert_count", 0) > 0
    fitting = [family for family in known if family.mixture == experts or family.maybe_mixture]
    if not fitting:
        raise ModelError(f"attar cannot read a {keys.arch} {'with' if experts else 'without'} experts")
    shared = keys.get("expert_shared_feed_forward_length", 0) > 0
    fitting = [
        family for family in fitting if shared == any(count.size == "shared_ff" for count in family.counts)
    ] or fitting
    usual = dict(fitting[0].fixed)  # of a file that leaves it out
    stated = {key: keys.get(key, value) for key, value in usual.items()}
    fitting = [family for family in fitting if all(stated[key] == value for key, value in family.fixed)]
    if not fitting:
        shown = ", ".join(f"{keys.arch}.{key} is {value}" for key, value in stated.items())
        raise ModelError(f"attar cannot read a {keys.arch} of this kind: {shown}")
    if fitting[0].family == "deepseek_v2" and keys.get("expert_group_count", 0) > 1:
        raise ModelError(
            "attar cannot read a deepseek2 whose softmax router has groups",
            hint="llama.cpp scores groups by their two best experts, transformers by the best",
        )
    if keys.arch != MISTRAL.arch or experts:
        return fitting[0]
    uneven = keys.positive("embedding_length") % keys.positive("attention.head_count")
    return MISTRAL if keys.get("attention.sliding_window") or uneven else fitting[0]


def _sizes(keys: ArchitectureMetadata, arch: Architecture, tensors: Mapping[str, Any]) -> Sizes:
    hidden = keys.positive("embedding_length")
    heads = 0 if arch.attention_free else keys.positive("attention.head_count")
    more = {count.size: _count(keys, count) for count in arch.counts}
    if arch.recurrent:
        more["ssm_head"] = keys.positive("ssm.inner_size") // more["ssm_heads"]
    kv_heads = heads if arch.latent or arch.attention_free else _kv_heads(keys, arch, heads)
    if arch.attention_free:
        head = 0
    elif arch.latent:
        head = keys.positive("attention.key_length_mla")
        more["nope"] = head - more["rope"]
        _check_latent(keys, more)
    else:
        head = keys.positive("attention.key_length", hidden // heads)
        if keys.positive("attention.value_length", head) != head:
            raise CheckpointError(
                f"GGUF: {keys.arch}.attention.value_length is not key_length",
                hint="a config of transformers has one width for keys and values",
            )
    if kv_heads != heads and (arch.equal_heads or not arch.grouped):
        raise CheckpointError(f"GGUF: {keys.arch} has as many KV heads as heads, not {kv_heads} for {heads}")
    if "token_embd.weight" not in tensors:
        raise CheckpointError("GGUF: there is no token_embd.weight", hint=DAMAGED)
    return Sizes(
        layers=keys.positive("block_count") - keys.get(NEXTN, 0),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        ff=0 if arch.attention_free else keys.positive("feed_forward_length", more.get("expert_ff")),
        vocabulary=int(tensors["token_embd.weight"].shape[0]),
        context=keys.positive("context_length"),
        more=more,
        nextn=int(keys.get(NEXTN, 0)),
    )


def _kv_heads(keys: ArchitectureMetadata, arch: Architecture, heads: int) -> int:
    """KV heads of blocks with attention; the others have 0."""
    counts = keys.metadata.get(f"{keys.arch}.attention.head_count_kv")
    if not arch.layer_types or not isinstance(counts, list):
        return keys.positive("attention.head_count_kv", heads)
    present = list(dict.fromkeys(count for count in counts if count != 0))
    if len(present) != 1 or isinstance(present[0], bool) or not isinstance(present[0], int) or present[0] < 1:
        raise CheckpointError(f"GGUF: {keys.arch}.attention.head_count_kv is {counts}", hint=DAMAGED)
    return present[0]


def _layer_types(keys: ArchitectureMetadata, arch: Architecture) -> dict[str, Any]:
    """The blocks with attention, by their KV heads."""
    if not arch.layer_types:
        return {}
    if arch.attention_interval:
        return {"layer_types": _by_interval(keys, arch)}
    counts = keys.metadata.get(f"{keys.arch}.attention.head_count_kv")
    if not isinstance(counts, list):
        raise CheckpointError(
            f"GGUF: {keys.arch}.attention.head_count_kv is {counts!r}, not a list", hint=DAMAGED
        )
    return {"layer_types": [arch.layer_types[0 if count else 1] for count in counts]}


def _by_interval(keys: ArchitectureMetadata, arch: Architecture) -> list[str]:
    """The kinds of blocks of a file that marks those without attention, or has each n-th with it."""
    layers = keys.positive("block_count") - keys.get(NEXTN, 0)
    every = keys.positive("full_attention_interval", arch.attention_interval)
    marks = keys.metadata.get(f"{keys.arch}.attention.recurrent_layers")
    if marks is None:
        marks = usual_pattern(every, layers)
    if not isinstance(marks, list) or len(marks) < layers:
        raise CheckpointError(f"GGUF: {keys.arch}.attention.recurrent_layers is {marks!r}", hint=DAMAGED)
    return [arch.layer_types[1 if mark else 0] for mark in marks[:layers]]


def _check_latent(keys: ArchitectureMetadata, more: Mapping[str, int]) -> None:
    """Raise where the widths of MLA's one shared key and value are not what follows from its ranks."""
    needed = {
        "head_count_kv": 1,
        "key_length": more["kv_rank"] + more["rope"],
        "value_length": more["kv_rank"],
    }
    for key, value in needed.items():
        stated = keys.positive(f"attention.{key}", value)
        if stated != value:
            raise CheckpointError(
                f"GGUF: {keys.arch}.attention.{key} is {stated}, but must be {value}",
                hint="convert the model again, with a recent llama.cpp",
            )


def _count(keys: ArchitectureMetadata, count: ConfigCount) -> int:
    """A number of :attr:`Architecture.counts`; numbers without a key are computed from others."""
    if not count.gguf:
        return 0
    if count.zero:
        return int(keys.get(count.gguf, 0))
    return keys.positive(count.gguf, 1 if count.size in OPTIONAL else None)


def _numbers(keys: ArchitectureMetadata, arch: Architecture, measured: Sizes) -> dict[str, Any]:
    """Sizes and epsilon, under the family's keys."""
    names = ["hidden", "layers", "vocabulary"]
    names += [] if arch.attention_free else ["heads", "ff", "context"]
    names += ["kv_heads"] if arch.grouped else []
    names += [] if arch.square or arch.latent or arch.attention_free else ["head"]
    kind = "layer_norm" if arch.layer_norm else "layer_norm_rms"
    epsilon = keys.get(f"attention.{kind}_epsilon", math.nan)
    config = {key_of(arch, name): getattr(measured, name) for name in names}
    for count in arch.counts:
        config[count.keys[0]] = measured.of(count.size) or (0 if count.size in COUNTS_FROM_0 else None)
    return config | {key_of(arch, "epsilon"): float(epsilon)}


def _biases(arch: Architecture, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that state which modules have a bias."""
    optional = [module for module in arch.blocks if isinstance(module.bias, str)]
    flagged = [module for module in arch.blocks if module.flag]
    return {
        **{str(module.bias): f"{module.gguf.format(0)}.bias" in tensors for module in reversed(optional)},
        **{module.flag: f"{module.gguf.format(0)}.weight" in tensors for module in flagged},
    }


def _ruled(rule: ConfigRule) -> Any:
    """The value of a key that llama.cpp's code fixes: transformers' default where it is allowed."""
    assert rule.allowed, "a rule without allowed values allows any number"
    return rule.default if rule.default in rule.allowed else rule.allowed[0]


def _extras(keys: ArchitectureMetadata, arch: Architecture) -> dict[str, Any]:
    return {source: keys.get(key, arch.defaults.get(source)) for key, source in arch.extras}


def _window(keys: ArchitectureMetadata, arch: Architecture, measured: Sizes) -> dict[str, Any]:
    """Sliding windows, and the scale of queries that goes with them in Gemma."""
    tokens, marks = keys.get("attention.sliding_window", 0), keys.get("attention.sliding_window_pattern")
    if tokens and (type(tokens) is not int or tokens < 0):
        raise CheckpointError(f"GGUF: {keys.arch}.attention.sliding_window is {tokens!r}", hint=DAMAGED)
    if arch.window == "all":
        return {"sliding_window": int(tokens) if tokens else None}
    if arch.window == "marked":
        return _marked(int(tokens), marks) if tokens and isinstance(marks, list) else {}
    if arch.window is None:
        return {}
    interval = marks if isinstance(marks, int) and not isinstance(marks, bool) else int(arch.window)
    blocks = marks if isinstance(marks, list) else usual_pattern(interval, measured.layers)
    if arch.family == "gemma3_text" and not tokens:
        blocks = [False] * measured.layers
    scale = {"query_pre_attn_scalar": query_scalar(arch, measured)} if arch.scale_by_layers else {}
    window = int(tokens or arch.defaults["sliding_window"])
    return {"sliding_window": window, "layer_types": _types(blocks), **scale}


def _marked(tokens: int, marks: list[bool]) -> dict[str, Any]:
    config = {"use_sliding_window": True, "sliding_window": tokens, "max_window_layers": 0}
    return config | {"layer_types": _types(marks)}


def _types(blocks: list[bool]) -> list[str]:
    return ["sliding_attention" if marked else "full_attention" for marked in blocks]


def _tokens(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    ids = stored_ids(metadata)
    return {f"{role}_token_id": ids.get(role) for role in ("bos", "eos", "pad")}


def _dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype of the matrices: float32 where all are, bfloat16 where one is, else float16."""
    kinds = [
        getattr(tensor, "kind", None) or str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors.values()
        if len(tensor.shape) > 1
    ]
    names = [DTYPES.get(kind, kind) for kind in kinds]
    if all(name == "float32" for name in names):
        return "float32"
    return "bfloat16" if "bfloat16" in names else "float16"


def file_placements(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[Placement]:
    """The placements of the checkpoint's tensors, in the file's order.

    Args:
        config: of :func:`hf_config`.
        tensors: of the file by name, every expert by itself (:func:`attar.formats.gguf.placement.pieces`),
            each with a ``shape``.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or unknown; names it.
    """
    expected = expected_placements(config, tensors)
    wanted = [placement for placement in expected if placement.stored is not None and not placement.unused]
    for placement in wanted:
        if placement.piece not in tensors:
            raise CheckpointError(f"GGUF: there is no tensor {placement.piece!r}", hint=DAMAGED)
        shape = tuple(tensors[placement.piece].shape)
        if shape != placement.shape and (1, *shape) != placement.shape:
            raise CheckpointError(
                f"GGUF: tensor {placement.piece!r} is {list(shape)}, but must be {list(placement.shape)}"
            )
    known = frozenset(placement.piece for placement in expected)
    for name in tensors:
        if name not in known and name not in TENSORS:
            raise CheckpointError(f"GGUF: tensor {name!r} has no place in a {config['model_type']}")
    return wanted
