"""Gates after a quantization: checks of the codes, of each layer and of the whole model that a result must
pass.

An **error** means that the result is unusable, and decides the exit code. A **warning** goes into the report.

    scales     not finite: error.  Zero where the weights are not: error when those tiles held more than 0.1 %
               of the layer's squared weight, else a warning (a k-quant's smallest block may underflow)
    codes      u = H(codes of the weights that are not 0) / log2(levels), the part of the stored bits that
               carries information.  u < 1/4: warning.  u < 1/8, or one code for different weights: error
    layer      output error not finite: error.  Above RTN's, or 1 and more: warning
    tokens     none seen: error.  Few: warning
    inputs     always zero in the calibration text: one warning for all layers
    model      KL(original || result) not finite, or at least the KL of a model blind to the context: error.
               At least half of that: warning.  A greedy sample that is one token repeated: error, where the
               KL is at least a twentieth of the blind one's; else a warning (weak models do it too)

Why u, and not the share of zeros: at 2 bits most codes of a healthy layer are zero. For normal weights with
the scale at the largest of a tile, u is 0.66 at 2 bits (65 % zeros) and 0.87 at 4 bits in groups of 128, and
0.47 and 0.76 with one scale for 4096 inputs. u < 1/4 takes 92 % zeros at 4 levels, 86 % at 8, 79 % at 16 and
42 % at 256, which is a largest weight of 5, 11, 19 and 143 standard deviations in every tile: outliers
determine the scale. u < 1/8 takes 96 %, 95 %, 92 % and 79 %. Weights that are zero already (a pruned layer)
are excluded.

Why blind: the reference's average distribution, predicted at every position, has KL H(mean p) - mean H(p). A
result with that KL predicts no better than without the context; see ``Distance.blind`` in
attar.walks.objectives.

No model runs here: numbers in, violations out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.kernels import planes
from attar.quantization.grids import Grid, QuantizedTensor

LOST = 1e-3  # share of a layer's squared weight that may lie in tiles of scale zero
USED_WARNING, USED_ERROR = 1 / 4, 1 / 8
WORSE = 1.001  # times RTN's output error, above which a layer counts as worse
FEW_TOKENS = 128
STUCK = 1 / 20  # of the blind KL, below which a repeating sample is a warning only
CHUNK = 1 << 22  # codes counted at once


@dataclass(frozen=True)
class GateViolation:
    """A failed check.

    Attributes:
        layer: name of the module, or "" for the model as a whole.
        check: "scales", "codes", "layer", "tokens" or "model".
        severity: "error" or "warning".
        message: what failed in one line, without the name.
    """

    layer: str
    check: str
    severity: str
    message: str
    mend: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.message}" if self.layer else self.message


def code_numbers(quantized: QuantizedTensor, weight: Tensor, decoded: Tensor | None = None) -> dict[str, Any]:
    """The numbers of a quantized weight that the gates check; part of its report. Modifies nothing.

    Args:
        quantized: codes (N, K) and what decodes them.
        weight: (N, K), what was quantized.
        decoded: (N, K), the decoded codes, if known.

    Returns:
        ``bad_scales``: scales, zeros and minima that are not finite; ``zero_scales``: tiles of scale zero
        whose weights are not all zero; ``lost``: the share of the squared weight in them; ``used``: u;
        ``zeros``: share of the weights not 0 that became 0; ``codes``: codes that occur; ``varied``: whether
        the weights are not all equal.
    """
    parameters, grid = quantized.parameters, quantized.grid
    named = (parameters.scale, parameters.zero, parameters.minimum)
    bad = sum(int((~torch.isfinite(value)).sum()) for value in named if value is not None)
    empty = parameters.scale == 0
    energy = (
        grid.tile(weight).square().sum((1, 3)) if bool(empty.any()) else torch.ones_like(parameters.scale)
    )
    empty = empty & (energy > 0)
    counts, zeros, kept = torch.zeros(256, dtype=torch.int64, device=weight.device), 0, 0
    low, high = float("inf"), float("-inf")
    rows = max(CHUNK // max(weight.shape[1], 1), 1)
    zero_codes = _zero_codes(grid)
    for codes, part in zip(quantized.codes.split(rows), weight.split(rows), strict=True):
        number = int(torch.count_nonzero(part))
        kept += number
        counts += _histogram(codes)
        if number < part.numel():
            counts -= _histogram(codes[part == 0])
        if number:
            bottom, top = _ends(part)
            low, high = min(low, bottom), max(high, top)
    if zero_codes is None:
        decoded = quantized.dequantize() if decoded is None else decoded
        zeros = int(((decoded == 0) & (weight != 0)).sum())
    else:
        zeros = int(counts[zero_codes].sum())
    return {
        "bad_scales": bad,
        "zero_scales": int(empty.sum()),
        "lost": float(energy[empty].sum() / energy.sum().clamp(min=1e-30)),
        "used": _entropy(counts) / math.log2(levels(grid)),
        "zeros": zeros / max(kept, 1),
        "codes": int((counts > 0).sum()),
        "varied": low < high,
    }


def _ends(weight: Tensor) -> tuple[float, float]:
    """The smallest and the largest non-zero weight; there must be one."""
    low, high = (float(end) for end in torch.aminmax(weight))
    if low == 0 or high == 0:  # 0 is an end only where all weights have one sign
        low, high = (float(end) for end in torch.aminmax(weight[weight != 0]))
    return low, high


def _zero_codes(grid: Grid) -> list[int] | None:
    """The bytes that decode to 0 in every tile; None where that depends on the tile (zeros, minima)."""
    if getattr(grid, "symmetric", True) is False or grid.searches:
        return None
    codes = torch.arange(256, dtype=torch.uint8).view(grid.code_dtype)
    codes = codes if grid.code_dtype != torch.uint8 else codes[: levels(grid)]
    return [int(code) for code in torch.nonzero(grid.level(codes) == 0).flatten()]


@lru_cache(maxsize=64)
def levels(grid: Grid) -> int:
    """Number of codes of a grid, found by encoding magnitudes from 1e-6 to 1e6."""
    magnitudes = torch.logspace(-6, 6, 16384)
    values = torch.cat([-magnitudes, torch.zeros(1), magnitudes])
    return max(int(grid.nearest(values).unique().numel()), 2)


def _histogram(codes: Tensor) -> Tensor:
    """Occurrences of each of the 256 bytes that a code can be."""
    bytes_ = codes.contiguous().view(torch.uint8).flatten()
    compiled = planes.histogram(bytes_)
    if compiled is not None:
        return compiled
    counts = torch.zeros(256, dtype=torch.int64, device=codes.device)
    for part in bytes_.split(CHUNK):
        counts += torch.bincount(part.int(), minlength=256)
    return counts


def _entropy(counts: Tensor) -> float:
    """Bits of information in a code."""
    share = counts.double() / counts.sum().clamp(min=1)
    return float(-torch.special.xlogy(share, share).sum() / math.log(2))


def check_layers(
    reports: Sequence[Mapping[str, Any]], *, few_tokens: int = FEW_TOKENS, method: str = ""
) -> list[GateViolation]:
    """Check the layers by their reports, in order.

    Args:
        reports: one for each Linear, with its ``name`` and any of: what :func:`code_numbers` gives; ``error``
            and ``rtn_error``, relative output errors; ``tokens``, seen by its accumulator; ``routed``, those
            that the router gave to its expert. What is absent is not checked.
        few_tokens: fewer tokens than this are a warning.
    """
    checks = (_scales, _codes, lambda report: _error(report, method), lambda r: _tokens(r, few_tokens))
    violations = [violation for report in reports for check in checks for violation in check(report)]
    return violations + _experts(reports, few_tokens) + _inputs(reports)


def checked_layers(reports: Sequence[Mapping[str, Any]], method: str = "") -> list[str]:
    """The warnings of :func:`check_layers`, for a result that is not compared as a whole.

    Raises:
        NumericsError: an error is among the violations.
    """
    violations = check_layers(reports, method=method)
    raise_on_error(violations)
    return [str(violation) for violation in violations]


def rarest_expert(reports: Sequence[Mapping[str, Any]]) -> tuple[str, int] | None:
    """A Linear of the expert that the routers gave the fewest tokens, and how many; None without experts."""
    routed = [(int(report["routed"]), str(report["name"])) for report in reports if "routed" in report]
    return min(routed)[::-1] if routed else None  # type: ignore[return-value]


def _experts(reports: Sequence[Mapping[str, Any]], few: int) -> list[GateViolation]:
    """One violation for all experts that saw few tokens."""
    rare = {str(r["name"]).rpartition(".")[0] for r in reports if "routed" in r and int(r["routed"]) < few}
    rarest = rarest_expert(reports)
    if not rare or rarest is None:
        return []
    text = f"the router gave its expert {rarest[1]} calibration tokens; {len(rare)} experts got under {few}"
    mend = "more --samples, or text that these experts are used for"
    return [GateViolation(rarest[0], "tokens", "warning", text, mend)]


def _inputs(reports: Sequence[Mapping[str, Any]]) -> list[GateViolation]:
    """One violation for all inputs without information."""
    unseen = unseen_inputs(reports)
    text = f"{unseen}: their weights are rounded to nearest"
    return [GateViolation("", "inputs", "warning", text, "text that uses them")] if unseen else []


def unseen_inputs(reports: Sequence[Mapping[str, Any]]) -> str:
    """How many inputs of how many layers the calibration text left at zero, in words; empty where none."""
    counts = [int(report["unseen"]) for report in reports if report.get("unseen")]
    if not counts:
        return ""
    layers = "1 layer" if len(counts) == 1 else f"{len(counts)} layers"
    return f"{sum(counts):,} inputs of {layers} are zero on all calibration text"


def _scales(report: Mapping[str, Any]) -> list[GateViolation]:
    name = str(report["name"])
    mend = "check the weight; another grid or group size, or leave the layer out with --ignore"
    violations = []
    if report.get("bad_scales"):
        violations.append(
            GateViolation(name, "scales", "error", f"{report['bad_scales']} scales are not finite", mend)
        )
    if report.get("zero_scales"):
        lost = float(report.get("lost", 1.0))
        text = f"{report['zero_scales']} scales are zero, with {lost:.2%} of the layer's squared weight"
        violations.append(GateViolation(name, "scales", "error" if lost > LOST else "warning", text, mend))
    return violations


def _codes(report: Mapping[str, Any]) -> list[GateViolation]:
    if not report.get("varied") or "used" not in report:
        return []
    name, used, zeros = str(report["name"]), float(report["used"]), float(report.get("zeros", 0.0))
    mend = "a smaller group size, scales searched by squared error, or more bits for this layer"
    if report.get("codes") == 1:
        return [GateViolation(name, "codes", "error", "every weight has the same code", mend)]
    if used >= USED_WARNING:
        return []
    text = (
        f"codes collapsed: {zeros:.0%} of its weights became zero, {used:.0%} of the bits carry information"
    )
    return [GateViolation(name, "codes", "error" if used < USED_ERROR else "warning", text, mend)]


def _error(report: Mapping[str, Any], method: str) -> list[GateViolation]:
    if report.get("error") is None:
        return []
    name, error, rtn = str(report["name"]), float(report["error"]), report.get("rtn_error")
    mend = "more calibration text, more damping, or more bits for this layer"
    if not math.isfinite(error):
        return [GateViolation(name, "layer", "error", f"its output error is {error}", mend)]
    violations = []
    if rtn is not None and error > WORSE * float(rtn):
        text = f"{method or 'the rounding'} has output error {error:.3g}, round to nearest {float(rtn):.3g}"
        violations.append(GateViolation(name, "layer", "warning", text, mend))
    if error >= 1.0:
        text = f"its output error is {error:.3g} of the output itself"
        violations.append(GateViolation(name, "layer", "warning", text, mend))
    return violations


def _tokens(report: Mapping[str, Any], few: int) -> list[GateViolation]:
    if report.get("tokens") is None or int(report["tokens"]) >= few or "routed" in report:
        return []
    name, tokens = str(report["name"]), int(report["tokens"])
    mend = "more --samples, or text that this layer is used for"
    if tokens == 0:
        return [GateViolation(name, "tokens", "error", "no calibration token reached it", mend)]
    return [GateViolation(name, "tokens", "warning", f"only {tokens} calibration tokens reached it", mend)]


def check_model(
    kl: float,
    blind: float,
    *,
    top1: float | None = None,
    sample: Sequence[int] = (),
    original_sample: Sequence[int] = (),
    worst_layer: str = "",
) -> list[GateViolation]:
    """Check the whole model by numbers measured on held-out text.

    Args:
        kl: mean KL(original || result), nats a token.
        blind: the KL of the original's average distribution (``Distance.blind``).
        top1: agreement of the preferred tokens, for the message.
        sample: tokens of a greedy continuation by the result.
        original_sample: the same by the original.
        worst_layer: the layer that caused it, where known (:func:`suspect`).
    """
    agree = "" if top1 is None else f", same first choice at {top1:.0%} of the tokens"
    mend = "more bits (for this layer: an override), another method, or more calibration text"
    violations = []
    if not math.isfinite(kl):
        violations.append(
            GateViolation(worst_layer, "model", "error", f"the model's KL to the original is {kl}", mend)
        )
    elif kl >= blind / 2 and kl > 0:
        text = f"KL to the original is {kl:.3g} nats{agree}; a model blind to the context has {blind:.3g}"
        severe = kl >= blind
        text = f"the model is unusable: {text}" if severe else text
        violations.append(GateViolation(worst_layer, "model", "error" if severe else "warning", text, mend))
    if stuck(sample) and not stuck(original_sample):
        text = f"a greedy sample repeats token {int(sample[-1])}; the original's does not"
        severity = "warning" if kl < STUCK * blind else "error"
        violations.append(GateViolation(worst_layer, "model", severity, text, mend))
    return violations


def stuck(sample: Sequence[int]) -> bool:
    """Whether nine tenths of a sample of 8 tokens or more are one token."""
    counts = [list(sample).count(token) for token in dict.fromkeys(sample)]
    return len(sample) >= 8 and max(counts) >= 0.9 * len(sample)


def suspect(reports: Sequence[Mapping[str, Any]]) -> str:
    """The layer that most likely caused a failure, by the reports alone: one whose error is not finite, else
    the largest output error relative to RTN's where that is above 1, else the largest error. "" when no
    report has an error."""
    known = [report for report in reports if report.get("error") is not None]
    if not known:
        return ""

    def rank(report: Mapping[str, Any]) -> tuple[bool, float, float]:
        error, rtn = float(report["error"]), float(report.get("rtn_error") or 0.0)
        if not math.isfinite(error):
            return True, 0.0, 0.0
        ratio = error / rtn if rtn > 0 else 1.0
        return False, ratio if ratio > WORSE else 1.0, error

    return str(max(known, key=rank)["name"])


def raise_on_error(violations: Sequence[GateViolation]) -> None:
    """Raise for the first error, naming its layer and how many more there are.

    Raises:
        NumericsError: there is an error among the violations.
    """
    errors = [violation for violation in violations if violation.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise NumericsError(f"{errors[0]}{more}", hint=errors[0].mend)
