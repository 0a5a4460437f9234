"""The Hessian of a layer's output error, H = 2 / T * sum over tokens of x x^T, accumulated batch by batch,
and its factor.

Letters: X (T, K) inputs of a Linear, T tokens; H (K, K). The output error of a changed weight is
|| (W - W') X^T ||^2 = T / 2 * tr((W - W') H (W - W')^T): all that the second-order roundings use of the data.
X~ (T, K) are the inputs of the same tokens in the original model; C = 2 / T * sum x~ x^T. U (K, K) is upper
triangular with U^T U = (H + lambda I)^-1.

Most of a calibration's arithmetic is in these products. A sweep in bfloat16 lets them multiply in it and add
in float32 where the processor has such an instruction: H then differs from float32's by some 3e-4 of its mean
diagonal, where damping adds 1e-2. A factorization that fails in float32 is tried again in float64 before the
damping is raised.

An input that was always zero ("unseen") has no information: H has nothing in its row and its column, which
says that its weights may be anything, while other text may need them. It gets the median H_ii of the others
(1 where there are none), as an input that varies like a usual one and independently of all: every solver then
rounds it to nearest and prunes it by its magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.kernels.precision import reduced_products

STEP = 256  # inputs whose rows of H are summed at a time
CHUNK = 1 << 21  # weights whose energy is computed at a time
ROWS = 1024  # at a time at least, also where they have more weights
COLUMNS = 2048  # of H in one of its products
CHECK = "check the model and the calibration data"


class Hessian:
    """Accumulates H in float32 over any number of batches; the same batches in the same order give the same
    bytes.

    Args:
        inputs: K.

    Attributes:
        tokens: in the sums.
        unseen: inputs that were always zero, known after :meth:`value` or :meth:`final`.
    """

    def __init__(self, inputs: int) -> None:
        self.sum = torch.zeros(inputs, inputs, dtype=torch.float32)
        self.tokens = 0
        self._weight: float | Tensor = 0.0
        self.ended = False
        self.unseen = 0

    @property
    def weight(self) -> float:
        """The sum of the tokens' importance; to read it waits for the device."""
        return float(self._weight)

    def add(self, x: Tensor, importance: Tensor | None = None) -> None:
        """Add a batch of inputs (..., K); tokens may weigh differently (importance (...), mean about 1)."""
        assert not self.ended, "nothing is added after final()"
        rows = x.reshape(-1, x.shape[-1]).float()
        weighted = rows if importance is None else rows * importance.reshape(-1, 1)
        self.sum = self.sum.to(x.device)
        for start in range(0, len(self.sum), STEP):  # H is symmetric: the upper half is enough
            at, from_start = slice(start, start + STEP), slice(start, None)
            self.sum[at, from_start].addmm_(weighted[:, at].T, rows[:, from_start])
        self.tokens += rows.shape[0]
        self._weight = self._weight + (rows.shape[0] if importance is None else importance.sum().double())

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add the sums of several processes: ``total`` of a tensor is its sum over them."""
        self.sum = total(self.sum)
        tokens, weight = total(torch.tensor([self.tokens, self.weight], dtype=torch.float64)).tolist()
        self.tokens, self._weight = int(tokens), weight

    def value(self) -> Tensor:
        """H, float32 (K, K)."""
        H = self._full_sum().mul_(2.0 / max(self.weight, 1e-30))
        self.unseen = fill_unseen_(H)
        return H

    def final(self) -> Tensor:
        """:meth:`value` in the memory of the sum: not to be modified, and nothing is added afterwards."""
        if not self.ended:
            _mirror(self.sum).mul_(2.0 / max(self.weight, 1e-30))
            self._weight, self.ended, self.unseen = 2.0, True, fill_unseen_(self.sum)
        return self.sum

    def _full_sum(self) -> Tensor:
        """The sum with its lower half."""
        return _mirror(self.sum.clone())

    def ordered(self, order: Tensor) -> Hessian:
        """The same statistics with the inputs in another order, int64 (K,)."""
        other = Hessian(0)
        other.sum, other.tokens, other._weight = self._full_sum()[order][:, order], self.tokens, self._weight
        return other

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.sum.nbytes)


class CrossHessian(Hessian):
    """H of the inputs after the quantized layers, and C = 2 / T * sum x~ x^T with the original model's inputs
    x~ of the same tokens."""

    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        self.change = torch.zeros(inputs, inputs, dtype=torch.float32)  # sum of (x~ - x) x^T: small

    def add(  # type: ignore[override]
        self, x: Tensor, original: Tensor | None = None, importance: Tensor | None = None
    ) -> None:
        """Add a batch of inputs (..., K) and the original model's inputs (None: the same)."""
        super().add(x, importance)
        rows = x.reshape(-1, x.shape[-1]).float()
        if original is None:
            return
        drift = original.reshape(-1, x.shape[-1]).float() - rows
        self.change = self.change.to(x.device)
        self.change.addmm_((drift if importance is None else drift * importance.reshape(-1, 1)).T, rows)

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """See :meth:`Hessian.reduce`."""
        super().reduce(total)
        self.change = total(self.change)

    def final(self) -> Tensor:
        """:meth:`Hessian.value`: the sum is needed beside it."""
        return self.value()

    def cross(self) -> Tensor:
        """C, float32 (K, K): rows belong to the original inputs, columns to the quantized ones."""
        C = self._full_sum().add_(self.change).mul_(2.0 / max(self.weight, 1e-30))
        diagonal = self.sum.diagonal() * (2.0 / max(self.weight, 1e-30))
        C.diagonal().add_(informed(diagonal) - diagonal)
        return C

    def ordered(self, order: Tensor) -> CrossHessian:
        """The same statistics with the inputs in another order, int64 (K,)."""
        other = CrossHessian(0)
        other.sum, other.change = (value[order][:, order] for value in (self._full_sum(), self.change))
        other.tokens, other._weight = self.tokens, self._weight
        return other

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.sum.nbytes + self.change.nbytes)


def fill_unseen_(H: Tensor) -> int:
    """Give the inputs that were always zero the median H_ii of the others, in place; how many there are."""
    diagonal = H.diagonal()
    unseen = int((diagonal <= 0).sum())
    if unseen:
        diagonal.copy_(informed(diagonal))
    return unseen


def informed(energies: Tensor) -> Tensor:
    """Energies, norms or ranges of inputs (..., K), with the median of the positive ones (the lower of two in
    the middle) in place of zeros; 1 where all are zero."""
    seen = ~(energies <= 0)
    if bool(seen.all()):
        return energies
    usual = energies[seen].median() if bool(seen.any()) else energies.new_ones(())
    return energies.where(seen, usual)


def _mirror(full: Tensor) -> Tensor:
    """Write the lower half of a symmetric matrix (K, K), of which the upper half is enough, in place."""
    for start in range(0, len(full), STEP):
        at, below = slice(start, start + STEP), slice(start + STEP, None)
        full[at, at] = full[at, at].triu() + full[at, at].triu(1).T
        full[below, at] = full[at, below].T
    return full


@dataclass(frozen=True)
class HessianFactor:
    """U and the order of columns that it belongs to; weights with the same inputs share it.

    Attributes:
        order: int64 (K,), the order in which columns are rounded.
        U: (K, K), of the damped H in that order.
        damp: lambda that was used, as a fraction of H's mean diagonal.
        diagonal: of H (K,).
    """

    order: Tensor
    U: Tensor
    damp: float
    diagonal: Tensor

    def group(self, group_size: int) -> Tensor:
        """The group of each column in rounding order, int64 (K,); 0: one group."""
        return self.order // (group_size or len(self.order))

    def columns(self, weight: Tensor) -> Tensor:
        """A weight's columns in rounding order: float32 (K, N), in memory of their own.

        Args:
            weight: W (N, K), any float type.
        """
        columns = torch.empty(weight.shape[::-1], dtype=torch.float32, device=weight.device)
        for part, order in zip(columns.split(STEP), self.order.split(STEP), strict=True):
            part.copy_(weight[:, order].T)
        return columns


def factorize(H: Tensor, damp: float = 0.01, act_order: bool = True, together: int = 1) -> HessianFactor:
    """The factor of a Hessian (K, K). Does not modify its input.

    Args:
        H: (K, K) float32, symmetric, positive semi-definite.
        damp: lambda as a fraction of the mean of H's diagonal.
        act_order: columns in descending order of H_ii.
        together: columns that stay neighbours, in their order: M of N:M. Their sum of H_ii counts.

    Raises:
        NumericsError: H is not finite, or no damping up to 1 makes it invertible.
    """
    return factorize_(H.float().clone(), damp, act_order, together)


def factorize_(H: Tensor, damp: float = 0.01, act_order: bool = True, together: int = 1) -> HessianFactor:
    """As :func:`factorize`, in the memory of H and one more matrix; see :func:`inverse_factor_`."""
    if not all_finite(H):
        raise NumericsError("the Hessian holds NaN or infinity", hint=CHECK)
    stored = H.diagonal().clone()
    diagonal = informed(stored)
    order = torch.arange(len(H), device=H.device)
    if act_order:
        order = order_by_energy(diagonal, together)
    H.diagonal().copy_(diagonal)
    U, used = inverse_factor_(H, damp, order)
    H.diagonal().copy_(stored)
    return HessianFactor(order, U, used, diagonal)


@contextmanager
def damped(H: Tensor, ridge: float | Tensor) -> Iterator[Tensor]:
    """H + ridge I (K, K), inside the context and in H's memory; see :func:`informed`."""
    stored = H.diagonal().clone()
    H.diagonal().copy_(informed(stored) + ridge)
    try:
        yield H
    finally:
        H.diagonal().copy_(stored)


def order_by_energy(diagonal: Tensor, together: int = 1) -> Tensor:
    """Columns in descending order of H_ii, int64 (K,); ``together`` neighbours by their sum."""
    groups = diagonal.reshape(-1, together).sum(1).argsort(descending=True, stable=True)
    return (groups[:, None] * together + torch.arange(together, device=groups.device)).flatten()


def check_finite(*values: Tensor) -> None:
    """Raise NumericsError unless a weight and its statistics are finite."""
    if not all(all_finite(value) for value in values):
        raise NumericsError("the weight or its Hessian holds NaN or infinity", hint=CHECK)


def inverse_factor(H: Tensor, damp: float, order: Tensor | None = None) -> tuple[Tensor, float]:
    """U, upper triangular with U^T U = (H + lambda I)^-1, and the damping that was needed. Does not modify
    its input.

    Args:
        H: (K, K), symmetric.
        damp: lambda as a fraction of H's mean diagonal; raised tenfold until the factor exists.
        order: int64 (K,), the order of rows and columns to factorize H in; None: as it is.

    Raises:
        NumericsError: not even a damping of 1 is enough.
    """
    return inverse_factor_(H.float().clone(), damp, order)


def inverse_factor_(H: Tensor, damp: float, order: Tensor | None = None) -> tuple[Tensor, float]:
    """As :func:`inverse_factor`, in the memory of H and one more matrix, which becomes U.

    H (K, K), float32 and contiguous, is overwritten meanwhile, and restored afterwards: its upper half,
    mirrored.
    """
    mean = H.diagonal().mean()
    back = torch.arange(len(H) - 1, -1, -1, device=H.device) if order is None else order.flip(0)
    _reorder_(H, back)
    used = damp
    while True:
        U = _inverse_factor_(H, used * mean)
        if U is None:
            U = _inverse_factor_(H.double(), used * mean)
        if U is not None:
            _reorder_(H, back.argsort())
            return U.float(), used
        if used >= 1.0:
            raise NumericsError(
                "the Hessian stays singular with a damping of 1",
                hint="more calibration samples, or --method rtn",
            )
        used = max(used * 10.0, 1e-4)


def _inverse_factor_(H: Tensor, ridge: Tensor) -> Tensor | None:
    """U of H + ridge I for an H (K, K) whose rows and columns are in reversed order; None where it fails.

    From one factorization: H = L L^T (Cholesky) is R R^T in the order that is not reversed, R upper
    triangular, so U = R^-1. L^T takes the upper half of H's memory, where LAPACK leaves it; the lower half is
    kept in U's memory while torch clears it, then put back, and mirrored at the end.
    """
    U, diagonal = H.clone(), H.diagonal().clone()
    H.diagonal().add_(ridge)
    failed = torch.empty((), dtype=torch.int32, device=H.device)
    torch.linalg.cholesky_ex(H.T, out=(H.T, failed))
    if failed:
        H.copy_(U)
        return None
    H.add_(U.tril_(-1))
    _reverse_(H)
    U.zero_().fill_diagonal_(1.0)
    torch.linalg.solve_triangular(H.T, U.T, upper=True, out=U.T)
    _reverse_(H)
    H.diagonal().copy_(diagonal)
    _mirror(H.T)
    _mirror(U.T)  # LAPACK's columns become rows
    U.triu_()
    return U if all_finite(U) and bool((U.diagonal() > 0).all()) else None


def _reorder_(H: Tensor, order: Tensor) -> None:
    """H[order][:, order], in its own memory, STEP columns and then STEP rows at a time."""
    for columns in H.split(STEP, 1):
        columns.copy_(columns[order])
    for rows in H.split(STEP):
        rows.copy_(rows[:, order])


def _reverse_(H: Tensor) -> None:
    """Both axes reversed, in place, STEP rows at a time."""
    middle = len(H) // 2
    for start in range(0, middle, STEP):
        stop = min(start + STEP, middle)
        top, bottom = H[start:stop], H[len(H) - stop : len(H) - start]
        kept = top.flip(0, 1)
        top.copy_(bottom.flip(0, 1))
        bottom.copy_(kept)
    if len(H) % 2:
        H[middle] = H[middle].flip(0)


def all_finite(values: Tensor) -> bool:
    """Whether nothing is NaN or infinite; makes no tensor of their size."""
    return not values.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def output_error(weight: Tensor, rounded: Tensor, H: Tensor) -> float:
    """Relative output error || (W - W') X ||^2 / || W X ||^2 of a rounded weight, from H alone (0: exact)."""
    return energy(weight, H, rounded) / max(energy(weight, H), 1e-30)


def energy(W: Tensor, H: Tensor, less: Tensor | None = None) -> float:
    """:func:`exact_energy` with products that may be rounded to bfloat16."""
    with reduced_products():
        return exact_energy(W, H, less)


def exact_energy(W: Tensor, H: Tensor, less: Tensor | None = None) -> float:
    """tr(E H E^T), never negative, of E = W, or W - ``less`` (N, K), both any float type; H (K, K) float32,
    symmetric."""
    total = torch.zeros((), dtype=torch.float64, device=W.device)
    size = max(ROWS, CHUNK // W.shape[1])
    for start in range(0, len(W), size):
        E = W[start : start + size].float()
        if less is not None:
            E = E - less[start : start + size].float()
        for first in range(0, len(H), COLUMNS):
            at = slice(first, first + COLUMNS)
            product = E[:, at] @ H[at, at]
            if first:  # the other half of H is the same
                product.addmm_(E[:, :first], H[:first, at], alpha=2.0)
            total += product.mul_(E[:, at]).sum(dtype=torch.float64)
    return max(float(total), 0.0)
