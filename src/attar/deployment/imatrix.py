"""The importance matrix of a checkpoint, computed by one sweep over calibration text.

    in_sum2[k] = sum over tokens of x[k]^2        count = tokens

Letters: x (K,) the input of a Linear for one token. The sums are those of llama.cpp's ``imatrix`` with its
``--process-output``: the head is a weight like any other. Differs from llama.cpp: a head that is the
embedding too has its sums, under the name of the stored embedding (there: none), and sums of batches are kept
in float64.

The sweep solves nothing, so a block runs once for each batch and no weight is
copied. The head runs last, on the hidden states after the last block, up to its product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from attar.checkpoint import atomic
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.errors import NumericsError
from attar.models.anatomy.discover import discover
from attar.progress import SILENT, Progress
from attar.walks.offloaded_model import HiddenStates, OffloadedModel
from attar.walks.passes import StopForward
from attar.walks.sweep import SweepOptions, observe

MEMORY = 4 * 2**30  # bytes of hidden states in memory; the rest is on disk
RESULT = "importance.safetensors"

Sums = dict[str, tuple[Tensor, float]]
"""(in_sum2 float32 (K,), tokens) by name of the stored weight."""


def compute(
    checkpoint: Checkpoint,
    batches: Sequence[Tensor],
    *,
    work: Path,
    processes: Processes = SINGLE_PROCESS,
    precision: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress = SILENT,
) -> Sums:
    """Sums of squared inputs of every Linear of the blocks, and of the head.

    Args:
        batches: int64 (B, S), none padded.
        work: a separate folder; sums that a finished run left there are read back.
        processes: each runs a part of the batches; all get the sums of all.
        precision: of the passes: "fp32", "bf16" or "auto".

    Raises:
        NumericsError: an input or a block's output is not finite.
    """
    if (work / RESULT).exists():
        return _read_sums(work / RESULT)
    inputs = _SquaredInputs()
    sums: Sums = {}

    def prepare(model: nn.Module) -> None:
        for name in [name for block in discover(model).blocks for name in block.linears]:
            inputs.watch(name, model.get_submodule(name))

    def after_blocks(
        offloaded: OffloadedModel, batches: Sequence[Tensor], hidden: HiddenStates, processes: Processes
    ) -> None:
        _run_head(offloaded, batches, hidden, inputs)
        inputs.reduce(processes)
        sums.update(_named(offloaded, inputs))

    observe(
        checkpoint,
        batches,
        SweepOptions(
            work=work,
            spill_bytes=MEMORY,
            precision=precision,
            prepare=prepare,
            after_blocks=after_blocks,
            processes=processes,
            device=device,
            progress=progress,
            what="importance",
        ),
    )
    if processes.first:
        _write_sums(work / RESULT, sums)
    return sums


def head_sums(
    offloaded: OffloadedModel, batches: Sequence[Tensor], hidden: HiddenStates, processes: Processes
) -> Sums:
    """The head's sums alone, from the hidden states after the last block; none for a model without a head."""
    inputs = _SquaredInputs()
    _run_head(offloaded, batches, hidden, inputs)
    inputs.reduce(processes)
    return _named(offloaded, inputs)


def _named(offloaded: OffloadedModel, inputs: _SquaredInputs) -> Sums:
    """Sums by the names of the stored weights."""
    names = {name: offloaded.names[offloaded.first_names[f"{name}.weight"]] for name in inputs.sums}
    return {names[name]: (sums.float(), float(inputs.counts[name])) for name, sums in inputs.sums.items()}


class _SquaredInputs:
    """Sums of the squared inputs of modules; an input that several have is squared once.

    Attributes:
        sums: float64 (K,) by name.
        counts: tokens by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.last: tuple[Tensor, Tensor] | None = None

    def watch(self, name: str, module: nn.Module) -> None:
        """Add up the inputs of a module from now on."""
        module.register_forward_pre_hook(lambda _, args: self._add(name, args[0]))

    def _add(self, name: str, x: Tensor) -> None:
        if x.is_meta:
            return
        if self.last is None or self.last[0] is not x:
            self.last = x, x.flatten(0, -2).float().square().sum(0).double().cpu()
        squares = self.last[1]
        if not math.isfinite(float(squares.sum())):
            raise NumericsError(f"an input of {name} is not finite", hint="the model overflows; try fp32")
        self.sums[name] = squares + self.sums[name] if name in self.sums else squares.clone()
        self.counts[name] = self.counts.get(name, 0) + x.shape[:-1].numel()

    def reduce(self, processes: Processes) -> None:
        """Add the sums of several processes; an expert may have seen tokens in some of them only."""
        parts = processes.of_all((self.sums, self.counts))
        self.sums, self.counts = {}, {}
        for sums, counts in parts:
            for name, value in sums.items():
                self.sums[name] = self.sums[name] + value if name in self.sums else value
                self.counts[name] = self.counts.get(name, 0) + counts[name]


def _run_head(
    offloaded: OffloadedModel, batches: Sequence[Tensor], hidden: HiddenStates, inputs: _SquaredInputs
) -> None:
    """Run what follows the blocks, up to the head's product; nothing for a model without a head."""
    if offloaded.anatomy.head is None:
        return
    head = offloaded.model.get_submodule(offloaded.anatomy.head)
    inputs.watch(offloaded.anatomy.head, head)
    head.register_forward_pre_hook(_stop)
    used = torch.cat([batch.flatten() for batch in batches]).unique()
    with torch.no_grad(), offloaded.with_lm_head(used):
        for number, batch in enumerate(batches):
            with suppress(StopForward):
                offloaded.logits(batch, hidden[number].to(offloaded.device))


def _stop(module: nn.Module, args: Any) -> None:
    raise StopForward


def _write_sums(file: Path, sums: Sums) -> None:
    tensors = {f"{name}/in_sum2": in_sum2.contiguous() for name, (in_sum2, _) in sums.items()}
    tensors |= {
        f"{name}/count": torch.tensor(count, dtype=torch.float64) for name, (_, count) in sums.items()
    }
    atomic.save_tensors(file, tensors)


def _read_sums(file: Path) -> Sums:
    tensors = load_file(file)
    names = [name.removesuffix("/in_sum2") for name in tensors if name.endswith("/in_sum2")]
    return {name: (tensors[f"{name}/in_sum2"], float(tensors[f"{name}/count"])) for name in names}
