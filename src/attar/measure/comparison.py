"""How a model differs from its original: KL over rows and by the original's confidence, flips by direction.

A flip is a prediction that is right in one of both: lost where the original was right, won where the
model is. Equal shares of both leave the accuracy as it is, and are two different models all the same (Dutta
et al., Accuracy is Not All You Need, 2024, arXiv 2407.09141).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import fmean, stdev

import torch
from torch import Tensor

from attar.measure.metrics import agreement, confidence, hits, kl, percentile
from attar.measure.uncertainty import mean_stderr, ratio_stderr, row_means, row_stderr

CONFIDENCES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class ConfidenceBucket:
    """Tokens of which the original's likeliest has a probability above ``above`` and up to ``up_to``.

    Attributes:
        kl_mean, kl_mean_row_stderr, top1_agreement: as in :class:`Divergence`; None without such a token.
    """

    above: float
    up_to: float
    tokens: int
    kl_mean: float | None
    kl_mean_row_stderr: float | None
    top1_agreement: float | None


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A model beside its reference, on the same tokens; None without a reference.

    Attributes:
        kl_mean, kl_p99: mean and 99th percentile of KL(reference || model) per token, in nats.
        top1_agreement: fraction of tokens where both models have the same likeliest token.
        quality_kept: accuracy / the reference's accuracy; None where its is 0.
        tokens_lost, tokens_won: fraction of tokens that are the reference's likeliest and not the model's,
            and the reverse.
        kl_mean_stderr, quality_kept_stderr: standard errors over blocks of tokens (uncertainty.py).
        kl_mean_row_stderr: standard error over rows: what other texts would give.
        kl_noise_floor, kl_noise_floor_row_stderr: mean KL of the reference to itself with products in
            bfloat16 (noise.py), and its standard error over rows.
        kl_rows: mean KL of each row, or of 64 stretches of neighbouring rows.
        kl_by_confidence: by the reference's confidence.
    """

    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None
    quality_kept: float | None = None
    tokens_lost: float | None = None
    tokens_won: float | None = None
    kl_mean_stderr: float | None = None
    quality_kept_stderr: float | None = None
    kl_mean_row_stderr: float | None = None
    kl_noise_floor: float | None = None
    kl_noise_floor_row_stderr: float | None = None
    kl_rows: tuple[float, ...] | None = None
    kl_by_confidence: tuple[ConfidenceBucket, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerAgreement:
    """Greedy answers beside the reference's, to the same prompts; None where none were generated.

    Attributes:
        answers_same: fraction of answers that are the reference's, token for token.
        answers_agreement: mean share of an answer before the first token that differs, of the longer one.
        answers_length, reference_answers_length: mean tokens of an answer.
    """

    answers_same: float | None = None
    answers_agreement: float | None = None
    answers_agreement_stderr: float | None = None
    answers_length: float | None = None
    reference_answers_length: float | None = None


@dataclass(frozen=True)
class TokenComparison:
    """Of n predictions: KL float64 (n,), whether both models have the same likeliest token and whether each
    model's is right: bool (n,), and the reference's confidence, float64 (n,)."""

    kl: Tensor
    agrees: Tensor
    right: Tensor
    reference_right: Tensor
    confidence: Tensor

    def split(self, counts: list[int]) -> list[TokenComparison]:
        """As many predictions each; the counts sum to n."""
        columns = (value.split(counts) for value in vars(self).values())
        return [TokenComparison(*row) for row in zip(*columns, strict=True)]


def compare_tokens(reference: Tensor, logits: Tensor, labels: Tensor) -> TokenComparison:
    """Compare the predictions of labels int64 (n,), on the CPU.

    Args:
        reference, logits: (n, V); not modified.
    """
    compared = (
        kl(reference, logits),
        agreement(reference, logits),
        hits(logits, labels),
        hits(reference, labels),
        confidence(reference),
    )
    return TokenComparison(*(value.cpu() for value in compared))


def compare(rows: Sequence[TokenComparison]) -> Divergence:
    """The comparison over all predictions of some rows, one at least."""
    distances = [row.kl for row in rows]
    right, theirs = [row.right for row in rows], [row.reference_right for row in rows]
    ours_only = [row.right & ~row.reference_right for row in rows]
    theirs_only = [row.reference_right & ~row.right for row in rows]
    reference_accuracy = fraction(theirs)
    return Divergence(
        kl_mean=float(torch.cat(distances).mean()),
        kl_p99=percentile(torch.cat(distances), 99.0),
        top1_agreement=fraction([row.agrees for row in rows]),
        quality_kept=fraction(right) / reference_accuracy if reference_accuracy else None,
        tokens_lost=fraction(theirs_only),
        tokens_won=fraction(ours_only),
        kl_mean_stderr=mean_stderr(distances),
        quality_kept_stderr=ratio_stderr(right, theirs),
        kl_mean_row_stderr=row_stderr(distances),
        kl_rows=row_means(distances),
        kl_by_confidence=tuple(_bucket(rows, *bounds) for bounds in pairwise(CONFIDENCES)),
    )


def compare_answers(answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> AnswerAgreement:
    """The agreement of token ids, an answer each; none: no figures."""
    if not answers:
        return AnswerAgreement()
    pairs = list(zip(answers, reference, strict=True))
    shares = [_common(ours, theirs) / max(len(ours), len(theirs), 1) for ours, theirs in pairs]
    return AnswerAgreement(
        answers_same=fmean(ours == theirs for ours, theirs in pairs),
        answers_agreement=fmean(shares),
        answers_agreement_stderr=stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None,
        answers_length=fmean(map(len, answers)),
        reference_answers_length=fmean(map(len, reference)),
    )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def fraction(parts: Sequence[Tensor]) -> float:
    """The fraction of elements that are true."""
    return float(torch.cat(list(parts)).double().mean())


def _bucket(rows: Sequence[TokenComparison], above: float, up_to: float) -> ConfidenceBucket:
    chosen = [(row.confidence > above) & (row.confidence <= up_to) for row in rows]
    distances = [row.kl[part] for row, part in zip(rows, chosen, strict=True)]
    agrees = [row.agrees[part] for row, part in zip(rows, chosen, strict=True)]
    count = sum(map(len, distances))
    if not count:
        return ConfidenceBucket(above, up_to, 0, None, None, None)
    mean = float(torch.cat(distances).mean())
    return ConfidenceBucket(above, up_to, count, mean, row_stderr(distances), fraction(agrees))
