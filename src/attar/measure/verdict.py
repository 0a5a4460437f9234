"""The result of a run in one line, and its findings: sentences that compare measured numbers.

No order is claimed of two KLs that are not told apart (:meth:`StageRecord.kl_differs`).
"""

from __future__ import annotations

from attar.measure.numbers import nats, nats_with_interval, percent, significant, times, with_interval
from attar.measure.run_folder import ENCODER_TASKS, RunRecord, StageRecord


def verdict(run: RunRecord, stage: StageRecord | None = None) -> str:
    """How much smaller a stage is and how much quality it keeps: ``8.1x smaller, keeps 93 ± 1 % of its
    next-token accuracy, KL 0.21 nats``, with the 95 % interval where the record has a standard error; top-1
    choices where it has no accuracy.

    Args:
        stage: None: the last that was measured.
    """
    stage = stage or run.last
    smaller, kl = run.times_smaller(stage), stage.number("kl_mean")
    kept, stderr = stage.number("quality_kept"), stage.number("quality_kept_stderr")
    measure = "its accuracy" if stage.text("task") in ENCODER_TASKS else "its next-token accuracy"
    if kept is None:
        kept, stderr, measure = stage.number("top1_agreement"), None, "top-1 choices"
    parts = [f"{times(smaller)} smaller" if smaller is not None else None]
    parts.append(f"keeps {with_interval(kept, stderr)} % of {measure}" if kept is not None else None)
    if kl is not None:
        parts.append(f"KL {nats_with_interval(kl, stage.number('kl_mean_row_stderr'), 2)} nats")
    if kept is None and kl is None and stage.number("perplexity") is not None:
        parts.append(f"perplexity {significant(stage.number('perplexity'))}")
    return ", ".join(part for part in parts if part) or "nothing was measured"


def findings(run: RunRecord) -> list[str]:
    """What recovery won back, and what a method gained over round-to-nearest at the same bits."""
    recovered = (_recovery(run, stage) for stage in run.stages if stage.verb == "recover")
    compared = (_against_rtn(run, stage) for stage in run.stages if stage.verb == "quantize")
    return [sentence for sentence in (*recovered, *compared) if sentence]


def _recovery(run: RunRecord, stage: StageRecord) -> str | None:
    """Share of the KL lost by the prune stages just before that this stage won back."""
    pruned = before = run.parent(stage)
    while before is not None and before.verb == "prune":
        before = run.parent(before)
    if pruned is None or before is None or before is pruned:
        return None
    start, low, high = (point.number("kl_mean") for point in (before, pruned, stage))
    if start is None or low is None or high is None or low <= start or not before.kl_differs(pruned):
        return None
    if not pruned.kl_differs(stage):
        return f"{stage.name} won back nothing that can be told: KL {nats(low, 2)} and {nats(high, 2)} nats."
    share = (low - high) / (low - start)
    if share < 0:
        return f"{stage.name} lost more: KL went from {nats(low, 2)} to {nats(high, 2)} nats."
    return (
        f"{stage.name} won back {percent(share)} % of what pruning lost: "
        f"KL {nats(start, 2)} before, {nats(low, 2)} pruned, {nats(high, 2)} recovered."
    )


def _against_rtn(run: RunRecord, stage: StageRecord) -> str | None:
    """This method against round-to-nearest from the same parent at the same scheme and group size."""
    if stage.settings.get("method") == "rtn":
        return None
    same_settings = ("scheme", "group_size", "embedding_bits")
    for other in run.stages:
        same = all(other.settings.get(key) == stage.settings.get(key) for key in same_settings)
        if (
            other.verb == "quantize"
            and other.settings.get("method") == "rtn"
            and other.parents == stage.parents
            and same
        ):
            return _kl_difference(run, stage, other)
    return None


def _kl_difference(run: RunRecord, stage: StageRecord, other: StageRecord) -> str | None:
    """Compare the KL that both add to their parent's."""
    parent = run.parent(stage) or run.original
    base = parent.number("kl_mean")
    ours, theirs = stage.number("kl_mean"), other.number("kl_mean")
    if base is None or ours is None or theirs is None or theirs <= base:
        return None
    if not stage.kl_differs(other):
        return (
            f"At the same bits, the KL of {stage.name} and of {other.name} cannot be told apart: "
            f"{nats(ours, 2)} and {nats(theirs, 2)} nats."
        )
    ours, theirs = max(ours - base, 0.0), theirs - base
    word = "less" if ours <= theirs else "more"
    share = percent(abs(1 - ours / theirs))
    return (
        f"At the same bits, {stage.name} costs {share} % {word} KL than {other.name}: "
        f"{nats(ours, 2)} against {nats(theirs, 2)} nats on top of {parent.name}."
    )
