"""A checkpoint as all verbs see it: what config.json says agrees with what the files hold.

Judged from the headers alone, by the rows of :mod:`attar.checkpoint.oddities`; only where the tie flag is set
and a head is stored as well are the bytes of the two compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attar.checkpoint import mlx_folder
from attar.checkpoint.config_numbers import TOKENS, odd_number
from attar.checkpoint.geometry import geometry
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.mtp import missing_part, mtp_names
from attar.checkpoint.oddities import Oddity, oddity
from attar.checkpoint.parts import AUXILIARY
from attar.checkpoint.tensors import TensorInfo
from attar.checkpoint.weight_files import more, same_bytes
from attar.errors import CheckpointError

FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of a folder with ``qweight``, and the method of folders that name none."""
MODELOPT = "hf_quant_config.json"


def with_quantization(config: dict[str, Any], names: Iterable[str], folder: Path) -> dict[str, Any]:
    """The config with its quantization, where one of the files or the older key has it.

    Args:
        names: of the tensors, which tell whether the files mean anything.

    Raises:
        CheckpointError: a file is no JSON object.
    """
    if config.get("quantization_config"):
        return config
    stated = _elsewhere(config, tuple(names), folder)
    return config if stated is None else {**config, "quantization_config": stated}


def _elsewhere(config: Mapping[str, Any], names: tuple[str, ...], folder: Path) -> dict[str, Any] | None:
    older = config.get("compression_config")
    if isinstance(older, Mapping):
        return {"quant_method": "compressed-tensors", **older}
    if any(name.endswith(".weight_scale") for name in names) and (folder / MODELOPT).is_file():
        return _modelopt(read_json(folder / MODELOPT))
    packed = any(name.endswith(".qweight") for name in names)
    for name, method in FILES.items() if packed else ():
        if (folder / name).is_file():
            return {"quant_method": method, **read_json(folder / name)}
    return None


def _modelopt(content: Mapping[str, Any]) -> dict[str, Any]:
    """ModelOpt's own file, which its older folders have alone, in the terms of config.json."""
    inner = content.get("quantization")
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{MODELOPT}: quantization is {inner!r}, not an object")
    cached = inner.get("kv_cache_quant_algo")
    return {
        "quant_method": "modelopt",
        "quant_algo": inner.get("quant_algo"),
        "ignore": inner.get("exclude_modules") or [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False} if cached == "FP8" else None,
    }


EMPTY = ("text_config", "quantization_config")
"""Keys that mean nothing where they are null or empty."""
TIE = "tie_word_embeddings"
METHODS = (
    *("compressed-tensors", "bitsandbytes", "gptq", "awq", "modelopt", "fp8", "fbgemm_fp8"),
    *("exl2", "exl3", "mxfp4", "mlx"),
)
"""Of :data:`attar.formats.readers.READERS` in folders: their codes are known by their names and types."""

_WRAPPERS = ("module.", "base_model.model.", "language_model.")
"""Prefixes of all names in files that training libraries wrote."""
_INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""The same, anywhere in a name."""
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer|modules_to_save)\.")
_LEAVES = r"\.(weight|qweight|q_weight|weight_packed|trellis)$"
_HEAD = re.compile(
    r"(^|\.)(lm_head|embed_out|output_layer|lm_head\.decoder|cls\.predictions\.decoder)" + _LEAVES
)
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|embeddings)" + _LEAVES
)
_LAYER = re.compile(r"^(.*?\.|)layers\.(\d+)\.")
_CODES = re.compile(
    r"\.(qweight|q_weight|weight_packed|trellis|weight\.SCB|SCB|weight_format|B)$|(_blocks|_scales)$"
)
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")


@dataclass
class NormalForm:
    """The parts of a checkpoint that are set right.

    Attributes:
        as_stored: all tensors of the files have their names there.
        mtp: the tensors of the multi-token prediction head.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    mtp: dict[str, TensorInfo] = field(default_factory=dict)
    oddities: list[Oddity] = field(default_factory=list)
    as_stored: bool = True


def normal_form(config: dict[str, Any], tensors: dict[str, TensorInfo], folder: Path) -> NormalForm:
    """The normal form of a config and the tensors of its files, with what is odd about them.

    Raises:
        CheckpointError: an older writer's file of a quantization is no JSON object.
    """
    config = {key: value for key, value in config.items() if key not in EMPTY or value}
    form = NormalForm(with_quantization(config, tensors, folder), tensors)
    odd = odd_number(form.config)
    if odd is not None:
        form.oddities.append(odd)
        return form
    for settle in STEPS:
        settle(form)
    return form


def _settle_mlx(form: NormalForm) -> None:
    """mlx-lm's names, stacks and quantization as the family's published checkpoints have them."""
    if not mlx_folder.is_mlx(form.config, form.tensors):
        return
    family = form.config["model_type"]
    if family not in mlx_folder.FAMILIES:
        form.oddities.append(oddity("mlx family", family=family, families=", ".join(mlx_folder.FAMILIES)))
        return
    tensors, twice = mlx_folder.published(form.tensors, family)
    if twice:
        form.oddities.append(oddity("mlx twice", tensor=f"{twice[0]}{more(twice)}"))
        return
    form.as_stored = form.as_stored and tensors.keys() == form.tensors.keys()
    form.config, form.tensors = mlx_folder.with_method(form.config), tensors


def _settle_layers(form: NormalForm) -> None:
    """Refuse a config with more layers than there are tensors, before a module is built for each."""
    layers = geometry(form.config, "float32").layers
    if layers is not None and layers > len(form.tensors) > 0:
        form.oddities.append(oddity("too many layers", layers=layers, tensors=len(form.tensors)))


def _settle_names(form: NormalForm) -> None:
    """Names without what training libraries put around a model."""
    adapter = next((name for name in form.tensors if _ADAPTER.search(name)), None)
    if adapter is not None:
        form.oddities.append(oddity("adapter inside", tensor=adapter))
        return
    names = {name: _unwrapped(name) for name in form.tensors}
    prefixes = [piece for piece in _INSIDE if any(piece in name for name in form.tensors)]
    wrappers = _WRAPPERS if "text_config" not in form.config else _WRAPPERS[:-1]
    while names and (
        wrapper := next(
            (prefix for prefix in wrappers if all(n.startswith(prefix) for n in names.values())), None
        )
    ):
        names = {name: bare.removeprefix(wrapper) for name, bare in names.items()}
        prefixes.append(wrapper)
    if prefixes and len(set(names.values())) == len(names):
        _rename(form, names)
        form.oddities.append(oddity("wrapped names", prefix=prefixes[0]))


def _unwrapped(name: str) -> str:
    for piece in _INSIDE:
        name = name.replace(piece, "")
    return name


def _rename(form: NormalForm, names: Mapping[str, str]) -> None:
    form.tensors = {names[name]: replace(info, name=names[name]) for name, info in form.tensors.items()}
    form.as_stored = False


def _settle_mtp(form: NormalForm) -> None:
    """The head that predicts further tokens apart from the model; half of one is left out."""
    names = mtp_names(form.config, list(form.tensors))
    if not names:
        return
    head = {name: form.tensors[name] for name in names}
    form.tensors = {name: info for name, info in form.tensors.items() if name not in head}
    missing = missing_part(names)
    if missing:
        form.oddities.append(oddity("half a head", tensor=f"{names[0]}{more(names)}", missing=missing))
        form.as_stored = False
    else:
        form.mtp = head


def _settle_codes(form: NormalForm) -> None:
    """Codes need a ``quantization_config``, and one without codes means nothing."""
    stated = form.config.get("quantization_config")
    coded = next((info for info in form.tensors.values() if holds_codes(info)), None)
    if coded is not None and not stated:
        form.oddities.append(oddity("codes without config", tensor=coded.name, dtype=coded.dtype))
    elif coded is None and stated and _means_codes(stated):
        method = stated["quant_method"]
        form.oddities.append(oddity("config without codes", method=method))
        form.config = {key: value for key, value in form.config.items() if key != "quantization_config"}


def holds_codes(info: Any) -> bool:
    """Whether a tensor is a part of a quantized weight: its codes, its scales."""
    if info.block or info.dtype.startswith(("F4", "F6_", "F8_")):
        return True
    integers = info.dtype in _INTEGERS
    if integers and info.name.endswith(".weight") and len(info.shape) > 1:
        return True
    return bool(AUXILIARY.search(info.name)) or (integers and bool(_CODES.search(info.name)))


def _means_codes(stated: Any) -> bool:
    """Whether a quantization is one of known codes, and does not round activations or the KV cache, for which
    nothing need be stored."""
    if not isinstance(stated, Mapping) or stated.get("quant_method") not in METHODS:
        return False
    groups = stated.get("config_groups")
    parts = groups.values() if isinstance(groups, Mapping) else ()
    activations = any(isinstance(part, Mapping) and part.get("input_activations") for part in parts)
    return not activations and not stated.get("kv_cache_scheme")


def _settle_tie(form: NormalForm) -> None:
    """The tie flag as the tensors have it: two tensors with other values are not tied, whatever it says."""
    heads = [name for name in form.tensors if _HEAD.search(name)]
    embeddings = [name for name in form.tensors if _EMBEDDING.search(name) and not _LAYER.match(name)]
    flag = stated_tie(form.config)
    if flag and not heads:
        form.config = with_tie(form.config, True)
    if len(heads) != 1 or len(embeddings) > 1 or flag is False:
        return
    head, embedding = heads[0], embeddings[0] if embeddings else None
    if embedding is None:
        _settle_embedding(form, head, flag)
        return
    tied = same_bytes(form.tensors[head], form.tensors[embedding])
    if tied:
        form.tensors = {name: info for name, info in form.tensors.items() if name != head}
        form.oddities.append(oddity("head twice"))
    elif flag:
        form.oddities.append(oddity("own head", head=head))
    form.config = with_tie(form.config, tied)


def _settle_embedding(form: NormalForm, head: str, flag: bool | None) -> None:
    """A tied model whose one table is stored under the head's name."""
    layer = next((match for match in map(_LAYER.match, form.tensors) if match), None)
    if not flag or layer is None or not head.endswith(".weight"):
        return
    embedding = f"{layer[1]}embed_tokens.weight"
    _rename(form, {**{name: name for name in form.tensors}, head: embedding})
    form.oddities.append(oddity("head for embedding", head=head, embedding=embedding))


def stated_tie(config: Mapping[str, Any]) -> bool | None:
    """What a config says of the tie between head and embedding, at the top or in ``text_config``; None where
    it leaves that to the family."""
    text = config.get("text_config")
    flags = [part.get(TIE) for part in (config, text) if isinstance(part, Mapping)]
    stated = [flag for flag in flags if isinstance(flag, bool)]
    return any(stated) if stated else None


def with_tie(config: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The config with the flag set, in ``text_config`` too."""
    text = config.get("text_config")
    inner = {"text_config": {**text, TIE: tied}} if isinstance(text, Mapping) else {}
    return {**config, **inner, TIE: tied}


def _settle_tokens(form: NormalForm) -> None:
    """Special tokens that have no row are left out; no model can read or write them."""
    text = form.config.get("text_config")
    form.config = _with_rows(form, form.config)
    if isinstance(text, Mapping):
        form.config = {**form.config, "text_config": _with_rows(form, dict(text))}


def _with_rows(form: NormalForm, config: dict[str, Any]) -> dict[str, Any]:
    rows, changed = config.get("vocab_size"), {}
    for key in TOKENS if rows is not None else ():
        value = config.get(key)
        values = value if isinstance(value, list) else [value]
        inside = [token for token in values if token is not None and 0 <= token < rows]
        if value is None or len(inside) == len(values):
            continue
        changed[key] = inside if isinstance(value, list) and inside else None
        if any(token is not None and token >= rows for token in values):
            form.oddities.append(oddity("token without row", key=key, value=value, rows=rows))
    return {**config, **changed} if changed else config


STEPS = (
    *(_settle_mlx, _settle_layers, _settle_names, _settle_mtp, _settle_codes, _settle_tie, _settle_tokens),
)
