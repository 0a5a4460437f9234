"""Checks of written files, read back: the faults that other exporters are known for.

Scales that are zero, infinite or out of the range of their type; layers whose codes are all the same; a file
that does not decode to what went in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.errors import NumericsError
from attar.formats.readers import reader
from attar.progress import SILENT, Progress


def same_tensors(
    source: Checkpoint, written: Checkpoint, dtype: torch.dtype | None, progress: Progress = SILENT
) -> list[str]:
    """Compare the decoded tensors of two checkpoints, bit for bit. Returns what was checked, as sentences.

    Args:
        dtype: what floating-point tensors were cast to; None: they stay as they are.

    Raises:
        NumericsError: a tensor differs, overflows, or is degenerate.
    """
    from attar.models.loading.single_experts import stacked_reader

    before, after = stacked_reader(reader(source), source), reader(written)
    stored_names = {slot[0]: info.name for info in written.tensors.values() if (slot := after.header(info))}
    checked = 0
    with progress.task("verify", total=len(source.tensors)) as task:
        for name, info in source.tensors.items():
            slot = before.header(info)
            if slot is not None:
                before.check(name)
                wanted, stored = before.decode(name), stored_names.get(slot[0])
                assert wanted is not None
                got = None if stored is None else after.decode(stored)
                compare(slot[0], wanted, got, dtype)
                checked += 1
            task.advance()
    return [f"{checked} tensors read back equal", "scales finite and not zero", "no layer of constant codes"]


def compare(name: str, wanted: Tensor, got: Tensor | None, dtype: torch.dtype | None) -> None:
    """Raise where a tensor that was read back differs from the written tensor, cast to ``dtype``.

    Raises:
        NumericsError: it differs, or overflowed in the cast.
    """
    if dtype is not None and wanted.is_floating_point():
        wanted = wanted.to(dtype)
    check_fits(name, wanted)
    if got is None or got.dtype != wanted.dtype or not torch.equal(got, wanted):
        raise NumericsError(
            f"{name} reads back differently from what was written",
            hint="the disk may be failing; run it again",
        )


def check_fits(name: str, tensor: Tensor) -> None:
    """Raise where a cast tensor is not finite.

    Raises:
        NumericsError: names the tensor and its type.
    """
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise NumericsError(
            f"{name} does not fit {str(tensor.dtype).removeprefix('torch.')}", hint="try --dtype bfloat16"
        )


def same_weights(source: Checkpoint, written: Checkpoint, progress: Progress = SILENT) -> list[str]:
    """Compare codes where both layouts have them, and decoded tensors within the rounding of the coarser
    type. Returns what was checked, as sentences.

    Raises:
        NumericsError: a tensor differs, or is degenerate.
    """
    from attar.models.loading.single_experts import stacked_reader

    before, after = reader(source), reader(written)
    stored_names = {slot[0]: info.name for info in written.tensors.values() if (slot := after.header(info))}
    slots = [slot for info in source.tensors.values() if (slot := before.header(info))]
    if any(slot[0] not in stored_names for slot in slots):  # experts were stacked
        before = stacked_reader(before, source)
    coded = 0
    with progress.task("verify", total=len(source.tensors)) as task:
        for name, info in source.tensors.items():
            slot = before.header(info)
            if slot is not None:
                coded += _same_codes(slot[0], before, name, after, stored_names.get(slot[0], ""))
                close(slot[0], before.decode(name), after.decode(stored_names[slot[0]]))
                after.check(stored_names[slot[0]])
            task.advance()
    return [
        f"{coded} Linears with the same codes",
        f"{len(stored_names)} tensors read back",
        "scales are finite",
    ]


def _same_codes(name: str, before: Any, stored: str, after: Any, written: str) -> bool:
    """Whether codes were compared; raises where they differ."""
    if not (hasattr(before, "codes") and hasattr(after, "codes")):
        return False
    old, new = before.codes(stored), after.codes(written)
    if old is None or new is None or bool((old[0].scale <= 0).any()):
        return False
    if not torch.equal(old[0].codes.float(), new[0].codes.float()):
        raise NumericsError(f"{name}: its codes read back differently", hint="run it again")
    return True


def close(name: str, wanted: Tensor | None, got: Tensor | None) -> None:
    """Raise where two decoded tensors differ by more than their types do."""
    if wanted is None or got is None or wanted.shape != got.shape:
        raise NumericsError(f"{name} did not come back", hint="run it again")
    step = max(torch.finfo(value.dtype).eps for value in (wanted, got) if value.is_floating_point())
    smallest = max(torch.finfo(value.dtype).smallest_normal for value in (wanted, got))
    lost = (wanted.float() - got.float()).abs()
    if not (lost <= 1.5 * step * wanted.float().abs() + smallest).all():
        raise NumericsError(f"{name} reads back differently from what was written", hint="run it again")
