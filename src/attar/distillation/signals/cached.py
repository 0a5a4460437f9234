"""The cached signal: what a teacher predicts, kept on disk. The teacher runs once for each row of text, in
however many epochs and stages the row is learned from.

    p' = p on the K likeliest tokens;   on each of N tokens drawn from the others  (1 - sum of those K) / N

so that E[p'] = p: a student that sees the likeliest tokens alone becomes overconfident (Anshumann et al.
2025, "Sparse Logit Sampling", arXiv 2503.16870, section 3). N = K / 4. A position takes 2 bytes for each
token number (4 beyond 65,536 tokens), 2 for each of the K probabilities, and 4 for the entropy: 292 for K =
64.

A row's file is named by a hash of its tokens, in a folder named by a hash of all else that its numbers
depend on. The teacher sees each row alone, and each row's draws have their own seed: a row's numbers are
the same in any batch, epoch and order, so a resumed run ends with the same bytes.

Letters: S tokens a row, n = S - 1 predicted positions, K kept, N drawn, V tokens of both models, T
temperature.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoint import atomic
from attar.checkpoint.hashing import identity
from attar.data.examples import Examples
from attar.data.packing import numbered_generator
from attar.distillation.objectives.chunked import blockwise
from attar.distillation.objectives.forward_kl import sparse_slopes
from attar.distillation.outputs import Insides, ModelOutputs
from attar.distillation.settings import LearnSettings
from attar.distillation.signals.target import SignalSource
from attar.models.device import resolve

VERSION = 1  # of a file's content
SMALLEST = 1e-30  # keeps a draw possible where the K tokens have all probability


def cached_signal(source: SignalSource, student: Any, settings: LearnSettings) -> CachedTeacher:
    """Forward KL to the cached predictions of ``settings.teacher_top`` tokens a position."""
    assert settings.soft_loss == "kl", "other objectives read all logits"
    assert source.checkpoint is not None
    models = (student, source.teacher)
    return CachedTeacher(
        source.teacher,
        source.cache,
        source.checkpoint.fingerprint(),
        resolve(settings.precision, source.teacher.device, source.work),
        settings.teacher_top,
        settings.temperature,
        min(model.get_output_embeddings().weight.shape[0] for model in models),
    )


@dataclass(frozen=True)
class Prediction:
    """The kept predictions of one or several rows.

    Attributes:
        tokens: int64 (n, K + N).
        weights: p' float32 (n, K + N); each row sums to 1.
        entropy: float32 (n,), of p, in nats.
    """

    tokens: Tensor
    weights: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class CachedTarget:
    """The stored predictions of a batch."""

    prediction: Prediction
    temperature: float
    width: int
    outputs: ModelOutputs | None = None

    def slopes(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Of T^2 KL(teacher || student), see :class:`attar.distillation.signals.target.SoftTarget`."""
        stored = [value[part] for value in vars(self.prediction).values()]
        known = z[:, : self.width]
        values, _ = blockwise(sparse_slopes, known, *stored, T=self.temperature, out=known)
        z[:, self.width :] = 0.0
        return values, z


@dataclass(frozen=True)
class CachedTeacher:
    """A teacher whose predictions are cached on disk.

    Attributes:
        model: gives ``.logits``; called as the loss is, under its autocast.
        folder: of the files; may be shared by several teachers and settings.
        precision: of the model's products: ``bf16`` or ``fp32``.
        top: K.
        temperature: T.
        width: V.
    """

    model: Any
    folder: Path
    fingerprint: str
    precision: str
    top: int
    temperature: float
    width: int

    def __call__(self, rows: Tensor) -> Prediction:
        """Predictions at all positions of rows (B, S), row after row: n = B (S - 1)."""
        parts = [self._row(row) for row in rows]
        tokens = torch.cat([part["tokens"].long() for part in parts])
        likely = torch.cat([part["likely"].float() for part in parts])
        entropy = torch.cat([part["entropy"] for part in parts])
        drawn = tokens.shape[1] - likely.shape[1]
        rest = (1 - likely.sum(1, keepdim=True)).clamp(min=0) / max(drawn, 1)
        weights = torch.cat([likely, rest.expand(-1, drawn)], 1)
        weights /= weights.sum(1, keepdim=True)  # the probabilities are rounded to float16
        return Prediction(*(part.to(rows.device) for part in (tokens, weights, entropy)))

    def target(self, batch: Examples, insides: Insides) -> CachedTarget:
        """See :class:`attar.distillation.signals.target.Signal`; rows are of text, without insides."""
        assert insides == Insides(), "the insides of a teacher are not cached"
        prediction, predicted = self(batch.tokens), batch.predicted[:, :-1].flatten()
        if not bool(predicted.all()):
            prediction = Prediction(*(part[predicted] for part in vars(prediction).values()))
        return CachedTarget(prediction, self.temperature, self.width)

    def _row(self, row: Tensor) -> dict[str, Tensor]:
        """Content of the file of a row (S,); written where it is missing or cannot be read."""
        digest = hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()
        file = self._rows / f"{digest[:32]}.safetensors"
        try:
            cached: dict[str, Tensor] = load_file(file)
            return cached
        except (OSError, SafetensorError):
            prediction = self._predict(row, int(digest[:8], 16))
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.save_tensors(file, prediction)
        return prediction

    @property
    def _rows(self) -> Path:
        settings = {name: getattr(self, name) for name in ("precision", "top", "temperature", "width")}
        return self.folder / identity("teacher", VERSION, settings, [self.fingerprint])

    def _predict(self, row: Tensor, seed: int) -> dict[str, Tensor]:
        with torch.no_grad():
            logits = self.model(input_ids=row.clamp(min=0)[None]).logits[0, :-1, : self.width]
            return summary(logits.float() / self.temperature, self.top, seed)


def summary(logits: Tensor, top: int, seed: int) -> dict[str, Tensor]:
    """The tensors of a row's file, on the CPU.

    Args:
        logits: (n, V), divided by T, float32.
        top: K.

    Returns:
        ``tokens`` (n, K + N) uint16 or int32, the likeliest first; ``likely`` float16 (n, K), their
        probabilities; ``entropy`` float32 (n,).
    """
    log_p = logits.log_softmax(-1).cpu()
    p = log_p.exp()
    top = min(top, p.shape[1])
    likely, tokens = p.topk(top)
    draws = 0 if top == p.shape[1] else max(top // 4, 1)
    drawn = tokens[:, :0]
    if draws:
        rest = p.clamp(min=SMALLEST).scatter_(1, tokens, 0.0)
        drawn = torch.multinomial(rest, draws, replacement=True, generator=numbered_generator(seed, 0))
    number = torch.uint16 if p.shape[1] <= 2**16 else torch.int32
    return {
        "tokens": torch.cat([tokens, drawn], 1).to(number),
        "likely": likely.half(),
        "entropy": -torch.special.xlogy(p, p).sum(-1),
    }
