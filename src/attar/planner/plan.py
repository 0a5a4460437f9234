"""``attar plan``: losses measured, budgets met, the prediction checked, a recipe written.

1. the smallest and the best point; an impossible budget is refused before anything is measured
2. every group at 4 bits; then solve, and measure what the choice took, until all of it is measured
3. the plan and a few neighbours as a whole: a factor of all losses and of pairs in a block is fitted, and
   the budget solved again (additivity.py)
4. with ``prune``, models that were cut: those that may lose less than the plan are solved and measured in the
   same way (cuts.py), and the best is taken
5. the KL that the recipe will have, with an interval (correction.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attar.checkpoint.units import bytes_text, range_text
from attar.data.auto import fit
from attar.deployment.gguf_type_search import candidates, fits
from attar.errors import ModelError, SettingsError, UsageError
from attar.formats.readers import quant_method
from attar.models.anatomy.discover import discover
from attar.models.loading.empty import empty_model
from attar.models.loading.fit import admit
from attar.models.loading.stored import stored_precision
from attar.planner.additivity import corrected_losses
from attar.planner.correction import PredictedKL, predicted_kl
from attar.planner.costs import EMBEDDING, StepTimes, kv_bytes, layer_groups, weight_costs
from attar.planner.cuts import CutModel, cut_model_of, cuts_folder
from attar.planner.gguf_costs import GGUFCosts, PlanCosts, gguf_costs
from attar.planner.llama_cpp_speed import llama_cpp_times
from attar.planner.losses import MIXTURE_REFERENCE_BITS, Losses, integer_grids, with_kept_scales
from attar.planner.result import Plan, PlanRow, recipe_of
from attar.planner.settings import KV_DTYPES_OF, NOISE, SCHEMES_OF, PlanSettings
from attar.planner.solve import KVOption, PlanPoint, PlanSolver
from attar.planner.speed import step_times
from attar.progress import SILENT, Progress
from attar.quantization.mixed_precision.rounded_options import rounding_of
from attar.quantization.mixed_precision.sensitivity import CandidateGrid, RoundFunction, nearest_mse
from attar.quantization.settings import GPTQ_KIN
from attar.recipe.estimate import UNSURE, Work, rounded_options
from attar.recipe.estimate import seconds as work_seconds
from attar.recipe.machine import measure_rates
from attar.recipe.plan_history import read_records
from attar.recipe.shapes import shape_of
from attar.runtime.runner.kept_shapes import kept_shapes
from attar.sensitivity.weight_changes import ROWS, SensitivityInputs, load_inputs

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

WORTH_CUTTING = 0.1  # nats a token: bits that lose more may lose more than a cut
BROKEN = 1.0  # nats a token: two-bit models of so much repeated one token, which the gate of quantize refuses
SAMPLES, MIXTURE_SAMPLES = 8, 32
"""Sequences that losses are measured on. A router that chooses another expert for a token makes losses
uneven: on 8 sequences of attar:tiny-moe an o_proj seemed to lose as much at 8 bits as at 5."""

FRONT = 12  # points of the curve that is shown
ROUNDS = 16  # of solving and measuring


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
    if not settings.samples:
        blocks = discover(empty_model(checkpoint.config)).blocks
        mixture = any(block.mixture is not None for block in blocks)
        settings = replace(settings, samples=MIXTURE_SAMPLES if mixture else SAMPLES)
    with ExitStack() as stack:
        return _Planner(checkpoint, str(getattr(model, "spelling", model)), settings, progress, stack).plan()


@dataclass(frozen=True)
class PlanBranch:
    """A model that bits are chosen for: the whole one, or a cut one.

    Attributes:
        cut: None: the whole model.
    """

    costs: PlanCosts
    losses: Losses
    solver: PlanSolver
    cut: CutModel | None = None


@dataclass
class _Planner:
    """One plan in the making."""

    checkpoint: Checkpoint
    name: str
    settings: PlanSettings
    progress: Progress
    stack: ExitStack = field(default_factory=ExitStack)

    def plan(self) -> Plan:
        settings, checkpoint = self.settings, self.checkpoint
        self.fingerprint, self.records = checkpoint.fingerprint(), read_records()
        costs, kv = self._costs(checkpoint), self._kv(checkpoint)
        tied = sum(len(members) for members in costs.groups.values() if len(members) > 1)
        self._check_size(costs, kv)
        times = self._times(checkpoint, costs)
        self._announce(len(costs.table))
        inputs = load_inputs(checkpoint, settings)
        losses = self._losses(costs, inputs)
        losses.rounding = self._rounding(checkpoint, costs)
        if any(block.mixture is not None for block in inputs.anatomy.blocks):
            losses.reference_bits = MIXTURE_REFERENCE_BITS
        losses.measure([(group, losses.reference(options)) for group, options in costs.table.items()])
        uncut = branch = self._branch(costs, losses, kv, times)
        point = self._settled(branch)
        joint: dict[tuple[Any, ...], PlanPoint] = {}
        if settings.check and point is not None:
            branch, point, joint = self._checked(branch, point)
        branch, point, joint, about_cuts = self._best_branch(branch, point, joint)
        if point is None:
            raise self._impossible(branch.solver)
        alternatives = self._alternatives(branch, point, joint)
        point = alternatives[0]
        uniform = {name: uncut.solver.point(choice, kv[0]) for name, choice in costs.uniform.items()}
        stages = [
            *(branch.cut.stages if branch.cut else ()),
            branch.costs.stage(point.choice, settings.method),
        ]
        return Plan(
            self.name,
            settings,
            self._row(point, branch),
            recipe_of(self.name, settings, stages, point.kv_dtype, self._predicted(point, branch)),
            tuple(self._row(other, branch) for other in alternatives[1:]),
            tuple(self._row(front_point, branch) for front_point in _front(branch.solver)),
            tuple(self._row(uniform_point, uncut, name) for name, uniform_point in uniform.items()),
            (*self._reasons(branch, point, tied), *about_cuts),
        )

    def _branch(
        self,
        costs: PlanCosts,
        losses: Losses,
        kv: Sequence[KVOption],
        times: StepTimes | None,
        cut: CutModel | None = None,
    ) -> PlanBranch:
        """A model with the solver of its bits."""
        table = costs.table
        kv = [replace(option, loss=losses.kv_loss(option.kv_dtype)) for option in kv]
        alone = losses.joint({}).kl if cut else 0.0
        solver = PlanSolver(costs, table, kv, times, lambda: losses.options(table), alone)
        return PlanBranch(costs, losses, solver, cut)

    def _best_branch(
        self, branch: PlanBranch, point: PlanPoint | None, joint: dict[tuple[Any, ...], PlanPoint]
    ) -> tuple[PlanBranch, PlanPoint | None, dict[tuple[Any, ...], PlanPoint], list[str]]:
        """The best of the whole model and of its cuts, each with its own bits; and what cuts came to."""
        settings, lines = self.settings, list[str]()
        if not settings.shares:
            if point is not None and point.loss > WORTH_CUTTING:
                lines.append("--prune 0.1,0.25 --recover-tokens 1000000 would try cut models too")
            return branch, point, joint, lines
        uncut, smallest = branch.losses, not settings.bytes and settings.kl < math.inf
        with cuts_folder(self.checkpoint, settings) as folder:
            for share in settings.shares:
                try:
                    cut = cut_model_of(self.checkpoint, share, settings, folder, self.progress)
                    costs = self._costs(cut.checkpoint)
                    times = self._times(cut.checkpoint, costs)
                except (ModelError, SettingsError, UsageError) as error:
                    lines.append(f"without {share:.0%} of its parameters: not possible: {error.message}")
                    continue
                losses = cut.losses(uncut, costs, self._grids(costs))
                other = self._branch(costs, losses, self._kv(cut.checkpoint), times, cut)
                alone, after = other.solver.cut_loss, " after recovery" if settings.recover_tokens else ""
                line = (
                    f"{cut.text} ({share:.0%} of the parameters cut): a KL of {alone:.3g}{after} before bits"
                )
                hopeless = point is not None and not smallest and alone >= point.loss
                solved = None if hopeless or self._kl(alone, alone).kl > settings.kl else self._settled(other)
                if solved is None:
                    lines.append(f"{line}, more than all that the plan may lose: not taken")
                    if hopeless and not settings.recover_tokens:
                        break  # a larger cut loses more
                    continue
                losses.rounding = self._rounding(cut.checkpoint, costs)
                other, solved, measured = self._checked(other, solved)
                better = point is None or _better(solved, point, smallest)
                lines.append(f"{line}, {solved.loss:.3g} with them: {'taken' if better else 'not taken'}")
                if better:
                    branch, point, joint = other, solved, measured
        return branch, point, joint, lines

    def _times(self, checkpoint: Checkpoint, costs: PlanCosts) -> StepTimes | None:
        """Times of the products; None: no speed is asked for.

        Raises:
            UsageError: not even the fastest formats are fast enough, or nothing times the engine's.
        """
        settings = self.settings
        if not settings.speed:
            return None
        if isinstance(costs, GGUFCosts):
            times = llama_cpp_times(checkpoint, costs, settings.batch, self.progress)
        else:
            times = step_times(checkpoint, costs.groups, settings, self.progress)
        if (fastest := times.fastest(costs.table)) > self._seconds:
            rate = settings.batch / fastest
            near = format(0.98 * rate, ".0f" if rate > 10 else ".2g")
            raise UsageError(
                f"speed is {settings.speed!r}, but the fastest recipe decodes {rate:.4g} tokens a second",
                hint=f'--speed "decode>={near}" is possible, by what was measured here',
            )
        return times

    def _costs(self, checkpoint: Checkpoint) -> PlanCosts:
        """What the options of the engine cost."""
        if self.settings.engine == "llama.cpp":
            return gguf_costs(checkpoint, self.settings.method)
        groups = layer_groups(checkpoint)
        schemes = SCHEMES_OF[self.settings.engine]
        return weight_costs(checkpoint, groups, schemes, embedding=self.settings.engine == "attar")

    def _grids(self, costs: PlanCosts) -> Mapping[str, CandidateGrid]:
        """The grid of each option."""
        return candidates() if isinstance(costs, GGUFCosts) else integer_grids(costs.group_size)

    def _losses(self, costs: PlanCosts, inputs: SensitivityInputs) -> Losses:
        """What they lose, of which nothing is measured yet."""
        anatomy, dtype = inputs.anatomy, stored_precision(self.checkpoint)
        if isinstance(costs, GGUFCosts):
            head = [anatomy.head] if anatomy.head and not anatomy.tied else []
            return Losses(inputs, costs.groups, "", dtype, self._grids(costs), self.progress, head)
        return Losses(inputs, costs.groups, anatomy.embedding, dtype, self._grids(costs), self.progress)

    def _rounding(self, checkpoint: Checkpoint, costs: PlanCosts) -> RoundFunction:
        """How the options of a model are rounded."""
        return self.stack.enter_context(
            rounding_of(
                checkpoint,
                costs.groups,
                self._grids(costs),
                self.settings.method,
                self.settings,
                fits=fits if isinstance(costs, GGUFCosts) else lambda grid, shape: True,
                otherwise=with_kept_scales(nearest_mse),
                progress=self.progress,
            )
        )

    def _kv(self, checkpoint: Checkpoint) -> list[KVOption]:
        """Formats of keys and values with the bytes of their caches and states, losses not yet known."""
        settings = self.settings
        if not settings.tokens:
            return [KVOption("auto", 0, 0.0)]
        context = checkpoint.config.get("max_position_embeddings")
        if context and settings.tokens > context:
            raise SettingsError("context", settings.context, f"at most the model's, {context}")
        layers, state_bytes = kept_shapes(checkpoint.config)
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

    def _check_size(self, costs: PlanCosts, kv: Sequence[KVOption]) -> None:
        """Refuse a size that not even the smallest options fit."""
        size = self.settings.bytes
        least = {group: min(options, key=options.__getitem__) for group, options in costs.table.items()}
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
        work = Work(read=passes * tokens)
        if settings.method in GPTQ_KIN:
            work += rounded_options()
        likely = work_seconds(work, shape, measure_rates())
        about = range_text(likely / UNSURE, likely * UNSURE)
        self.progress.log(f"measuring {groups} groups of layers on {tokens:,} tokens: about {about}")

    def _wanted(self, solver: PlanSolver) -> PlanPoint | None:
        """The point that the budget asks for; None: nothing meets it."""
        settings = self.settings
        if not settings.bytes and settings.kl < math.inf:
            return solver.smallest(self._good(solver, settings.kl), self._seconds)
        point = solver.best(settings.bytes or math.inf, self._seconds)
        good = point is not None and self._good(solver, settings.kl)(point.loss)
        return point if good else None

    def _good(self, solver: PlanSolver, kl: float) -> Callable[[float], bool]:
        """Whether the KL that is predicted of a loss is at most this."""
        return lambda loss: self._kl(loss, solver.cut_loss).kl <= kl

    @property
    def _seconds(self) -> float:
        """The longest step of decoding."""
        speed = self.settings.tokens_per_second
        return self.settings.batch / speed if speed else math.inf

    def _settled(self, branch: PlanBranch) -> PlanPoint | None:
        """The point of the budget, all of whose losses are measured; None: nothing meets it."""
        solver, losses = branch.solver, branch.losses
        for _ in range(ROUNDS):
            point = self._wanted(solver)
            nearest = point or solver.best(self.settings.bytes or math.inf, self._seconds) or solver.best()
            missing = losses.missing(nearest.choice) if nearest is not None else []
            if not missing:
                break
            losses.measure(missing)
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
            kl = self._kl(point.loss, solver.cut_loss)
            bounds = " and ".join(within) or "any size"
            near.append(f"{bounds}: kl {kl.kl:.4g} ({kl.low:.4g} to {kl.high:.4g})")
        if settings.kl < math.inf and settings.size:
            small = solver.smallest(self._good(solver, settings.kl), seconds)
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
        self, branch: PlanBranch, point: PlanPoint
    ) -> tuple[PlanBranch, PlanPoint, dict[tuple[Any, ...], PlanPoint]]:
        """The branch with losses corrected by what the plan and neighbours cost as a whole; those points."""
        solver, losses, size = branch.solver, branch.losses, point.bytes
        steps = [(-1) ** n * (1 + n // 2) * 0.03 for n in range(self.settings.check)]
        near = [solver.best(size * (1 + step), self._seconds) for step in steps]
        points = [point, *(other for other in [*near, self._uniform(branch)] if other is not None)]
        joint = {_identity(other): self._measured(losses, other) for other in points}
        options = corrected_losses(
            lambda: losses.options(solver.bytes),
            list(joint.values()),
            losses.inputs.blocks,
            {option.kv_dtype: option.loss + solver.cut_loss for option in solver.kv},
        )
        again = replace(branch, solver=replace(solver, options=options))
        better = self._settled(again)
        if better is None:
            return branch, joint[_identity(point)], joint
        if _identity(better) not in joint:
            joint[_identity(better)] = self._measured(losses, better)
        return again, joint[_identity(better)], joint

    def _uniform(self, branch: PlanBranch) -> PlanPoint | None:
        """The best point of one option for all groups that meets the budget; None: none does."""
        solver, size = branch.solver, self.settings.bytes or math.inf
        embeddings = [{EMBEDDING: name} for name in branch.costs.table.get(EMBEDDING, ())] or [{}]
        points = [
            solver.point({**choice, **embedding}, kv)
            for choice in branch.costs.uniform.values()
            for embedding in embeddings
            for kv in solver.kv
        ]
        meeting = [point for point in points if self._meets(point, size, solver)]
        return min(meeting, key=lambda point: (point.loss, point.bytes), default=None)

    def _measured(self, losses: Losses, point: PlanPoint) -> PlanPoint:
        """The point with its loss as a whole."""
        joint = losses.joint(point.choice, point.kv_dtype)
        return replace(point, loss=joint.kl, flips=joint.flips)

    def _alternatives(
        self, branch: PlanBranch, point: PlanPoint, joint: Mapping[tuple[Any, ...], PlanPoint]
    ) -> list[PlanPoint]:
        """The plan, and where its KL says nothing of tasks two more like it, the fewest flips first."""
        solver, losses = branch.solver, branch.losses
        size = self.settings.bytes or math.inf
        meeting = [other for other in joint.values() if self._meets(other, size, solver)]
        if self.settings.bytes or self.settings.kl == math.inf:
            point = min(meeting, key=lambda other: (other.loss, other.bytes), default=point)
        else:  # the smallest was wanted
            point = min(meeting, key=lambda other: (other.bytes, other.loss), default=point)
        noisy = self._good(solver, math.nextafter(NOISE, 0.0))
        if not noisy(point.loss):
            return [point]
        smallest = solver.smallest(noisy, self._seconds)
        others = [smallest]
        if smallest is not None:
            others.append(solver.best((smallest.bytes + point.bytes) / 2, self._seconds))
        known = {_identity(point): point}
        for other in others:
            if other is not None and _identity(other) not in known and self._meets(other, size, solver):
                known[_identity(other)] = joint.get(_identity(other)) or self._measured(losses, other)
        if not self.settings.bytes:  # the smallest was wanted
            return list(known.values())
        same = [other for other in known.values() if noisy(other.loss)]
        return sorted(
            same, key=lambda other: (other.flips if other.flips is not None else math.inf, other.bytes)
        )

    def _meets(self, point: PlanPoint, size: float, solver: PlanSolver) -> bool:
        fast = point.seconds is None or point.seconds <= self._seconds
        return point.bytes <= size and fast and self._good(solver, self.settings.kl)(point.loss)

    def _kl(self, loss: float, cut_loss: float = 0.0) -> PredictedKL:
        return predicted_kl(loss, self.settings.method, self.fingerprint, self.records, cut_loss)

    def _row(self, point: PlanPoint, branch: PlanBranch, name: str = "") -> PlanRow:
        kl = self._kl(point.loss, branch.solver.cut_loss)
        name = name or _mix(point) if branch.cut is None else f"{branch.cut.text}; {_mix(point)}"
        speed = self.settings.batch / point.seconds if point.seconds else None
        return PlanRow(
            name, point.file_bytes, point.cache_bytes, kl.kl, kl.low, kl.high,
            point.kv_dtype, point.choice.get(EMBEDDING, "dense"), speed, point.flips,
        )  # fmt: skip

    def _predicted(self, point: PlanPoint, branch: PlanBranch) -> dict[str, float]:
        """For the recipe; the loss of a cut model is none of rounding, which later plans are corrected by."""
        kl = self._kl(point.loss, branch.solver.cut_loss)
        predicted: dict[str, float] = {
            "bytes": point.file_bytes,
            "cache_bytes": point.cache_bytes,
            "kl": kl.kl,
            "kl_low": kl.low,
            "kl_high": kl.high,
        }
        if branch.cut is None:
            predicted["loss"] = point.loss
        if point.seconds:
            predicted["decode_tokens_per_s"] = self.settings.batch / point.seconds
        return {
            name: value if isinstance(value, int) else float(f"{value:.6g}")
            for name, value in predicted.items()
        }

    def _reasons(self, branch: PlanBranch, point: PlanPoint, tied: int) -> list[str]:
        """Why the plan is as it is."""
        solver = branch.solver
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
        if not self._good(solver, self.settings.kl)(point.loss):
            lines.append(
                f"measured as a whole it loses more than kl<={self.settings.kl:g}: its parts lose less"
            )
        kl = self._kl(point.loss, solver.cut_loss).kl
        if kl >= BROKEN:
            lines.append(
                f"at {kl:.2g} nats a model says other things than its original: attar run may refuse it for "
                "what it generates (with check_tokens: 0 it does not look)"
            )
        more = solver.best(point.bytes * 1.05, self._seconds)
        if more is not None and self.settings.bytes:
            losses = (point.loss, min(more.loss, point.loss))
            now, then = (self._kl(loss, solver.cut_loss).kl for loss in losses)
            lines.append(
                f"{bytes_text(0.05 * point.bytes)} more would save about {max(now - then, 0):.2g} nats"
            )
        return lines


def _better(solved: PlanPoint, point: PlanPoint, smallest: bool) -> bool:
    """Whether a point is smaller, where the smallest is wanted, or else loses less."""
    if smallest:
        return (solved.bytes, solved.loss) < (point.bytes, point.loss)
    return (solved.loss, solved.bytes) < (point.loss, point.bytes)


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
