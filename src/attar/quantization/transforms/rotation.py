"""Rotations: Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv 2404.00456,
section 4 (stage 1a and 1c), and Liu et al. 2024, "SpinQuant", arXiv 2405.16406, R1 and R2 of figure 1.

    embedding, positions      E R                      h becomes h R
    norm                      weight 1, bias 0: n(h R) = n(h) R
    readers (q, k, v, up)     W diag(g) R ,  bias + W b         (g weight, b bias of the norm before)
    writers (o, down)         R^T W ,  bias R
    v, o                      each head's rows of v R2^T W, columns of o W R2

    R = D (H_64 x H_64 x ... x H_m) / sqrt(n)        (x: Kronecker product)

Letters: h residual stream; R (n, n), R2 orthogonal; D random signs; H a Hadamard matrix (entries +-1, H H^T =
n I); W (N, K) weight.

A random Hadamard matrix spreads every outlier over all channels, and its Kronecker factors make x R cost
n * (64 + ...) operations a row instead of n^2. For n = 2^k times an odd number, m is the smallest order 2^j
times that number for which Paley's construction with a prime gives a Hadamard matrix (12, 20, 28, 36, 44,
...); where there is none, the last factor is a random orthogonal matrix of the odd number.

Differs from the papers: only rotations that fold offline are applied, so the architecture does not change; no
rotation is learned. With ``keep_mean`` a reflection after R maps 1 R (1: the vector of ones) back to 1,
so that a LayerNorm, which subtracts the mean, commutes with R as an RMSNorm does (the papers turn
LayerNorms into RMSNorms instead, as SliceGPT does). Where a reader has no bias (a head after a LayerNorm),
the norm keeps (b / g) R instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attar.errors import ModelError

if TYPE_CHECKING:
    from attar.models.anatomy.residual import HeadValues, NormRead, Residual

FACTOR = 64  # largest power of two that is one Kronecker factor
CHUNK = 1 << 24  # numbers rotated at a time
SMALLEST = 1e-4  # of |g| relative to its largest, where b / g is needed

ParameterChange = Callable[[str, Tensor], Tensor]
"""``change(leaf, tensor)``: a module's new ``weight`` or ``bias``, float32, as stored."""

Load = Callable[[str], Tensor]
"""A parameter of the model by name, float32, as stored."""


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix R (n, n) as signs, Kronecker factors and perhaps a reflection.

    Attributes:
        signs: D, float32 (n,).
        factors: orthogonal matrices, float32, whose sizes multiply to n.
        mirror: unit vector u (n,) of a last reflection I - 2 u u^T, or None.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]
    mirror: Tensor | None = field(default=None)

    @property
    def size(self) -> int:
        """n."""
        return len(self.signs)

    def columns(self, weight: Tensor) -> Tensor:
        """W R: the last dimension (..., n) rotated, float32. Does not modify its input."""
        flat = weight.reshape(-1, self.size)
        step = max(CHUNK // self.size, 1)
        parts = [self._rotate(flat[start : start + step]) for start in range(0, len(flat), step)]
        return torch.cat(parts).reshape(weight.shape)

    def rows(self, weight: Tensor) -> Tensor:
        """R^T W: the first dimension (n, K) rotated, float32. Does not modify its input."""
        return self.columns(weight.T).T.contiguous()

    def head_columns(self, weight: Tensor) -> Tensor:
        """Every n columns of (N, heads * n) rotated, float32."""
        return self.columns(weight.reshape(len(weight), -1, self.size)).reshape(weight.shape)

    def head_rows(self, weight: Tensor) -> Tensor:
        """Every n rows of (heads * n, K), or entries of (heads * n,), rotated, float32."""
        return self.head_columns(weight.reshape(len(weight), -1).T).T.reshape(weight.shape)

    def matrix(self) -> Tensor:
        """R, float32 (n, n)."""
        return self.columns(torch.eye(self.size))

    def _rotate(self, x: Tensor) -> Tensor:
        x = x.float() * self.signs.to(x.device)
        after = self.size
        for factor in self.factors:
            after //= len(factor)
            x = torch.matmul(factor.to(x.device).T, x.reshape(-1, len(factor), after))
        x = x.reshape(-1, self.size)
        if self.mirror is None:
            return x
        u = self.mirror.to(x.device)
        return x - 2.0 * (x @ u)[:, None] * u


def random_rotation(size: int, seed: int, *, keep_mean: bool = False) -> Rotation:
    """A random rotation of n channels; the same seed gives the same one.

    Args:
        size: n, at least 1.
        seed: of the signs, and of the odd factor where it is random.
        keep_mean: 1 R = 1 for the vector of ones, which preserves the mean of every row.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).float() * 2.0 - 1.0
    factors = tuple(_factors(size, generator))
    plain = Rotation(signs, factors)
    if not keep_mean:
        return plain
    ones = torch.full((1, size), size**-0.5, dtype=torch.float32)
    u = (plain.columns(ones) - ones)[0]
    norm = float(u.norm())
    return Rotation(signs, factors, u / norm) if norm > 1e-6 else plain


def _factors(size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The Kronecker factors of a rotation of n channels, each orthogonal."""
    order = _paley_order(size)
    odd = size >> _twos(size)
    powers = size // (order or odd)
    while powers > 1:
        step = min(powers, FACTOR)
        yield _sylvester(step) / math.sqrt(step)
        powers //= step
    if order:
        yield paley(order) / math.sqrt(order)
    elif odd > 1:
        yield _random_orthogonal(odd, generator)


def _twos(number: int) -> int:
    """The exponent of 2 in a number."""
    return (number & -number).bit_length() - 1


def _paley_order(size: int) -> int | None:
    """The smallest m = 2^j * odd part of n, dividing n, with a Paley matrix; None for powers of two too."""
    odd = size >> _twos(size)
    orders = [odd << shift for shift in range(2, _twos(size) + 1)]
    return next((order for order in orders if odd > 1 and _paley_prime(order)), None)


def _paley_prime(order: int) -> int | None:
    """The prime q of Paley's first (m = q + 1, q = 3 mod 4) or second construction (m = 2 q + 2, q = 1 mod
    4)."""
    for q, remainder in ((order - 1, 3), (order // 2 - 1, 1)):
        if q % 4 == remainder and _is_prime(q):
            return q
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _sylvester(order: int) -> Tensor:
    """The Hadamard matrix of a power of two."""
    H = torch.ones(1, 1)
    while len(H) < order:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def paley(order: int) -> Tensor:
    """A Hadamard matrix (m, m) by Paley 1933, from the squares modulo a prime q.

    First construction, skew Q: H = I + S. Second, symmetric Q: H = S x [[1, 1], [1, -1]] + I x [[1, -1],
    [-1, -1]]. S is Q with a border of ones (and -1 down the side where Q is skew).
    """
    q = _paley_prime(order)
    assert q is not None, f"no Paley matrix of order {order}"
    squares = {number * number % q for number in range(1, q)}
    character = torch.tensor([0.0] + [1.0 if number in squares else -1.0 for number in range(1, q)])
    numbers = torch.arange(q)
    S = torch.zeros(q + 1, q + 1)
    S[0, 1:] = 1.0
    S[1:, 0] = -1.0 if q % 4 == 3 else 1.0
    S[1:, 1:] = character[(numbers[:, None] - numbers) % q]
    eye = torch.eye(q + 1)
    if q % 4 == 3:
        return eye + S
    two, twist = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(S, two) + torch.kron(eye, twist)


def _random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A uniformly distributed one, from the QR decomposition of normal numbers in float64."""
    Q, R = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return (Q * R.diagonal().sign()).float()


def rotation_changes(
    facts: Residual, model: Any, width: int, load: Load, seed: int, device: str | torch.device = "cpu"
) -> dict[str, ParameterChange]:
    """The change of each module under a random rotation.

    Args:
        facts: the readers and writers of the residual stream.
        model: the model whose modules are named; on meta or not. Not changed.
        load: reads a parameter.

    Raises:
        ModelError: a norm's bias cannot be moved.
    """
    R = random_rotation(width, seed, keep_mean=facts.centred)
    steps: dict[str, list[ParameterChange]] = {}

    def add(name: str, step: ParameterChange) -> None:
        steps.setdefault(name, []).append(step)

    for name in facts.embeddings:
        add(name, lambda leaf, tensor: R.columns(tensor))
    for norm in facts.norms:
        for name, step in _norm_steps(norm, model, load, R):
            add(name, step)
    for number, value in enumerate(facts.values):
        for name, step in _value_steps(value, random_rotation(value.head_dim, seed + 1 + number)):
            add(name, step)
    for name in facts.writers:
        add(name, lambda leaf, tensor: R.rows(tensor) if leaf == "weight" else R.columns(tensor))
    return {name: _composed(model.get_submodule(name), changes, device) for name, changes in steps.items()}


def _composed(module: nn.Module, steps: list[ParameterChange], device: str | torch.device) -> ParameterChange:
    """Steps on (N, K) weights as one change of the stored tensor."""
    transposed = not isinstance(module, nn.Linear | nn.Embedding)

    def change(leaf: str, tensor: Tensor) -> Tensor:
        transpose = transposed and tensor.dim() == 2
        value = tensor.to(device).float()
        value = value.T if transpose else value
        for step in steps:
            value = step(leaf, value)
        return (value.T if transpose else value).contiguous()

    return change


def _norm_steps(norm: NormRead, model: Any, load: Load, R: Rotation) -> list[tuple[str, ParameterChange]]:
    """Move a norm's weight and bias into its readers."""
    g = load(f"{norm.name}.weight") + norm.offset
    biased = getattr(model.get_submodule(norm.name), "bias", None) is not None
    b = load(f"{norm.name}.bias") if biased else None
    moves = b is not None and all(model.get_submodule(name).bias is not None for name in norm.readers)
    kept = torch.zeros_like(g) if b is None or moves else R.columns(_divided(norm.name, b, g)[None])[0]

    def emptied(leaf: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 1.0 - norm.offset) if leaf == "weight" else kept.to(tensor.device)

    def read(name: str) -> ParameterChange:
        def step(leaf: str, tensor: Tensor) -> Tensor:
            if leaf == "weight":
                return R.columns(tensor * g.to(tensor.device))
            if b is None or not moves:
                return tensor
            weight = load(f"{name}.weight")
            weight = weight if isinstance(model.get_submodule(name), nn.Linear) else weight.T
            return tensor + (weight @ b).to(tensor.device)

        return step

    return [(norm.name, emptied), *((name, read(name)) for name in norm.readers)]


def _divided(name: str, b: Tensor, g: Tensor) -> Tensor:
    """b / g, 0 where b is 0."""
    if bool(((g.abs() <= SMALLEST * g.abs().max()) & (b != 0)).any()):
        raise ModelError(
            f"{name}: its bias cannot move: the Linear after it has none, and a weight of the norm is zero",
            hint="this model cannot be rotated; smoothing needs no rotation",
        )
    return torch.where(b == 0, torch.zeros_like(b), b / g)


def _value_steps(value: HeadValues, R2: Rotation) -> list[tuple[str, ParameterChange]]:
    """Rotate the values of each head: rows of v, columns of o."""
    rows = list(value.v_rows)

    def on_v(leaf: str, tensor: Tensor) -> Tensor:
        result = tensor.clone()
        result[rows] = R2.head_rows(tensor[rows])
        return result

    def on_o(leaf: str, tensor: Tensor) -> Tensor:
        return R2.head_columns(tensor) if leaf == "weight" else tensor

    return [(value.v, on_v), (value.o, on_o)]
