"""The knapsacks of a plan against every choice there is."""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any

import pytest

from attar.planner.costs import GroupProduct, StepTimes, group_seconds
from attar.planner.losses import JointLoss
from attar.planner.plan import PlanBranch, _Planner
from attar.planner.settings import NOISE, PlanSettings
from attar.planner.solve import KVOption, PlanPoint, PlanSolver
from attar.progress import SILENT
from attar.quantization.mixed_precision.allocate import Option
from attar.runtime.kernel_times import KernelShape, KernelTimes

BYTES = {
    "a": {"W2A16": 100, "W4A16": 200, "W8A16": 407},
    "b": {"W2A16": 310, "W4A16": 595, "W8A16": 1200},
    "c": {"W2A16": 55, "W4A16": 90, "W8A16": 171},
    "embedding": {"dense": 500, "int8": 260},
}
LOSS = {
    "a": {"W2A16": 0.5, "W4A16": 0.09, "W8A16": 0.001},
    "b": {"W2A16": 0.3, "W4A16": 0.11, "W8A16": 0.002},
    "c": {"W2A16": 0.9, "W4A16": 0.05, "W8A16": 0.003},
    "embedding": {"dense": 0.0, "int8": 0.01},
}
UNIFORM = {name: {**dict.fromkeys("abc", name), "embedding": "dense"} for name in BYTES["a"]}
KV = [KVOption("auto", 400, 0.0), KVOption("int8", 210, 0.004), KVOption("int4", 120, 0.2)]


class Costs:
    """Tensors and a header that depends on the choice, as the writer's does."""

    def file_bytes(self, choice: dict[str, str]) -> int:
        header = 64 + 3 * sum(name == "W8A16" for name in choice.values()) + 7 * (choice["a"] == "W2A16")
        return header + sum(BYTES[group][name] for group, name in choice.items())


def solver(times: Any = None) -> PlanSolver:
    costs: Any = Costs()
    options = {g: [Option(n, BYTES[g][n], LOSS[g][n]) for n in BYTES[g]] for g in BYTES}
    return PlanSolver(costs, BYTES, KV, times, lambda: options)


def step_times() -> StepTimes:
    table = KernelTimes("here", 1)
    products = {"a": (8, 4), "b": (16, 4), "c": (4, 4)}
    for rows, columns in products.values():
        for kind, slow in (("int4", 2.0), ("int8", 1.0), ("bf16", 4.0)):  # fewer bits are slower here
            table.seconds[KernelShape(kind, rows, columns, 1)] = slow * rows
    fused = {group: [GroupProduct(*shape)] for group, shape in products.items()}
    return StepTimes(group_seconds(table, fused, 1), 3.0)


def every(times: StepTimes | None = None) -> list[PlanPoint]:
    points = []
    for names in itertools.product(*(BYTES[group] for group in BYTES)):
        choice = dict(zip(BYTES, names, strict=True))
        for kv in KV:
            loss = math.fsum([*(LOSS[g][n] for g, n in choice.items()), kv.loss])
            seconds = None if times is None else times.seconds(choice)
            files = Costs().file_bytes(choice)
            points.append(PlanPoint(choice, kv.kv_dtype, files, kv.bytes, loss, seconds))
    return points


@pytest.mark.parametrize("size", [*range(905, 2700, 45), math.inf])
def test_the_best_point_is_the_best_of_all(size: float) -> None:
    fitting = [point for point in every() if point.bytes <= size]
    found = solver().best(size)
    if not fitting:
        assert found is None
        return
    assert found is not None and found in every() and found.bytes <= size
    # the header may take a few bytes of what the best choice needs
    slack = min(point.loss for point in fitting if point.bytes <= size - 16) if size < math.inf else 0.0
    assert found.loss <= max(slack, min(point.loss for point in fitting)) + 1e-12


@pytest.mark.parametrize("bound", [0.01, 0.05, 0.2, 0.5, 1.0, 2.0])
def test_the_smallest_point_within_a_loss(bound: float) -> None:
    found = solver().smallest(lambda loss: loss <= bound)
    least = min(point.bytes for point in every() if point.loss <= bound)
    assert found is not None and found.loss <= bound
    assert least <= found.bytes <= least + 16


def test_no_point_is_good_enough() -> None:
    assert solver().smallest(lambda loss: loss < 0.001) is None


@pytest.mark.parametrize("seconds", [50.0, 58.0, 65.0, 80.0])
def test_a_bound_on_time_is_met_at_little_loss(seconds: float) -> None:
    times = step_times()
    found = solver(times).best(2000, seconds)
    fitting = [p for p in every(times) if p.bytes <= 2000 and (p.seconds or 0) <= seconds]
    if found is None:
        assert not fitting
        return
    assert found.bytes <= 2000 and found.seconds is not None and found.seconds <= seconds
    assert found.loss <= 1.5 * min(point.loss for point in fitting) + 0.05


def test_time_that_nothing_meets() -> None:
    times = step_times()
    fastest = min(times.seconds(point.choice) for point in every(times))
    assert times.fastest(BYTES) == fastest
    assert solver(times).best(seconds=fastest - 0.01) is None
    assert solver(times).best(seconds=fastest) is not None


def test_experts_are_read_as_often_as_tokens_choose_them() -> None:
    product = GroupProduct(64, 32, experts=8, active=2)
    assert product.calls(1) == pytest.approx(2) and product.shape("int4", 1) == KernelShape("int4", 64, 32, 1)
    drawn = random.Random(0)
    for batch in (4, 16):
        chosen = [{e for _ in range(batch) for e in drawn.sample(range(8), 2)} for _ in range(2000)]
        assert product.calls(batch) == pytest.approx(sum(map(len, chosen)) / 2000, rel=0.03)
    assert product.shape("int4", 16).tokens == 4
    assert GroupProduct(64, 32).calls(16) == 1 and GroupProduct(64, 32).shape("int4", 16).tokens == 16


def planner(**options: Any) -> _Planner:
    no_checkpoint: Any = None
    empty_planner = _Planner(no_checkpoint, "m", PlanSettings(**options), SILENT)
    empty_planner.fingerprint, empty_planner.records = "", []
    return empty_planner


@pytest.mark.parametrize("sign", [1, -1])
def test_below_the_noise_the_fewest_flips_come_first(sign: int) -> None:
    """Whatever their KL: three plans are equal there; above it there is one."""
    low = solver()
    options = {
        g: [Option(o.name, o.bits, o.loss / 50) for o in listed] for g, listed in low.options().items()
    }
    low.options = lambda: options

    class Losses:
        def joint(self, choice: dict[str, str], kv_dtype: str) -> JointLoss:
            point = low.point(choice, next(option for option in KV if option.kv_dtype == kv_dtype))
            return JointLoss(point.loss, 1.0 + sign * point.bytes / 1e4)

    losses: Any = Losses()
    budget = planner(size="2600B")
    point = low.best(2600)
    assert point is not None
    plans = budget._alternatives(PlanBranch(low.costs, losses, low), point, {})
    assert 2 <= len(plans) <= 3 and all(budget._kl(plan.loss).kl < NOISE for plan in plans)
    sizes = [plan.bytes for plan in plans if plan.flips is not None]
    assert sizes == sorted(sizes, reverse=sign < 0) and len(set(sizes)) > 1
    best = solver().best(1200)
    assert best is not None and budget._alternatives(PlanBranch(low.costs, losses, solver()), best, {}) == [
        best
    ]


def test_an_impossible_budget_names_the_nearest_point_in_each_direction() -> None:
    """Of quality at this size and speed, of size at this quality, and of speed."""
    quick = solver(step_times())
    budget = planner(size="1400B", quality="kl<=0.005", speed="decode>=0.0156")
    assert budget._wanted(quick) is None
    error = budget._impossible(quick).message
    assert error.startswith("no recipe has 1400B and kl<=0.005 and decode>=0.0156; the nearest are ")
    for direction in (
        r"1400B and decode>=0\.0156: kl 0\.\d+ \(",
        r"kl<=0\.005: [\d,]+ bytes",
        r"speed: decode 0\.01\d+",
    ):
        assert re.search(direction, error), error


def test_one_option_for_all_groups_is_taken_where_it_loses_less_as_a_whole() -> None:
    """Sums of losses cannot tell: here the parts of a uniform choice make up for each other."""

    class UniformCosts(Costs):
        table = BYTES
        uniform = UNIFORM

    low = solver()
    low.costs = UniformCosts()  # type: ignore[assignment]
    size = low.costs.file_bytes({**dict.fromkeys("abc", "W4A16"), "embedding": "int8"}) + KV[0].bytes

    class Losses:
        options = staticmethod(lambda bytes: low.options())
        inputs = type("Inputs", (), {"blocks": ()})
        missing = staticmethod(lambda choice: [])

        def joint(self, choice: dict[str, str], kv_dtype: str) -> JointLoss:
            uniform = len({choice[group] for group in "abc"}) == 1
            point = low.point(choice, next(option for option in KV if option.kv_dtype == kv_dtype))
            return JointLoss(point.loss / 10 if uniform else point.loss, 0.0)

    losses: Any = Losses()
    budget = planner(size=f"{size}B", check=0)
    branch, point = PlanBranch(low.costs, losses, low), low.best(size)
    assert point is not None and len({point.choice[group] for group in "abc"}) > 1
    plan = budget._alternatives(*budget._checked(branch, point))[0]
    assert {plan.choice[group] for group in "abc"} == {"W4A16"} and plan.bytes <= size
