"""The training loop. The loss that it is given decides what is learned.

    for step:  g = sum over micro-batches of n_i / n d loss(model, batch_i) / d parameters;  clip;  optimize

n_i counts the predictions of a micro-batch, n those of all, on all processes: a step is the mean over its
predicted tokens however they are divided.

Distillation, recovery and quantization-aware training bring a loss and trainable parameters, never another
loop. A sparse model brings its masks (masks.py). Under ``--launch``, ``torchrun`` or ``accelerate launch``
processes share the rows of each step, and with FSDP2 the model too (distributed.py); a step is the same
however many they are.

Every ``checkpoint_every`` steps, every five minutes, and at the step in which Ctrl-C or SIGTERM comes, the
whole state (weights, optimizers, random number generators, curve) is written and renamed (states.py,
interruption.py). A stopped or killed run resumes from the last state with the same batches and ends with the
same bytes; where another number of processes goes on, with the same up to the rounding of sums.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from signal import SIGTERM
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attar.checkpoint import atomic
from attar.checkpoint.processes import SHARD
from attar.data.examples import Examples
from attar.data.packing import Batches
from attar.errors import NumericsError, SettingsError
from attar.interruption import Interruption, interruptible
from attar.models.loading.device import resolve
from attar.progress import SILENT, Progress
from attar.walks import distributed, optimizers, states
from attar.walks.masks import Masks, mask_gradients, mask_weights
from attar.walks.objectives import Loss
from attar.walks.settings import TrainSettings

MAX_GRAD_NORM = 1.0  # gradients of a larger norm are scaled down to it


@dataclass
class TrainHistory:
    """The course of a run.

    Attributes:
        curve: one row per logged step: ``step``, ``loss`` (mean since the last row), and ``held_out`` where
            it was measured.
        waited: held-out losses since the best one.
        stopped: the run ended early because the held-out loss did not fall.
        precision: of the products: ``bf16`` or ``fp32``.
        unlogged: losses since the last row of the curve.
    """

    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    best: float = math.inf
    waited: int = 0
    stopped: bool = False
    tokens: int = 0
    precision: str = ""
    unlogged: list[float] = field(default_factory=list)


class BatchSource(Protocol):
    """Batches by number, made with the model's current weights if need be.

    A batch must be the same again when a killed run asks for it with the same weights.
    """

    def batch(self, number: int, model: nn.Module) -> Any:
        """Batch ``number``, from 0 on, one for each micro-batch: what the loss takes, with rows of tokens or
        as :class:`Examples`. Every process asks for every batch, in the same order."""


def train(
    model: nn.Module,
    loss: Loss,
    rows: Tensor | Examples | BatchSource,
    settings: TrainSettings,
    *,
    work: Path | None = None,
    held_out: Callable[[nn.Module], float] | None = None,
    masks: Masks | None = None,
    progress: Progress = SILENT,
    what: str = "train",
) -> TrainHistory:
    """Train ``model`` in place. Returns the history; with ``patience`` the model holds its best weights,
    else its last.

    Args:
        model: its parameters with ``requires_grad`` are trained, in float32 (bf16 is used for the arithmetic
            only).
        loss: see :data:`attar.walks.objectives.Loss`; like ``held_out``, called under autocast where
            products are in bf16. One that leaves parameters without a gradient says so by ``partial``.
        rows: training rows int64 (N, S), or examples, shuffled by the settings' seed; or a source of batches.
        work: folder for resumable states; None: the run cannot be resumed.
        held_out: measures the held-out loss, every ``evaluate_every`` steps and at the end.
        masks: weights that are zero and stay zero.

    Raises:
        NumericsError: the loss or the gradient is not finite.
        StoppedError: Ctrl-C or SIGTERM came; the state is written.
    """
    accelerator = _accelerator(model)
    work = _shared(accelerator, work)
    with accelerator.main_process_first():
        settings = replace(settings, precision=resolve(settings.precision, accelerator.device, work))
    torch.manual_seed(settings.seed)
    if settings.gradient_checkpointing:
        _checkpoint_activations(model)
    with ExitStack() as stack:
        if distributed.shards() and distributed.blocks_of(model):
            stack.enter_context(distributed.sharded(model))
            prepared, averages = model, False
        else:  # DDP waits for the gradient of all that its forward pass has used
            averages = getattr(loss, "partial", False) and accelerator.num_processes > 1
            prepared = model if averages else accelerator.prepare(model)
        run = _TrainRun(accelerator, prepared, optimizers.build(model, settings), work, averages)
        if masks is not None:
            run.pruned = masks.pairs(model)
        source: BatchSource
        if isinstance(rows, Tensor | Examples):
            source = Batches(rows, settings.batch_size, settings.seed)
        else:
            source = rows
        interruption = stack.enter_context(interruptible())
        history = _steps(run, loss, source, settings, held_out, interruption, progress, what)
        if settings.patience:
            run.restore_best()
    accelerator.free_memory()
    return history


def _steps(
    run: _TrainRun,
    loss: Loss,
    source: BatchSource,
    settings: TrainSettings,
    held_out: Callable[[nn.Module], float] | None,
    interruption: Interruption,
    progress: Progress,
    what: str,
) -> TrainHistory:
    """The steps, from the newest state on."""
    history = run.resume()
    history.precision = settings.precision
    start = time.monotonic()
    first = history.step
    with progress.task(what, total=settings.steps, done=history.step) as task:
        while history.step < settings.steps and not history.stopped:
            value, tokens = _step(run, loss, source, history.step, settings)
            history.step += 1
            history.tokens += tokens
            history.unlogged.append(value)
            rate = optimizers.rate(history.step - 1, settings)
            speed = (history.step - first) / (time.monotonic() - start)
            numbers = {"loss": value, "learning rate": rate, "steps/s": speed}
            last = history.step == settings.steps
            if last or history.step % _log_every(settings) == 0:
                mean = sum(history.unlogged) / len(history.unlogged)
                history.curve.append({"step": history.step, "loss": mean})
                history.unlogged.clear()
            if held_out is not None and (last or _due(history.step, settings.evaluate_every)):
                numbers["held-out"] = _measure(run, held_out, history, settings)
            task.advance(**numbers)
            if run.agreed(interruption):
                run.save(history)
                interruption.saved()
            elif last or history.stopped or _due(history.step, settings.checkpoint_every):
                run.save(history)
    return history


def _accelerator(model: nn.Module) -> Any:
    from accelerate import Accelerator

    device = next(model.parameters()).device
    with _without(SHARD):  # distributed.py divides the model, on CPUs too
        return Accelerator(cpu=device.type == "cpu")


@contextmanager
def _without(name: str) -> Iterator[None]:
    """The environment without a variable."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def _shared(accelerator: Any, work: Path | None) -> Path | None:
    """The work folder of the first process, which all of them use."""
    if accelerator.num_processes == 1:
        return work
    from accelerate.utils import broadcast_object_list

    (first,) = broadcast_object_list([work])
    return None if first is None else Path(first)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _log_every(settings: TrainSettings) -> int:
    """Every how many steps the curve has a row."""
    return math.gcd(max(settings.steps // 50, 1), settings.checkpoint_every)


def _checkpoint_activations(model: nn.Module) -> None:
    """Have the model's blocks compute their activations again in the backward pass."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise SettingsError("gradient_checkpointing", True, f"false: {type(model).__name__} cannot do it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 6 will call it otherwise
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _step(
    run: _TrainRun, loss: Loss, source: BatchSource, step: int, settings: TrainSettings
) -> tuple[float, int]:
    """One optimizer step; returns the mean loss over its predictions, and its tokens, on all processes."""
    accelerator, first = run.accelerator, step * settings.accumulate
    device, count = accelerator.device, accelerator.num_processes
    batches = [source.batch(first + micro, run.inner) for micro in range(settings.accumulate)]
    parts = distributed.share(batches, accelerator.process_index, count)
    run.model.train()
    n = _sum_over_ranks(accelerator, sum(n_i for _, n_i in parts))
    values = []  # read after the last: reading one waits for the device
    for number, (batch, n_i) in enumerate(parts, start=1):
        if not n_i and count == 1:
            continue
        with run.gathering(last=number == len(parts)):
            with _arithmetic(run, settings):
                value = loss(run.model, batch.to(device))
            divisor = n / (count * n_i) if n_i else math.inf  # the processes' gradients are averaged
            accelerator.backward(value / divisor)
        values.append((value.detach(), divisor))
    total = sum((float(value) / divisor for value, divisor in values), 0.0)
    if count > 1:
        total = float(accelerator.reduce(torch.tensor(total, device=device), "mean"))
    if not math.isfinite(total):
        raise _diverged(f"the loss became {total} at step {step + 1}", settings)
    if run.averages:
        distributed.average_gradients(run.model)
    mask_gradients(run.pruned)
    norm = accelerator.clip_grad_norm_(run.model.parameters(), MAX_GRAD_NORM)
    norm = float(distributed.gathered(norm))
    if not math.isfinite(norm):
        raise _diverged(f"the gradient became {norm} at step {step + 1}", settings)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizers.rate(step, settings) * group.get("scale", 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mask_weights(run.pruned)
    return total, sum(_token_count(batch) for batch in batches)


def _sum_over_ranks(accelerator: Any, count: int) -> int:
    """The sum of a count over all processes."""
    if accelerator.num_processes == 1:
        return count
    return int(accelerator.reduce(torch.tensor(count, device=accelerator.device), "sum"))


def _token_count(batch: Tensor | Examples) -> int:
    """Positions of a batch, padding included."""
    return int((batch.tokens if isinstance(batch, Examples) else batch).numel())


def _arithmetic(run: _TrainRun, settings: TrainSettings) -> torch.autocast:
    """bf16 products, where that was decided; sums and weights stay float32."""
    return torch.autocast(run.accelerator.device.type, torch.bfloat16, enabled=settings.precision == "bf16")


def _diverged(what: str, settings: TrainSettings) -> NumericsError:
    lower = f"a --learning-rate below {settings.learning_rate:g}, or a --warmup above {settings.warmup:g}"
    more = ", or --precision fp32" if settings.precision == "bf16" else ""
    return NumericsError(what, hint=f"try {lower}{more}")


def _measure(
    run: _TrainRun, held_out: Callable[[nn.Module], float], history: TrainHistory, settings: TrainSettings
) -> float:
    """Measure the held-out loss and count how often it has not fallen."""
    run.model.eval()
    with torch.no_grad(), _arithmetic(run, settings):
        value = held_out(run.inner)
    distributed.reshard(run.inner)
    history.curve.append({"step": history.step, "held_out": value})
    if value < history.best:
        history.best, history.waited = value, 0
        run.save_best(settings)
    else:
        history.waited += 1
        history.stopped = 0 < settings.patience <= history.waited
    return value


@dataclass
class _TrainRun:
    """The prepared model and optimizers of a run, and the folder of its states.

    Attributes:
        averages: gradients of several processes are averaged here, not by the wrapper of the model.
        pruned: parameters with the weights in them that stay zero.
    """

    accelerator: Any
    model: nn.Module
    optimizers: list[Any]
    work: Path | None
    averages: bool = False
    best: dict[str, Tensor] | None = None
    pruned: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    @property
    def inner(self) -> nn.Module:
        """The model without the wrapper of several processes."""
        inner: nn.Module = self.accelerator.unwrap_model(self.model)
        return inner

    def gathering(self, *, last: bool) -> Any:
        """For a pass: gradients of several processes are averaged once a step, after the last one."""
        return nullcontext() if last or not hasattr(self.model, "no_sync") else self.model.no_sync()

    def agreed(self, interruption: Interruption) -> bool:
        """Whether a state is due in some process: they write it together, and end together. Of a training
        without states, whether it must end."""
        if self.work is None:
            return bool(interruption.signal)
        if self.accelerator.num_processes == 1:
            return interruption.due()
        flags = [float(interruption.due()), float(interruption.signal)]
        due, stopped = self.accelerator.reduce(torch.tensor(flags, device=self.accelerator.device), "sum")
        if stopped and not interruption.signal:  # the signal of another process
            interruption.signal = SIGTERM
        return bool(due)

    def save(self, history: TrainHistory) -> None:
        """Write the state whole, then delete the one before."""
        if self.work is None:
            return
        target = self.work / f"state-{history.step:08d}"
        partial = self._begin("state.partial")
        states.save_state(partial, self.inner, self.optimizers, self.accelerator.process_index)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            (partial / "history.json").write_text(json.dumps(asdict(history)))
            shutil.rmtree(target, ignore_errors=True)
            atomic.publish(partial, target)
            for old in self.states():
                if old != target:
                    shutil.rmtree(old, ignore_errors=True)

    def _begin(self, name: str) -> Path:
        """An empty folder that all processes write into."""
        assert self.work is not None
        if self.accelerator.is_main_process:
            shutil.rmtree(self.work / name, ignore_errors=True)
            (self.work / name).mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        return self.work / name

    def states(self) -> list[Path]:
        """Complete states, oldest first."""
        return sorted(self.work.glob("state-*")) if self.work is not None and self.work.is_dir() else []

    def resume(self) -> TrainHistory:
        """Load the newest state, if there is one."""
        complete = self.states()
        if not complete:
            if self.work is not None:
                self.work.mkdir(parents=True, exist_ok=True)
            return TrainHistory()
        states.load_state(complete[-1], self.inner, self.optimizers, self.accelerator.process_index)
        return TrainHistory(**json.loads((complete[-1] / "history.json").read_text()))

    def save_best(self, settings: TrainSettings) -> None:
        """Keep the trainable weights of the best held-out loss, where ``patience`` will restore them."""
        if not settings.patience:
            return
        self.best = {name: p.detach().clone() for name, p in self._trained().items()}
        if self.work is not None:
            partial = self._begin("best.partial")
            states.save_tensors(partial, self.best)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                shutil.rmtree(self.work / "best", ignore_errors=True)
                atomic.publish(partial, self.work / "best")

    def restore_best(self) -> None:
        """Put the best weights back."""
        best = self.best
        if best is None and self.work is not None and (self.work / "best").exists():
            best = {name: torch.empty_like(p, requires_grad=False) for name, p in self._trained().items()}
            states.load_tensors(self.work / "best", best)
        if best is not None:
            with torch.no_grad():
                for name, parameter in self._trained().items():
                    parameter.copy_(best[name])

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.inner.named_parameters() if p.requires_grad}
