"""The importance matrix of a checkpoint, computed by one sweep over calibration text.

    in_sum2[k] = sum over tokens of x[k]^2        count = tokens

Letters: x (K,) the input of a Linear for one token. The sums are those of llama.cpp's ``imatrix`` with its
``--process-output``: the head is a weight like any other. Differs from llama.cpp: a head that is the
embedding too has its sums, under the name of the stored embedding (there: none), and sums of batches are
kept in float64.

Nothing is solved, so a block runs once for each batch and no weight is copied. The head is run last, on the
hidden states behind the last block, up to its product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from attar.checkpoint import atomic
from attar.data.packing import calibration_batches, row_length
from attar.deployment.settings import ExportSettings
from attar.errors import NumericsError, SettingsError
from attar.formats.gguf import imatrix
from attar.models.anatomy import discover
from attar.models.device import pick_device
from attar.progress import SILENT, Progress
from attar.walks.passes import StopForward
from attar.walks.skeleton import HiddenStates, Skeleton
from attar.walks.sweep import sweep

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


MEMORY = 4 * 2**30  # bytes of hidden states behind the last block kept in memory; the rest waits on disk
RESULT = "importance.safetensors"

Sums = dict[str, tuple[Tensor, float]]
"""(in_sum2 float32 (K,), tokens) by name of the stored weight."""


def compute(
    checkpoint: Checkpoint,
    batches: Sequence[Tensor],
    *,
    work: Path,
    precision: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress = SILENT,
) -> Sums:
    """Sums of squared inputs of every Linear of the blocks, and of the head.

    Args:
        checkpoint: dense.
        batches: int64 (B, S), none padded.
        work: folder of its own for this; what a finished run left there is read back.
        precision: of the passes: "fp32", "bf16" or "auto".

    Raises:
        NumericsError: an input or a block's output is not finite.
    """
    if (work / RESULT).exists():
        return _kept(work / RESULT)
    place, watch = torch.device(device), _SquaredInputs()
    behind = HiddenStates(work / "behind", MEMORY)

    def prepare(model: nn.Module) -> None:
        anatomy = discover(model)
        for name in [name for block in anatomy.blocks for name in block.linears]:
            watch.on(name, model.get_submodule(name))
        anatomy.blocks[-1].module.register_forward_hook(lambda _, args, output: _keep(behind, output))

    sweep(
        checkpoint,
        batches,
        None,
        work=work,
        precision=precision,
        prepare=prepare,
        device=place,
        progress=progress,
        what="importance",
    )
    skeleton = Skeleton(checkpoint, place)
    _run_head(skeleton, batches, behind, watch)
    behind.clear()
    found = _named(skeleton, watch)
    _write(work / RESULT, found)
    return found


def head_sums(skeleton: Skeleton, batches: Sequence[Tensor], behind: HiddenStates) -> Sums:
    """The head's sums alone, of the hidden states that a sweep has left behind the last block; none for a
    model without a head."""
    watch = _SquaredInputs()
    _run_head(skeleton, batches, behind, watch)
    return _named(skeleton, watch)


def _named(skeleton: Skeleton, watch: _SquaredInputs) -> Sums:
    """Sums by the names of the stored weights."""
    names = {name: skeleton.names[skeleton.first_names[f"{name}.weight"]] for name in watch.sums}
    return {names[name]: (sums.float(), float(watch.counts[name])) for name, sums in watch.sums.items()}


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

    def on(self, name: str, module: nn.Module) -> None:
        """Add up what a module is given from now on."""
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


def _keep(behind: HiddenStates, output: Any) -> None:
    """The hidden states of one more batch; those on the meta device are of no batch."""
    hidden = output if isinstance(output, Tensor) else output[0]
    if not hidden.is_meta:
        behind[len(behind)] = hidden.float()


def _run_head(
    skeleton: Skeleton, batches: Sequence[Tensor], behind: HiddenStates, watch: _SquaredInputs
) -> None:
    """What is behind the blocks, up to the head's product; nothing for a model without a head."""
    if skeleton.anatomy.head is None:
        return
    head = skeleton.model.get_submodule(skeleton.anatomy.head)
    watch.on(skeleton.anatomy.head, head)
    head.register_forward_pre_hook(_stop)
    used = torch.cat([batch.flatten() for batch in batches]).unique()
    with torch.no_grad(), skeleton.headed(used):
        for number, batch in enumerate(batches):
            with suppress(StopForward):
                skeleton.logits(batch, behind[number].to(skeleton.device))


def _stop(module: nn.Module, args: Any) -> None:
    raise StopForward


def _write(file: Path, found: Sums) -> None:
    """Write the sums."""
    tensors = {f"{name}/in_sum2": sums.contiguous() for name, (sums, _) in found.items()}
    tensors |= {
        f"{name}/count": torch.tensor(count, dtype=torch.float64) for name, (_, count) in found.items()
    }
    atomic.save_tensors(file, tensors)


def _kept(file: Path) -> Sums:
    tensors = load_file(file)
    names = [name.removesuffix("/in_sum2") for name in tensors if name.endswith("/in_sum2")]
    return {name: (tensors[f"{name}/in_sum2"], float(tensors[f"{name}/count"])) for name in names}


@dataclass(frozen=True)
class InputImportance:
    """Mean squared inputs by tensor.

    Attributes:
        entries: by llama.cpp's name of the weight.
        origin: of a computed one, what its file says of where it comes from.
        source: in words; "" where there is none.
    """

    entries: Mapping[str, imatrix.ImportanceEntry] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def notes(self) -> list[str]:
        """A sentence for people."""
        return [f"scales are searched with the importance of inputs: {self.source}"] if self.source else []

    def vector(self, name: str) -> Tensor | None:
        """Importance (K,) of the inputs of a weight; None where nothing is known."""
        entry = self.entries.get(name)
        return None if entry is None else entry.importance()


def importance_of(
    source: Checkpoint,
    view: Any,
    placed: Sequence[Any],
    settings: ExportSettings,
    work: Path,
    progress: Progress,
) -> InputImportance:
    """What the settings ask for; nothing with ``auto`` and a rounding with data, which sees the inputs of
    what it rounds itself (codes.py).

    Args:
        view: the source with its weights decoded.

    Raises:
        SettingsError: the file does not fit the model.
    """
    if settings.importance_rows:
        return _compute(source, view, placed, settings, work, progress)
    if settings.imatrix in ("auto", "none", ""):
        return InputImportance()
    return _read(Path(settings.imatrix), placed)


def _read(file: Path, placed: Sequence[Any]) -> InputImportance:
    entries = imatrix.read_imatrix(file)
    for one in placed:
        entry = entries.get(one.gguf)
        if entry is not None and entry.in_sum2.numel() != one.shape[-1]:
            raise SettingsError(
                "imatrix",
                str(file),
                f"one of this model: {one.gguf} has {one.shape[-1]} inputs, {entry.in_sum2.numel()} there",
            )
    if not any(one.gguf in entries for one in placed):
        raise SettingsError("imatrix", str(file), "one of this model: no tensor of it is in there")
    return InputImportance(entries, source=file.name)


def _compute(
    source: Checkpoint,
    view: Any,
    placed: Sequence[Any],
    settings: ExportSettings,
    work: Path,
    progress: Progress,
) -> InputImportance:
    from attar.deployment.imatrix import compute
    from attar.models.load import load_tokenizer

    length = row_length(settings.sequence_length, source.config)
    batches = calibration_batches(
        load_tokenizer(source),
        settings.data,
        samples=settings.importance_rows,
        sequence_length=length,
        batch_size=settings.batch_size,
        seed=settings.seed,
        bos=settings.bos,
    )
    found = compute(
        view,
        batches,
        work=work / "imatrix",
        precision=settings.precision,
        device=pick_device(settings.device),
        progress=progress,
    )
    entries = {one.gguf: imatrix.ImportanceEntry(*found[one.stored]) for one in placed if one.stored in found}
    origin = {
        "datasets": [settings.data],
        "chunks": sum(len(batch) for batch in batches),
        "chunk_size": length,
    }
    tokens = sum(batch.numel() for batch in batches)
    return InputImportance(entries, origin, f"{tokens:,} tokens of {settings.data}")
