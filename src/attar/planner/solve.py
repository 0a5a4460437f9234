"""The choice under a budget: exact knapsacks over weights, one for each format of keys and values.

    minimise  sum_g loss[g, o_g] + loss[kv]     under   files + cache <= size,  seconds <= 1 / speed

Bytes of tensors add up exactly; headers do not, and differ by a few bytes between choices: the budget of the
knapsack is what the headers of the last choice leave for tensors, until a choice fits. A bound on the
time of a step enters as a price mu of a second, the smallest at which the choice is fast enough (exact at the
vertices of the convex hull; between them time is left over).

Letters: g a group, o an option, mu nats a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from attar.errors import SettingsError
from attar.planner.costs import GroupChoice, StepTimes
from attar.planner.gguf_costs import PlanCosts
from attar.quantization.mixed_precision.allocate import Option, allocate

ROUNDS = 6  # of the budget less its headers
STEPS = 40  # of a bisection


@dataclass(frozen=True)
class PlanPoint:
    """A choice and what it costs.

    Attributes:
        choice: option by group.
        kv_dtype: format of keys and values.
        file_bytes: of the weight files, headers included.
        cache_bytes: of the KV cache.
        loss: summed KL of its parts, the cut's too, nats a token; once it was measured as a whole, that.
        seconds: of a step of decoding; None: not known.
        flips: as :class:`attar.planner.losses.JointLoss` has them; None: not measured.
    """

    choice: dict[str, str]
    kv_dtype: str
    file_bytes: int
    cache_bytes: int
    loss: float
    seconds: float | None = None
    flips: float | None = None

    @property
    def bytes(self) -> int:
        """Of weights and cache."""
        return self.file_bytes + self.cache_bytes


@dataclass(frozen=True)
class KVOption:
    """A format of keys and values: bytes of the cache, and its KL in nats a token."""

    kv_dtype: str
    bytes: int
    loss: float


@dataclass
class PlanSolver:
    """Knapsacks over one model's options.

    Attributes:
        bytes: of a group's tensors by option, without headers.
        kv: formats of keys and values.
        times: None: not known.
        options: as :meth:`attar.planner.losses.Losses.options` has them; called for every solution, as
            losses are measured in between.
        cut_loss: KL of the model that bits are chosen for, where it was cut.
    """

    costs: PlanCosts
    bytes: Mapping[str, Mapping[str, int]]
    kv: Sequence[KVOption]
    times: StepTimes | None
    options: Callable[[], Mapping[str, Sequence[Option]]]
    cut_loss: float = 0.0

    def best(self, size: float = math.inf, seconds: float = math.inf) -> PlanPoint | None:
        """The point of the smallest loss; None: nothing fits.

        Args:
            size: bytes of weights and cache.
            seconds: of a step.
        """
        options = self.options()
        points = [self._best(options, kv, size, seconds) for kv in self.kv]
        return min(
            (point for point in points if point is not None),
            key=lambda point: (point.loss, point.bytes),
            default=None,
        )

    def smallest(self, allowed: Callable[[float], bool], seconds: float = math.inf) -> PlanPoint | None:
        """The smallest point whose loss is allowed; None: no point's is.

        Args:
            allowed: of a loss; where it is of one, it is of every smaller one.
        """
        best = self.best(seconds=seconds)
        if best is None or not allowed(best.loss):
            return None
        low, high = 0, best.bytes
        for _ in range(STEPS):
            if high - low <= max(high >> 14, 1):
                break
            middle = (low + high) // 2
            point = self.best(middle, seconds)
            if point is not None and allowed(point.loss):
                best, high = point, min(point.bytes, middle)
            else:
                low = middle
        return best

    def point(self, choice: GroupChoice, kv: KVOption) -> PlanPoint:
        """A choice with its costs."""
        by_name = {(group, o.name): o.loss for group, options in self.options().items() for o in options}
        loss = math.fsum([*(by_name.get(pair, math.inf) for pair in choice.items()), kv.loss, self.cut_loss])
        seconds = None if self.times is None else self.times.seconds(choice)
        files = self.costs.file_bytes(choice)
        return PlanPoint(dict(choice), kv.kv_dtype, files, kv.bytes, loss, seconds)

    def _best(
        self, options: Mapping[str, Sequence[Option]], kv: KVOption, size: float, seconds: float
    ) -> PlanPoint | None:
        point = self._within(options, kv, size)
        if point is None or point.seconds is None or point.seconds <= seconds:
            return point
        fast, low, high = None, 0.0, 1e-3
        for _ in range(2 * STEPS):
            priced = self._within(self._priced(options, high), kv, size)
            if priced is not None and (priced.seconds or 0.0) <= seconds:
                fast = priced
                break
            low, high = high, 4 * high
        for _ in range(STEPS if fast else 0):
            middle = (low + high) / 2
            priced = self._within(self._priced(options, middle), kv, size)
            if priced is not None and (priced.seconds or 0.0) <= seconds:
                fast, high = priced, middle
            else:
                low = middle
        return None if fast is None else self.point(fast.choice, kv)

    def _priced(self, options: Mapping[str, Sequence[Option]], price: float) -> dict[str, list[Option]]:
        """Losses with the price of their time."""
        assert self.times is not None, "a bound on time needs times"
        times = self.times
        return {
            group: [
                option
                if group not in times.groups
                else replace(option, loss=option.loss + price * times.groups[group][option.name])
                for option in group_options
            ]
            for group, group_options in options.items()
        }

    def _within(self, options: Mapping[str, Sequence[Option]], kv: KVOption, size: float) -> PlanPoint | None:
        """The choice of the smallest loss whose files and cache fit."""
        most = sum(max(counts.values()) for counts in self.bytes.values())
        smallest = {group: min(counts, key=counts.__getitem__) for group, counts in self.bytes.items()}
        head = self._head(smallest)
        for _ in range(ROUNDS):
            budget = most if size == math.inf else int(size) - kv.bytes - head
            try:
                chosen = allocate(options, budget).choice
            except SettingsError:
                return None
            point = self.point(chosen, kv)
            if point.bytes <= size:
                return point
            head = max(self._head(chosen), head + 1)
        return None

    def _head(self, choice: GroupChoice) -> int:
        """Bytes of the files without the tensors of the groups."""
        inside = sum(self.bytes[group][option] for group, option in choice.items())
        return self.costs.file_bytes(choice) - inside
