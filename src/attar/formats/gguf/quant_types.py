"""llama.cpp's mixes: which type each tensor of a GGUF file gets under a name such as Q4_K_M.

llama.cpp, ``src/llama-quant.cpp`` (``tensor_allows_quantization``, ``llama_tensor_get_type_impl``,
``tensor_type_fallback``), as of llama-cpp-python 0.3.36.

    mix       default  attn_v (or fused qkv)       ffn_down                     attn_output   output
    Q2_K      Q2_K     Q4_K if gqa >= 4 else Q3_K  Q3_K                         Q3_K          Q6_K
    Q2_K_S    Q2_K     Q4_K if gqa >= 4            Q4_K if i < n/8                            Q6_K
    Q3_K_S    Q3_K                                                                            Q6_K
    Q3_K_M    Q3_K     Q5_K if i < 2 else Q4_K     Q5_K if i < n/16 else Q4_K   Q4_K          Q6_K
    Q3_K_L    Q3_K     Q5_K                        Q5_K                         Q5_K          Q6_K
    Q4_K_S    Q4_K     Q5_K if i < 4               Q5_K if i < n/8                            Q6_K
    Q4_K_M    Q4_K     Q6_K if more(i, n)          Q6_K if more(i, n)                         Q6_K
    Q5_K_S    Q5_K                                                                            Q6_K
    Q5_K_M    Q5_K     Q6_K if more(i, n)          Q6_K if more(i, n)                         Q6_K
    IQ4_NL    IQ4_NL   Q5_K if gqa >= 4            Q5_K if i < n/8, no imatrix                Q6_K
    IQ4_XS    IQ4_XS   the same                    the same                                   Q6_K
    Q4_0      Q4_0                                 Q4_1 if i < n/8, imatrix                   Q6_K
    Q5_0      Q5_0                                 Q5_1 if i < n/8, imatrix                   Q6_K
    MXFP4_MOE Q8_0     (experts MXFP4)                                                        Q8_0
    others    itself                                                                          Q6_K, or Q8_0

    more(i, n) = i < n/8  or  i >= 7n/8  or  (i - n/8) mod 3 = 2        divisions of integers

Letters: i how many tensors of this role came before, in llama.cpp's order of tensors; n how many there are
(for ffn_down: the layers); gqa = heads / key-value heads; K inputs of a tensor.

A file without ``output.weight`` is tied: its embedding gets the type of the output. Anything but a matrix or
a ``weight``, and norms, routers and the other small tensors in :data:`KEPT`, stay F32. A type whose block
does not divide K is replaced by one of 32 weights, or by F16; each such case is a sentence in the notes.

Differs from llama.cpp: tensors that are never quantized are F32 (there: unchanged); overrides also
apply to the mixes F32, F16 and BF16; ``MXFP4`` and ``NVFP4`` are mixes of our own, with every matrix of a
block in that type and embedding and output in Q8_0, because MXFP4_MOE has no MXFP4 tensor in a model without
experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attar.errors import SettingsError, nearest
from attar.formats.gguf.types import FILE_TYPES, TYPES, row_bytes
from attar.patterns import search

DEFAULTS = {
    "F32": "F32", "F16": "F16", "BF16": "BF16", "Q8_0": "Q8_0",
    "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1",
    "Q2_K": "Q2_K", "Q2_K_S": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K",
    "IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_XS", "MXFP4_MOE": "MXFP4", "MXFP4": "MXFP4", "NVFP4": "NVFP4",
}  # fmt: skip
"""The type of most tensors of each mix."""

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""Other names of mixes."""

KEPT = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel",
    "per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight",
    "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight", "time_mix_a0.weight",
    "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight", "time_mix_g2.weight",
    "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
    ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
"""Tensors with one of these in their name are never quantized."""

KEPT_WHOLE = ("position_embd.weight", "token_types.weight")
"""Nor are these."""

FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
    "NVFP4": "IQ4_NL",
}
"""Replacements of types whose block does not divide K."""

ROLES = (
    ("attn_v", ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")),
    ("attn_k", ("attn_k.weight",)),
    ("attn_output", ("attn_output.weight",)),
    ("ffn_down", ("ffn_down",)),
)
"""Roles in the rules, by parts of names."""

SEVENTY = {"llama": 80, "qwen2": 80, "olmo": 80, "deci": 80, "jais2": 68}
"""Layers of a model that llama.cpp takes for one of 70 billion weights, by architecture."""

OUTPUT, EMBEDDINGS = "output.weight", ("token_embd.weight", "per_layer_token_embd.weight")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class TypeMix:
    """A type for every tensor.

    Attributes:
        kinds: type by tensor name, in the order of the shapes.
        file_type: ``general.file_type``.
    """

    kinds: dict[str, str]
    notes: tuple[str, ...]
    file_type: int


@dataclass(frozen=True)
class _MixInput:
    """The properties of a model in the rules.

    Attributes:
        layers: n of ffn_down.
        values: n of attn_v.
        gqa: heads / key-value heads.
        experts: in a layer; 0 or 1: none.
        seventy: llama.cpp takes it for one of 70 billion weights.
        falcon: its architecture is falcon's, with its own rules.
        tied: the embedding is the output too.
    """

    name: str
    layers: int
    values: int
    gqa: int
    experts: int
    seventy: bool
    falcon: bool
    imatrix: bool
    tied: bool


def mix(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    architecture: str,
    experts: int = 0,
    imatrix: bool = False,
    overrides: Sequence[str] = (),
) -> TypeMix:
    """The types that llama.cpp's quantizer gives the tensors of a model.

    Args:
        name: of the mix, such as Q4_K_M.
        shapes: of every tensor of the file in torch's order, (N, K) or (E, N, K) of experts, by GGUF name.
        heads, kv_heads: of the first block's attention.
        architecture: ``general.architecture``.
        imatrix: whether weights are rounded with an importance matrix.
        overrides: ``PATTERN=TYPE``: a type of their own for tensors whose name holds the regular expression;
            the first match counts. As in llama.cpp, these tensors are not counted in i.

    Raises:
        SettingsError: no such mix or type, or an override that no matrix matches.
    """
    name = canonical(name, imatrix)
    ordered = sorted(shapes, key=_tensor_order)
    overridden_kinds = overridden(
        [tensor for tensor in ordered if quantizable(tensor, shapes[tensor])], overrides
    )
    model = _MixInput(
        name=name,
        layers=layers,
        values=sum(role(tensor) == "attn_v" for tensor in ordered),
        gqa=heads // kv_heads if kv_heads else 0,
        experts=experts,
        seventy=_seventy(architecture, layers, heads, kv_heads, experts),
        falcon=architecture == "falcon",
        imatrix=imatrix,
        tied=OUTPUT not in shapes,
    )
    kinds, fallbacks = _kinds(model, ordered, shapes, overridden_kinds)
    notes = list(_notes(fallbacks))
    if name == "MXFP4_MOE" and "MXFP4" not in kinds.values():
        notes.append("the mix MXFP4_MOE is for experts; this model has none and is Q8_0 (see the mix MXFP4)")
    file_type = FILE_TYPES["MXFP4_MOE" if name == "MXFP4" else name]
    return TypeMix({tensor: kinds[tensor] for tensor in shapes}, tuple(notes), file_type)


def canonical(name: str, imatrix: bool = False) -> str:
    """The name of a mix as llama.cpp spells it.

    Raises:
        SettingsError: no such mix, or one that needs an importance matrix.
    """
    mix_name = ALIASES.get(name.upper(), name.upper())
    if mix_name not in DEFAULTS:
        close = nearest(mix_name, DEFAULTS)
        mean = f" (did you mean {close}?)" if close else ""
        raise SettingsError("type", name, f"one of {', '.join(DEFAULTS)}{mean}")
    if mix_name == "Q2_K_S" and not imatrix:
        raise SettingsError("type", name, "another without an importance matrix, such as Q2_K")
    return mix_name


def bits(kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[float, int]:
    """Average stored bits of a weight and bytes, over the tensors of ``kinds``; without padding."""
    stored = sum(tensor_bytes(kind, shapes[name]) for name, kind in kinds.items())
    weights = sum(math.prod(shapes[name]) for name in kinds)
    return stored * 8 / max(weights, 1), stored


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a type."""
    return math.prod(shape[:-1]) * row_bytes(kind, shape[-1])


def quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp quantizes a tensor at all."""
    matrix = len(shape) > 1 and math.prod(shape[:-1]) > 1
    kept = name in KEPT_WHOLE or any(part in name for part in KEPT)
    return matrix and name.endswith("weight") and not kept


def fitting(kind: str, columns: int) -> str:
    """The type, or its replacement where its block does not divide K."""
    if columns % TYPES[kind].block == 0:
        return kind
    smaller = FALLBACK.get(kind, kind)
    return smaller if columns % TYPES[smaller].block == 0 else "F16"


def overridden(names: Sequence[str], overrides: Sequence[str]) -> dict[str, str]:
    """Types given by hand, by tensor name: the first ``PATTERN=TYPE`` whose pattern is in a name counts.

    Raises:
        SettingsError: no such type, or no tensor matches.
    """
    types: dict[str, str] = {}
    for text in overrides:
        pattern, _, kind = text.rpartition("=")
        if not pattern or kind.upper() not in TYPES or kind.upper() in ("F64", "I8", "I16", "I32", "I64"):
            kinds = [known for known in TYPES if known[0] != "I" or known[1] == "Q"]
            raise SettingsError("overrides", text, f"PATTERN=TYPE with one of {', '.join(kinds)}")
        matched = [name for name in names if search(pattern, name)]
        if not matched:
            raise SettingsError("overrides", text, "a pattern that some matrix of the model matches")
        types.update({name: kind.upper() for name in matched if name not in types})
    return types


def role(name: str) -> str:
    """What the rules call a tensor: output, token_embd, attn_v, attn_k, attn_output, ffn_down or other."""
    if name == OUTPUT:
        return "output"
    if name in EMBEDDINGS:
        return "token_embd"
    return next((known for known, parts in ROLES if any(part in name for part in parts)), "other")


def _kinds(
    model: _MixInput,
    ordered: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    overridden_kinds: Mapping[str, str],
) -> tuple[dict[str, str], list[tuple[str, str, str, int]]]:
    """Types by name, and the replaced ones: (name, wanted, got, K)."""
    kinds, fallbacks = {}, []
    seen = {"attn_v": 0, "ffn_down": 0}
    for name in ordered:
        shape, what = shapes[name], role(name)
        if not quantizable(name, shape):
            kinds[name] = "F32"
            continue
        if name in overridden_kinds or model.name in FLOATS:
            wanted = overridden_kinds.get(name, model.name)
        else:
            wanted = _wanted(model, what, name, shape, seen.get(what, 0))
            seen[what] = seen.get(what, 0) + 1
        kinds[name] = fitting(wanted, shape[-1])
        if kinds[name] != wanted:
            fallbacks.append((name, wanted, kinds[name], shape[-1]))
    return kinds, fallbacks


def _wanted(model: _MixInput, what: str, name: str, shape: tuple[int, ...], i: int) -> str:
    """The type that the rules give, before K is considered."""
    default = DEFAULTS[model.name]
    if what == "output" or (what == "token_embd" and model.tied):
        return _output(model, default)
    if model.name == "MXFP4_MOE":
        return "MXFP4" if len(shape) > 2 and shape[0] > 1 else "Q8_0"
    if what == "token_embd":
        return "Q8_0" if model.name in ("MXFP4", "NVFP4") else default
    if what == "attn_v":
        return _values(model, i, default)
    if what == "attn_k":
        return "Q8_0" if model.experts == 8 else default
    if what == "ffn_down":
        layer = int(name.split(".")[1]) if model.experts > 1 else i
        return _down(model, layer, default)
    return _attention_output(model, default) if what == "attn_output" else default


def _output(model: _MixInput, default: str) -> str:
    """The output, and a tied embedding."""
    return "Q8_0" if default in ("Q8_0", "MXFP4", "NVFP4") or model.falcon else "Q6_K"


def _values(model: _MixInput, i: int, default: str) -> str:
    """attn_v, and fused tensors that hold it."""
    if model.experts == 8:
        return "Q8_0"
    kind = default
    if model.name in ("Q2_K", "Q2_K_S", "IQ4_NL", "IQ4_XS"):
        few = {"Q2_K": "Q3_K"}.get(model.name, default)
        many = "Q4_K" if default == "Q2_K" else "Q5_K"
        kind = many if model.gqa >= 4 else few
    elif model.name == "Q3_K_M":
        kind = "Q5_K" if i < 2 else "Q4_K"
    elif model.name == "Q3_K_L" or (model.name == "Q4_K_S" and i < 4):
        kind = "Q5_K"
    elif model.name in ("Q4_K_M", "Q5_K_M") and use_more_bits(i, model.values):
        kind = "Q6_K"
    return "Q5_K" if model.seventy and kind in ("Q3_K", "Q4_K") else kind


def _down(model: _MixInput, i: int, default: str) -> str:
    """ffn_down."""
    n, name = model.layers, model.name
    if model.falcon and name in ("Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M"):
        return _down_falcon(name, i, n)
    if name in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if use_more_bits(i, n) else default
    if name == "Q3_K_M":
        return "Q5_K" if i < n // 16 else "Q4_K"
    always = {"Q2_K": "Q3_K", "Q3_K_L": "Q5_K"}
    first = {"Q2_K_S": "Q4_K", "Q4_K_S": "Q5_K"}
    first |= {"Q4_0": "Q4_1", "Q5_0": "Q5_1"} if model.imatrix else {"IQ4_NL": "Q5_K", "IQ4_XS": "Q5_K"}
    return first[name] if name in first and i < n // 8 else always.get(name, default)


def _down_falcon(name: str, i: int, n: int) -> str:
    if name in ("Q3_K_L", "Q4_K_S"):
        return "Q4_K"
    first, some, other = ("Q6_K", "Q5_K", "Q4_K") if name == "Q4_K_M" else ("Q5_K", "Q4_K", "Q3_K")
    return first if i < n // 16 else some if use_more_bits(i, n) else other


def _attention_output(model: _MixInput, default: str) -> str:
    if model.falcon:
        return "Q4_K" if model.name == "Q3_K_L" else default
    if model.experts == 8:
        raised = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS")
        return "Q5_K" if model.name in raised else default
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(model.name, default)


def use_more_bits(i: int, n: int) -> bool:
    """The first and the last eighth of n layers, and every third between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _seventy(architecture: str, layers: int, heads: int, kv_heads: int, experts: int) -> bool:
    if SEVENTY.get(architecture) != layers:
        return False
    return architecture != "llama" or (heads != kv_heads and experts != 8)


def _tensor_order(name: str) -> tuple[int, str]:
    """llama.cpp's order of tensors: by layer, then by name."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return (int(layer[1]) if layer else -1, name)


def _notes(fallbacks: Iterable[tuple[str, str, str, int]]) -> Iterable[str]:
    """A sentence for all tensors with the same replacement."""
    alike: dict[tuple[str, str, int], list[str]] = {}
    for name, wanted, got, columns in fallbacks:
        alike.setdefault((wanted, got, columns), []).append(name)
    for (wanted, got, columns), names in alike.items():
        several = f"{names[0]} and {len(names) - 1} more have" if len(names) > 1 else f"{names[0]} has"
        block = TYPES[FALLBACK.get(wanted, wanted) if got == "F16" else wanted].block
        yield f"{several} {columns} inputs, no multiple of {block}: {got} instead of {wanted}"
