"""Export to GGUF: one file that llama.cpp runs.

place    which tensors the architecture has, and how each is turned           (formats/gguf/tensor_map.py)
type     a mix of llama.cpp's, our own under a budget, or what the codes say  (gguf_types.py)
round    nearest with importance, or any rounding of attar.quantization, and tuned (gguf_codes.py)
write    tensor by tensor, its place known beforehand                         (formats/gguf/writer.py)
verify   the file's bytes against those in memory, and decoded by the gguf library, value by value
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.checkpoint import atomic
from attar.checkpoint.licences import hub_tags
from attar.checkpoint.lineage import duties_of
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.processes import Processes
from attar.checkpoint.readme import HUB_NAME, MODELFILE
from attar.checkpoint.tensors import TensorInfo, read_tensor
from attar.checkpoint.units import byte_count
from attar.deployment.gguf_codes import GGUFCodes, quantized_codes
from attar.deployment.gguf_types import TensorTypes, choose_kinds, refuse_type
from attar.deployment.importance import importance_of
from attar.deployment.modelfile import modelfile
from attar.deployment.settings import ExportSettings
from attar.errors import ModelError, NumericsError
from attar.formats.gguf import blocks, container, imatrix
from attar.formats.gguf.metadata import metadata as described
from attar.formats.gguf.metadata import notes as architecture_notes
from attar.formats.gguf.placement import pieces
from attar.formats.gguf.provenance import provenance_metadata
from attar.formats.gguf.reader import scale_name
from attar.formats.gguf.tensor_map import architecture, placements
from attar.formats.gguf.tokenizer.files import read_tokenizer_files
from attar.formats.gguf.tokenizer.to_gguf import source_metadata, tokenizer_differences
from attar.formats.gguf.types import QUANTIZATION_VERSION, TYPES
from attar.formats.gguf.writer import GGUFTensorInfo, GGUFWriter
from attar.formats.readers import Decoded, quant_method
from attar.kernels.threads import one_thread
from attar.progress import Progress
from attar.quantization.gates import checked_layers

CHUNK = 1 << 20  # weights decoded at a time
WAITING = 2  # tensors whose digests are still computed while the next are rounded
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IMATRIX = "imatrix.gguf"
TWICE = "the source is quantized already ({}): what does not keep its codes is rounded a second time"


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot become a GGUF file.

    Raises:
        ModelError: its architecture has no mapping, or a rounding does not take its stacked experts.
        SettingsError: no such type.
    """
    view = dense_view(source)
    placed = placements(view.config, view.infos)
    refuse_type(settings, placed)
    option = f"--rounding {settings.rounding}"
    if settings.rounding == "nearest":
        option = f"--effort {settings.effort}"
    by_layer = bool(settings.most_steps) or settings.rounding != "nearest"
    if by_layer and any(placement.single for placement in placed):
        raise ModelError(
            f"{source.spelling} stores its experts in one tensor; {option} takes experts that are stored "
            "one by one",
            hint="--rounding nearest --effort fast (a plan's --method rtn), which weighs its inputs",
        )


def keeps_mtp(source: Checkpoint) -> bool:
    """Whether a file has the multi-token prediction head: of the families of which llama.cpp's converter
    writes it."""
    return architecture(source.config).nextn is not None


def dense_view(source: Checkpoint) -> Any:
    """The checkpoint with its weights decoded on access."""
    return LastLoaded(Decoded(source) if quant_method(source) else source)


class LastLoaded:
    """A view that keeps the tensor that was loaded last: experts that are stored in one are asked for one
    after the other.

    Attributes:
        infos: of the tensors that a file has a place for: the model's, and its head's where
            :func:`keeps_mtp`.
    """

    def __init__(self, view: Any) -> None:
        self._view = view
        self.infos = {**view.tensors, **view.mtp} if view.mtp and keeps_mtp(view) else view.tensors
        self._last: tuple[str, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def load(self, name: str) -> Tensor:
        """As of the view."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._view.load(name)
        return self._last[1]


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the file (or its parts) into the output folder; what was checked, in words."""
    view = dense_view(source)
    placed = placements(view.config, view.infos)
    importance = importance_of(source, view, placed, settings, output.shared, output.processes, progress)
    tokenizer = read_tokenizer_files(source.path, view.config)
    metadata = file_metadata(source, view, tokenizer, settings.pretokenizer)
    weighted = bool(importance.entries) or settings.rounding != "nearest"
    kinds = choose_kinds(source, view, placed, settings, metadata, weighted, output.processes, progress)
    _refuse_two_scales(kinds.of)
    missing = importance.missing(placed, kinds.of)
    codes = quantized_codes(
        source, view, placed, kinds, settings, importance, output.shared, output.processes, progress
    )
    file = output.folder / f"{file_stem(source)}-{kinds.label}.gguf"
    metadata |= {"general.file_type": kinds.file_type, "general.quantization_version": QUANTIZATION_VERSION}
    if importance.origin:
        imatrix.write_imatrix(output.folder / IMATRIX, importance.entries, **importance.origin)
    digests = _write(file, metadata, placed, kinds, codes, settings, view, output.processes, progress)
    output.exit_unless_rank0()
    if file.exists():  # Ollama takes no file in several parts
        write_modelfile(file, metadata, source)
    output.details.update(kinds.details(placed))
    output.details["importance"] = importance.source
    if codes.tuning:
        output.details["tuning"] = dict(codes.tuning)
    output.details["layers"] = reports = codes.reports()
    checked = checked_layers(reports, settings.rounding)
    again = any(kind not in FLOATS and name not in kinds.carried for name, kind in kinds.of.items())
    coded = [TWICE.format(quant_method(source))] if quant_method(source) and again else []
    output.details["notes"] = [*coded, *kinds.notes, *importance.notes, *missing, *checked]
    output.details["limits"] = [
        *architecture_notes(view.config),
        *tokenizer_differences(tokenizer, metadata),
    ]
    return verify(file, digests, progress)


def file_metadata(source: Checkpoint, view: Any, tokenizer: Any, pretokenizer: str = "") -> dict[str, Any]:
    """What a file says of its model, but for its types."""
    return {
        **described(view.config, file_stem(source), view.infos),
        **source_metadata(tokenizer, pretokenizer or None),
        **_provenance(source),
    }


def _provenance(source: Checkpoint) -> dict[str, Any]:
    """Licences and origins of a checkpoint's weights."""
    sources = duties_of(source).sources
    models = dict.fromkeys(entry.model.partition("@")[0] for entry in sources if entry.role == "weights")
    bases = [name for name in models if HUB_NAME.fullmatch(name)]
    return provenance_metadata(hub_tags([entry.id for entry in sources]), bases)


def write_modelfile(file: Path, metadata: dict[str, Any], source: Checkpoint) -> None:
    """``Modelfile`` for Ollama, in the folder of the file."""
    bare = {key: getattr(value, "value", value) for key, value in metadata.items()}
    sources = [f"{entry.title} ({entry.model})" for entry in duties_of(source).sources]
    context = source.config.get("max_position_embeddings")
    text = modelfile(file.name, bare, "\n".join(sources), context if isinstance(context, int) else None)
    atomic.write_bytes(file.with_name(MODELFILE), text.encode())


def file_stem(source: Checkpoint) -> str:
    """The model's name as part of a file's."""
    return source.name.replace("attar:", "attar-").rpartition("/")[2].partition("@")[0]


def _write(
    file: Path,
    metadata: dict[str, Any],
    placed: list[Any],
    kinds: TensorTypes,
    codes: GGUFCodes,
    settings: ExportSettings,
    view: Any,
    processes: Processes,
    progress: Progress,
) -> dict[str, str]:
    """Fill the first process's file, each process with some of the tensors; the digest of each tensor's
    bytes, as they are in memory."""
    shapes = {placement.gguf: placement.file_shape for placement in placed}
    slots = [slot for name, shape in shapes.items() for slot in _slots(name, kinds.of[name], shape)]
    writer = GGUFWriter(
        processes.of_first(file),
        metadata,
        slots,
        max_bytes=byte_count("max_file", settings.max_file) or None,
        processes=processes,
    )
    written = _of_rank(placed, processes)
    digests: dict[str, Future[str]] = {}
    with progress.task("write gguf", total=len(written)) as task, ThreadPoolExecutor(1) as pool:
        for placement in written:
            kind = kinds.of[placement.gguf]
            floats = kind in FLOATS
            if floats:
                data, weight_scale = _floats(placement, kind, view, codes.norms), None
            else:
                data, weight_scale = _blocks(placement, kind, codes)
            if weight_scale is not None:
                writer.add(
                    scale_name(placement.gguf),
                    weight_scale if placement.expert is None else weight_scale[0],
                    placement.expert,
                )
            digests[placement.piece] = pool.submit(_digest, data)
            writer.add(placement.gguf, data, placement.expert)
            task.advance()
            if len(digests) > WAITING:  # what waits for its digest is in memory
                digests[list(digests)[-1 - WAITING]].result()
    writer.finish()
    parts = processes.of_all({name: digest.result() for name, digest in digests.items()})
    return {name: digest for part in parts for name, digest in part.items()}


def _refuse_two_scales(kinds: Mapping[str, str]) -> None:
    """Raise where a tensor of NVFP4 has a scale beside it already (Gemma 4's experts)."""
    for name, kind in kinds.items():
        if kind == "NVFP4" and scale_name(name) in kinds:
            raise ModelError(
                f"{name} cannot be NVFP4: {scale_name(name)} is a tensor of the model",
                hint=f"--override '{name}=Q4_K', or another --type",
            )


def _of_rank(placed: Sequence[Any], processes: Processes) -> list[Any]:
    """The tensors that this process writes; tensors that are stored in one go together."""
    sizes: dict[str, int] = {}
    for placement in placed:
        name = placement.stored or placement.gguf
        sizes[name] = sizes.get(name, 0) + math.prod(placement.shape)
    owners = dict(zip(sizes, processes.partition_by_size(list(sizes.values())), strict=True))
    return [placement for placement in placed if owners[placement.stored or placement.gguf] == processes.rank]


def _floats(placement: Any, kind: str, view: Any, norms: Mapping[str, Tensor]) -> Tensor:
    """A tensor of numbers, cast; tuned norms in place of the checkpoint's."""
    value = placement.value
    if placement.stored is not None:
        tuned = norms.get(placement.stored)
        value = placement.apply(view.load(placement.stored) if tuned is None else tuned.cpu())
    data = value.to(FLOATS[kind]).contiguous()
    if not torch.isfinite(data).all():
        raise NumericsError(
            f"{placement.gguf} ({placement.stored}) does not fit {kind}", hint="--type BF16 or F32"
        )
    return data


def _slots(name: str, kind: str, shape: tuple[int, ...]) -> list[GGUFTensorInfo]:
    """A tensor of the file, and the scale of the whole weight beside it, where its type has one."""
    infos = [GGUFTensorInfo(name, kind, shape)]
    experts = shape[0] if len(shape) > 2 else 1
    return [*infos, GGUFTensorInfo(scale_name(name), "F32", (experts,))] if kind == "NVFP4" else infos


def _blocks(placement: Any, kind: str, codes: GGUFCodes) -> tuple[Tensor, Tensor | None]:
    """A tensor of blocks, and the scale of the whole weight, where its type has one."""
    rounded = codes(placement, kind)
    with one_thread():
        packed = blocks.pack(kind, rounded.codes, rounded.stored).view(*placement.shape[:-1], -1)
    return packed, rounded.whole_scale if kind == "NVFP4" else None


def verify(file: Path, digests: dict[str, str], progress: Progress) -> list[str]:
    """Open the written file: every tensor must have the bytes that it had in memory, and the gguf library
    must decode its blocks to what attar does. Returns what was checked, in words.

    Raises:
        NumericsError: a tensor reads back differently.
    """
    opened = container.read_gguf(
        file if file.exists() else next(iter(sorted(file.parent.glob(f"{file.stem}-*.gguf"))))
    )
    threads, infos = (
        torch.get_num_threads(),
        pieces({name: tensor.info for name, tensor in opened.tensors.items()}),
    )
    with (
        progress.task("verify", total=len(digests)) as task,
        one_thread(),
        ThreadPoolExecutor(threads) as pool,
    ):
        for _ in pool.map(lambda item: _check(infos[item[0]], item[1]), digests.items()):
            task.advance()
    return [f"{len(opened.tensors)} tensors read back equal, decoded by the gguf library"]


def _digest(data: Tensor) -> str:
    """SHA-256 of a contiguous tensor's bytes."""
    return hashlib.sha256(memoryview(data.view(torch.uint8).numpy()).cast("B")).hexdigest()


def _check(info: TensorInfo, digest: str) -> None:
    """Raise where a tensor's bytes are not those of the digest, or the gguf library decodes its blocks to
    other numbers than attar, bit for bit."""
    data = read_tensor(info)
    if _digest(data) != digest:
        raise NumericsError(
            f"{info.name} reads back differently from what was written",
            hint="the disk may be failing; run it again",
        )
    rows = data.reshape(-1, data.shape[-1])
    if info.block and not _decodes_alike(info.block, rows, info.weight_shape[-1]):
        raise NumericsError(
            f"{info.name}: the gguf library decodes {info.block} differently from attar",
            hint="another version of the package gguf, or another --type",
        )


def _decodes_alike(kind: str, data: Tensor, columns: int) -> bool:
    """Whether attar and the gguf library decode blocks (N, row bytes) to the same float32 numbers (N, K)."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    number = GGMLQuantizationType(TYPES[kind].id)
    parts = data.split(max(1, CHUNK // columns))
    pairs = ((blocks.dequantize(kind, part, columns), dequantize(part.numpy(), number)) for part in parts)
    return all(np.array_equal(ours.numpy().view(np.int32), theirs.view(np.int32)) for ours, theirs in pairs)
