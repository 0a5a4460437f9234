"""The tensors of a merge on the stream walk: read, align, merge, write, one output tensor after the other.

    for each output:  x_i, base <- parents, in the working type;  rows aligned to the merged vocabulary
                      y = method(x_1 .. x_n, base)               written to its place in its shard

Blocks' matrices are merged side by side, one thread each; what reads more than :data:`TOGETHER` has the
machine to itself. So peak memory is what the largest output needs, whatever the model's size. Random methods
draw from a stream of their own for each (seed, output tensor, place of the model), so that no result depends
on order, shards or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import check_finite, stored_dtype
from attar.errors import NumericsError, SettingsError
from attar.merging.methods.common.random_masks import Draws
from attar.merging.planning.plan import Input, Output, Plan
from attar.models.device import trim_memory
from attar.progress import SILENT, Progress
from attar.walks.stream import SHARD_BYTES, WriteStep, stream_steps

if TYPE_CHECKING:
    from attar.merging.tokenizer.vocabulary import Vocabulary

TOGETHER = 400_000_000
"""Bytes of inputs that outputs may read side by side."""

Look = Callable[[Output, list[Tensor], Tensor], None]
"""Sees every output's inputs and base."""


@dataclass(frozen=True)
class Merge:
    """A merge that is ready to run.

    Attributes:
        plan: the tensor map.
        vocabulary: aligns embeddings and head; None where the models share theirs.
        compat: ``"mergekit"`` or ``"paper"``.
        seed: of the random methods.
        look: sees what goes into every output that has a base, e.g. to measure conflicts.
        known: what the method must know of all tensors (the paper's TIES trims over the whole model).
    """

    plan: Plan
    vocabulary: Vocabulary | None = None
    compat: str = "mergekit"
    seed: int = 0
    look: Look | None = None
    known: Mapping[str, Any] = field(default_factory=dict)

    def slot(self, output: Output) -> TensorSpec:
        """Where an output goes."""
        return TensorSpec(output.name, stored_dtype(getattr(torch, output.dtype)), output.shape)

    def read(self, output: Output) -> tuple[list[Tensor], Tensor | None]:
        """The inputs and the base of an output, finite, aligned, in the working type.

        Raises:
            NumericsError: a parent's tensor has NaN or infinity.
        """
        wanted = [*output.inputs, *([output.base] if output.base else [])]
        if output.aligned and self.vocabulary is not None:
            tensors = self._aligned(output, wanted)
        else:
            tensors = [self._load(item) for item in wanted]
        if not output.copied:
            tensors = [tensor.to(getattr(torch, output.work_dtype)) for tensor in tensors]
        return (tensors[:-1], tensors[-1]) if output.base else (tensors, None)

    def make(self, output: Output, tensors: list[Tensor], base: Tensor | None) -> Tensor:
        """One tensor of the result.

        Raises:
            NumericsError: the result is not finite: a coefficient is too large, or the type too narrow.
        """
        if output.copied:
            return tensors[0].to(getattr(torch, output.dtype))
        if self.look is not None and base is not None:
            self.look(output, tensors, base)
        draws = [Draws.of(self.seed, output.name, str(place)) for place in range(len(tensors))]
        made = self.plan.method.merge(
            tensors,
            base,
            shared=output.shared,
            each=output.each,
            compat=self.compat,
            draws=draws if self.plan.method.random else (),
            known=self.known,
        ).to(getattr(torch, output.dtype))
        try:
            check_finite(output.name, made, Path("merge"))
        except NumericsError:
            raise NumericsError(
                f"{output.name}: the merge gives NaN or infinity in {output.dtype}",
                hint="smaller weights, weights that do not cancel, or out_dtype: bfloat16 or float32",
            ) from None
        return made

    def nbytes(self, output: Output) -> int:
        """How much :meth:`read` brings into memory."""
        size = getattr(torch, output.work_dtype).itemsize
        count = len(output.inputs) + (output.base is not None)
        return int(torch.Size(output.shape).numel() * size * count)

    def scanned(self, progress: Progress = SILENT) -> Merge:
        """The same merge, knowing what only passes over all tensors can tell, where its method asks for that.

        Raises:
            SettingsError: the method wants one value for the whole model where the configuration has several.
        """
        method, outputs = self.plan.method, [output for output in self.plan.outputs if not output.copied]
        if method.scan is None or self.compat != "paper":
            return self
        scan = method.scan(_constant([output.each for output in outputs]))
        with progress.task("scan", total=scan.passes * len(outputs)) as task:
            for _ in range(scan.passes):
                for output in outputs:
                    tensors, base = self.read(output)
                    assert base is not None, "a method that scans has a base"
                    scan.add(tensors, base)
                    task.advance()
                scan.end_pass()
        return replace(self, known=scan.finish())

    def write(
        self,
        folder: Path,
        *,
        work: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
        progress: Progress = SILENT,
    ) -> list[Path]:
        """Write every tensor; goes on at the first unfinished shard.

        Returns:
            the files written.
        """
        steps = [self._step(output) for output in self.plan.outputs]
        return stream_steps(
            steps,
            folder,
            work=work,
            shard_bytes=shard_bytes,
            together=TOGETHER,
            progress=progress,
            what="merge",
        )

    def state(self) -> dict[str, Tensor]:
        """Every tensor in memory, for models that are small enough."""
        return {output.name: self.make(output, *self.read(output)) for output in self.plan.outputs}

    def _step(self, output: Output) -> WriteStep:
        nbytes = self.nbytes(output)

        def make() -> dict[str, Tensor]:
            if nbytes > TOGETHER:
                trim_memory()  # what the layers before have left
            return {output.name: self.make(output, *self.read(output))}

        return WriteStep([self.slot(output)], make, nbytes)

    def _load(self, item: Input) -> Tensor:
        view = self.plan.models[item.model]
        tensor: Tensor = view.load(item.name)
        check_finite(item.name, tensor, view.path)
        return tensor

    def _aligned(self, output: Output, wanted: list[Input]) -> list[Tensor]:
        """Rows of every wanted input in the order of the merged vocabulary.

        A row that a model lacks is made of the rows of the others, so every model's matrix is read.
        """
        assert self.vocabulary is not None
        names = {item.model: item.name for item in wanted}
        tensors = [
            self._load(Input(number, name)) if name in view.tensors else None
            for number, view in enumerate(self.plan.models)
            for name in (names.get(number, output.name),)
        ]
        aligned = self.vocabulary.align(tensors)
        made = [aligned[item.model] for item in wanted]
        assert all(tensor is not None for tensor in made)
        return made  # type: ignore[return-value]


def _constant(each: Sequence[Mapping[str, Sequence[Any]]]) -> Mapping[str, Sequence[Any]]:
    """Parameters per model that are the same for all tensors.

    Raises:
        SettingsError: one is not.
    """
    for name, values in each[0].items():
        for other in each:
            if tuple(other[name]) != tuple(values):
                raise SettingsError(
                    name,
                    "a gradient or filtered",
                    "one number a model with compat paper, which trims all tensors at once",
                )
    return each[0]
