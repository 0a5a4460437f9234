"""YAQA: Tseng, Sun, De Sa 2025, "Model-Preserving Adaptive Rounding", arXiv 2505.22988.

The Hessian of the whole model's KL divergence in one weight is taken as a Kronecker product, so that a change
E = W - W' costs

    KL ~ 1/2 vec(E)^T (H_O (x) H_I) vec(E) = 1/2 tr(E^T H_O E H_I)

With H_O^-1 = U_O^T U_O and H_I^-1 = U_I^T U_I, and A = diag(U_O)^-1 U_O, B = diag(U_I)^-1 U_I (unit upper),
every entry is rounded after the errors of all entries above and to the left of it are compensated:

    t_ik = w_ik - sum over a <= i, b <= k, not (i, k) itself, of A_ai R_ab B_bk
    w'_ik = round(t_ik) ;  r_ik = t_ik - w'_ik

so that E = A^T R B and the cost is sum r_ik^2 / (U_O,ii U_I,kk)^2 / 2: an error's weight is
what the entries not yet rounded cannot compensate. H_O = I is GPTQ.

Letters: W (N, K) weight, N outputs, K inputs; H_O (N, N), H_I (K, K) from sensitivity/kronecker.py; R (N, K)
rounding errors; Z = R B. The sum falls into s_ik = sum over b < k of r_ib B_bk, along the row, and v_ik = sum
over a < i of z_ak A_ai, down the column, where z = s + r: t = w - s - v.

Entries on one anti-diagonal (i + k constant) do not depend on each other. The weight is cut into tiles of T x
T; the tiles of one anti-diagonal of tiles run as a batch through the 2 T - 1 anti-diagonals of a tile, and
the contributions from outside a tile are two matrix products. So N K entries take 2 (N + K) vectorised steps,
and nearly all arithmetic, N K (N + K) multiplications, is in the products. Exact: tiles change only the order
of sums.

Differs from the paper: the paper writes the same rule with the unit triangular factors of H and the errors E;
here it has the factors of H^-1 and the errors R, as in GPTQ, which needs no second factorization. Rows and
columns are in descending order of their diagonals (``act_order``). A target can replace the weight. Static
groups, damping (of both factors, each relative to its mean diagonal) and unseen columns as in GPTQ; a row
whose diagonal in H_O is 0 is rounded independently, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from attar.errors import NumericsError
from attar.quantization.columns import RoundingResult
from attar.quantization.grids import Grid, QuantizedTensor, TileParameters
from attar.quantization.hessian import fill_unseen_, inverse_factor

TILE = 32  # T


def yaqa(
    weight: Tensor,
    H_O: Tensor,
    H_I: Tensor,
    grid: Grid,
    *,
    parameters: TileParameters | None = None,
    target: Tensor | None = None,
    damp: float = 0.01,
    damp_output: float | None = None,
    act_order: bool = True,
    mask: Tensor | None = None,
) -> RoundingResult:
    """Round a weight so that the model's output distribution changes least. Does not modify its inputs.

    Args:
        weight: W (N, K), any float type.
        H_O: (N, N) float32, symmetric, positive semi-definite; its scale does not matter.
        H_I: (K, K), the same.
        parameters: of each tile; None: the grid's choice for W.
        target: (N, K), approximated instead of W (a weight corrected for a quantized prefix).
        damp: added to H_I's diagonal, as a fraction of its mean.
        damp_output: the same for H_O; None: as ``damp``.
        act_order: rows and columns in descending order of their diagonals.
        mask: bool (N, K); False: the weight is zero and stays zero.

    Raises:
        NumericsError: an input is not finite, or no damping up to 1 makes a factor invertible.
    """
    W = weight.float().clone()
    aim = W if target is None else target.float().clone()
    H_O, H_I = H_O.float().clone(), H_I.float().clone()
    if not all(torch.isfinite(value).all() for value in (W, aim, H_O, H_I)):
        raise NumericsError(
            "the weight or its Hessian holds NaN or infinity", hint="check the model and the calibration data"
        )
    fill_unseen_(H_I)
    fill_unseen_(H_O)
    parameters = parameters or grid.choose(W, importance=H_I.diagonal())
    down, across = _order(H_O, act_order), _order(H_I, act_order)
    A, _ = _unit_factor(H_O, down, damp if damp_output is None else damp_output)
    B, used = _unit_factor(H_I, across, damp)
    group = across // (grid.group_size or W.shape[1])
    spread = grid.by_row(parameters, W.shape[0]).map(lambda value: value[down][:, group])
    kept = None if mask is None else mask[down][:, across]
    codes = torch.empty_like(W, dtype=grid.code_dtype)
    rounded = _round_tiles(aim[down][:, across], A, B, grid, spread, kept)
    codes[down[:, None], across] = rounded.to(grid.code_dtype)
    return RoundingResult(QuantizedTensor(grid, codes, parameters), used)


def _order(H: Tensor, act_order: bool) -> Tensor:
    """The order in which the rows (or columns) are rounded."""
    if act_order:
        return torch.argsort(H.diagonal(), descending=True, stable=True)
    return torch.arange(len(H), device=H.device)


def _unit_factor(H: Tensor, order: Tensor, damp: float) -> tuple[Tensor, float]:
    """diag(U)^-1 U of the ordered H, unit upper triangular, and the damping that was needed."""
    U, used = inverse_factor(H, damp, order)
    return U / U.diagonal()[:, None], used


def _round_tiles(
    W: Tensor, A: Tensor, B: Tensor, grid: Grid, spread: TileParameters, mask: Tensor | None
) -> Tensor:
    """Codes (N, K), float32, in rounding order.

    Args:
        W: (N, K) float32.
        A, B: (N, N) and (K, K), unit upper triangular.
        spread: parameters (N, K), one for each entry.
        mask: bool (N, K); False: stays zero.
    """
    N, K = W.shape
    W, A, B = _padded(W), _padded(A), _padded(B)
    scale = _padded(spread.scale, 1.0)  # grids divide by it, in the padding too
    spread = TileParameters(scale, _maybe(_padded, spread.zero), _maybe(_padded, spread.minimum))
    kept = None if mask is None else _padded(mask.float())
    R, Z, codes = torch.zeros_like(W), torch.zeros_like(W), torch.zeros_like(W)
    for tiles in _diagonals(W.shape[0] // TILE, W.shape[1] // TILE):

        def cut(value: Tensor, tiles: list[tuple[slice, slice]] = tiles) -> Tensor:
            return torch.stack([value[i, k] for i, k in tiles])

        s = torch.stack([R[i, : k.start] @ B[: k.start, k] for i, k in tiles])
        v = torch.stack([Z[: i.start, k].T @ A[: i.start, i] for i, k in tiles])
        inside = (torch.stack([A[i, i] for i, _ in tiles]), torch.stack([B[k, k] for _, k in tiles]))
        results = _round_tile(cut(W), s, v, *inside, grid, spread.map(cut), _maybe(cut, kept))
        for result, parts in zip((codes, R, Z), results, strict=True):
            for (i, k), part in zip(tiles, parts, strict=True):
                result[i, k] = part
    return codes[:N, :K]


def _round_tile(
    W: Tensor,
    s: Tensor,
    v: Tensor,
    A: Tensor,
    B: Tensor,
    grid: Grid,
    spread: TileParameters,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, R and Z (M, T, T) of a batch of M tiles.

    An anti-diagonal of a contiguous T x T tile is a slice of its T^2 values with step T - 1, in ascending
    i. In a tile stored as (k, i), such as v, the same slice is in ascending k, which is descending i.

    Args:
        W: (M, T, T).
        s: (M, T, T), the sums over the tiles to the left; overwritten with Z.
        v: (M, T, T) as (k, i), the sums over the tiles above; overwritten.
        A, B: (M, T, T), the factors inside each tile.
        spread: parameters (M, T, T).
        mask: (M, T, T), 1 or 0.
    """
    A, B = A.flip(1), B.flip(1)  # rows of descending index become a slice
    R, codes = torch.zeros_like(W), torch.zeros_like(W)
    values, s_flat, v_flat, R_flat, codes_flat = (x.flatten(1) for x in (W, s, v, R, codes))
    kept = None if mask is None else mask.flatten(1)
    spread = spread.map(lambda value: value.flatten(1))
    for number in range(2 * TILE - 1):
        low, high = max(0, number - TILE + 1), min(TILE - 1, number)  # first and last i, and first and last k
        line = slice(low * (TILE - 1) + number, high * (TILE - 1) + number + 1, TILE - 1)
        rising, falling = slice(low, high + 1), slice(TILE - 1 - high, TILE - low)
        row_sum = s_flat[:, line]
        t = values[:, line] - row_sum - v_flat[:, line].flip(1)
        at = spread.map(lambda value, line=line: value[:, line])  # type: ignore[misc]
        chosen = grid.encode(t if kept is None else t * kept[:, line], at)
        r = t - grid.decode(chosen, at)
        z = (row_sum + r).flip(1)
        codes_flat[:, line], R_flat[:, line] = chosen, r
        s[:, rising].addcmul_(r[:, :, None], B[:, falling])
        v[:, rising].addcmul_(z[:, :, None], A[:, falling])
    return codes, R, s


def _diagonals(down: int, across: int) -> Iterator[list[tuple[slice, slice]]]:
    """The anti-diagonals of a table of tiles, as rows and columns of each tile."""
    for number in range(down + across - 1):
        rows = range(max(0, number - across + 1), min(down, number + 1))
        yield [(_tile(i), _tile(number - i)) for i in rows]


def _tile(number: int) -> slice:
    return slice(number * TILE, (number + 1) * TILE)


def _maybe(change: Callable[[Tensor], Tensor], value: Tensor | None) -> Tensor | None:
    return None if value is None else change(value)


def _padded(value: Tensor, fill: float = 0.0) -> Tensor:
    """A matrix padded to whole tiles; the padding changes no other entry."""
    return pad(value, (0, -value.shape[1] % TILE, 0, -value.shape[0] % TILE), value=fill)
