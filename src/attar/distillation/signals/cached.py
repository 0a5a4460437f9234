"""The cached signal: what a teacher predicts, kept on disk. The teacher runs once for each row of text, in
however many epochs and stages the row is learned from: before the training, over all rows that it will see.

A position keeps K tokens and N drawn ones (``sampling.py``), 2 bytes for each number (4 beyond 65,536
tokens), 2 for each of the K probabilities, and 4 for the entropy: 292 for K = 64 and N = 16.

Predictions are filed by a hash of the row's tokens (``prediction_store.py``), in a folder named by a hash of
all else that its numbers depend on. The teacher sees batches of one shape, filled with copies, and each row's
draws have a seed of its own: a row's numbers do not depend on its batch, epoch or order, and a resumed run
ends with the same bytes.

Letters: S tokens a row, n predicted positions, K kept, N drawn, V tokens of both models, T temperature.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.hashing import identity
from attar.data.examples import Examples
from attar.data.packing import numbered_generator
from attar.distillation.objectives.chunked import BYTES, blockwise
from attar.distillation.objectives.forward_kl import sparse_loss_and_grad
from attar.distillation.outputs import Intermediates, ModelOutputs, run_model
from attar.distillation.settings import LearnSettings
from attar.distillation.signals.prediction_store import PredictionStore, row_digest
from attar.distillation.signals.sampling import sparse_prediction, sparse_weights
from attar.distillation.signals.target import SignalSource
from attar.models.head import Head, head_of
from attar.models.loading.device import resolve
from attar.progress import SILENT, Progress

VERSION = 2  # of a file's content
TOKENS = 4096  # the teacher reads at once, about
FILE_ROWS = 64  # at most, of a file


def cached_signal(source: SignalSource, student: Any, settings: LearnSettings) -> CachedTeacher:
    """Forward KL to the cached predictions; those of the source's rows are computed now."""
    assert settings.soft_loss == "kl", "other objectives read all logits"
    assert source.checkpoint is not None
    top, samples = settings.predictions.teacher_top, settings.predictions.teacher_samples
    kept: dict[str, Any] = {
        "precision": resolve(settings.precision, source.teacher.device, source.work),
        "top": top,
        "draws": samples or max(top // 4, 1),
        "temperature": settings.temperature,
        "width": _width(source, student),
    }
    name = identity("teacher", VERSION, kept, [source.checkpoint.fingerprint()])
    store = PredictionStore(source.cache / name)
    signal = CachedTeacher(source.teacher, store, **kept, head=head_of(source.teacher))
    if os.environ.get("WORLD_SIZE", "1") == "1":  # else a process asks for the rows of its own batches
        signal.prepare(source.rows, source.progress)
    return signal


def _width(source: SignalSource, student: Any) -> int:
    """Columns of the logits that are tokens of both models."""
    widths = [int(model.get_output_embeddings().weight.shape[0]) for model in (student, source.teacher)]
    return min(*widths, source.tokens.vocabulary or widths[0])


@dataclass(frozen=True)
class CachedTarget:
    """The stored predictions of a batch: tokens int64 (n, K + N), their weights p', the entropy (n,) of p."""

    tokens: Tensor
    weights: Tensor
    entropy: Tensor
    temperature: float
    width: int
    outputs: ModelOutputs | None = None

    def loss_and_grad(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Of T^2 KL(teacher || student), see :class:`attar.distillation.signals.target.SoftTarget`."""
        stored = [value[part] for value in (self.tokens, self.weights, self.entropy)]
        known = z[:, : self.width]
        values, _ = blockwise(sparse_loss_and_grad, known, *stored, T=self.temperature, out=known)
        z[:, self.width :] = 0.0
        return values, z


@dataclass(frozen=True)
class CachedTeacher:
    """A teacher whose predictions are cached on disk.

    Attributes:
        model: gives ``.logits``.
        precision: of the model's products: ``bf16`` or ``fp32``.
        top: K.
        draws: N.
        temperature: T.
        width: V.
        head: of the model, where its logits need not be made at once.
    """

    model: Any
    store: PredictionStore
    precision: str
    top: int
    draws: int
    temperature: float
    width: int
    head: Head | None = None

    def target(self, batch: Examples, intermediates: Intermediates) -> CachedTarget:
        """See :class:`attar.distillation.signals.target.Signal`; rows are of text, without intermediates."""
        assert intermediates == Intermediates(), "the intermediates of a teacher are not cached"
        stored = self.predictions(batch.tokens)
        predicted = batch.predicted[:, :-1].cpu()
        tokens, likely, entropy = (stored[name][predicted] for name in ("tokens", "likely", "entropy"))
        weights = sparse_weights(likely, tokens.shape[1] - likely.shape[1])
        device = batch.tokens.device
        kept = (tokens.long().to(device), weights.to(device), entropy.to(device))
        return CachedTarget(*kept, self.temperature, self.width)

    def predictions(self, rows: Tensor) -> dict[str, Tensor]:
        """What is stored of rows (B, S): ``tokens`` uint16 or int32 (B, S - 1, K + N), ``likely`` float16
        (B, S - 1, K), ``entropy`` float32 (B, S - 1); written where it is missing."""
        digests = [row_digest(row) for row in rows]
        with torch.autocast(rows.device.type, enabled=False):  # of training; the teacher's is its own
            self._write_missing(rows, digests)
            return self.store.read(digests)

    def prepare(self, examples: Iterable[Examples], progress: Progress = SILENT) -> None:
        """Write what is missing of all rows."""
        blocks = [block for part in examples for block in part.tokens.split(FILE_ROWS)]
        with progress.task("teacher's predictions", total=len(blocks)) as task:
            for rows in blocks:
                self._write_missing(rows, [row_digest(row) for row in rows])
                task.advance()

    def _write_missing(self, rows: Tensor, digests: Sequence[bytes]) -> None:
        missing = {digest: row for digest, row in zip(digests, rows, strict=True) if digest not in self.store}
        if missing:
            seeds = [int.from_bytes(digest[:4], "big") for digest in missing]
            self.store.write(list(missing), self._predict(torch.stack(list(missing.values())), seeds))

    def _predict(self, rows: Tensor, seeds: Sequence[int]) -> dict[str, Tensor]:
        """The tensors of a file, on the CPU."""
        inputs, size = rows.clamp(min=0).to(self.model.device), max(TOKENS // rows.shape[1], 1)
        parts = [
            self._batch(inputs[start : start + size], seeds[start : start + size], size)
            for start in range(0, len(rows), size)
        ]
        tokens, likely, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        return {"tokens": tokens, "likely": likely, "entropy": entropy}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _batch(self, rows: Tensor, seeds: Sequence[int], size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a batch, filled to ``size`` rows by copies: the head, too, sees them, for a product's last bits
        may hang on its shape."""
        filled = torch.cat([rows, rows[-1:].expand(size - len(rows), -1)])
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            outputs = run_model(self.model, Examples.of_text(filled), head=self.head)
        copies = [seeds[-1]] * (size - len(rows))
        tokens, likely, entropy = self._sampled(outputs, [*seeds, *copies], rows.shape[1] - 1)
        number = torch.uint16 if self.width <= 2**16 else torch.int32
        shape = (size, -1)
        return (
            tokens.to(number).unflatten(0, shape)[: len(rows)],
            likely.half().unflatten(0, shape)[: len(rows)],
            entropy.float().unflatten(0, shape)[: len(rows)],
        )

    def _sampled(
        self, outputs: ModelOutputs, seeds: Sequence[int], positions: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What is kept at the positions of the first rows, one for each seed; on the CPU."""
        n, uniforms = len(seeds) * positions, self._uniforms(seeds, positions)
        uniforms, chunk = uniforms.to(outputs.predictions.device), max(1, BYTES // (4 * self.width))
        parts = []
        for start in range(0, n, chunk):
            part = slice(start, min(start + chunk, n))
            logits = outputs.logits(part)[:, : self.width].float() / self.temperature
            parts.append(sparse_prediction(logits, self.top, uniforms[part]))
        tokens, likely, entropy = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return tokens, likely, entropy

    def _uniforms(self, seeds: Sequence[int], positions: int) -> Tensor:
        """float64 (n, N), those of a row drawn with its own seed; none where K is all tokens."""
        draws = self.draws if self.top < self.width else 0
        return torch.cat(
            [
                torch.rand(positions, draws, dtype=torch.float64, generator=numbered_generator(seed, 0))
                for seed in seeds
            ]
        )
