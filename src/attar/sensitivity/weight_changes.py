"""How much a model loses by a change of one group of matrices, each group and change alone.

    kl[g, c] = mean over tokens of KL(p || p_gc)      p the model; p_gc the model with group g alone changed

Letters: g a group of matrices: Linears, or the embedding; c a change; W (N, K) weight, W' changed; x (K,) its
input (of an embedding, the unit vector of a token). An embedding that is the head too is measured as one, in
both uses at once. The sum of the groups' KLs approximates the KL of all changes together (Taylor's second
order without its mixed terms; it fails when a few large changes dominate).

The file (measurements.py) is replaced after every measurement: a killed run resumes after the last one. It is
in the user's cache, named after the checkpoint and the text: other budgets measure nothing again. Several
processes each make a part of the measurements, on all of the text, and keep them in a file of their own until
all are made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attar.checkpoint.hashing import computed_folder, sha256_text
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.data.sources import fingerprint
from attar.errors import DataError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Anatomy, weight_of
from attar.models.anatomy.roles import common_parent
from attar.models.loading.calibration import calibration_text
from attar.models.loading.device import pick_device
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model
from attar.options import flatten
from attar.progress import SILENT, Progress
from attar.sensitivity.measurements import Measurement, SensitivityKey, read, write
from attar.sensitivity.reference import MEMORY, ReferenceModel, reference_of

ROWS = 32  # calibration sequences that sensitivities are measured on

NewWeight = Callable[[Tensor], Tensor]
"""The changed weight (N, K) of a weight (N, K), which it does not modify."""


@dataclass(frozen=True)
class SensitivityInputs:
    """The model and the text that sensitivities are measured on.

    Attributes:
        model: loaded dense, float32.
        batches: int64 (B, S).
    """

    model: Any
    anatomy: Anatomy
    batches: list[Tensor]
    key: SensitivityKey
    file: Path

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks."""
        return [block.name for block in self.anatomy.blocks]


def load_inputs(checkpoint: Checkpoint, settings: Any) -> SensitivityInputs:
    """Load the model and its calibration text, at most :data:`ROWS` sequences.

    Args:
        settings: with the options data, bos, samples, sequence_length, batch_size, seed and device.

    Raises:
        DataError: there is not enough text.
    """
    options = flatten(settings)
    device = torch.device(pick_device(options["device"]))
    model = unstack(load_model(checkpoint, dtype=torch.float32, device=device))
    batches = calibration_text(checkpoint, settings, min(options["samples"], ROWS))
    key = SensitivityKey(
        model=checkpoint.fingerprint(),
        data=sha256_text(f"{fingerprint(options['data'])} {options['bos']}"),
        tokens=sum(batch.numel() for batch in batches),
        sequence_length=batches[0].shape[1],
        seed=options["seed"],
    )
    return SensitivityInputs(model, discover(model), batches, key, cache_folder() / key.file_name())


def cache_folder() -> Path:
    """Folder of measurements that outlast a run: ``$ATTAR_CACHE``, or ``attar`` in the user's cache."""
    folder = computed_folder() / "sensitivity"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def shared_groups(
    blocks: Sequence[Any], modules: Sequence[str], apart: bool = False, qkv: bool = True
) -> dict[str, list[str]]:
    """Linears that must share a scheme, because runtimes fuse them: q, k and v; gate and up; all experts of a
    block. Returns modules by group, in the order of the blocks; a group is named after its modules.

    Args:
        blocks: those of an Anatomy.
        modules: names of the Linears that will be quantized.
        apart: each expert is a separate group.
        qkv: q, k and v are a group.
    """
    groups: dict[str, list[str]] = {}
    for block in blocks:
        together = block.fused(qkv)
        if block.mixture is not None and block.mixture.experts:
            experts = [
                [part.name for part in (expert.gate, expert.up, expert.down) if part is not None]
                for expert in block.mixture.experts
            ]
            together = [*(experts if apart else [block.mixture.linears]), *together]
        done: dict[str, None] = {}
        for name in block.linears:
            mates = next((family for family in together if name in family), [name])
            members = [mate for mate in dict.fromkeys(mates) if mate in modules and mate not in done]
            if members:
                done.update(dict.fromkeys(members))
                groups[group_name(members)] = members
    return groups


def group_name(modules: Sequence[str]) -> str:
    """``model.layers.0.mlp.gate_proj+up_proj``: what modules have in common, and their last names."""
    leaves = "+".join(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    parent = functools.reduce(common_parent, (name.rpartition(".")[0] for name in modules))
    return ".".join(filter(None, [parent, leaves]))


@dataclass(frozen=True)
class WeightChange:
    """A measurement to make.

    Attributes:
        blank: the measurement without its numbers.
        new_weights: what becomes of each of its modules' weights, by module name.
    """

    blank: Measurement
    new_weights: Mapping[str, NewWeight]


def measure_changes(
    model: nn.Module,
    changes: Sequence[WeightChange],
    batches: Sequence[Tensor],
    file: Path,
    *,
    key: SensitivityKey,
    blocks: Sequence[str] = (),
    after_blocks: Sequence[str] = (),
    memory: int = MEMORY,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> list[Measurement]:
    """Measure every change alone; what the file holds is not measured again.

    Args:
        model: loaded dense, in evaluation mode. Its weights are changed while this runs and restored to the
            same bytes afterwards, also after an error.
        batches: int64 (B, S), none padded.
        file: of the measurements; may not exist yet.
        key: of the measurements; must be the file's.
        blocks: names of the model's blocks in order. With them only the part of the model from the changed
            block on is run, which gives the same numbers in about half the time.
        after_blocks: names of modules that run after the last block, such as an untied head; for them the
            blocks are not run at all.
        memory: bytes of reference logits kept in memory; more are spilled to disk.
        processes: they share the measurements; all of them get all.

    Raises:
        ModelError: the file belongs to another model or text.
        CheckpointError: the file is damaged.
        DataError: there are no batches.
    """
    if not batches:
        raise DataError("no text to measure sensitivities with", hint="more --samples")
    parts = f"{file.stem}.rank-*.json"  # of processes that were killed, or are at work
    files = [path for path in (file, *sorted(file.parent.glob(parts))) if path.exists()]
    stored = [measurement for path in files for measurement in read(path, key)]
    known = processes.of_first({measurement.identity: measurement for measurement in stored})
    todo = [change for change in changes if change.blank.identity not in known]
    rank, count = processes.rank, processes.count
    rank_file = file if processes.first else file.with_name(f"{file.stem}.rank-{rank}.json")
    shares = range(rank, len(todo), count)
    done = len(changes) - len(todo)
    with progress.task("sensitivity", total=done + len(shares), done=done) as task:
        if shares:
            work = rank_file.with_name(f".{rank_file.name}.work")
            with reference_of(model, blocks, batches, key.precision, memory, work, after_blocks) as reference:
                ordered = sorted(todo, key=lambda change: reference.first_block(change.blank.modules))
                for number in shares:
                    measurement = _measure(reference, ordered[number])
                    known[measurement.identity] = measurement
                    write(rank_file, key, list(known.values()))
                    task.advance(kl=measurement.kl)
    if todo and count > 1:
        known = {name: measurement for part in processes.of_all(known) for name, measurement in part.items()}
        if processes.first:
            write(file, key, list(known.values()))
            for path in file.parent.glob(parts):
                path.unlink()
        processes.wait()
    return [known[change.blank.identity] for change in changes]


def _measure(reference: ReferenceModel, change: WeightChange) -> Measurement:
    """One measurement: the group changed, the rest of the model run, the weights put back."""
    reference.move(reference.first_block(change.blank.modules))
    with changed(reference.model, change.new_weights) as energy:
        kl = reference.kl()
    lost, total = (sum(sums[part] for sums in energy.values()) for part in (0, 1))
    error = lost / max(total, 1e-30) if math.isfinite(lost) else math.inf
    return replace(change.blank, kl=kl, output_error=error)


@contextmanager
def changed(model: nn.Module, new_weights: Mapping[str, NewWeight]) -> Iterator[dict[str, list[float]]]:
    """Matrices with new weights for the length of the context; afterwards they are the same bytes as before.

    Args:
        new_weights: by module name.

    Yields:
        by module, the sums of ||(W - W') x||^2 and ||W x||^2 over its inputs x so far.
    """
    energy: dict[str, list[float]] = {name: [0.0, 0.0] for name in new_weights}
    with torch.no_grad(), ExitStack() as stack:
        for name, new_weight in new_weights.items():
            module = model.get_submodule(name)
            original = weight_of(module).clone()
            stack.callback(weight_of(module).copy_, original)
            weight_of(module).copy_(new_weight(original).to(original.dtype))
            hook = module.register_forward_pre_hook(_error_hook(original, energy[name]))
            stack.callback(hook.remove)
        yield energy


def _error_hook(original: Tensor, energy: list[float]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook that adds up the output error of a changed matrix."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        W, changed = original.float(), weight_of(module).float()
        with torch.autocast(W.device.type, enabled=False):
            lost, output = (_output(module, args[0], weight) for weight in (W - changed, W))
            energy[0] += float(lost.square().sum(dtype=torch.float64))
            energy[1] += float(output.square().sum(dtype=torch.float64))

    return hook


def _output(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """The output of a module with this weight, without bias: rows of an embedding, products otherwise."""
    return weight[x] if isinstance(module, nn.Embedding) else F.linear(x.flatten(0, -2).float(), weight)
