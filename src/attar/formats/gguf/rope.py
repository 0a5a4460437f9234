"""Rotary position embeddings: a config's settings as GGUF metadata and tensors, and back.

A head's first d dimensions rotate by position times theta^(-2i/d) / f_i, i = 0 .. d/2 - 1. Kinds of f:

    default    1
    linear     one factor for all
    yarn       1 to ``factor``, computed by llama.cpp (its constants are transformers' defaults)
    llama3     1 to ``factor`` by wavelength; written as the tensor ``rope_freqs.weight``
    longrope   two given lists: ``rope_factors_short.weight`` up to the original context, ``..._long`` beyond
    proportional  1 for a part of the frequencies, and so much for the others that they do not turn (Gemma 4)

llama3 (w = 2 pi theta^(2i/d) the wavelength, c the original context, l and h the low and high frequency
factors): f = 1 where w < c/h, ``factor`` where w > c/l, between them 1/f = (1 - s)/factor + s with
s = (c/w - l)/(h - l).

A file has only the f_i of llama3. An equivalent l, h and c is computed from the line s(1/w): two of the three
are free, so l = 1. Factors on no such line are passed to transformers as longrope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.architecture import LLAMA_ROPES, Architecture, Sizes, shortest

FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
TENSORS = (FREQUENCIES, SHORT, LONG)
PROPORTIONAL, STILL = "proportional", 1e30
ORIGINAL = "original_max_position_embeddings"
SCALINGS = ("none", "linear", "yarn", "longrope")
"""Values of ``rope.scaling.type``."""
YARN = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
"""Keys that llama.cpp reads for architectures that are not known here, and llama.cpp's values for the known
ones."""


@dataclass(frozen=True)
class Rope:
    """Rotary settings.

    Attributes:
        kind: ``default``, ``linear``, ``yarn``, ``llama3``, ``longrope`` or ``proportional``.
        theta: base of the frequencies; ``local_theta``: in blocks with a sliding window, where it is another.
        dimensions: d.
        original: context before scaling.
    """

    kind: str
    theta: float
    dimensions: int
    settings: Mapping[str, Any]
    original: int
    local_theta: float | None = None


def read_rope(config: Mapping[str, Any], architecture: Architecture, sizes: Sizes) -> Rope | None:
    """The rotary settings of a config, from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``.
    Returns None for families without rotary embeddings.

    Raises:
        ModelError: llama.cpp does not compute this kind in this family.
    """
    if not architecture.ropes:
        return None
    config = architecture.plain_config(config)
    full, local = _settings(config)
    two = architecture.local_rope
    theta = _first(
        full.get("rope_theta"),
        config.get("rope_theta"),
        config.get("rotary_emb_base"),
        architecture.defaults.get("rope_theta"),
    )
    local_theta = (
        _first(local.get("rope_theta"), config.get("rope_local_base_freq"), 10000.0) if two else None
    )
    kind = _kind(full, architecture)
    if two and str(local.get("rope_type", "default")) != "default":
        raise ModelError(
            f"{architecture.family}: llama.cpp has no rope_type {local['rope_type']!r} in windowed blocks",
            hint="only default is known there",
        )
    _check_kind(kind, full, architecture)
    return Rope(
        kind=kind,
        theta=float(_first(theta, 1e6 if two else 1e4)),
        dimensions=sizes.of("global_head")
        if kind == PROPORTIONAL
        else _dimensions(config, full, architecture, sizes),
        settings=full,
        original=int(_first(_original(config, architecture), full.get(ORIGINAL), sizes.context)),
        local_theta=None if local_theta is None else float(local_theta),
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _setting(settings: Mapping[str, Any], key: str) -> Any:
    if settings.get(key) is None:
        kind = settings.get("rope_type") or settings.get("type")
        raise ModelError(f"config.json: the rope settings of type {kind!r} have no {key!r}")
    return settings[key]


def _settings(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Settings of full attention, and of blocks with a sliding window where they have their own."""
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json: the rope settings are {settings!r}, not an object")
    if "full_attention" in settings or "sliding_attention" in settings:
        return settings.get("full_attention") or {}, settings.get("sliding_attention") or {}
    return settings, {}


def _kind(settings: Mapping[str, Any], architecture: Architecture) -> str:
    kind = str(_first(settings.get("rope_type"), settings.get("type"), "default"))
    return "longrope" if kind == "su" or (kind == "yarn" and architecture.family == "phi3") else kind


def _original(config: Mapping[str, Any], architecture: Architecture) -> Any:
    """The config's entry goes before the entry of the rope settings, as in transformers."""
    return config[ORIGINAL] if ORIGINAL in config else architecture.defaults.get(ORIGINAL)


def _dimensions(
    config: Mapping[str, Any], settings: Mapping[str, Any], architecture: Architecture, sizes: Sizes
) -> int:
    fraction = _first(
        settings.get("partial_rotary_factor"),
        config.get("partial_rotary_factor"),
        config.get("rotary_pct"),
        architecture.defaults.get("partial_rotary_factor"),
        1.0,
    )
    dimensions = sizes.of("rope") if architecture.latent else int(sizes.head * fraction)
    rotates_all = architecture.ropes == LLAMA_ROPES
    if dimensions % 2 or dimensions < 2 or (rotates_all and dimensions != sizes.head):
        raise ModelError(
            f"{architecture.family}: GGUF's {architecture.arch} cannot turn {dimensions} of a head's "
            f"{sizes.head} dimensions",
            hint="config.json's partial_rotary_factor must leave an even number, for llama all of them",
        )
    return dimensions


def _check_kind(kind: str, settings: Mapping[str, Any], architecture: Architecture) -> None:
    if kind not in architecture.ropes:
        raise ModelError(
            f"{architecture.family}: llama.cpp's {architecture.arch} has no rope_type {kind!r}",
            hint=f"it has {', '.join(architecture.ropes)}",
        )
    if kind == "yarn":
        _check_yarn(settings, architecture)


def _check_yarn(settings: Mapping[str, Any], architecture: Architecture) -> None:
    """llama.cpp reads two factors and a context; the rest are the paper's constants."""
    usual = usual_yarn_scale(float(_setting(settings, "factor")))
    fixed: dict[str, float] = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
    if architecture.latent:
        fixed["attention_factor"] = usual
    if architecture.family == "gpt_oss":  # its own false is a note (metadata.py)
        del fixed["truncate"]
    for key, value in fixed.items():
        stated = settings.get(key)
        if stated is not None and not math.isclose(float(stated), float(value), rel_tol=1e-6):
            raise ModelError(f"{architecture.family}: llama.cpp's yarn has {key} {value}, not {stated}")
    scales = (settings.get("mscale"), settings.get("mscale_all_dim"))
    if architecture.latent:
        if not scales[0] or scales[0] != scales[1]:
            raise ModelError(
                f"{architecture.family}: llama.cpp's yarn has one mscale, not {scales[0]} and {scales[1]}"
            )
    elif all(scales):
        raise ModelError(f"{architecture.family}: llama.cpp's yarn has no mscale here")


def usual_yarn_scale(factor: float) -> float:
    """The factor of queries and keys under yarn (arXiv:2309.00071, section 3.4)."""
    return 0.1 * math.log(max(factor, 1.0)) + 1.0


def rope_metadata(rope: Rope, architecture: Architecture, context: int) -> dict[str, Any]:
    """Keys without the architecture's prefix."""
    keys: dict[str, Any] = {"rope.dimension_count": rope.dimensions, "rope.freq_base": rope.theta}
    if architecture.sections:
        keys["rope.dimension_sections"] = _sections(rope, architecture)
    if rope.local_theta is not None:
        keys["rope.freq_base_swa"] = rope.local_theta
    if rope.kind in ("linear", "yarn"):
        keys |= {
            "rope.scaling.type": rope.kind,
            "rope.scaling.factor": float(_setting(rope.settings, "factor")),
        }
    stated = rope.settings.get("attention_factor")
    if rope.kind == "yarn" and stated is not None and not architecture.latent:
        scale = float(stated) / usual_yarn_scale(float(_setting(rope.settings, "factor")))
        if not math.isclose(scale, 1.0, rel_tol=1e-6):
            keys["rope.scaling.attn_factor"] = scale
    if rope.kind == "yarn" and architecture.latent:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * float(_setting(rope.settings, "mscale_all_dim"))
    if rope.kind == "longrope":
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.attn_factor": _longrope_scale(rope, context)}
    if rope.kind in ("yarn", "longrope") or ORIGINAL in architecture.defaults:
        keys["rope.scaling.original_context_length"] = rope.original
    return keys


def _sections(rope: Rope, architecture: Architecture) -> list[int]:
    """How many of the frequencies turn with time, height, width and a fourth position; all are the same in a
    text."""
    stated = rope.settings.get("mrope_section", architecture.sections)
    counts = isinstance(stated, list | tuple) and [*stated, 0][:4]
    if not counts or len(counts) != 4 or not all(type(count) is int and count >= 0 for count in counts):
        raise ModelError(f"config.json: mrope_section is {stated!r}, not three or four numbers")
    return counts


def _longrope_scale(rope: Rope, context: int) -> float:
    """The factor of queries and keys under longrope."""
    if rope.settings.get("attention_factor") is not None:
        return float(rope.settings["attention_factor"])
    factor = float(_first(rope.settings.get("factor"), context / rope.original))
    return math.sqrt(1 + math.log(factor) / math.log(rope.original)) if factor > 1 else 1.0


def rope_tensors(rope: Rope) -> dict[str, Tensor]:
    """The rotary tensors of a file: float32 (d / 2,)."""
    if rope.kind == "llama3":
        return {FREQUENCIES: llama3_factors(rope)}
    if rope.kind == PROPORTIONAL:
        return {FREQUENCIES: _proportional_factors(rope)}
    if rope.kind != "longrope":
        return {}
    return {name: _list(rope, f"{kind}_factor") for name, kind in ((LONG, "long"), (SHORT, "short"))}


def _list(rope: Rope, key: str) -> Tensor:
    values = _setting(rope.settings, key)
    if len(values) != rope.dimensions // 2:
        raise ModelError(
            f"config.json: the rope settings' {key!r} has {len(values)} numbers, not {rope.dimensions // 2}"
        )
    return torch.tensor(values, dtype=torch.float32)


def _proportional_factors(rope: Rope) -> Tensor:
    """f, float32 (d / 2,)."""
    turning = int(float(_setting(rope.settings, "partial_rotary_factor")) * rope.dimensions / 2)
    factors = torch.full((rope.dimensions // 2,), STILL)
    factors[:turning] = 1.0
    return factors


def _proportional_config(
    get: Callable[[str, Any], Any], sizes: Sizes, factors: Tensor | None
) -> dict[str, Any]:
    """``rope_parameters`` of Gemma 4."""
    width = int(get("rope.dimension_count", 0))
    turning = 0 if factors is None else int((factors == 1).sum())
    if (
        factors is None
        or factors.shape != (width // 2,)
        or width != get("attention.key_length", 0)
        or get("rope.dimension_count_swa", sizes.head) != sizes.head
        or not bool((factors[turning:] >= STILL).all())
    ):
        raise CheckpointError(
            f"GGUF: {FREQUENCIES} and rope.dimension_count are not those of Gemma 4",
            hint="convert the model again",
        )
    full = {"rope_type": PROPORTIONAL, "rope_theta": _positive(get, "rope.freq_base", 10000.0)}
    local = {"rope_type": "default", "rope_theta": _positive(get, "rope.freq_base_swa", 10000.0)}
    full["partial_rotary_factor"] = _fraction(2 * turning, width)
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def llama3_factors(rope: Rope) -> Tensor:
    """f of llama3, float32 (d / 2,), computed in float64."""
    factor, low, high = (
        float(_setting(rope.settings, key)) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    turns = rope.original / _wavelengths(rope.theta, rope.dimensions)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _wavelengths(theta: float, dimensions: int) -> Tensor:
    exponents = torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions
    return 2 * math.pi * torch.tensor(theta, dtype=torch.float64) ** exponents


def rope_config(
    get: Callable[[str, Any], Any], architecture: Architecture, sizes: Sizes, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """``rope_parameters`` and related keys of a config, from a file.

    Args:
        get: value of (key without the architecture's prefix, default).
        tensors: the tensors of the file in ``TENSORS``.
    """
    if not architecture.ropes:
        return {}
    if architecture.ropes == (PROPORTIONAL,):
        return _proportional_config(get, sizes, tensors.get(FREQUENCIES))
    theta = _positive(get, "rope.freq_base", 10000.0)
    rotated = _rotated(get, architecture, sizes)
    for name, factors in tensors.items():
        if factors.shape != (rotated // 2,):
            raise CheckpointError(f"GGUF: {name} has {factors.numel()} factors, not {rotated // 2}")
    kind = _kind_config(get, theta, rotated, sizes, tensors)
    if kind["rope_type"] not in architecture.ropes or (architecture.latent and "attention_factor" in kind):
        raise CheckpointError(
            f"GGUF: its rope.scaling keys are of no rotary embedding that {architecture.family} has "
            f"({', '.join(architecture.ropes)})"
        )
    parameters: dict[str, Any] = {"rope_theta": theta, **kind}
    if architecture.latent:
        if parameters["rope_type"] == "yarn":
            scale = round(10 * float(get("rope.scaling.yarn_log_multiplier", 0.0)), 6)
            parameters |= {"mscale": scale, "mscale_all_dim": scale}
        return {"rope_parameters": parameters}
    if rotated != sizes.head or "partial_rotary_factor" in architecture.defaults:
        parameters["partial_rotary_factor"] = _fraction(rotated, sizes.head)
    counts = get("rope.dimension_sections", None) if architecture.sections else None
    if counts is not None and tuple(counts) != architecture.sections:
        parameters["mrope_section"] = counts[:-1] if counts[-1] == 0 else counts
    if architecture.local_rope:
        local = {"rope_type": "default", "rope_theta": _positive(get, "rope.freq_base_swa", 10000.0)}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    if ORIGINAL in architecture.defaults:
        return {"rope_parameters": parameters, ORIGINAL: _original_context(get, sizes)}
    return {"rope_parameters": parameters}


def _fraction(part: int, total: int) -> float:
    """A number x for which int(x * whole) is ``part``."""
    fraction = part / total
    return fraction if int(total * fraction) == part else math.nextafter(fraction, 2.0)


def _positive(get: Callable[[str, Any], Any], key: str, default: float) -> float:
    value = float(get(key, default))
    if value <= 0:
        raise CheckpointError(f"GGUF: {key} is {value}, not a number above 0")
    return value


def _original_context(get: Callable[[str, Any], Any], sizes: Sizes) -> int:
    return int(_positive(get, "rope.scaling.original_context_length", sizes.context))


def _rotated(get: Callable[[str, Any], Any], architecture: Architecture, sizes: Sizes) -> int:
    """Dimensions of a head that rotate."""
    if architecture.latent:
        return sizes.of("rope")
    rotated = int(get("rope.dimension_count", sizes.head))
    too_few = architecture.ropes == LLAMA_ROPES and rotated != sizes.head
    if rotated < 2 or rotated % 2 or rotated > sizes.head or too_few:
        raise CheckpointError(
            f"GGUF: rope.dimension_count is {rotated}: {architecture.arch} cannot turn so many of a head's "
            f"{sizes.head} dimensions"
        )
    return rotated


def _kind_config(
    get: Callable[[str, Any], Any], theta: float, rotated: int, sizes: Sizes, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """``rope_type`` and its settings. ``rope.scale_linear`` is the factor's old name; a factor of 0 is none.

    Raises:
        CheckpointError: llama.cpp has no such type or setting, or a list is missing.
    """
    kind = get("rope.scaling.type", "linear")
    if kind not in SCALINGS:
        raise CheckpointError(f"GGUF: rope.scaling.type is {kind!r}, not one of {', '.join(SCALINGS)}")
    factor = float(get("rope.scaling.factor", get("rope.scale_linear", 0.0))) or 1.0
    factor = 1.0 if kind == "none" else factor
    if factor < 0:
        raise CheckpointError(f"GGUF: rope.scaling.factor is {factor}, not a number above 0")
    scale = float(get("rope.scaling.attn_factor", 1.0))
    if kind == "yarn":
        return _yarn_config(get, factor, scale, sizes)
    if (LONG in tensors) != (SHORT in tensors):
        raise CheckpointError(f"GGUF: of {LONG} and {SHORT} there is only one")
    if LONG in tensors:
        short, long = (tensors[name] * factor for name in (SHORT, LONG))
        return _lists(short, long, scale, _original_context(get, sizes))
    factors = tensors.get(FREQUENCIES)
    if factors is not None:
        config = _llama3_config(factors.double(), theta) if scale == factor == 1.0 else None
        return config or _lists(factors * factor, factors * factor, scale, sizes.context)
    if scale != 1.0:
        even = torch.full((rotated // 2,), factor)
        return _lists(even, even, scale, sizes.context)
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}


def _yarn_config(get: Callable[[str, Any], Any], factor: float, scale: float, sizes: Sizes) -> dict[str, Any]:
    """yarn. llama.cpp multiplies its usual factor of queries and keys by ``scale``."""
    for name, usual in YARN.items():
        stated = float(get(f"rope.scaling.{name}", usual))
        if stated not in (usual, -1.0):  # -1: not set
            raise CheckpointError(f"GGUF: rope.scaling.{name} is {stated}; llama.cpp has {usual} alone here")
    config = {"rope_type": "yarn", "factor": factor, ORIGINAL: _original_context(get, sizes)}
    return config if scale == 1.0 else {**config, "attention_factor": scale * usual_yarn_scale(factor)}


def _lists(short: Tensor, long: Tensor, scale: float, original: int) -> dict[str, Any]:
    """longrope, which can express any factors."""
    return {
        "rope_type": "longrope",
        "short_factor": [shortest(factor) for factor in short.tolist()],
        "long_factor": [shortest(factor) for factor in long.tolist()],
        "attention_factor": scale,
        ORIGINAL: original,
    }


def _llama3_config(factors: Tensor, theta: float) -> dict[str, Any] | None:
    """The llama3 settings with these factors; None where there are none."""
    largest = float(factors.max())
    between = (factors > 1 + 1e-6) & (factors < largest * (1 - 1e-6))
    if largest == 1.0 or int(between.sum()) < 2:
        return _step_config(factors, theta) if largest != 1.0 and not int(between.sum()) else None
    rates = 1 / _wavelengths(theta, 2 * len(factors))
    smooth = (1 / factors - 1 / largest) / (1 - 1 / largest)
    slope, offset = np.polyfit(rates[between].numpy(), smooth[between].numpy(), 1)
    high = round(1 - 1 / float(offset), 4)
    settings = {"factor": largest, "low_freq_factor": 1.0, "high_freq_factor": high}
    original = round(float(slope) * (high - 1))
    again = llama3_factors(Rope("llama3", theta, 2 * len(factors), settings, original)).double()
    if not torch.allclose(again, factors, rtol=1e-5, atol=0):
        return None
    return {"rope_type": "llama3", **settings, ORIGINAL: original}


def _step_config(factors: Tensor, theta: float) -> dict[str, Any] | None:
    """The llama3 settings without a transition (Llama 4): the original context lies between the wavelengths
    of the last factor of 1 and of the first other one, and is 8192 where that does."""
    largest = float(factors.max())
    waves, first = _wavelengths(theta, 2 * len(factors)), int((factors == 1).sum())
    if first in (0, len(factors)) or not bool((factors[:first] == 1).all()):
        return None
    low, high = float(waves[first - 1]), float(waves[first])
    original = next((c for c in (8192, math.ceil(math.sqrt(low * high))) if low < c < high), None)
    if original is None:
        return None
    settings = {"factor": largest, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    return {"rope_type": "llama3", **settings, ORIGINAL: original}
