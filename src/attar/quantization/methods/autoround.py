"""AutoRound: Cheng, Zhang, Shen, Cai, He, Lv, Liu 2023, "Optimize Weight Rounding via Signed Gradient Descent
for the Quantization of LLMs", arXiv 2309.05516, algorithm 1 and eq. 2 to 5.

    W' = s * (level(nearest(W / s + z + V * h)) - z) ,    s = s_0 (alpha h_+ + beta h_-) ,  z likewise
    loss = || block(X; W') - block(X~; W) ||^2
    V <- V - rate * sign(d loss / d V) ,  and alpha, beta likewise ;  rate falls linearly to 0

Letters: W (N, K) weights of a block's Linears; V (N, K) rounding offsets in [-0.5, 0.5]; alpha, beta (P, G)
factors in (0, 1] on the largest and the smallest weight of a tile (one factor, alpha, for grids without a
zero); h the distance between the two levels around a weight, 1 for integers; X (B, S, D) the block's inputs
after the quantized prefix, X~ in the original model.

Differs from the paper: it runs on every grid (there V moves a weight in units of the local distance between
levels). It can start from given codes, such as GPTQ's: each weight is first moved to the nearest point of its
code's cell, and V is relative to that point. The paper keeps the V of the step with the lowest loss, which is
often only the step with the easiest batch: here the start, that V and the last one are compared on all
batches, so the result is never worse than its start. The scale is rounded to its stored form in every step.
``update="adam"`` replaces the sign by Adam's step, which hardly moves weights whose gradient changes sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attar.errors import NumericsError, SettingsError
from attar.models.anatomy.parts import weight_of
from attar.quantization.grids import Grid, IntGrid, QuantizedTensor, TileParameters
from attar.quantization.grids.grid import stored_scale
from attar.quantization.grids.straight_through import (
    into_cells,
    on_unit_scale,
    quantize_through,
    spacing,
    through,
)

if TYPE_CHECKING:
    from attar.walks.solvers import BlockView

REACH = 0.5  # bound of |V|, in distances between levels
MARGIN = 0.1  # from a cell's edge to a weight moved into the cell of its code, in distances between levels
SMALLEST = 0.01  # lower bound of alpha and beta
UPDATES = ("sign", "adam")
BETAS, TINY = (0.9, 0.99), 1e-12  # of Adam
HOLD = 8 * 2**30  # bytes of inputs and targets kept in memory; above it, whole batches are drawn


@dataclass(frozen=True)
class LearnedBlock:
    """The learned rounding of a block.

    Attributes:
        quantized: by name.
        first: mean squared error of the block's output at the start, over all batches.
        best: the same with the returned codes.
    """

    quantized: dict[str, QuantizedTensor]
    first: float
    best: float


def autoround(
    view: BlockView,
    grids: Mapping[str, Grid],
    *,
    iterations: int = 200,
    batch: int = 8,
    learning_rate: float | None = None,
    clip: bool = True,
    update: str = "sign",
    fast: bool = False,
    seed: int = 0,
    starts: Mapping[str, QuantizedTensor] | None = None,
    masks: Mapping[str, Tensor] | None = None,
    hold: int = HOLD,
) -> LearnedBlock:
    """Learn the rounding of all Linears of a block. The block's weights are left as they were.

    Args:
        view: the block.
        batch: sequences in a step.
        learning_rate: of the first step; None: 1 / iterations.
        update: "sign", or "adam".
        fast: arithmetic of the block in bfloat16 while learning; comparisons are in float32.
        starts: codes to start from.
        masks: bool (N, K) by name; False: the weight is zero and stays zero.
        hold: bytes of inputs and targets kept in memory; where there are more, steps draw whole batches
            instead of sequences.

    Raises:
        SettingsError: no iteration, an unknown update, or a start whose groups do not follow the columns.
        NumericsError: the loss is not finite.
    """
    if iterations < 1:
        raise SettingsError("iterations", iterations, "at least 1")
    if update not in UPDATES:
        raise SettingsError("update", update, " or ".join(UPDATES))
    roundings = {
        name: LearnedRounding(
            weight_of(view.modules[name]).detach(),
            grids[name],
            clip=clip,
            update=update,
            start=(starts or {}).get(name),
            mask=(masks or {}).get(name),
        )
        for name in view.names
    }
    rows = _Rows(view, batch, seed, hold)
    peak = 1.0 / iterations if learning_rate is None else learning_rate
    with _originals(view.modules), torch.enable_grad():
        candidates = [_state(roundings)]
        lowest, best, done = float("inf"), candidates[0], 0
        if stored := view.state.load():
            lowest, best, done = stored["lowest"], stored["best"], stored["step"]
            _resume(roundings, rows, stored)
        for step in range(done, iterations):
            placed = _put_weights(view.modules, roundings)
            loss = _descend(view, rows, fast)
            if not loss < float("inf"):
                raise NumericsError(f"the loss of learned rounding became {loss} at step {step + 1}")
            if loss < lowest:
                lowest, best = loss, _state(roundings)
            for name, rounded in placed.items():
                slope = view.modules[name].weight.grad
                if slope is not None and not isinstance(view.modules[name], nn.Linear):
                    slope = slope.T
                roundings[name].step(rounded, slope, peak * (1.0 - step / iterations))
            view.state.step(
                lambda done=step + 1, lowest=lowest, best=best: {  # type: ignore[misc]
                    **_resumable(roundings, rows),
                    "lowest": lowest,
                    "best": best,
                    "step": done,
                }
            )
        candidates += [best, _state(roundings)]
        losses = [_whole_loss(view, roundings, state) for state in candidates]
        kept = min(range(len(losses)), key=losses.__getitem__)
        _load(roundings, candidates[kept])
    return LearnedBlock(
        {name: rounding.quantized() for name, rounding in roundings.items()}, losses[0], losses[kept]
    )


class LearnedRounding:
    """The learned parameters of one weight: V and the factors on its range.

    Args:
        weight: W (N, K), float32; not modified.
        clip: learn alpha and beta, where the grid allows it: not where it searches for its scales itself;
            with two levels of scales only where the start has the grid's own choice.
        update: "sign" or "adam".
        start: codes and scales to start from; None: nearest codes.
        mask: bool (N, K).
    """

    def __init__(
        self,
        weight: Tensor,
        grid: Grid,
        *,
        clip: bool = True,
        update: str = "sign",
        start: QuantizedTensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        if start is not None and start.g_idx is not None:
            raise SettingsError("act_order", "group", "off or static where learned rounding follows")
        self.grid, self.weight = grid, weight
        self.tiled = grid.tile(weight)
        chosen = grid.choose(weight) if start is None or not grid.searches else start.parameters
        self.base = chosen if start is None else _moved(start.parameters, weight.device)
        self.shrink = grid.own_shrink(weight)
        self.learned = [torch.zeros_like(self.tiled)]  # V, then alpha (and beta)
        if clip and self._can_clip(chosen):
            factors = 1 if self.base.zero is None else 2
            self.learned += [torch.ones_like(self.base.scale) for _ in range(factors)]
        for part in self.learned:
            part.requires_grad_(True)
        self.update = _signs if update == "sign" else _Adam(self.learned)
        u = on_unit_scale(self.tiled, self._spread(self.base))
        self.gap = spacing(grid, u)
        self.shift: Tensor | None = None
        if start is not None:
            codes = grid.tile(start.codes.to(weight.device))
            self.shift = into_cells(grid, u, codes, MARGIN) - u
        if mask is not None:
            kept = grid.tile(mask.to(weight.device))
            self.gap = kept if self.gap is None else self.gap * kept
            self.shift = None if self.shift is None else self.shift * kept

    def __call__(self) -> Tensor:
        """W' (N, K) as a reader decodes it, with gradients to V, alpha and beta."""
        rounded = quantize_through(self.tiled, self.grid, self._spread(self.parameters()), self.offset())
        return self.grid.untile(rounded, (self.weight.shape[0], self.weight.shape[1]))

    def step(self, rounded: Tensor, gradient: Tensor | None, rate: float) -> None:
        """One optimizer step.

        Args:
            rounded: the result of the last call.
            gradient: (N, K) of the loss with respect to it; None: the Linear was not used.
        """
        if gradient is None:
            return
        slopes = torch.autograd.grad(rounded, self.learned, gradient)
        with torch.no_grad():
            for number, (part, change) in enumerate(zip(self.learned, self.update(slopes), strict=True)):
                part.sub_(change, alpha=rate).clamp_(*((SMALLEST, 1.0) if number else (-REACH, REACH)))

    def offset(self) -> Tensor:
        """The offset of each weight on the unit scale (P, r, G, c)."""
        moved = self.learned[0] if self.gap is None else self.learned[0] * self.gap
        return moved if self.shift is None else moved + self.shift

    def parameters(self) -> TileParameters:
        """Scale, zero and minimum (P, G) at the current alpha and beta, in stored form, with gradients."""
        if len(self.learned) == 1:
            return self.base
        if isinstance(self.grid, IntGrid) and self.base.zero is not None:
            return _clipped(self.grid, self.base, *self.learned[1:])
        alpha = self.learned[1]
        with torch.no_grad():
            current = self.grid.rescaled(self.base, self.base.scale * alpha)
            if current is None:
                current = self.grid.choose(self.weight, alpha.detach() * self.shrink)
        unit = alpha / alpha.detach()  # the scale is proportional to the range
        return TileParameters(current.scale * unit, current.zero, current.minimum, current.stored)

    def quantized(self) -> QuantizedTensor:
        """The current codes and parameters."""
        with torch.no_grad():
            current = self.parameters()
            codes = self.grid.nearest(on_unit_scale(self.tiled, self._spread(current)) + self.offset())
        untiled = self.grid.untile(codes, (self.weight.shape[0], self.weight.shape[1]))
        plain = current.map(lambda value: value.detach().clone())
        return QuantizedTensor(
            self.grid,
            untiled.to(self.grid.code_dtype).contiguous(),
            TileParameters(plain.scale, plain.zero, plain.minimum, current.stored),
        )

    def _can_clip(self, chosen: TileParameters) -> bool:
        """Whether alpha can be learned: the scale is free, or the start has the grid's own choice."""
        if isinstance(self.grid, IntGrid):
            return True
        if self.base.zero is not None or self.base.minimum is not None or self.grid.searches:
            return False
        return self.grid.rescaled(self.base, self.base.scale) is not None or _same(self.base, chosen)

    def _spread(self, parameters: TileParameters) -> TileParameters:
        """Parameters that broadcast against (P, r, G, c)."""
        return parameters.map(lambda value: value[:, None, :, None])


def _signs(slopes: Sequence[Tensor]) -> list[Tensor]:
    """Signed gradient descent."""
    return [slope.sign() for slope in slopes]


class _Adam:
    """Adam's step for a rate of 1 (Kingma & Ba 2014, arXiv 1412.6980, algorithm 1)."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.means = [torch.zeros_like(part) for part in parts]
        self.squares = [torch.zeros_like(part) for part in parts]
        self.steps = 0

    def __call__(self, slopes: Sequence[Tensor]) -> list[Tensor]:
        self.steps += 1
        changes = []
        for slope, mean, square in zip(slopes, self.means, self.squares, strict=True):
            mean.lerp_(slope, 1.0 - BETAS[0])
            square.lerp_(slope.square(), 1.0 - BETAS[1])
            size = (square / (1.0 - BETAS[1] ** self.steps)).sqrt_().add_(TINY)
            changes.append(mean / (1.0 - BETAS[0] ** self.steps) / size)
        return changes


def _clipped(grid: IntGrid, base: TileParameters, alpha: Tensor, beta: Tensor) -> TileParameters:
    """Integer scale and zero of a range whose upper end is multiplied by alpha, its lower end by beta."""
    assert base.zero is not None
    above, below = grid.high - base.zero, base.zero - grid.low  # the range in steps
    soft = base.scale * ((alpha * above + beta * below) / (above + below))
    scale = through(soft, stored_scale(soft.detach(), grid.storage))
    zero = grid.low + beta * below * base.scale / scale
    return TileParameters(scale, through(zero, zero.detach().round().clamp(grid.low, grid.high)))


def _same(a: TileParameters, b: TileParameters) -> bool:
    pairs = ((a.scale, b.scale), (a.zero, b.zero), (a.minimum, b.minimum))
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


def _moved(parameters: TileParameters, device: torch.device) -> TileParameters:
    plain = parameters.map(lambda value: value.detach().to(device))
    stored = {name: value.to(device) for name, value in parameters.stored.items()}
    return TileParameters(plain.scale, plain.zero, plain.minimum, stored)


class _Rows:
    """Draws ``batch`` random sequences of one shape for a step, in pieces as large as a calibration batch,
    because the attention masks of a call belong to its shape."""

    def __init__(self, view: BlockView, batch: int, seed: int, hold: int) -> None:
        self.view, self.batch = view, batch
        self.generator = torch.Generator().manual_seed(seed)
        first = view.inputs(0)
        self.held: list[tuple[Tensor, Tensor]] | None = None
        if 2 * first.nbytes * view.count <= hold:
            self.held = [(view.inputs(number), view.targets(number)) for number in range(view.count)]

    def draw(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """The pieces: inputs, targets, and the number of a batch of the same shape."""
        if self.held is None:
            numbers = self._random(self.view.count, 1)
            size = len(self.view.inputs(numbers[0]))
            numbers += self._random(self.view.count, max(self.batch // size, 1) - 1)
            yield from ((self.view.inputs(n), self.view.targets(n), n) for n in numbers)
            return
        held = self.held
        anchor = self._random(self.view.count, 1)[0]
        alike = [n for n, (x, _) in enumerate(held) if x.shape == held[anchor][0].shape]
        size = len(held[anchor][0])
        for _ in range(max(self.batch // size, 1)):
            drawn = self._random(len(alike) * size, size)
            positions = [(alike[row // size], row % size) for row in drawn]
            x, y = (torch.stack([held[n][part][row] for n, row in positions]) for part in (0, 1))
            yield x, y, anchor

    def _random(self, limit: int, count: int) -> list[int]:
        drawn: list[int] = torch.randperm(limit, generator=self.generator)[:count].tolist()
        return drawn


def _descend(view: BlockView, rows: _Rows, fast: bool) -> float:
    """Loss of one forward and backward pass; the gradients are in the modules' weights."""
    pieces, losses = list(rows.draw()), []  # read after the last: reading one waits for the device
    for hidden, target, number in pieces:
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=fast):
            output = view(hidden, number)
        loss = squared_error(output, target, view.importance(hidden)) / len(pieces)
        loss.backward()
        losses.append(loss.detach())
    return sum(map(float, losses))


def _put_weights(
    modules: Mapping[str, nn.Module], roundings: Mapping[str, LearnedRounding]
) -> dict[str, Tensor]:
    """Set the modules' weights to W', as leaves that collect gradients; returns W' with its graph."""
    placed = {}
    for name, rounding in roundings.items():
        rounded, module = rounding(), modules[name]
        module.weight = nn.Parameter(
            rounded.detach() if isinstance(module, nn.Linear) else rounded.detach().T
        )
        placed[name] = rounded
    return placed


def _whole_loss(view: BlockView, roundings: Mapping[str, LearnedRounding], state: LearnedState) -> float:
    """Mean squared error of the block's output over all batches."""
    errors = []
    with torch.no_grad():
        _load(roundings, state)
        _put_weights(view.modules, roundings)
        for number in range(view.count):
            hidden, target = view.inputs(number), view.targets(number)
            error = squared_error(view(hidden, number), target, view.importance(hidden))
            errors.append((error, target.numel()))
    total = sum(float(error) * size for error, size in errors)
    return float(total / sum(size for _, size in errors))


def squared_error(output: Tensor, target: Tensor, importance: Tensor | None) -> Tensor:
    """The mean squared error of a block's output (B, S, D); tokens may count differently, importance
    (B, S)."""
    squares = (output.float() - target).square()
    if importance is None:
        return squares.mean()
    return (squares.mean(-1) * importance).sum() / importance.sum()


LearnedState = dict[str, list[Tensor]]


def _state(roundings: Mapping[str, LearnedRounding]) -> LearnedState:
    """A copy of everything learned."""
    return {
        name: [part.detach().clone() for part in rounding.learned] for name, rounding in roundings.items()
    }


def _load(roundings: Mapping[str, LearnedRounding], state: LearnedState) -> None:
    for name, rounding in roundings.items():
        for part, kept in zip(rounding.learned, state[name], strict=True):
            part.data.copy_(kept)


def _resumable(roundings: Mapping[str, LearnedRounding], rows: _Rows) -> dict[str, Any]:
    """What the next step depends on."""
    optimizers = {
        name: vars(rounding.update)
        for name, rounding in roundings.items()
        if isinstance(rounding.update, _Adam)
    }
    return {"learned": _state(roundings), "adam": optimizers, "drawn": rows.generator.get_state()}


def _resume(roundings: Mapping[str, LearnedRounding], rows: _Rows, stored: Mapping[str, Any]) -> None:
    """The inverse of :func:`_resumable`, in place."""
    _load(roundings, stored["learned"])
    for name, values in stored["adam"].items():
        vars(roundings[name].update).update(values)
    rows.generator.set_state(stored["drawn"])


@contextmanager
def _originals(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Restores the modules' weights on exit."""
    kept = {name: module.weight for name, module in modules.items()}
    try:
        yield
    finally:
        for name, weight in kept.items():
            modules[name].weight = weight
