"""``attar plan``: losses measured, budgets met, the prediction checked, a recipe written.

1. the smallest and the best point; an impossible budget is refused before anything is measured
2. every group at 4 bits; then solve, and measure what the choice took, until all of it is measured
3. the plan and a few neighbours as a whole: a factor of all losses and of pairs in a block is fitted, and
   the budget solved again (additivity.py)
4. the KL that the recipe will have, with an interval (correction.py)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attar.checkpoint.units import bytes_text, range_text
from attar.data.auto import fit
from attar.deployment.gguf_type_search import candidates
from attar.errors import ModelError, SettingsError, UsageError
from attar.formats.readers import quant_method
from attar.models.loading.fit import admit
from attar.models.loading.stored import stored_precision
from attar.planner.additivity import corrected_losses
from attar.planner.correction import PredictedKL, predicted_kl
from attar.planner.costs import EMBEDDING, kv_bytes, layer_groups, weight_costs
from attar.planner.gguf_costs import GGUFCosts, PlanCosts, gguf_costs
from attar.planner.losses import Losses, integer_grids
from attar.planner.result import Plan, PlanRow, recipe_of
from attar.planner.settings import KV_DTYPES_OF, NOISE, SCHEMES_OF, PlanSettings
from attar.planner.solve import KVOption, PlanPoint, PlanSolver
from attar.planner.speed import step_times
from attar.progress import SILENT, Progress
from attar.recipe.estimate import UNSURE, Work
from attar.recipe.estimate import seconds as work_seconds
from attar.recipe.machine import measure_rates
from attar.recipe.plan_history import read_records
from attar.recipe.shapes import shape_of
from attar.runtime.runner.kept_shapes import kept_shapes
from attar.sensitivity.weight_changes import ROWS, SensitivityInputs, load_inputs

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

FRONT = 12  # points of the curve that is shown
ROUNDS = 8  # of solving and measuring


def make_plan(model: Any, settings: PlanSettings, *, progress: Progress = SILENT) -> Plan:
    """Find the recipe that meets the budget at the smallest loss; without a size, the smallest that is good
    enough.

    Raises:
        UsageError: no recipe meets the budget; names the nearest point in each direction.
        AttarError: bad input.
    """
    checkpoint = admit(model, progress)
    if quant_method(checkpoint) is not None:
        raise ModelError(f"{checkpoint.path} is quantized already", hint="plan from the dense original")
    settings = fit(settings, checkpoint, progress)
    return _Planner(checkpoint, str(getattr(model, "spelling", model)), settings, progress).plan()


@dataclass
class _Planner:
    """One plan in the making."""

    checkpoint: Checkpoint
    name: str
    settings: PlanSettings
    progress: Progress

    def plan(self) -> Plan:
        settings, checkpoint = self.settings, self.checkpoint
        self.fingerprint, self.records = checkpoint.fingerprint(), read_records()
        costs = self._costs()
        groups, table = costs.groups, costs.table
        tied = sum(len(members) for members in groups.values() if len(members) > 1)
        kv = self._kv()
        self._check_size(costs, table, kv)
        times = step_times(checkpoint, groups, settings, self.progress) if settings.speed else None
        if times is not None and (fastest := times.fastest(table)) > self._seconds:
            rate = settings.batch / fastest
            near = format(0.98 * rate, ".0f" if rate > 10 else ".2g")
            raise UsageError(
                f"speed is {settings.speed!r}, but the fastest recipe decodes {rate:.4g} tokens a second",
                hint=f'--speed "decode>={near}" is possible, by what was measured here',
            )
        self._announce(len(table))
        inputs = load_inputs(checkpoint, settings)
        losses = self._losses(costs, inputs)
        losses.measure([(group, losses.reference(options)) for group, options in table.items()])
        kv = [replace(option, loss=losses.kv_loss(option.kv_dtype)) for option in kv]
        solver = PlanSolver(costs, table, kv, times, lambda: losses.options(table))
        point = self._settled(solver, losses)
        joint: dict[tuple[Any, ...], PlanPoint] = {}
        if settings.check:
            solver, point, joint = self._checked(solver, losses, point, inputs)
        alternatives = self._alternatives(solver, losses, point, joint)
        point = alternatives[0]
        front = [self._row(front_point) for front_point in _front(solver)]
        uniform = {name: solver.point(choice, solver.kv[0]) for name, choice in costs.uniform.items()}
        return Plan(
            self.name,
            settings,
            self._row(point),
            recipe_of(
                self.name,
                settings,
                costs.stage(point.choice, settings.method),
                point.kv_dtype,
                self._predicted(point),
            ),
            tuple(self._row(other) for other in alternatives[1:]),
            tuple(front),
            tuple(self._row(uniform_point, name) for name, uniform_point in uniform.items()),
            tuple(self._reasons(solver, point, tied)),
        )

    def _costs(self) -> PlanCosts:
        """What the options of the engine cost."""
        if self.settings.engine == "llama.cpp":
            return gguf_costs(self.checkpoint, self.settings.method)
        groups = layer_groups(self.checkpoint)
        schemes = SCHEMES_OF[self.settings.engine]
        return weight_costs(self.checkpoint, groups, schemes, embedding=self.settings.engine == "attar")

    def _losses(self, costs: PlanCosts, inputs: SensitivityInputs) -> Losses:
        """What they lose, of which nothing is measured yet."""
        anatomy, dtype = inputs.anatomy, stored_precision(self.checkpoint)
        if isinstance(costs, GGUFCosts):
            head = [anatomy.head] if anatomy.head and not anatomy.tied else []
            return Losses(inputs, costs.groups, "", dtype, candidates(), self.progress, after_blocks=head)
        return Losses(
            inputs, costs.groups, anatomy.embedding, dtype, integer_grids(costs.group_size), self.progress
        )

    def _kv(self) -> list[KVOption]:
        """Formats of keys and values with the bytes of their caches and states, losses not yet known."""
        settings = self.settings
        if not settings.tokens:
            return [KVOption("auto", 0, 0.0)]
        context = self.checkpoint.config.get("max_position_embeddings")
        if context and settings.tokens > context:
            raise SettingsError("context", settings.context, f"at most the model's, {context}")
        layers, state_bytes = kept_shapes(self.checkpoint.config)
        names = [
            name
            for name in KV_DTYPES_OF.get(settings.engine, ("auto",))
            if name == "auto" or not any(layer.latent or layer.head_dim % 2 for layer in layers)
        ]
        states = settings.batch * state_bytes
        return [
            KVOption(name, kv_bytes(layers, name, settings.tokens, settings.batch) + states, 0.0)
            for name in names
        ]

    def _check_size(
        self, costs: PlanCosts, table: Mapping[str, Mapping[str, int]], kv: Sequence[KVOption]
    ) -> None:
        """Refuse a size that not even the smallest options fit."""
        size = self.settings.bytes
        least = {group: min(options, key=options.__getitem__) for group, options in table.items()}
        files, cache = costs.file_bytes(least), min(option.bytes for option in kv)
        if not size or files + cache <= size:
            return
        parts = f"{files:,} of weights, each layer at its smallest, and {cache:,} of KV cache"
        hint = f"--size {files + cache}B is possible"
        if cache and files < size:
            shorter = self.settings.tokens * (size - files) // cache
            hint += f", and so is about --context {shorter} with this size"
        raise UsageError(
            f"size is {self.settings.size!r}, but must be at least {files + cache:,} bytes ({parts})",
            hint=hint,
        )

    def _announce(self, groups: int) -> None:
        """How long the measurements take, before they begin."""
        settings, shape = self.settings, shape_of(self.checkpoint)
        tokens = min(settings.samples, ROWS) * settings.sequence_length
        passes = 0.6 * 3 * groups + 2 * (settings.check + 4)  # three options of each, from its block on
        likely = work_seconds(Work(read=passes * tokens), shape, measure_rates())
        about = range_text(likely / UNSURE, likely * UNSURE)
        self.progress.log(f"measuring {groups} groups of layers on {tokens:,} tokens: about {about}")

    def _wanted(self, solver: PlanSolver) -> PlanPoint | None:
        """The point that the budget asks for; None: nothing meets it."""
        settings = self.settings
        if not settings.bytes and settings.kl < math.inf:
            return solver.smallest(lambda loss: self._kl(loss).kl <= settings.kl, self._seconds)
        point = solver.best(settings.bytes or math.inf, self._seconds)
        good = point is not None and self._kl(point.loss).kl <= settings.kl
        return point if good else None

    @property
    def _seconds(self) -> float:
        """The longest step of decoding."""
        speed = self.settings.tokens_per_second
        return self.settings.batch / speed if speed else math.inf

    def _settled(self, solver: PlanSolver, losses: Losses) -> PlanPoint:
        """The point of the budget, all of whose losses are measured."""
        for _ in range(ROUNDS):
            point = self._wanted(solver)
            nearest = point or solver.best(self.settings.bytes or math.inf, self._seconds) or solver.best()
            missing = losses.missing(nearest.choice) if nearest is not None else []
            if not missing:
                break
            losses.measure(missing)
        if point is None:
            raise self._impossible(solver)
        return point

    def _impossible(self, solver: PlanSolver) -> UsageError:
        """The error of a budget that nothing meets, with the nearest point in each direction."""
        settings = self.settings
        size, seconds = settings.bytes or math.inf, self._seconds
        wanted = [text for text in (settings.size, settings.quality, settings.speed) if text]
        near = []
        point = solver.best(size, seconds)
        if point is not None:
            within = [text for text in (settings.size, settings.speed) if text]
            kl = self._kl(point.loss)
            bounds = " and ".join(within) or "any size"
            near.append(f"{bounds}: kl {kl.kl:.4g} ({kl.low:.4g} to {kl.high:.4g})")
        if settings.kl < math.inf and settings.size:
            small = solver.smallest(lambda loss: self._kl(loss).kl <= settings.kl, seconds)
            if small is not None:
                near.append(f"kl<={settings.kl:g}: {small.bytes:,} bytes")
        if settings.speed:
            slowest = [solver.best(size, self._seconds * factor) for factor in (1.05, 1.2, 1.5, 2, 4, 16)]
            fast = next((near for near in slowest if near is not None and near.seconds), None)
            if fast is not None:
                near.append(f"speed: decode {settings.batch / (fast.seconds or math.inf):.4g}")
        return UsageError(
            f"no recipe has {' and '.join(wanted)}; the nearest are {'; '.join(near)}",
            hint="give one of these",
        )

    def _checked(
        self, solver: PlanSolver, losses: Losses, point: PlanPoint, inputs: SensitivityInputs
    ) -> tuple[PlanSolver, PlanPoint, dict[tuple[Any, ...], PlanPoint]]:
        """The solver with losses corrected by what the plan and neighbours cost as a whole; those points."""
        size = point.bytes
        steps = [(-1) ** n * (1 + n // 2) * 0.03 for n in range(self.settings.check)]
        near = [solver.best(size * (1 + step), self._seconds) for step in steps]
        points = [point, *(other for other in near if other is not None)]
        joint = {_identity(other): self._measured(losses, other) for other in points}
        options = corrected_losses(
            lambda: losses.options(solver.bytes),
            list(joint.values()),
            inputs.blocks,
            {option.kv_dtype: option.loss for option in solver.kv},
        )
        again = replace(solver, options=options)
        try:
            point = self._settled(again, losses)
        except UsageError:
            return solver, joint[_identity(point)], joint
        if _identity(point) not in joint:
            joint[_identity(point)] = self._measured(losses, point)
        return again, joint[_identity(point)], joint

    def _measured(self, losses: Losses, point: PlanPoint) -> PlanPoint:
        """The point with its loss as a whole."""
        joint = losses.joint(point.choice, point.kv_dtype)
        return replace(point, loss=joint.kl, flips=joint.flips)

    def _alternatives(
        self,
        solver: PlanSolver,
        losses: Losses,
        point: PlanPoint,
        joint: Mapping[tuple[Any, ...], PlanPoint],
    ) -> list[PlanPoint]:
        """The plan, and where its KL says nothing of tasks two more like it, the fewest flips first."""
        size = self.settings.bytes or math.inf
        meeting = [other for other in joint.values() if self._meets(other, size)]
        if self.settings.bytes or self.settings.kl == math.inf:
            point = min(meeting, key=lambda other: (other.loss, other.bytes), default=point)
        else:  # the smallest was wanted
            point = min(meeting, key=lambda other: (other.bytes, other.loss), default=point)
        if self._kl(point.loss).kl >= NOISE:
            return [point]
        smallest = solver.smallest(lambda loss: self._kl(loss).kl < NOISE, self._seconds)
        others = [smallest]
        if smallest is not None:
            others.append(solver.best((smallest.bytes + point.bytes) / 2, self._seconds))
        known = {_identity(point): point}
        for other in others:
            if other is not None and _identity(other) not in known and self._meets(other, size):
                known[_identity(other)] = joint.get(_identity(other)) or self._measured(losses, other)
        if not self.settings.bytes:  # the smallest was wanted
            return list(known.values())
        same = [other for other in known.values() if self._kl(other.loss).kl < NOISE]
        return sorted(
            same, key=lambda other: (other.flips if other.flips is not None else math.inf, other.bytes)
        )

    def _meets(self, point: PlanPoint, size: float) -> bool:
        fast = point.seconds is None or point.seconds <= self._seconds
        return point.bytes <= size and fast and self._kl(point.loss).kl <= self.settings.kl

    def _kl(self, loss: float) -> PredictedKL:
        return predicted_kl(loss, self.settings.method, self.fingerprint, self.records)

    def _row(self, point: PlanPoint, name: str = "") -> PlanRow:
        kl = self._kl(point.loss)
        speed = self.settings.batch / point.seconds if point.seconds else None
        return PlanRow(
            name or _mix(point), point.file_bytes, point.cache_bytes, kl.kl, kl.low, kl.high,
            point.kv_dtype, point.choice.get(EMBEDDING, "dense"), speed, point.flips,
        )  # fmt: skip

    def _predicted(self, point: PlanPoint) -> dict[str, float]:
        kl = self._kl(point.loss)
        predicted: dict[str, float] = {
            "bytes": point.file_bytes,
            "cache_bytes": point.cache_bytes,
            "kl": kl.kl,
            "kl_low": kl.low,
            "kl_high": kl.high,
            "loss": point.loss,
        }
        if point.seconds:
            predicted["decode_tokens_per_s"] = self.settings.batch / point.seconds
        return {
            name: value if isinstance(value, int) else float(f"{value:.6g}")
            for name, value in predicted.items()
        }

    def _reasons(self, solver: PlanSolver, point: PlanPoint, tied: int) -> list[str]:
        """Why the plan is as it is."""
        options = solver.options()
        saved = {group: min(o.loss for o in options[group]) for group in options}
        losses_of_choice = {
            group: next(o.loss for o in options[group] if o.name == option)
            for group, option in point.choice.items()
        }
        worst = sorted(losses_of_choice, key=lambda group: losses_of_choice[group] - saved[group])[-3:][::-1]
        lines = [
            f"{tied} Linears share a scheme with others, because {self.settings.engine} runs them as one "
            "(q, k and v; gate and up; the experts of a layer)",
            "most is lost by "
            + ", ".join(
                f"{group} at {point.choice[group]} ({losses_of_choice[group]:.2g})" for group in worst
            ),
        ]
        if point.kv_dtype != "auto":
            kv = next(option for option in solver.kv if option.kv_dtype == point.kv_dtype)
            lines.append(
                f"keys and values in {point.kv_dtype}: {bytes_text(kv.bytes)} in place of "
                f"{bytes_text(solver.kv[0].bytes)}, at a loss of {kv.loss:.2g}"
            )
        if self._kl(point.loss).kl > self.settings.kl:
            lines.append(
                f"measured as a whole it loses more than kl<={self.settings.kl:g}: its parts lose less"
            )
        more = solver.best(point.bytes * 1.05, self._seconds)
        if more is not None and self.settings.bytes:
            gained = self._kl(point.loss).kl - self._kl(min(more.loss, point.loss)).kl
            lines.append(f"{bytes_text(0.05 * point.bytes)} more would save about {max(gained, 0):.2g} nats")
        return lines


def _front(solver: PlanSolver) -> list[PlanPoint]:
    """Points of the curve of loss over bytes, from the smallest to the best."""
    best = solver.best()
    least = {group: min(options, key=options.__getitem__) for group, options in solver.bytes.items()}
    cache = min(option.bytes for option in solver.kv)
    smallest = solver.costs.file_bytes(least) + cache
    assert best is not None, "without a bound there is a best point"
    sizes = [smallest + (best.bytes - smallest) * step / (FRONT - 1) for step in range(FRONT)]
    points = [solver.best(math.ceil(size)) for size in sizes]
    return list({_identity(point): point for point in points if point is not None}.values())


def _identity(point: PlanPoint) -> tuple[Any, ...]:
    return (*point.choice.items(), point.kv_dtype)


def _mix(point: PlanPoint) -> str:
    """``W3 x 20, W4 x 12``: groups by scheme."""
    names = sorted(option for group, option in point.choice.items() if group != EMBEDDING)
    return ", ".join(f"{name.removesuffix('A16')} x {names.count(name)}" for name in dict.fromkeys(names))
