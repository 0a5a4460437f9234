"""The tensors of a merge on the stream walk: read, align, merge and write, one output after the other.

    for each output:  x_i, base <- parents, in the working type;  rows aligned to the merged vocabulary
                      y = method(x_1 .. x_n, base)               written in place into its shard

Several outputs are merged in parallel, one thread each; an output that reads more than :data:`TOGETHER` runs
alone, so that the largest output decides the peak memory, whatever the model's size. Random methods draw from
a stream for each (seed, output tensor, index of the model), so that no result depends on order, shards or
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import check_finite, stored_dtype
from attar.errors import NumericsError, SettingsError
from attar.merging.methods.common.random_masks import RandomMasks
from attar.merging.planning.plan import InputTensor, MergePlan, OutputTensor
from attar.merging.tokenizer.vocabulary import MergedVocabulary
from attar.models.loading.device import trim_memory
from attar.progress import SILENT, Progress
from attar.walks.stream import SHARD_BYTES, WriteStep, stream_steps

TOGETHER = 400_000_000
"""Bytes of inputs that outputs merged in parallel may read."""


@dataclass(frozen=True)
class Merge:
    """A merge that is ready to run.

    Attributes:
        vocabulary: aligns embeddings and head; None: the models share their vocabulary.
        compat: ``"mergekit"`` or ``"paper"``.
        observe: called with every output that has a base, its inputs and its base, from several threads.
        scan_result: what the method knows of all tensors (the paper's TIES trims over the whole model).
    """

    plan: MergePlan
    vocabulary: MergedVocabulary | None = None
    compat: str = "mergekit"
    seed: int = 0
    observe: Callable[[OutputTensor, list[Tensor], Tensor], None] | None = None
    scan_result: Mapping[str, Any] = field(default_factory=dict)

    def specs(self) -> list[TensorSpec]:
        """Name, stored type and shape of every output."""
        return [
            TensorSpec(output.name, stored_dtype(getattr(torch, output.dtype)), output.shape)
            for output in self.plan.outputs
        ]

    def input_bytes(self, output: OutputTensor) -> int:
        """Bytes that :meth:`read` brings into memory."""
        size = getattr(torch, output.work_dtype).itemsize
        count = len(output.inputs) + (output.base is not None)
        return int(torch.Size(output.shape).numel() * size * count)

    def read(self, output: OutputTensor) -> tuple[list[Tensor], Tensor | None]:
        """The inputs and the base of an output, finite, aligned, in the working type.

        Raises:
            NumericsError: a parent's tensor has NaN or infinity.
        """
        inputs = [*output.inputs, *([output.base] if output.base else [])]
        if output.aligned and self.vocabulary is not None:
            tensors = self._aligned(self.vocabulary, output, inputs)
        else:
            tensors = [self._load(item) for item in inputs]
        if not output.copied:
            tensors = [tensor.to(getattr(torch, output.work_dtype)) for tensor in tensors]
        return (tensors[:-1], tensors[-1]) if output.base else (tensors, None)

    def merged(self, output: OutputTensor) -> dict[str, Tensor]:
        """One tensor of the result, by its name.

        Raises:
            NumericsError: a parent's tensor, or the result, is not finite.
        """
        if self.input_bytes(output) > TOGETHER:
            trim_memory()  # what earlier layers left
        tensors, base = self.read(output)
        dtype = getattr(torch, output.dtype)
        if output.copied:
            return {output.name: tensors[0].to(dtype)}
        if self.observe is not None and base is not None:
            self.observe(output, tensors, base)
        method = self.plan.method
        masks = [RandomMasks.of(self.seed, output.name, str(index)) for index in range(len(tensors))]
        tensor = method.merge(
            tensors,
            base,
            shared=output.shared,
            per_model=output.per_model,
            compat=self.compat,
            masks=masks if method.random else (),
            scan_result=self.scan_result,
        ).to(dtype)
        try:
            check_finite(output.name, tensor, Path("merge"))
        except NumericsError:
            raise NumericsError(
                f"{output.name}: the merge gives NaN or infinity in {output.dtype}",
                hint="smaller weights, weights that do not cancel, or out_dtype: bfloat16 or float32",
            ) from None
        return {output.name: tensor}

    def scanned(self, progress: Progress = SILENT) -> Merge:
        """The same merge after the method's passes over all tensors, if it needs any.

        Raises:
            SettingsError: the method needs one value for the whole model, and the configuration has several.
        """
        method, outputs = self.plan.method, [output for output in self.plan.outputs if not output.copied]
        if method.scan is None or self.compat != "paper":
            return self
        scan = method.scan(_constant([output.per_model for output in outputs]))
        with progress.task("scan", total=scan.passes * len(outputs)) as task:
            for _ in range(scan.passes):
                for output in outputs:
                    tensors, base = self.read(output)
                    assert base is not None, "a method that scans has a base"
                    scan.add(tensors, base)
                    task.advance()
                scan.end_pass()
        return replace(self, scan_result=scan.finish())

    def write(
        self,
        folder: Path,
        *,
        work: Path | None = None,
        processes: Processes = SINGLE_PROCESS,
        shard_bytes: int = SHARD_BYTES,
        progress: Progress = SILENT,
    ) -> list[Path]:
        """Write every tensor, from the first unfinished shard on; returns the files written.

        Args:
            processes: they share the shards.
        """
        steps = [
            WriteStep([spec], partial(self.merged, output), self.input_bytes(output))
            for spec, output in zip(self.specs(), self.plan.outputs, strict=True)
        ]
        return stream_steps(
            steps,
            folder,
            work=work,
            processes=processes,
            shard_bytes=shard_bytes,
            together=TOGETHER,
            progress=progress,
            what="merge",
        )

    def state(self) -> dict[str, Tensor]:
        """Every tensor in memory, for models that are small enough."""
        return {name: t for output in self.plan.outputs for name, t in self.merged(output).items()}

    def _load(self, item: InputTensor) -> Tensor:
        view = self.plan.models[item.model]
        tensor = view.load(item.name)
        check_finite(item.name, tensor, view.path)
        return tensor

    def _aligned(
        self, vocabulary: MergedVocabulary, output: OutputTensor, inputs: Sequence[InputTensor]
    ) -> list[Tensor]:
        """Rows of every input in the order of the merged vocabulary.

        A row that a model does not have comes from the rows of the others, so every model's matrix is read.
        """
        names = {item.model: item.name for item in inputs}
        items = [InputTensor(i, names.get(i, output.name)) for i in range(len(self.plan.models))]
        tensors = [
            self._load(item) if item.name in view.tensors else None
            for item, view in zip(items, self.plan.models, strict=True)
        ]
        aligned = vocabulary.align(tensors)
        tensors = [aligned[item.model] for item in inputs]
        assert all(tensor is not None for tensor in tensors)
        return tensors  # type: ignore[return-value]


def _constant(per_model: Sequence[Mapping[str, Sequence[Any]]]) -> Mapping[str, Sequence[Any]]:
    """Parameters per model that are the same for all tensors.

    Raises:
        SettingsError: one is not.
    """
    for name, values in per_model[0].items():
        for other in per_model:
            if tuple(other[name]) != tuple(values):
                raise SettingsError(
                    name,
                    "a gradient or filtered",
                    "one number a model with compat paper, which trims all tensors at once",
                )
    return per_model[0]
