"""Receipts: what a run knows of a finished stage, one small JSON file each, written whole.

A receipt is believed only while the checkpoint it speaks of is there with every file at its recorded size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors, write_json
from attar.checkpoint.card import FILE as CARD
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.readme import FILE as README
from attar.errors import CheckpointError

RECEIPTS = "receipts"
ORIGINAL_RECEIPT = "00-original"
"""Name of the receipt of the model that the recipe starts from: it has measurements and no folder."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What is known of one stage's work.

    Args:
        key: identity of the work (stage, code version, settings, inputs).
        finished: the checkpoint was written.
        seconds: time spent on it so far, over all attempts.
        peak_rss_bytes: the most memory the process held while it worked.
        estimated: seconds it was estimated to take; with ``seconds`` it says by how much estimates of such
            work are wrong here; 0 where the time is not that of the whole work.
        files: file name to size in bytes, card and README.md excepted.
        measurements_key: identity of the evaluation, empty where there was none.
        measurements: what the evaluation found.
    """

    key: str
    finished: bool = False
    seconds: float = 0.0
    peak_rss_bytes: int | None = None
    estimated: float = 0.0
    files: dict[str, int] = field(default_factory=dict)
    measurements_key: str = ""
    measurements: dict[str, Any] = field(default_factory=dict)

    def holds(self, folder: Path) -> bool:
        """Whether the finished checkpoint still stands there, with every file at its size."""
        if not self.finished or not (folder / CARD).is_file():
            return False
        return all(
            (folder / name).is_file() and (folder / name).stat().st_size == n
            for name, n in self.files.items()
        )


def sizes(folder: Path) -> dict[str, int]:
    """Relative name to size of every file of a checkpoint; not the card and README.md, which get measurements
    later."""
    later = (folder / CARD, folder / README)
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path not in later)
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}


def read_receipt(run: Path, name: str) -> Receipt | None:
    """The receipt of a stage folder, or None where there is none that can be read: the work is done again."""
    try:
        content = read_json(run / RECEIPTS / f"{name}.json")
        known = {item.name: content[item.name] for item in fields(Receipt) if item.name in content}
        return Receipt(**known)  # an earlier version's may lack a field
    except (CheckpointError, TypeError):
        return None


def write_receipt(run: Path, name: str, receipt: Receipt) -> None:
    """Write a receipt, whole. Raises OutputError."""
    folder = run / RECEIPTS
    with explain_os_errors(folder):
        folder.mkdir(exist_ok=True)
    write_json(folder / f"{name}.json", asdict(receipt))
