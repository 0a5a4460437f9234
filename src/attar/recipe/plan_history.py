"""Predicted against measured: what ``attar plan`` said of recipes, and what ``attar run`` measured.

    CACHE/plans.jsonl     CACHE: $ATTAR_CACHE, or attar in the user's cache
    {"date", "model": fingerprint, "name", "key": of the last stage, "method",
     "predicted": {...}, "measured": {...}}                                      a line a run

A recipe with the key ``predicted`` is a plan. Later predictions are corrected by these lines
(planner/correction.py).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors
from attar.checkpoint.hashing import computed_folder

NUMBERS = ("bytes", "cache_bytes", "kl", "kl_low", "kl_high", "loss", "decode_tokens_per_s")
"""What is predicted and measured of a recipe's last model: bytes of its weight files with their headers, and
of the KV cache; KL in nats a token with the ends of its 90 % interval; ``loss``: the KL on the calibration
text with every Linear rounded by the method alone; tokens a second of all sequences."""


@dataclass(frozen=True)
class PlanRecord:
    """A plan that was run.

    Attributes:
        model: fingerprint of the original.
        name: of the original, as the recipe has it.
        key: of the stage that was measured.
        method: of its rounding.
        predicted, measured: numbers by :data:`NUMBERS`.
    """

    date: str
    model: str
    name: str
    key: str
    method: str
    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def inside(self) -> bool | None:
        """Whether the measured KL is inside the predicted interval; None: one of them is not known."""
        try:
            return self.predicted["kl_low"] <= self.measured["kl"] <= self.predicted["kl_high"]
        except KeyError:
            return None


def history_file() -> Path:
    """The file of the records; it need not exist."""
    return computed_folder() / "plans.jsonl"


def read_records() -> list[PlanRecord]:
    """All records, the oldest first; of several of one stage the last. Damaged lines are left out."""
    try:
        lines = history_file().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    records = [record for line in lines if (record := _record(line)) is not None]
    return list({record.key: record for record in records}.values())


def append_record(
    model: str,
    name: str,
    key: str,
    method: str,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
) -> None:
    """Add a record, unless the same is there already.

    Raises:
        OutputError: the cache cannot be written.
    """
    date = datetime.now(UTC).date().isoformat()
    record = PlanRecord(date, model, name, key, method, dict(predicted), dict(measured))
    if any(old.key == key and old.measured == record.measured for old in read_records()):
        return
    file = history_file()
    with explain_os_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(record)) + "\n"
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())  # one call: lines of several processes do not mix
        finally:
            os.close(descriptor)


def _record(line: str) -> PlanRecord | None:
    try:
        record = PlanRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None
    texts = (record.date, record.model, record.name, record.key, record.method)
    numbers = (record.predicted, record.measured)
    if not all(isinstance(text, str) for text in texts) or not all(map(is_prediction, numbers)):
        return None
    return record


def is_prediction(value: Any) -> bool:
    """Whether a value is a mapping of :data:`NUMBERS`, each finite and not negative."""
    return isinstance(value, dict) and all(
        name in NUMBERS
        and isinstance(number, int | float)
        and not isinstance(number, bool)
        and 0 <= number < math.inf
        for name, number in value.items()
    )


def outcome_line(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """``predicted KL 0.042 (0.031 to 0.058), measured 0.045: inside; ...``; empty where one is missing."""
    parts = []
    if "kl" in predicted and "kl" in measured:
        low, high = predicted.get("kl_low", 0.0), predicted.get("kl_high", math.inf)
        where = "inside" if low <= measured["kl"] <= high else "outside"
        kl = f"predicted KL {predicted['kl']:.4g} ({low:.3g} to {high:.3g})"
        parts.append(f"{kl}, measured {measured['kl']:.4g}: {where}")
    for name, unit in (("bytes", "bytes"), ("decode_tokens_per_s", "tokens/s")):
        if name in predicted and name in measured:
            parts.append(f"predicted {predicted[name]:,.10g} {unit}, measured {measured[name]:,.10g}")
    return "; ".join(parts)
