"""The plan of a quantization: which tensors of a checkpoint are quantized, the grid of each, and the
``quantization_config`` of the result."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from attar.errors import ModelError, SettingsError, nearest
from attar.formats import bitsandbytes, compressed_tensors
from attar.formats.compressed_tensors import EMBEDDING, ConfigGroup
from attar.formats.dense_names import dense_names
from attar.formats.rules import BFLOAT16, NAIVE, PACK, ActivationRule
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Anatomy, matches
from attar.models.anatomy.roles import is_linear
from attar.models.loading.empty import empty_model
from attar.models.loading.single_experts import SingleExperts, single_experts
from attar.models.loading.stored import stored_names
from attar.patterns import RegexError, check
from attar.quantization.grids import Grid
from attar.quantization.kv_basis import check_cache
from attar.quantization.schemes import KV_CACHES, SCHEMES, QuantizationScheme
from attar.quantization.settings import StorageSettings

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}
DENSE = "dense"
SMALLEST = 32  # inputs of a group chosen automatically: engines have kernels for 32, 64 and 128
LARGE = 0.15  # share of the result from which on a dense embedding is worth a line
NARROW = 16
"""Linears with fewer inputs stay dense: they have no group, and hardly any bytes (Gemma 3n's mixing of
streams)."""
_MTP_LINEAR = re.compile(r"\.(self_attn|mlp)\.(.+\.)?\w+_proj(_with_mqa)?\.weight$")
READS_WEIGHTS = ("falcon", "gpt_bigcode", "nanochat")
"""Families whose code in transformers reads ``.weight`` itself, which packed Linears do not have."""


@dataclass(frozen=True)
class LayerPlan:
    """A Linear that will be quantized.

    Attributes:
        shape: (N, K).
        transposed: stored as (K, N), as Conv1D does.
        grid: the number format, its scales in the type of the stored weight.
        scheme: of weight and input, with its group size.
        stored: type of the stored weight.
    """

    module: str
    shape: tuple[int, int]
    transposed: bool
    grid: Grid
    scheme: QuantizationScheme
    stored: torch.dtype

    @property
    def static(self) -> bool:
        """Whether its input has a scale that calibration must find."""
        return self.scheme.activations is not None and self.scheme.activations.static


@dataclass(frozen=True)
class QuantizationPlan:
    """How a checkpoint is quantized.

    Attributes:
        sites: by the name of the stored weight, in file order.
        embedding: name of the stored embedding that becomes int8, or None.
        tied_head: module name of the head that shares it, or None.
        ignore: Linears that stay dense.
        config: the ``quantization_config`` of the result.
        caches: attention modules whose keys and values have scales that calibration must find, by the name
            of the stored weight of their keys.
        kv_cache: how keys and values are rounded, or None.
        reads_weights: the family is one of :data:`READS_WEIGHTS`.
        experts: Linears of mixtures are among the sites.
        mixed: experts of a block have several schemes.
        split: q, k and v of a block have several.
        table: name of the stored embedding.
        mtp: as ``sites``, of the multi-token prediction head (mtp_rounding.py).
        stacked: the family, where it stores experts in one tensor; here they are apart.
    """

    sites: dict[str, LayerPlan]
    embedding: str | None
    tied_head: str | None
    ignore: tuple[str, ...]
    config: dict[str, Any]
    caches: dict[str, str] = field(default_factory=dict)
    kv_cache: ActivationRule | None = None
    reads_weights: bool = False
    experts: bool = False
    stacked: str = ""
    mixed: bool = False
    split: bool = False
    table: str = ""
    mtp: dict[str, LayerPlan] = field(default_factory=dict)

    @property
    def code_bits(self) -> int:
        """Bits of most weights."""
        sizes: dict[int, int] = {}
        for layer in self.sites.values():
            bits = int(layer.scheme.weights.bits)
            sizes[bits] = sizes.get(bits, 0) + layer.shape[0] * layer.shape[1]
        return max(sizes, key=lambda bits: sizes[bits])


def plan(
    checkpoint: Any,
    settings: StorageSettings,
    assigned: Mapping[str, str] | None = None,
    *,
    group_order: bool = False,
    dtype: torch.dtype | None = None,
) -> QuantizationPlan:
    """Choose the scheme and grid of each Linear. Reads headers only.

    Args:
        settings: schemes and exceptions; of several overrides that match, the last one decides.
        assigned: scheme by module name, as an allocator chose it; overrides and ignore take precedence.
        group_order: act-order "group": the group of each input is stored.
        dtype: type of the stored scales; None: the type of each weight.

    Raises:
        ModelError: nothing in the checkpoint can be quantized.
        SettingsError: a group size does not divide a layer's inputs, a scheme is unknown or does not go with
            another, or q, k, v (or gate and up) would get different ones.
    """
    checkpoint = single_experts(checkpoint)
    model = empty_model(checkpoint.config, unstacked=True)
    anatomy = discover(model)
    names = stored_names(model, checkpoint)
    chosen = choose(anatomy, settings, assigned or {})
    if not chosen:
        raise ModelError(f"{checkpoint.path}: every Linear is ignored", hint="ignore fewer modules")
    shapes = {name: _shape(model, name) for name in chosen}
    small = [name for name in chosen if chosen[name].resizable and shapes[name][1] < NARROW]
    chosen = {name: scheme for name, scheme in chosen.items() if name not in small} or chosen
    chosen = fit(chosen, shapes, settings.group_size)
    if group_order:
        chosen = {name: _ordered(scheme) for name, scheme in chosen.items()}
    sites = {}
    for module, scheme in chosen.items():
        stored = names[f"{module}.weight"]
        kind = dtype or FLOATS.get(checkpoint.tensors[stored].dtype, torch.float32)
        transposed = not isinstance(model.get_submodule(module), nn.Linear)
        sites[stored] = LayerPlan(module, shapes[module], transposed, scheme.grid(kind), scheme, kind)
    order = {name: number for number, name in enumerate(checkpoint.tensors)}
    sites = {name: sites[name] for name in sorted(sites, key=order.__getitem__)}
    cache = _kv_cache(anatomy, settings.kv_cache)
    if settings.kv_cache == "int4":
        check_cache(checkpoint.config, settings.kv_bits)
    static = cache is not None and not cache.dynamic
    caches = {names[f"{b.attention.k.name}.weight"]: b.attention.name for b in anatomy.blocks if static}
    table = names[f"{anatomy.embedding}.weight"]
    embedding = table if settings.embedding_bits else None
    tied = anatomy.head if embedding and anatomy.tied else None
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    routers = [name for block in anatomy.blocks if block.mixture for name in block.mixture.dense]
    dense = [*(name for name in linears if name not in chosen), *routers]
    spelled = [names.get(f"{name}.weight", name).removesuffix(".weight") for name in dense]
    known = frozenset(names.values())
    further = {name: info for name, info in checkpoint.tensors.items() if name not in known}
    mtp = _mtp_sites(checkpoint, settings, first_scheme(sites, settings.scheme), dtype)
    further_names = dense_names({**further, **checkpoint.mtp}, mtp, checkpoint.config)
    ignore = tuple(dict.fromkeys([*dense, *spelled, *further_names]))  # engines keep the stored names
    reads = checkpoint.config["model_type"] in READS_WEIGHTS
    inside = [name for block in anatomy.blocks if block.mixture for name in block.mixture.linears]
    experts = any(name in chosen for name in inside)
    mixed = any(
        len({chosen.get(name) for name in block.mixture.linears}) > 1
        for block in anatomy.blocks
        if block.mixture is not None
    )
    split = any(
        len({chosen.get(name) for name in names}) > 1 for block in anatomy.blocks for names in block.fused()
    )
    stacked = anatomy.family if experts and isinstance(checkpoint, SingleExperts) else ""
    planned = QuantizationPlan(
        sites, embedding, tied, ignore, {}, caches, cache, reads, experts, stacked, mixed, split, table, mtp
    )
    return replace(planned, config=_config(planned, settings.scheme, anatomy.embedding))


def choose(
    anatomy: Anatomy, settings: StorageSettings, assigned: Mapping[str, str]
) -> dict[str, QuantizationScheme]:
    """The scheme of each Linear of the blocks that gets one, in forward order.

    Raises:
        SettingsError: see :func:`plan`.
    """
    overrides = [_override(text) for text in settings.overrides]
    modules = [name for block in anatomy.blocks for name in block.linears]
    for pattern, name in overrides:
        if not any(matches(module, pattern) for module in modules):
            raise SettingsError("overrides", f"{pattern}={name}", "a pattern that some Linear's name matches")
    for module in assigned:
        if module not in modules:
            raise ModelError(f"a scheme is assigned to {module}, which is no Linear of the blocks")
    wanted = {module: assigned.get(module, settings.scheme) for module in modules}
    for pattern, name in overrides:
        wanted |= {module: name for module in modules if matches(module, pattern)}
    ignored = [module for module in modules if any(matches(module, name) for name in settings.ignore)]
    wanted |= dict.fromkeys(ignored, DENSE)
    setting = "ignore" if ignored else "overrides" if overrides else "assigned"
    _check_fused(anatomy, wanted, setting, settings)
    chosen = {module: _scheme(name) for module, name in wanted.items() if name != DENSE}
    if settings.double_quant:
        chosen = {module: _double(scheme) for module, scheme in chosen.items()}
    _check_alone(chosen, settings)
    return chosen


def fit(
    chosen: Mapping[str, QuantizationScheme], shapes: dict[str, tuple[int, int]], wanted: int
) -> dict[str, QuantizationScheme]:
    """The schemes with their group sizes.

    Raises:
        SettingsError: a group size does not divide some K; names the layer and what would fit.
    """
    fitted = {}
    for name in dict.fromkeys(scheme.name for scheme in chosen.values()):
        modules = {module: shapes[module] for module, scheme in chosen.items() if scheme.name == name}
        scheme = next(chosen[module] for module in modules)
        if scheme.resizable:
            fitted[name] = scheme.sized(group_size(modules, wanted))
            continue
        fitted[name] = scheme
        for module, (_, columns) in modules.items():
            if columns % scheme.divisor:
                raise SettingsError(
                    "scheme",
                    name,
                    f"one that fits every layer: {module} has {columns} inputs, no multiple of "
                    f"{scheme.divisor}; ignore it or give it another scheme",
                )
    return {module: fitted[scheme.name] for module, scheme in chosen.items()}


def group_size(shapes: Mapping[str, tuple[int, int]], wanted: int) -> int:
    """g for a set of Linears: ``wanted``, or for -1 the largest usual size that divides every K.

    Args:
        shapes: (N, K) by module name.
        wanted: g; 0: a whole row; -1: chosen here.

    Raises:
        SettingsError: g does not divide some K; names the layer and what would fit.
    """
    fits = [size for size in (128, 64, 32, 16) if all(columns % size == 0 for _, columns in shapes.values())]
    if wanted == -1:
        return fits[0] if fits and fits[0] >= SMALLEST else 0
    wrong = {name: columns for name, (_, columns) in shapes.items() if wanted and columns % wanted}
    if not wrong:
        return wanted
    first = next(iter(wrong))
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in wrong}))
    allowed = " or ".join(map(str, fits)) or "0 (a whole row)"
    raise SettingsError(
        "group_size",
        wanted,
        f"a divisor of every layer's inputs: {first} has {wrong[first]} ({len(wrong)} layers: {kinds}); "
        f"{allowed} fits",
    )


def group_sizes(chosen: QuantizationPlan) -> dict[str, int]:
    """The group size of each scheme in a plan; 0: a whole row."""
    return {site.scheme.name: site.scheme.weights.group_size for site in chosen.sites.values()}


def embedding_note(checkpoint: Any, chosen: QuantizationPlan) -> str:
    """A line where a dense embedding is more than :data:`LARGE` of the result; empty where not.

    int8 rows cost SmolLM2-135M 0.0013 nats. They are not the default because SGLang drops the codes of an
    embedding unseen, and vLLM does not run one that is the head as well (their state in 2026).
    """
    if chosen.embedding or any(site.scheme.name == "NF4" for site in chosen.sites.values()):
        return ""
    sites = chosen.sites
    coded = sum(site.grid.bits_per_weight(site.shape) / 8 * math.prod(site.shape) for site in sites.values())
    total = coded + sum(info.nbytes for name, info in checkpoint.tensors.items() if name not in sites)
    share = checkpoint.tensors[chosen.table].nbytes / total
    if share <= LARGE:
        return ""
    return (
        f"note: {chosen.table} stays as it is, {100 * share:.0f} % of the result; --embedding-bits 8 codes it"
    )


def mtp_note(checkpoint: Any, chosen: QuantizationPlan, calibrated: bool) -> str:
    """A line on what becomes of a multi-token prediction head; empty where there is none.

    Args:
        calibrated: it is rounded by the model's method.
    """
    if not checkpoint.mtp:
        return ""
    if not chosen.mtp:
        return "note: the multi-token prediction head stays as it is, and the config names it"
    how = "with the states that feed them" if calibrated else "to nearest"
    return f"note: {len(chosen.mtp)} Linears of the multi-token prediction head are rounded {how}"


def _override(text: str) -> tuple[str, str]:
    """(pattern, scheme name or "dense") of "pattern=SCHEME"."""
    pattern, _, name = text.rpartition("=")
    if not pattern or (name != DENSE and name not in SCHEMES):
        close = nearest(name, (*SCHEMES, DENSE))
        mean = f" (did you mean {close}?)" if close and close != name else ""
        raise SettingsError(
            "overrides", text, f"pattern=SCHEME, with dense or one of {', '.join(SCHEMES)}{mean}"
        )
    if pattern.startswith("re:"):
        try:
            check(pattern[3:])
        except RegexError as error:
            raise SettingsError("overrides", text, f"a regular expression ({error.message})") from error
    return pattern, name


def _scheme(name: str) -> QuantizationScheme:
    if name not in SCHEMES:
        raise SettingsError("scheme", name, " or ".join(SCHEMES))
    return SCHEMES[name]


def _double(scheme: QuantizationScheme) -> QuantizationScheme:
    """The scheme with coded scales, where its format has them."""
    if scheme.weights.kind != "nf4":
        raise SettingsError("double_quant", True, f"false with {scheme.name}: it belongs to NF4")
    return replace(scheme, weights=replace(scheme.weights, double=True))


def _ordered(scheme: QuantizationScheme) -> QuantizationScheme:
    """The scheme with the group of each input stored.

    Raises:
        SettingsError: its layout cannot store them.
    """
    if scheme.form != PACK or scheme.weights.strategy != "group":
        allowed = f"off or static with {scheme.name}; group wants integer weights in groups and dense inputs"
        raise SettingsError("act_order", "group", allowed)
    return replace(scheme, weights=replace(scheme.weights, ordered=True))


def _check_fused(
    anatomy: Anatomy, wanted: Mapping[str, str], setting: str, settings: StorageSettings
) -> None:
    """Raise where Linears that engines fuse would get different schemes, unless the settings allow it."""
    for block in anatomy.blocks:
        together = block.mixture is not None and settings.moe_schemes == "together"
        experts = [block.mixture.linears] if together and block.mixture is not None else []
        for names in [*experts, *block.fused(settings.qkv == "together")]:
            odd = next((name for name in names if wanted[name] != wanted[names[0]]), None)
            if odd is not None:
                leaves = "|".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
                raise SettingsError(
                    setting,
                    f"{names[0]}={wanted[names[0]]}, {odd}={wanted[odd]}",
                    f"one scheme for Linears that engines fuse; name them together, as in re:({leaves})$",
                )


def _check_alone(chosen: Mapping[str, QuantizationScheme], settings: StorageSettings) -> None:
    """Raise where NF4 is combined with other schemes: its file format holds NF4 only."""
    names = list(dict.fromkeys(scheme.name for scheme in chosen.values()))
    if "NF4" not in names:
        return
    if len(names) > 1:
        other = next(name for name in names if name != "NF4")
        raise SettingsError("scheme", "NF4", f"alone: the bitsandbytes format cannot hold {other} as well")
    for name, none in (("embedding_bits", 0), ("kv_cache", "none")):
        if getattr(settings, name) not in (none, "int4"):
            allowed = f"{none} with NF4: the bitsandbytes format has no place for it"
            raise SettingsError(name, getattr(settings, name), allowed)


def _kv_cache(anatomy: Anatomy, name: str) -> ActivationRule | None:
    """The rule for keys and values; a group is one head."""
    if name not in KV_CACHES:
        raise SettingsError("kv_cache", name, " or ".join(KV_CACHES))
    rule = KV_CACHES[name]
    if name == "none":
        return None
    if not anatomy.causal:
        raise SettingsError("kv_cache", name, f"none: {anatomy.family} keeps no keys and values")
    if rule is None:
        return None
    widths = sorted({block.attention.head_dim for block in anatomy.blocks})
    if rule.strategy == "group" and len(widths) > 1:
        raise SettingsError("kv_cache", name, f"none or fp8: heads here are {widths} wide")
    return replace(rule, group_size=widths[0]) if rule.strategy == "group" else rule


def _config(planned: QuantizationPlan, main: str, embedding: str) -> dict[str, Any]:
    """The ``quantization_config``: a group for each scheme. The main scheme targets all other Linears and is
    last: compressed-tensors takes the first target that matches, and warns of targets without match."""
    sites = list(planned.sites.values())
    schemes = {site.scheme.name: site.scheme for site in sites}
    if "NF4" in schemes:
        return bitsandbytes.nf4_config(
            list(planned.ignore), sites[0].grid.storage, schemes["NF4"].weights.double
        )
    transposed = any(site.transposed for site in sites)
    first = first_scheme(planned.sites, main).name
    groups = []
    if planned.embedding:
        head = (f"re:.*{re.escape(planned.tied_head)}$",) if planned.tied_head else ()
        groups.append(ConfigGroup((embedding if transposed else "Embedding", *head), EMBEDDING, None, NAIVE))
    for name in sorted(schemes, key=lambda name: name == first):
        modules = tuple(site.module for site in sites if site.scheme.name == name)
        scheme = schemes[name]
        targets = ("Linear",) if name == first else modules
        groups.append(ConfigGroup(targets, scheme.weights, scheme.activations, scheme.form))
    alone = len(groups) == 1 and groups[0].activations is None and planned.kv_cache is None
    return compressed_tensors.quantization_config(
        groups,
        dequantize=alone
        and not transposed
        and (not groups[0].weights.symmetric or _narrow(sites[0]) or planned.reads_weights),
        ignore=[name for name in planned.ignore if name != planned.tied_head or not planned.embedding],
        kv_cache=planned.kv_cache,
        transposed=transposed,
    )


def first_scheme(sites: Mapping[str, LayerPlan], main: str) -> QuantizationScheme:
    """The scheme that covers every Linear which the config does not name: the main one, where a site has
    it."""
    schemes = {site.scheme.name: site.scheme for site in sites.values()}
    return schemes.get(SCHEMES[main].name) or next(iter(schemes.values()))


def _mtp_sites(
    checkpoint: Any, settings: StorageSettings, scheme: QuantizationScheme, dtype: torch.dtype | None
) -> dict[str, LayerPlan]:
    """The Linears of the blocks of a multi-token prediction head that get the first scheme: all, where it
    needs no calibration and fits; what joins state and embedding stays as it is, as engines have it."""
    rule, sites = scheme.weights, {}
    static = scheme.activations is not None and scheme.activations.static
    if static or rule.kind == "nf4" or rule.ordered:
        return {}
    for name, info in checkpoint.mtp.items():
        module = name.removesuffix(".weight")
        ignored = any(matches(module, pattern) for pattern in settings.ignore)
        if ignored or not _MTP_LINEAR.search(name) or info.shape[1] % scheme.divisor:
            continue
        kind = dtype or FLOATS.get(info.dtype, torch.float32)
        sites[name] = LayerPlan(module, tuple(info.shape), False, scheme.grid(kind), scheme, kind)
    return sites


def _narrow(site: LayerPlan) -> bool:
    """Whether weights are decoded to another type than the model's: FP4 and MX to bfloat16."""
    return site.scheme.form in BFLOAT16 and site.stored != torch.bfloat16


def _shape(model: nn.Module, module: str) -> tuple[int, int]:
    """(N, K) of a Linear or a Conv1D."""
    linear = model.get_submodule(module)
    rows, columns = linear.weight.shape if isinstance(linear, nn.Linear) else reversed(linear.weight.shape)  # type: ignore[union-attr]
    return int(rows), int(columns)


def static_inputs(sites: Sequence[LayerPlan]) -> dict[str, ActivationRule]:
    """Modules whose input scale calibration must find, and how the input will be rounded."""
    return {site.module: site.scheme.activations for site in sites if site.static and site.scheme.activations}
