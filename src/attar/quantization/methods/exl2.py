"""EXL2 for a Linear: inputs sorted by H_ii, GPTQ with scales chosen group by group, codes refined.

turboderp, ExLlamaV2, ``conversion/adaptivegptq.py``; the rounding is GPTQ (gptq.py, arXiv 2210.17323) and
QuantEase (refine.py, arXiv 2309.01885).

    inputs in descending order of H_ii
    for each group a:   scales of least  sum_i (w_i - w'_i)^2 / U_ii^2   on the weights as corrected so far;
                        codes q of the group by the loop of GPTQ;
                        E = (W_a - W'_a) U_aa^-1 ;   W_b -= E U_ab   for the groups b after it
    then  w'_k <- round(w'_k - [W' H - W H]_k / H_kk)   for each input k, in several passes

Letters: W (N, K) weight, N outputs, K inputs; H (K, K) from hessian.py; U (K, K) upper, U^T U = (H + lambda
I)^-1; E (N, n) errors of a group of n inputs; W' decoded codes. 1 / U_ii^2 is the cost of input i's squared
error after the later inputs have compensated for it.

Scales chosen in advance from the original weight (grid.choose, as in gptq.py) give more output error, most at
2 bits. Refitting the scales between the passes of the refinement gained almost nothing and is left out.

Patterns: ``conversion/qparams.py`` (and the two of the head) and ``optimize.py`` (the choice). A pattern
gives a number of bits, in groups of a size, to a percentage of the inputs, those of the largest H_ii first.
Errors are measured for a few patterns of each Linear; the choice under an average of bits is exact
(allocate.py).

Differs from the reference: the reference chooses by simulated annealing, minimises the product of the errors
of attention and MLP blocks, and couples the patterns of a block's Linears; here each Linear has its own
pattern, and the sum of errors is minimised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.errors import NumericsError, SettingsError
from attar.formats import exl2 as layout
from attar.quantization.columns import round_columns
from attar.quantization.grids.exl2 import TILE, EXL2Grid, fit
from attar.quantization.grids.grid import QuantizedTensor
from attar.quantization.hessian import fill_unseen_, informed, inverse_factor_, output_error
from attar.quantization.methods.refine import refine
from attar.quantization.methods.rtn import rtn
from attar.quantization.mixed_precision.allocate import Option, allocate


@dataclass(frozen=True)
class BitPattern:
    """Bits of the inputs of a Linear.

    Attributes:
        parts: (bits, percent of the inputs, inputs of a group), bits descending, percents summing to
            100. Each part is rounded up to whole groups; the last one has the remaining inputs.
    """

    parts: tuple[tuple[int, int, int], ...]

    @property
    def name(self) -> str:
        """Such as ``10%:4b128+90%:3b128``."""
        return "+".join(f"{percent}%:{bits}b{size}" for bits, percent, size in self.parts)

    def sections(self, columns: int) -> tuple[tuple[int, int], ...]:
        """(bits, inputs) of each group of K inputs.

        Raises:
            ModelError: K is no multiple of 32.
        """
        layout.refuse((TILE, columns))
        left, groups = columns, []
        for number, (bits, percent, size) in enumerate(self.parts):
            last = number == len(self.parts) - 1
            count = -(-left // size) if last else -(-columns * percent // (100 * size))
            for _ in range(count):
                width = min(size, left)
                groups += [(bits, width)] if width else []
                left -= width
        return tuple(groups)

    def grid(self, columns: int) -> EXL2Grid:
        """The number format of a weight with K inputs."""
        return EXL2Grid(self.sections(columns))

    def stored_bits(self, shape: tuple[int, int]) -> int:
        """Bits of everything that is stored for a weight (N, K)."""
        return round(self.grid(shape[1]).bits_per_weight(shape) * shape[0] * shape[1])


def _pattern(*parts: tuple[int, int, int]) -> BitPattern:
    return BitPattern(parts)


PATTERNS = (
    _pattern((3, 5, 64), (2, 95, 64)),
    _pattern((3, 15, 64), (2, 85, 64)),
    _pattern((3, 30, 64), (2, 70, 64)),
    _pattern((4, 10, 64), (3, 35, 64), (2, 55, 64)),
    _pattern((4, 15, 64), (3, 55, 64), (2, 30, 64)),
    _pattern((3, 100, 128)),
    _pattern((4, 10, 128), (3, 90, 128)),
    _pattern((4, 25, 64), (3, 75, 64)),
    _pattern((5, 10, 64), (4, 35, 64), (3, 55, 64)),
    _pattern((5, 15, 64), (4, 55, 64), (3, 30, 64)),
    _pattern((4, 100, 128)),
    _pattern((5, 10, 128), (4, 90, 128)),
    _pattern((5, 25, 64), (4, 75, 64)),
    _pattern((6, 10, 64), (5, 35, 64), (4, 55, 64)),
    _pattern((5, 100, 128)),
    _pattern((6, 10, 128), (5, 90, 128)),
    _pattern((6, 50, 128), (5, 50, 128)),
    _pattern((6, 100, 128)),
    _pattern((8, 10, 128), (6, 90, 128)),
    _pattern((8, 50, 128), (6, 50, 128)),
    _pattern((8, 100, 128)),
)
"""From about 2.1 to about 8.05 bits a weight."""

HEADS = {6: _pattern((8, 15, 128), (6, 85, 128)), 8: _pattern((8, 100, 128))}
"""The reference's patterns of a head, by ``head_bits``."""


def patterns(shape: tuple[int, int], low: float = 0.0, high: float = 16.0) -> list[BitPattern]:
    """The distinct patterns of a weight (N, K), in ascending bits.

    Args:
        shape: (N, K).
        low: smallest average of stored bits.
        high: largest average of stored bits; if no pattern lies between the two, only the smallest is given.

    Raises:
        ModelError: K is no multiple of 32.
    """
    distinct: dict[tuple[tuple[int, int], ...], BitPattern] = {}
    for pattern in PATTERNS:
        distinct.setdefault(pattern.sections(shape[1]), pattern)
    count = shape[0] * shape[1]
    ranked = sorted(distinct.values(), key=lambda pattern: pattern.stored_bits(shape))
    kept = [pattern for pattern in ranked if low <= pattern.stored_bits(shape) / count <= high]
    return kept or ranked[:1]


@dataclass(frozen=True)
class PatternError:
    """The error of a Linear under a pattern.

    Attributes:
        pattern: its groups.
        bits: stored, of the whole Linear.
    """

    pattern: BitPattern
    bits: int
    error: float


def choose(
    measured: Mapping[str, Sequence[PatternError]],
    weights: Mapping[str, int],
    bits: float,
    importance: Mapping[str, float] | None = None,
) -> dict[str, PatternError]:
    """A pattern for each Linear: the smallest sum of errors within an average of stored bits.

    Args:
        measured: of each Linear, by name.
        weights: N K of each.
        bits: the average over all weights, scales and order of the inputs included.
        importance: cost of a relative error of 1 by Linear, in any additive unit; None: 1.

    Raises:
        SettingsError: the smallest patterns exceed the average.
        NumericsError: an error is not finite.
    """
    cost = importance or dict.fromkeys(measured, 1.0)
    options = {
        name: [Option(trial.pattern.name, trial.bits, trial.error * cost[name]) for trial in errors]
        for name, errors in measured.items()
    }
    total = sum(weights[name] for name in measured)
    least = sum(min(trial.bits for trial in errors) for errors in measured.values()) / total
    if least > bits:
        raise SettingsError("bits", bits, f"at least {least:.2f}: no Linear can be smaller")
    chosen = allocate(options, int(bits * total)).choice
    return {
        name: next(trial for trial in errors if trial.pattern.name == chosen[name])
        for name, errors in measured.items()
    }


@dataclass(frozen=True)
class SortedHessian:
    """What Linears with the same inputs share.

    Attributes:
        order: int64 (K,), inputs in descending order of H_ii.
        H: (K, K) float32 in that order.
        U: (K, K) float32 upper.
        damp: lambda that was used, as a fraction of H's mean diagonal.
    """

    order: Tensor
    H: Tensor
    U: Tensor
    damp: float


@dataclass(frozen=True)
class EXL2Layer:
    """A Linear in EXL2.

    Attributes:
        tensors: by the last part of their names, as in attar.formats.exl2.layout.
        weight: (N, K) float32, as a reader decodes it, inputs in their original order.
        report: pattern, bits (stored, a weight), error and rtn_error (relative, of the output), damp.
    """

    tensors: dict[str, Tensor]
    weight: Tensor
    report: dict[str, Any]


def order_inputs(H: Tensor, damp: float = 0.01) -> SortedHessian:
    """Order and factorization for all Linears that share these inputs. Does not modify H.

    Args:
        H: (K, K) float32, symmetric, positive semi-definite.
        damp: lambda as a fraction of the mean of H's diagonal.

    Raises:
        NumericsError: H is not finite, or no damping up to 1 makes it invertible.
    """
    if not torch.isfinite(H).all():
        raise NumericsError(
            "the Hessian holds NaN or infinity", hint="check the model and the calibration data"
        )
    order = torch.argsort(informed(H.diagonal()), descending=True, stable=True)
    sorted_H = H.float()[order][:, order]
    fill_unseen_(sorted_H)
    U, used = inverse_factor_(sorted_H, damp)
    return SortedHessian(order, sorted_H, U, used)


def quantize_layer(
    weight: Tensor,
    H: Tensor,
    pattern: BitPattern,
    *,
    damp: float = 0.01,
    sweeps: int = 4,
    inputs: SortedHessian | None = None,
) -> EXL2Layer:
    """Round a weight so that the layer's output changes least. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, not damped.
        pattern: bits of its inputs.
        damp: lambda as a fraction of the mean of H's diagonal.
        sweeps: passes of refinement; 0: none.
        inputs: order and factor of H, where Linears share them; None: computed.

    Raises:
        NumericsError: W or H is not finite, or no damping up to 1 makes H invertible.
        ModelError: K is no multiple of 32.
    """
    grid = pattern.grid(weight.shape[1])
    inputs = inputs or order_inputs(H, damp)
    W = _ordered(weight, inputs)
    quantized = round_groups(W, inputs.U, grid)
    if sweeps:
        quantized = refine(quantized, inputs.H, sweeps=sweeps, damp=inputs.damp, weight=W)
    return _layer(weight, quantized, pattern, inputs)


def measure(
    weight: Tensor, H: Tensor, candidates: Sequence[BitPattern], *, inputs: SortedHessian | None = None
) -> list[PatternError]:
    """The error of a Linear under each pattern, rounded without refinement. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H: (K, K) float32, not damped.
        inputs: order and factor of H, where Linears share them; None: computed.

    Raises:
        NumericsError: W or H is not finite, or no damping up to 1 makes H invertible.
        ModelError: K is no multiple of 32.
    """
    inputs = inputs or order_inputs(H)
    W, shape = _ordered(weight, inputs), (weight.shape[0], weight.shape[1])
    errors = []
    for pattern in candidates:
        rounded = round_groups(W, inputs.U, pattern.grid(shape[1])).dequantize()
        errors.append(PatternError(pattern, pattern.stored_bits(shape), output_error(W, rounded, inputs.H)))
    return errors


def round_groups(W: Tensor, U: Tensor, grid: EXL2Grid) -> QuantizedTensor:
    """Codes and scales, group by group. Does not modify its inputs.

    Args:
        W: (N, K) float32, in the order of the file.
        U: (K, K) upper triangular, in the same order.
        grid: its groups.
    """
    left, codes = W.clone(), torch.empty_like(W)
    cost = U.diagonal().square().reciprocal()
    steps, scale_codes, start = [], [], 0
    for bits, width in grid.sections:
        a, after = slice(start, start + width), slice(start + width, None)
        current = left[:, a].contiguous()
        h, c = fit(current, cost[a], bits)
        group_grid = EXL2Grid(((bits, width),))
        parameters = group_grid.parameters([h], [c])
        tiles = torch.arange(width, device=W.device) // TILE
        codes[:, a], _ = round_columns(current, U[a, a], group_grid, parameters, tiles)
        error = current - codes[:, a] * parameters.scale[:, :1]
        E = torch.linalg.solve_triangular(U[a, a], error, upper=True, left=False)
        left[:, after].addmm_(E, U[a, after], alpha=-1.0)
        steps.append(h)
        scale_codes.append(c)
        start += width
    return QuantizedTensor(grid, codes.to(grid.code_dtype), grid.parameters(steps, scale_codes))


def _ordered(weight: Tensor, inputs: SortedHessian) -> Tensor:
    """W in the file's order, float32."""
    W = weight.float()[:, inputs.order]
    if not torch.isfinite(W).all():
        raise NumericsError("the weight holds NaN or infinity", hint="check the model")
    return W


def _layer(
    weight: Tensor, quantized: QuantizedTensor, pattern: BitPattern, inputs: SortedHessian
) -> EXL2Layer:
    """The stored tensors, the weight that they decode to, and its error."""
    grid, stored = quantized.grid, quantized.parameters.stored
    assert isinstance(grid, EXL2Grid)
    tensors = layout.encode(
        quantized.codes, stored["scale_codes"], stored["scale_max"], grid.sections, inputs.order
    )
    W, rounded = _ordered(weight, inputs), quantized.dequantize()
    nearest = rtn(W, grid, grid.choose(W, importance=inputs.H.diagonal())).dequantize()
    dense = torch.empty_like(rounded)
    dense[:, inputs.order] = rounded
    report = {
        "pattern": pattern.name,
        "bits": grid.bits_per_weight((weight.shape[0], weight.shape[1])),
        "error": output_error(W, rounded, inputs.H),
        "rtn_error": output_error(W, nearest, inputs.H),
        "damp": inputs.damp,
    }
    return EXL2Layer(tensors, dense, report)
