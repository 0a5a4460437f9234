"""An adapter's files as peft writes them, and the model's tensor that each factor updates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.names import check_links
from attar.checkpoint.parts import part_of
from attar.checkpoint.tensors import TensorInfo, read_header
from attar.errors import AttarError, CheckpointError, ModelError
from attar.patterns import check, matches_start

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
NUMBERS = {"r": ("rank_pattern", 8), "lora_alpha": ("alpha_pattern", 8)}
"""A number of peft's config: the table of other values for some modules, and peft's default."""
MOST = 1 << 20  # of a rank, and of an alpha
HEAD = "lm_head.weight"
STORED_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Families whose Linear weights are stored (inputs, outputs)."""

UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""Keys of peft's config that change what an adapter computes, and that attar does not support."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the base weights as well, by an amount that the adapter does not store."""

_FACTOR = re.compile(
    r"^(?P<module>.+)\.(?P<factor>lora_embedding_[AB]|lora_[AB]|lora_magnitude_vector)"
    r"(\.(?!weight$|bias$)[^.]+)?(\.(?P<leaf>weight|bias))?$"
)
_WRAPPED = re.compile(r"\.(base_layer|modules_to_save(\.(?!weight$|bias$)[^.]+)?)(?=\.(weight|bias)$)")
_PREFIX = "base_model.model."
_NAME = re.compile(r"\w+(\.\w+)*")


@dataclass
class TensorUpdate:
    """An adapter's update of one tensor.

    Attributes:
        source: the model's tensor that is updated, or replaced.
        replacement: the adapter's tensor that replaces the model's.
        A: first factor, as stored in the adapter.
        B: second factor.
        magnitude: DoRA's m.
        bias: the bias of B, added times ``scale``.
        scale: s.
        transposed: (s B A)^T is added.
    """

    source: str
    replacement: TensorInfo | None = None
    A: TensorInfo | None = None
    B: TensorInfo | None = None
    magnitude: TensorInfo | None = None
    bias: TensorInfo | None = None
    scale: float = 1.0
    transposed: bool = False


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The adapter's config.

    Raises:
        CheckpointError: there is none, or it is not JSON.
        ModelError: the adapter is not LoRA, or uses something that attar does not support; names it.
        RegexError: a key of rank_pattern or alpha_pattern is no pattern, or too large.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}", hint="a folder that peft wrote is needed")
    check_links(folder, FILES)
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type is {kind!r}; only LORA can be added to a model")
    for key in UNSUPPORTED:
        if config.get(key):
            raise ModelError(
                f"{path}: {key} is set, which attar does not support",
                hint="merge it with peft's merge_and_unload, and name the result",
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise ModelError(
            f"{path}: init_lora_weights is {start!r}, which changes the base weights too",
            hint="save it with peft's path_initial_model_for_weight_conversion",
        )
    _check_numbers(path, config)
    return config


def _check_numbers(path: Path, config: Mapping[str, Any]) -> None:
    """Ranks are whole numbers from 1 on, alphas finite ones, and patterns can be matched."""
    for name, (pattern, default) in NUMBERS.items():
        values = config.get(pattern) or {}
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: {pattern} is {str(values)[:60]}, not a table of numbers")
        others = {f"{pattern}[{key[:60]!r}]": value for key, value in values.items()}
        numbers = {name: config.get(name, default), **others}
        for field, value in numbers.items():
            is_count = type(value) is int and 1 <= value <= MOST
            if not (
                is_count or (name == "lora_alpha" and type(value) in (int, float) and abs(value) <= MOST)
            ):
                kind = "a whole number from 1" if name == "r" else f"a number from {-MOST:,}"
                raise CheckpointError(f"{path}: {field} is {str(value)[:60]}, not {kind} to {MOST:,}")
        for key in values:
            check(_ending(key), f"{path}: {pattern}")


def _read_infos(folder: Path) -> dict[str, TensorInfo]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise CheckpointError(
            f"{folder}: no {WEIGHTS}" + (", only adapter_model.bin, which is pickled" if pickled else ""),
            hint="where you trust it, load it with peft and save it again" if pickled else "copy it too",
        )
    return {
        entry.name: TensorInfo(
            entry.name, entry.dtype, entry.shape, entry.end - entry.begin, path, entry.begin
        )
        for entry in read_header(path)
    }


@dataclass(frozen=True)
class AdapterTensors:
    """An adapter's tensors.

    Attributes:
        factors: of each module: ``lora_A``, ``lora_B``, ``lora_embedding_A``, ``lora_B.bias``, ...
        replacements: tensors that replace the model's, by the model's names.
    """

    factors: dict[str, dict[str, TensorInfo]]
    replacements: dict[str, TensorInfo]


def read_tensors(folder: Path) -> AdapterTensors:
    """An adapter's tensors by their modules. Reads the header, no weights.

    Raises:
        CheckpointError: the adapter's weights are missing or damaged.
        ModelError: a tensor is not one of a LoRA adapter; names it.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    replacements: dict[str, TensorInfo] = {}
    infos = _read_infos(folder)
    for key in sorted(infos, key=lambda key: "modules_to_save" in key):  # the trained tensor counts last
        info = infos[key]
        if ".original_module." in key:  # what peft kept beside a trained module; it does not read it back
            continue
        plain = key.removeprefix(_PREFIX)
        match = _FACTOR.match(plain)
        if match:
            factor = match["factor"] + (".bias" if match["leaf"] == "bias" else "")
            modules.setdefault(match["module"], {})[factor] = info
        elif plain.endswith((".weight", ".bias")):
            replacements[_WRAPPED.sub("", plain)] = info
        else:
            raise ModelError(f"{folder}: {key!r} is no tensor of a LoRA adapter")
    return AdapterTensors(modules, replacements)


def find_updates(checkpoint: Any, folder: Path, config: Mapping[str, Any]) -> dict[str, TensorUpdate]:
    """An adapter's updates by the name of the tensor in the result. Reads headers, no weights.

    Raises:
        CheckpointError: the adapter's weights are missing or damaged.
        ModelError: something in it belongs to no tensor of the model, or does not fit; names it.
    """
    tensors = read_tensors(folder)
    target = _TargetModel(checkpoint, folder, config)
    updates: dict[str, TensorUpdate] = {}
    for name, info in tensors.replacements.items():
        output, source = target.locate(name, info.name)
        updates[output] = TensorUpdate(source, replacement=info)
    for module, factors in tensors.factors.items():
        _add_factors(updates, target, module, factors)
    target.untie(updates)
    _check_rows(checkpoint, folder, updates)
    return updates


def _check_rows(checkpoint: Any, folder: Path, updates: Mapping[str, TensorUpdate]) -> None:
    """A tensor that replaces the model's has its shape; embedding and head may both have other rows."""
    rows = {}
    for name, update in updates.items():
        model_shape = tuple(checkpoint.tensors[update.source].shape)
        shape = tuple(update.replacement.shape) if update.replacement else model_shape
        part = part_of(name)
        if part in ("embedding", "head"):
            rows[name] = shape[0]
        if shape[1:] != model_shape[1:] or (shape != model_shape and name not in rows):
            raise ModelError(
                f"{folder}: {name!r} of shape {shape}, where {checkpoint.name} has {model_shape}"
            )
    if not any(count != checkpoint.tensors[updates[name].source].shape[0] for name, count in rows.items()):
        return
    vocabulary = checkpoint.config.get("vocab_size")
    others = {
        name: info.shape[0]
        for name, info in checkpoint.tensors.items()
        if part_of(name) in ("embedding", "head")
    }
    rows = {name: count for name, count in others.items() if count == vocabulary} | rows
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{count} rows of {name}" for name, count in sorted(rows.items()))
        raise ModelError(
            f"{folder}: the vocabulary has grown in a part alone: {counts}",
            hint="save both: modules_to_save=['embed_tokens', 'lm_head']",
        )


class _TargetModel:
    """The model's tensors, looked up by an adapter's names."""

    def __init__(self, checkpoint: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self.checkpoint, self.folder, self.config = checkpoint, folder, config
        self.tied = bool(checkpoint.config.get("tie_word_embeddings")) and HEAD not in checkpoint.tensors
        self.transposed = checkpoint.config.get("model_type") in STORED_TRANSPOSED

    def locate(self, name: str, key: str) -> tuple[str, str]:
        """Name of a tensor in the result, and of the model's tensor that it updates."""
        tensors = self.checkpoint.tensors
        if name in tensors:
            return name, name
        if name == HEAD and self.tied:
            return HEAD, self.embedding()
        shorter = name.partition(".")[2]
        longer = [known for known in tensors if known.partition(".")[2] == name]
        if shorter in tensors:
            return shorter, shorter
        if len(longer) == 1:
            return longer[0], longer[0]
        renamed = self.renamed.get(name)
        if renamed is not None:
            return renamed, renamed
        raise ModelError(f"{self.folder}: {key!r} fits nothing in {self.checkpoint.name}: no tensor {name!r}")

    @cached_property
    def renamed(self) -> dict[str, str]:
        """Stored names by transformers' parameter names, for families whose checkpoints use other names;
        empty for a family that transformers does not know."""
        from attar.models.loading.empty import empty_model
        from attar.models.loading.stored import stored_names

        try:
            return stored_names(empty_model(self.checkpoint.config), self.checkpoint, strict=False)
        except AttarError:
            return {}

    def embedding(self) -> str:
        """The embedding that the head is tied to."""
        rows = self.checkpoint.config.get("vocab_size")
        for name, info in self.checkpoint.tensors.items():
            if part_of(name) == "embedding" and len(info.shape) == 2 and info.shape[0] == rows:
                return str(name)
        raise ModelError(f"{self.checkpoint.name}: no embedding that its head could be tied to")

    def untie(self, updates: dict[str, TensorUpdate]) -> None:
        """Give a tied model a separate head where the adapter updates only the embedding."""
        if not self.tied:
            return
        embedding = self.embedding()
        if self.config.get("ensure_weight_tying"):
            updates.pop(HEAD, None)
            return
        if embedding in updates and HEAD not in updates:
            if not any("CausalLM" in name for name in self.checkpoint.config.get("architectures", ())):
                raise ModelError(
                    f"{self.folder}: changes {embedding!r}, to which {self.checkpoint.name} ties its head"
                )
            updates[HEAD] = TensorUpdate(embedding)


def _add_factors(
    updates: dict[str, TensorUpdate], target: _TargetModel, module: str, factors: Mapping[str, TensorInfo]
) -> None:
    """Add the updates by the factors of one module."""
    embedding = "lora_embedding_A" in factors or "lora_embedding_B" in factors
    first, second = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    A, B = factors.get(first), factors.get(second)
    unknown = sorted(set(factors) - {first, second, "lora_magnitude_vector", "lora_B.bias"})
    if A is None or B is None or unknown:
        what = f"has {unknown[0]}" if unknown else f"has no {first if A is None else second}"
        raise ModelError(f"{target.folder}: {module!r} {what}")
    name, source = target.locate(f"{module}.weight", A.name)
    update = updates.setdefault(name, TensorUpdate(source))
    r, update.scale = rank_and_scale(target.config, module)
    shape = tuple(update.replacement.shape if update.replacement else target.checkpoint.tensors[source].shape)
    straight = (*B.shape[:1], *A.shape[1:])
    if len(A.shape) != 2 or len(B.shape) != 2 or not A.shape[0] == B.shape[1] == r:
        raise ModelError(
            f"{target.folder}: {module!r}: factors of shape {A.shape} and {B.shape}, but rank {r} by {CONFIG}"
        )
    flipped = target.config.get("fan_in_fan_out") and shape == straight[::-1] != straight
    update.transposed = embedding or target.transposed or bool(flipped)
    if shape != (straight[::-1] if update.transposed else straight):
        raise ModelError(
            f"{target.folder}: {module!r}: an update of shape {straight} for {source!r} of shape {shape}"
        )
    update.A, update.B, update.magnitude = A, B, factors.get("lora_magnitude_vector")
    if (update.magnitude is not None) != bool(target.config.get("use_dora")):
        raise ModelError(f"{target.folder}: {module!r}: use_dora and its lora_magnitude_vector disagree")
    if "lora_B.bias" in factors:
        name, source = target.locate(f"{module}.bias", factors["lora_B.bias"].name)
        bias = updates.setdefault(name, TensorUpdate(source))
        bias.bias, bias.scale = factors["lora_B.bias"], update.scale


def rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank and s of a module, by an adapter's config."""
    r, alpha = (
        _pattern(config.get(pattern) or {}, module, config.get(name, default), pattern)
        for name, (pattern, default) in NUMBERS.items()
    )
    return r, alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def _pattern(patterns: Mapping[str, Any], module: str, default: Any, field: str) -> Any:
    """The value of the first pattern that matches the end of a module's name, as in peft."""
    matches = (value for key, value in patterns.items() if _is_ending(key, module, f"{CONFIG}: {field}"))
    return next(matches, default)


def _ending(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _is_ending(key: str, module: str, where: str) -> bool:
    """Whether a name, or a regular expression, is the end of a module's name: most are names."""
    if _NAME.fullmatch(key):
        return module == key or module.endswith(f".{key}")
    return matches_start(_ending(key), module, where)
