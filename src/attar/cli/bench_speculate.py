"""What ``attar bench --speculate`` says: a table, and how many drafts the passes took."""

from __future__ import annotations

from typing import Any

from attar.checkpoint.units import number, table

_HEADER = ("set", "method", "batch", "tok/s", "speedup", "95 %", "accepted", "a", "tok/pass", "theory",
           "drafting", "same")  # fmt: skip
_NOTE = """speedup: geometric mean over prompts, rounds interleaved; 95 %: Student's t of the logarithms
accepted: of all drafts; a: at the depths tried; theory: mean of (1 - a^(k+1)) / (1 - a), k a pass's depth
drafting: share of the time spent in the proposer; same: texts equal to plain decoding's"""


def profile_text(found: Any) -> str:
    """For people."""
    how = f"temperature {found.temperature:g}, seeded" if found.temperature else "greedy"
    rounds = f"{found.rounds} rounds" if found.rounds > 1 else "1 round"
    said = f"{found.model}, runner {found.runner}, {found.tokens} tokens a text, {how}, {rounds}"
    rows = [_row(row) for row in found.rows]
    return f"{said}\n\n{table(_HEADER, rows, left=2)}\n\n{_NOTE}\n\n{_histograms(found)}".rstrip()


def _row(row: Any) -> tuple[str, ...]:
    known = row.low is not None and row.low < row.high  # one prompt says nothing of the spread
    reach = f"{row.low:.2f} to {row.high:.2f}" if known else "-"
    return (
        row.set,
        row.method,
        str(row.batch),
        f"{row.tokens_per_s:.1f}",
        number(row.speedup, ".2f"),
        reach,
        number(row.acceptance, ".1%"),
        number(row.chance, ".2f"),
        number(row.tokens_per_pass, ".2f"),
        number(row.theory, ".2f"),
        f"{row.draft_share:.1%}",
        f"{row.same}/{row.texts}",
    )


def _histograms(found: Any) -> str:
    """For each method, over all sets: per cent of the passes with drafts that took 0, 1, 2, ..."""
    sums: dict[str, list[int]] = {}
    for row in found.rows:
        counts = sums.setdefault(row.method, [])
        counts += [0] * (len(row.histogram) - len(counts))
        for place, count in enumerate(row.histogram):
            counts[place] += count
    drafted = {method: counts for method, counts in sums.items() if sum(counts)}
    if not drafted:
        return ""
    width = max(map(len, drafted))
    lines = [
        f"{method:{width}}  " + "  ".join(f"{n}: {count / sum(counts):.0%}" for n, count in enumerate(counts))
        for method, counts in drafted.items()
    ]
    return "\n".join(["passes by accepted drafts, all sets", *lines])
