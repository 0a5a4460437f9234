"""The columns of the stage table, for the terminal and for the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from attar.measure.numbers import count, fixed, percent, significant, times
from attar.measure.run_folder import RunRecord, StageRecord


@dataclass(frozen=True)
class Column:
    """One column: its heading, what it means, and the text of a cell."""

    title: str
    meaning: str
    cell: Callable[[RunRecord, StageRecord], str]


def _aligned(key: str, scale: float = 1.0) -> Callable[[RunRecord, StageRecord], str]:
    """Cells with one number of decimals in all rows, chosen so that the smallest shows three digits."""

    def cell(run: RunRecord, stage: StageRecord) -> str:
        values = [abs(value) * scale for each in run.stages if (value := each.number(key))]
        decimals = max(0, 2 - math.floor(math.log10(min(values)))) if values else 0
        value = stage.number(key)
        return fixed(None if value is None else value * scale, min(decimals, 4))

    return cell


MB = Column("MB", "bytes of the stored tensors, in 10^6", _aligned("bytes", 1e-6))
SMALLER = Column(
    "smaller", "the original's bytes over these", lambda run, stage: times(run.times_smaller(stage))
)
BITS = Column(
    "bits/weight",
    "8 * bytes / parameters, scales included",
    lambda run, stage: fixed(stage.number("bits_per_weight"), 2),
)
PARAMETERS = Column("parameters", "of the dense model", lambda run, stage: count(stage.number("parameters")))
PERPLEXITY = Column("perplexity", "exp of the mean loss on held-out text", _aligned("perplexity"))
KL = Column(
    "KL", "mean KL(original || this), nats per token", lambda run, stage: significant(stage.number("kl_mean"))
)
KL_P99 = Column(
    "KL p99", "99th percentile of the tokens' KL", lambda run, stage: significant(stage.number("kl_p99"))
)
TOP1 = Column(
    "top-1 %",
    "tokens whose likeliest successor is the original's",
    lambda run, stage: percent(stage.number("top1_agreement"), 1),
)
KEPT = Column(
    "quality kept %",
    "next tokens predicted right, as a share of those of the original",
    lambda run, stage: percent(stage.number("quality_kept"), 1),
)
PREFILL = Column(
    "prefill tok/s",
    "prompt tokens read per second",
    lambda run, stage: fixed(stage.number("prefill_tokens_per_s")),
)
DECODE = Column(
    "decode tok/s",
    "tokens made per second, one sequence",
    lambda run, stage: fixed(stage.number("decode_tokens_per_s")),
)

TERMINAL = (MB, SMALLER, BITS, PERPLEXITY, KEPT, KL, TOP1, DECODE)
REPORT = (MB, SMALLER, BITS, PARAMETERS, PERPLEXITY, KEPT, KL, KL_P99, TOP1, PREFILL, DECODE)
