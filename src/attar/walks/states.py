"""The state of a training run on disk, by ``torch.distributed.checkpoint``: each process writes what it
holds, and any number of processes reads it again.

    model.NAME              trained parameters, and the buffers that a model keeps
    optimizer.I.NAME.KEY    of optimizer I, for each parameter: moments, steps
    rank-R.pt               the random number generators of process R; those beyond start as the first

A folder is complete when it has its name: it is written as ``state.partial`` and renamed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import Tensor, distributed, nn

from attar.errors import CheckpointError

GENERATORS = "rank-{}.pt"


def save_state(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int = 0
) -> None:
    """Write model, optimizers and generators; all processes call it."""
    save_tensors(folder, {**_model_tensors(model), **dict(_optimizer_tensors(model, optimizers))})
    torch.save(_generators(), folder / GENERATORS.format(rank))


def load_state(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int = 0
) -> None:
    """Read back, in place, what :func:`save_state` wrote; all processes call it.

    Raises:
        CheckpointError: the folder has the form of an earlier version.
    """
    from torch.distributed.checkpoint import FileSystemReader

    if not (folder / ".metadata").exists():
        raise CheckpointError(f"{folder}: the training state is of another version", hint="remove it")
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    with torch.no_grad():
        _make_room(model, optimizers, stored)
    load_tensors(folder, {**_model_tensors(model), **dict(_optimizer_tensors(model, optimizers))})
    generators = folder / GENERATORS.format(rank)
    _set_generators(torch.load(generators if generators.exists() else folder / GENERATORS.format(0)))


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, divided or whole, into a folder; all processes call it."""
    from torch.distributed import checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _alone() as alone:
            checkpoint.save(dict(tensors), checkpoint_id=folder, no_dist=alone)
    except checkpoint.CheckpointException as error:
        raise _cause(error) from None


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, divided or whole, in place; all processes call it."""
    from torch.distributed import checkpoint

    with torch.no_grad(), _alone() as alone:
        checkpoint.load(dict(tensors), checkpoint_id=folder, no_dist=alone)


def _cause(error: Any) -> BaseException:
    """What a disk said first, if that is what went wrong: torch wraps it several times."""
    for cause, _ in error.failures.values():
        while cause is not None:
            if isinstance(cause, OSError):
                return cause
            cause = cause.__cause__ or cause.__context__
    return error  # type: ignore[no-any-return]


@contextmanager
def _alone() -> Iterator[bool]:
    """Whether there is one process, of which torch would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield not distributed.is_initialized()


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers by name."""
    kept = model.state_dict(keep_vars=True)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return tensors | {f"model.{name}": b for name, b in model.named_buffers() if name in kept}


def _optimizer_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for key, tensor in state.items():
                yield f"optimizer.{number}.{names[id(parameter)]}.{key}", tensor


def _make_room(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], stored: Mapping[str, Any]
) -> None:
    """Give the optimizers empty tensors for their stored state."""
    keys: dict[str, list[str]] = {}
    for entry in stored:
        prefix, _, key = entry.rpartition(".")
        keys.setdefault(prefix, []).append(key)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            prefix = f"optimizer.{number}.{names[id(parameter)]}"
            for key in keys.get(prefix, ()):
                optimizer.state[parameter][key] = _room(parameter, stored[f"{prefix}.{key}"])


def _room(parameter: Tensor, entry: Any) -> Tensor:
    """An empty tensor for a state: divided as its parameter, where it has its shape."""
    dtype = entry.properties.dtype
    if entry.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype, device=parameter.device)


def _generators() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], numpy.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss),
    }


def _set_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *state = states["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *state))
