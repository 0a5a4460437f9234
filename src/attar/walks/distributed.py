"""Several processes of one run: how they divide a step's rows, calibration batches, and with FSDP2 the model.

Rows. A step sees the same rows however many processes share it: whole micro-batches where they can be dealt
out evenly, else each process takes every R-th row of each. So the step is the same up to the rounding of
sums, and a run that R processes began another number can go on with.

Model (Zhao et al. 2023, arXiv 2304.11277; ``torch.distributed.fsdp.fully_shard``). Each process holds 1/R of
every parameter, its gradient and its optimizer state; a block's parameters are gathered for its forward and
its backward pass. Embedding, head and norms outside the blocks are one more unit, which stays gathered
between the two, so that a loss can read the head's weight.

Letters: R processes, r the number of this one, A micro-batches a step, B rows a micro-batch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn

from attar.checkpoint.processes import SHARD, Processes, count
from attar.data.examples import Examples, predictions
from attar.errors import DataError
from attar.models.loading.device import resolve

Rows: TypeAlias = Tensor | Examples


def share(batches: Sequence[Rows], rank: int, ranks: int) -> list[tuple[Rows, int]]:
    """The part of a step's A micro-batches that process r runs, as many on every process, each with its
    number of predictions. Where rows are fewer than processes, some run a row that counts 0."""
    if len(batches) % ranks == 0:
        return [(batch, predictions(batch)) for batch in batches[rank::ranks]]
    parts = []
    for batch in batches:
        part = batch[rank::ranks]
        parts.append((part, predictions(part)) if len(part) else (batch[:1], 0))
    return parts


def passes_of(accumulate: int, ranks: int) -> int:
    """How many passes :func:`share` leaves to a process in a step of A micro-batches."""
    return accumulate if accumulate % ranks else accumulate // ranks


def shards() -> bool:
    """Whether the launcher asks for parameters divided over the processes (``--shard``, or ``accelerate
    launch --use_fsdp``)."""
    return os.environ.get(SHARD, "").lower() in ("1", "true") and count() > 1


def own_batches(batches: Sequence[Tensor], processes: Processes) -> list[Tensor]:
    """The batches int64 (B, S) that this process runs: every R-th, or rows where batches are fewer than
    processes.

    Raises:
        DataError: there are fewer rows than processes.
    """
    if len(batches) < processes.count:
        batches = [row for batch in batches for row in batch.split(1)]
    if len(batches) < processes.count:
        hint = f"more --samples, or --launch {max(len(batches), 1)}"
        raise DataError(f"{len(batches)} rows of text are too few for {processes.count} processes", hint=hint)
    return list(batches[processes.rank :: processes.count])


def agreed_precision(
    processes: Processes, precision: str, device: torch.device, work: Path | None = None
) -> str:
    """As :func:`attar.models.loading.device.resolve` of the first process has it, on every process."""
    return processes.of_first(resolve(precision, device, work) if processes.first else "")


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the processes; where none has one, it stays None."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    used = torch.tensor([parameter.grad is not None for parameter in parameters], device=device).int()
    distributed.all_reduce(used)
    for parameter, processes in zip(parameters, used.tolist(), strict=True):
        if processes:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)
            parameter.grad.div_(count())


@contextmanager
def sharded(model: nn.Module) -> Iterator[nn.Module]:
    """Within it, the parameters of a model are divided over the processes, on its device; afterwards they are
    the same objects as before, whole, with the values that they have then.

    A model without blocks (a draft head, projections) is refused by :func:`blocks_of`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (count(),))
    original = _Original(model)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # head.py's, of no row
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    original.empty()
    yield model
    original.restore()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers keeps on one device each; they repeat, and hold most of a model."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def gathered(tensor: Tensor) -> Tensor:
    """A divided tensor as a whole, on every process; all of them must ask. Any other as it is."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a divided tensor, a view; any other as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, the same on every process, divided as a parameter is; as it is where that is whole."""
    if not hasattr(parameter, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Give back what a forward pass without a backward one has left gathered; nothing in another model."""
    if hasattr(model, "reshard"):
        model.reshard()


class _Original:
    """A model as it was before it was divided: classes, hooks and parameters of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = [
            (module, type(module), {name: _copy(value) for name, value in vars(module).items()})
            for module in model.modules()
        ]
        self.shapes = {id(p): p.shape for p in model.parameters()}

    def empty(self) -> None:
        """Free the whole parameters; their objects stay."""
        for _, _, attributes in self.modules:
            for parameter in attributes["_parameters"].values():
                if parameter is not None:
                    parameter.data = parameter.data.new_empty(0)

    def restore(self) -> None:
        """Put them back, with what the divided ones hold."""
        reshard(self.model)
        filled: set[int] = set()
        for module, _, attributes in self.modules:
            for name, parameter in attributes["_parameters"].items():
                if parameter is not None and id(parameter) not in filled:
                    parameter.data = gathered(module._parameters[name].detach())
                    filled.add(id(parameter))
        for module, cls, attributes in self.modules:
            module.__class__ = cls
            for name in [name for name in vars(module) if name not in attributes]:
                del module.__dict__[name]
            for name, value in attributes.items():
                if name == "_parameters" or name.endswith(("_hooks", "_hooks_with_kwargs")):
                    module.__dict__[name] = value


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value
