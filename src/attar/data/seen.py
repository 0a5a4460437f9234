"""Records of the text that stages read, and the overlap of an evaluation's text with them.

Splits separate text within one source. Records detect overlap across sources: the same file under another
name, one document in two folders, recovery on one text and evaluation on another. A record of a text is a
bottom-k sketch (Broder, "On the resemblance and containment of documents", 1997): the smallest :data:`KEPT`
hashes of all runs of :data:`RUN` words. The records of a model's lineage are in
:data:`attar.checkpoint.lineage.TEXTS`. The evaluated text's hashes up to the largest recorded one are a
sample; the share of them in the record estimates the share of the text that was read. For a text with fewer
runs than KEPT the share is exact.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from attar.data.packing import pack
from attar.data.words import Hashes, run_hashes

RUN = 30  # words: shorter runs repeat in unrelated texts
KEPT = 2_048  # hashes of a record, 8 bytes each
LEAST_SHARE, LEAST_HITS = 0.01, 3  # less is a licence header or chance


def record(
    stage: str,
    tokenizer: Any,
    settings: Any,
    split: str,
    *,
    length: int,
    rows: int,
    seed: int | None = None,
    packing: str = "stream",
) -> dict[str, Any]:
    """The record of the rows that a stage reads of a split, as JSON values.

    The rows are packed for the record alone, so that a resumed stage writes the same record.

    Args:
        settings: has ``data``, ``bos`` and ``seed``.
        length, rows, packing: as in :func:`attar.data.packing.pack`.
        seed: of the order of documents; None: the settings'.

    Returns:
        ``stage``, ``data``, ``split``, ``tokens``, ``held_out`` (whether no other split holds the text),
        ``reason`` if one does, ``rows`` and ``wanted_rows`` where the text is shorter, and ``sketch``.

    Raises:
        DataError: the text is missing or too short.
    """
    packed = pack(
        tokenizer,
        settings.data,
        split,
        length=length,
        rows=rows,
        seed=settings.seed if seed is None else seed,
        packing=packing,
        bos=settings.bos,
    )
    return {
        "stage": stage,
        "data": settings.data,
        "split": split,
        "tokens": int((packed.rows >= 0).sum()),
        **({"rows": len(packed.rows), "wanted_rows": rows} if len(packed.rows) < rows else {}),
        "held_out": not packed.shared,
        "reason": packed.shared,
        "sketch": sketch(hashes(words_of(tokenizer, [packed.rows]))),
    }


def note_texts(output: Any, records: Sequence[dict[str, Any]], progress: Any) -> None:
    """Add records to a :class:`attar.checkpoint.output.StageOutput`, and warn of texts without splits."""
    output.texts += records
    output.details["text"] = [
        {name: value for name, value in item.items() if name != "sketch" and value != ""} for item in records
    ]
    for item in records:
        if item.get("cut") or item.get("dropped"):
            progress.log(
                f"{item['data']}, {item['split']}: of {item['conversations']} conversations, {item['cut']} "
                f"are longer than a row and cut, {item['dropped']} have no answer in it and are left out"
            )
        if item.get("wanted_rows"):
            progress.log(f"note: {item['data']} has {item['rows']} of the {item['wanted_rows']} rows to read")
        if not item["held_out"]:
            progress.log(
                f"warning: {item['data']}: nothing of it can be held out: {item['reason']}; "
                "an evaluation on it is no test"
            )


def seen(tokenizer: Any, batches: Iterable[Tensor], records: Iterable[dict[str, Any]]) -> list[str]:
    """The shares of an evaluation's rows, int64 (B, S), in earlier records: one sentence per record."""
    evaluated = np.unique(hashes(words_of(tokenizer, batches)))
    sentences = {}
    for item in records:
        share = contained(evaluated, item.get("sketch", ""))
        if share:
            percent = "all" if share > 0.995 else f"about {100 * share:.0f} %"
            sentences[f"{percent} of the evaluation text was read by {item['stage']} ({item['data']})"] = True
    return list(sentences)


def held_out_note(tokenizer: Any, batches: Sequence[Tensor], shared: str, records: Iterable[Any]) -> str:
    """The reason why an evaluation's text is not held out; empty if it is.

    Args:
        shared: of :class:`attar.data.packing.PackedRows`.
    """
    reasons = seen(tokenizer, batches, records)
    if shared:
        reasons.append(f"nothing of the text can be held out: {shared}")
    return "; ".join(reasons)


def words_of(tokenizer: Any, batches: Iterable[Tensor]) -> list[str]:
    """The words of rows of tokens, in lower case."""
    special = {int(token) for token in tokenizer.all_special_ids}
    ids = [token for batch in batches for token in batch.flatten().tolist() if token >= 0]
    text = tokenizer.decode([token for token in ids if token not in special])
    return re.findall(r"\w+", str(text).lower())


def hashes(sequence: Sequence[str]) -> Hashes:
    """A 64-bit hash of every run of :data:`RUN` words; of fewer words, one hash of all."""
    return run_hashes(sequence, RUN)


def sketch(values: Hashes) -> str:
    """The smallest :data:`KEPT` distinct hashes, in base 64."""
    return base64.b64encode(np.unique(values)[:KEPT].astype("<u8").tobytes()).decode()


def contained(evaluated: Hashes, sketched: str) -> float:
    """The estimated share of a text's distinct hashes in a record's :func:`sketch`; 0 if insignificant."""
    try:
        known = np.frombuffer(base64.b64decode(sketched, validate=True), "<u8")
    except ValueError:
        return 0.0
    if len(known) == 0:
        return 0.0
    sample = evaluated if len(known) < KEPT else evaluated[evaluated <= known[-1]]
    hits = int(np.isin(sample, known).sum())
    share = hits / max(len(sample), 1)
    return share if share >= LEAST_SHARE and hits >= min(LEAST_HITS, len(sample)) else 0.0
