"""Put the figures of a finished demo into docs/start.md: the table, and the size-against-quality picture.

attar demo && python scripts/readme_figures.py runs/quickstart
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from attar.measure.report.quality import write_quality_svg
from attar.measure.run_folder import RunRecord, read_run
from attar.measure.table import KEPT, engine_note
from attar.measure.verdict import findings, verdict

ROOT = Path(__file__).parents[1]
HEAD = (
    "| stage | MB | smaller | bits/weight | perplexity | quality kept | KL, nats | top-1 "
    "| prefill tok/s | decode tok/s |"
)


def table(run: RunRecord) -> str:
    """The run as a Markdown table, with its verdict, findings and engine."""
    first = run.stages[0].measurements["bytes"]
    rows = [HEAD, "|---|" + "---:|" * 9]
    for stage in run.stages:
        m = stage.measurements
        rows.append(
            f"| {stage.name} | {m['bytes'] / 1e6:.2f} | {first / m['bytes']:.1f}x "
            f"| {m['bits_per_weight']:.2f} | {m['perplexity']:.2f} | {KEPT.cell(run, stage)} % "
            f"| {m['kl_mean']:.3f} | {100 * m['top1_agreement']:.1f} % "
            f"| {m['prefill_tokens_per_s']:.0f} | {m['decode_tokens_per_s']:.0f} |"
        )
    sentences = " ".join([f"**{verdict(run)}.**", *findings(run), engine_note(run)]).rstrip()
    return "\n".join([*rows, "", sentences])


def main() -> None:
    """Rewrite docs/start.md and docs/pictures/quickstart.svg."""
    run = read_run(Path(sys.argv[1]))
    picture = ROOT / "docs/pictures/quickstart.svg"
    picture.parent.mkdir(exist_ok=True)
    write_quality_svg(run, picture)
    page = ROOT / "docs/start.md"
    marked = f"<!-- table:quickstart -->\n{table(run)}\n<!-- end -->"
    text = re.sub(
        r"<!-- table:quickstart -->(.*?<!-- end -->)?", lambda _: marked, page.read_text(), flags=re.S
    )
    page.write_text(text)


if __name__ == "__main__":
    main()
