"""What text a stage read, and how much of an evaluation's text is among it.

Splits keep text apart inside one source. Across sources (the same file under another name, one document in
two folders, a recipe that recovers on one text and evaluates on another) it takes a record. A stage records
each text it trains or calibrates on by the smallest :data:`KEPT` hashes of all runs of :data:`RUN` words (a
bottom-k sketch: Broder, "On the resemblance and containment of documents", 1997); the records of a model's
whole lineage travel in :data:`attar.checkpoint.lineage.TEXTS`. Of the evaluated text, the hashes up to the
largest kept one are a sample; the share of them that a record holds estimates how much of the text was read.
Where a text has fewer runs than are kept, the share is exact.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attar.data.packing import pack_split

RUN = 30  # words: shorter runs repeat in unrelated texts
KEPT = 2_048  # hashes of a record, 8 bytes each
LEAST_SHARE, LEAST_HITS = 0.01, 3  # below, it is a licence header or chance

Hashes = npt.NDArray[np.uint64]


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
    """What a stage reads of a split, as JSON values. The same rows are packed again: a stage that was killed
    and goes on must write the same record.

    Args:
        stage: the verb.
        settings: has ``data``, ``bos`` and ``seed``.
        length: S, tokens a row.
        rows: how many, at most.
        seed: of the order of documents; None: the settings'.
        packing: as in :func:`attar.data.packing.pack`.

    Returns:
        ``stage``, ``data``, ``split``, ``tokens``, ``held_out`` (whether the other splits are free of it),
        ``reason`` where they are not, and ``sketch``.

    Raises:
        DataError: the text is missing or too short.
    """
    packed = pack_split(
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
        "held_out": not packed.shared,
        "reason": packed.shared,
        "sketch": sketch(hashes(words_of(tokenizer, [packed.rows]))),
    }


def note_texts(output: Any, records: Sequence[dict[str, Any]], progress: Any) -> None:
    """Put records into a stage's output, and say which texts could not be split.

    Args:
        output: an :class:`attar.checkpoint.output.StageOutput`.
    """
    output.texts += records
    output.details["text"] = [
        {name: value for name, value in each.items() if name != "sketch" and value != ""} for each in records
    ]
    for each in records:
        if not each["held_out"]:
            progress.log(
                f"warning: {each['data']}: nothing of it can be held out: {each['reason']}; "
                "an evaluation on it is no test"
            )


def seen(tokenizer: Any, batches: Iterable[Tensor], records: Iterable[dict[str, Any]]) -> list[str]:
    """Which records hold how much of a text, one sentence each; empty where none does.

    Args:
        batches: the evaluated rows, int64 (B, S) each.
        records: of :func:`record`.
    """
    evaluated = np.unique(hashes(words_of(tokenizer, batches)))
    sentences = {}
    for each in records:
        share = contained(evaluated, each.get("sketch", ""))
        if share:
            percent = "all" if share > 0.995 else f"about {100 * share:.0f} %"
            sentences[f"{percent} of the evaluation text was read by {each['stage']} ({each['data']})"] = True
    return list(sentences)


def held_out_note(tokenizer: Any, batches: Sequence[Tensor], shared: str, records: Iterable[Any]) -> str:
    """Why an evaluation's text is not held out; empty where it is.

    Args:
        shared: of :class:`attar.data.packing.PackedRows`.
        records: of the model's lineage.
    """
    reasons = seen(tokenizer, batches, records)
    if shared:
        reasons.append(f"nothing of the text can be held out: {shared}")
    return "; ".join(reasons)


def words_of(tokenizer: Any, batches: Iterable[Tensor]) -> list[str]:
    """The words of rows of tokens, lower case, one row after the other."""
    special = {int(token) for token in tokenizer.all_special_ids}
    ids = [token for batch in batches for token in batch.flatten().tolist() if token >= 0]
    text = tokenizer.decode([token for token in ids if token not in special])
    return re.findall(r"\w+", str(text).lower())


def hashes(words: Sequence[str]) -> Hashes:
    """A 64-bit hash of every run of :data:`RUN` words; of all words where there are fewer."""
    if not words:
        return np.zeros(0, np.uint64)
    known = {word: hashlib.blake2b(word.encode(), digest_size=8).digest() for word in set(words)}
    single = np.frombuffer(b"".join(known[word] for word in words), "<u8").astype(np.uint64)
    run = min(RUN, len(words))
    total = np.zeros(len(words) - run + 1, np.uint64)
    for offset in range(run):
        total = total * np.uint64(0x9E3779B97F4A7C15) + single[offset : offset + len(total)]
    return _mixed(total)


def _mixed(values: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of a value (the end of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sketch(values: Hashes) -> str:
    """The smallest :data:`KEPT` different hashes, in base 64."""
    return base64.b64encode(np.unique(values)[:KEPT].astype("<u8").tobytes()).decode()


def contained(evaluated: Hashes, kept: str) -> float:
    """About how much of a text a record holds, 0 to 1; 0 where it is too little to mean anything.

    Args:
        evaluated: the text's different hashes.
        kept: a record's :func:`sketch`.
    """
    try:
        known = np.frombuffer(base64.b64decode(kept, validate=True), "<u8")
    except ValueError:
        return 0.0
    if len(known) == 0:
        return 0.0
    sample = evaluated if len(known) < KEPT else evaluated[evaluated <= known[-1]]
    hits = int(np.isin(sample, known).sum())
    share = hits / max(len(sample), 1)
    return share if share >= LEAST_SHARE and hits >= min(LEAST_HITS, len(sample)) else 0.0
