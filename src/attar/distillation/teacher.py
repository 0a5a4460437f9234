"""What a teacher predicts, kept on disk: it is run once for each row of text, however often the row is
learned from, and by however many stages.

    p' = p on the K likeliest tokens;   on each of N tokens drawn from the others  (1 - sum of those K) / N

so that E[p'] = p: a student that is shown the likeliest tokens alone learns to be too sure (Anshumann et al.
2025, "Sparse Logit Sampling", arXiv 2503.16870, section 3). N = K / 4. A place takes 2 bytes for each token's
number (4 beyond 65,536 tokens), 2 for each of the K probabilities, and 4 for the entropy: 292 for K = 64.

A row's file is named by a hash of its tokens, in a folder named by all else that its numbers follow from. The
teacher sees every row alone, and each row's draws have a seed of their own: a row's numbers are the same in
any batch, epoch and order, so a run that was killed ends with the bytes of one that was not.

Letters: S tokens a row, n = S - 1 predicted places, K kept, N drawn, V tokens of both models, T temperature.
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
from attar.data.packing import numbered_generator

VERSION = 1  # of what a file holds
SMALLEST = 1e-30  # keeps a draw possible where the K have everything


@dataclass(frozen=True)
class Prediction:
    """What is kept of one row or of several.

    Attributes:
        tokens: int64 (n, K + N).
        weights: p' float32 (n, K + N); each row sums to 1.
        entropy: float32 (n,), of p, in nats.
    """

    tokens: Tensor
    weights: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class KeptTeacher:
    """A teacher that remembers what it predicted.

    Attributes:
        model: gives ``.logits``; called as the loss is, under its autocast.
        folder: of the files; may be shared by several teachers and settings.
        fingerprint: of the teacher's checkpoint.
        precision: in which the model multiplies: ``bf16`` or ``fp32``.
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
        """The predictions of all places of rows (B, S), one row after the other: n = B (S - 1)."""
        parts = [self._row(row) for row in rows]
        tokens = torch.cat([part["tokens"].long() for part in parts])
        likely = torch.cat([part["likely"].float() for part in parts])
        entropy = torch.cat([part["entropy"] for part in parts])
        drawn = tokens.shape[1] - likely.shape[1]
        rest = (1 - likely.sum(1, keepdim=True)).clamp(min=0) / max(drawn, 1)
        weights = torch.cat([likely, rest.expand(-1, drawn)], 1)
        weights /= weights.sum(1, keepdim=True)  # the probabilities are rounded to float16
        return Prediction(*(part.to(rows.device) for part in (tokens, weights, entropy)))

    def _row(self, row: Tensor) -> dict[str, Tensor]:
        """What the file of a row (S,) holds; it is written if it is not there or cannot be read."""
        digest = hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()
        file = self._rows / f"{digest[:32]}.safetensors"
        try:
            held: dict[str, Tensor] = load_file(file)
            return held
        except (OSError, SafetensorError):
            kept = self._predict(row, int(digest[:8], 16))
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.save_tensors(file, kept)
        return kept

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
        seed: of the draws.

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
