"""Labelled texts: what a classifier learns from and is measured on.

    train.tsv       a line each: text TAB label, or text TAB second text TAB label; a first line that ends in
                    the word "label" names the columns
    train.jsonl     {"text": "...", "label": ...} a line, with "text_pair" for pairs

A label is a number from 0 on or a name. ``whole:FILE`` is all of a file for every split, such as a test set;
any other file is cut into splits by a hash of each text, as documents are (splits.py).
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.data.seen import RUN, contained, sketch
from attar.data.sources import UNSPLIT, parse_rows, read_text, sources
from attar.data.splits import BY_HASH, SPLITS, split_of
from attar.data.words import Hashes, run_hashes, words
from attar.errors import DataError, ModelError

MOST_CLASSES = 1_000  # more are scores, or an identity of each text
_FORM = 'a line is text TAB label (.tsv) or {"text": "...", "label": 0} (.jsonl)'
_NUMBER = re.compile(r"\d{1,6}")


@dataclass(frozen=True)
class LabelledText:
    """A text, or a pair, with its class.

    Attributes:
        pair: the second text; empty: there is none.
        label: a number from 0 on, or a name.
        where: file and line.
    """

    text: str
    pair: str
    label: int | str
    where: str

    @property
    def content(self) -> str:
        """What decides its split: not the label."""
        return f"{self.text}\t{self.pair}" if self.pair else self.text


@dataclass(frozen=True)
class LabelledSplit:
    """The rows of a split, and why other splits hold the same; empty if they do not."""

    rows: list[LabelledText]
    shared: str = ""


def has_labels(data: str) -> bool:
    """Whether a source is a file that holds labelled texts, by its name; a mixture's are read as texts."""
    return len(sources(data)) == 1 and Path(data.removeprefix(UNSPLIT)).suffix == ".tsv"


def read_labelled(data: str) -> list[LabelledText]:
    """All labelled texts of a file, in its order.

    Raises:
        DataError: no such file, or a line that is none; the message names file and line.
    """
    file = Path(data.removeprefix(UNSPLIT))
    if file.suffix not in (".tsv", ".jsonl"):
        raise DataError(f"{data}: holds no labels, which classification learns from", hint="--data FILE.tsv")
    content = read_text(file)
    read = _tsv_rows if file.suffix == ".tsv" else _json_rows
    rows = list(read(file, content))
    if not rows:
        raise DataError(f"{file}: no labelled texts", hint=_FORM)
    return rows


def labelled_split(data: str, split: str, seed: int = 0) -> LabelledSplit:
    """The labelled texts of a split (``train``, ``calibration``, ``evaluation``), shuffled by the seed.

    Of fewer than 100 texts the first 80 % by hash train, the next 10 % calibrate, the last 10 % evaluate.

    Raises:
        DataError: see :func:`read_labelled`.
    """
    rows, shared = read_labelled(data), ""
    if not data.startswith(UNSPLIT):
        if len(rows) >= BY_HASH:
            rows = [row for row in rows if split_of(row.content) == split]
        elif len(rows) >= 10:
            rows = _share(rows, split)
        else:
            shared = f"{len(rows)} texts cannot be cut into splits"
    random.Random(seed).shuffle(rows)
    return LabelledSplit(rows, shared)


def _share(rows: Sequence[LabelledText], split: str) -> list[LabelledText]:
    """The rows of a split of few."""
    order = sorted(rows, key=lambda row: hashlib.sha256(row.content.encode()).digest())
    first, second = len(order) * 8 // 10, len(order) * 9 // 10
    return dict(zip(SPLITS, (order[:first], order[first:second], order[second:]), strict=True))[split]


def _tsv_rows(file: Path, content: str) -> Iterator[LabelledText]:
    for number, line in enumerate(content.split("\n"), start=1):
        cells = line.rstrip("\r").split("\t")
        header = number == 1 and cells[-1].strip().lower() == "label"
        if not line.strip() or header:
            continue
        where = f"{file}:{number}"
        if len(cells) not in (2, 3):
            problem = "no label" if len(cells) < 2 else f"{len(cells)} columns"
            raise DataError(f"{where}: {problem}", hint=_FORM)
        yield _labelled(where, cells[0], cells[1] if len(cells) == 3 else "", cells[-1].strip())


def _json_rows(file: Path, content: str) -> Iterator[LabelledText]:
    for where, row in parse_rows(file, content):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise DataError(f"{where}: no text in field 'text'", hint=_FORM)
        pair = row.get("text_pair") or ""
        if not isinstance(pair, str):
            raise DataError(f"{where}: 'text_pair' is a {type(pair).__name__}, not a text", hint=_FORM)
        yield _labelled(where, row["text"], pair, row.get("label"))


def _labelled(where: str, text: str, pair: str, label: Any) -> LabelledText:
    if not text.strip():
        raise DataError(f"{where}: the text is empty", hint=_FORM)
    if isinstance(label, str) and _NUMBER.fullmatch(label):
        label = int(label)
    if label is None or label == "":
        raise DataError(f"{where}: no label", hint=_FORM)
    if isinstance(label, float) or (isinstance(label, str) and _is_score(label)):
        raise DataError(f"{where}: label {label} is a score, not a class", hint="regression is not learned")
    number = isinstance(label, int) and not isinstance(label, bool) and label >= 0
    if not number and not isinstance(label, str):
        raise DataError(f"{where}: label {label!r} is no class", hint="a number from 0 on, or a name")
    return LabelledText(text, pair, label, where)


def _is_score(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False


def class_names(rows: Sequence[LabelledText]) -> list[str]:
    """The names of the classes that labels are of, by number: ``LABEL_0`` and so on where they are numbers,
    as transformers names them; else the labels, sorted.

    Raises:
        DataError: one class, names and numbers mixed, a number that no text has, or very many.
    """
    first = {row.label: row.where for row in reversed(rows)}
    numbers = sorted(label for label in first if isinstance(label, int))
    if numbers and len(numbers) < len(first):
        name = next(label for label in first if isinstance(label, str))
        raise DataError(f"{first[name]}: label {name!r} is a name, but others are numbers", hint=_FORM)
    if len(first) == 1:
        only = next(iter(first))
        raise DataError(f"{rows[0].where}: every text has label {only!r}", hint="two classes at least")
    if len(first) > MOST_CLASSES:
        file = rows[0].where.rpartition(":")[0]
        raise DataError(f"{file}: {len(first):,} different labels", hint=f"at most {MOST_CLASSES:,} classes")
    if not numbers:
        return sorted(str(label) for label in first)
    if numbers != list(range(len(numbers))):
        missing = next(number for number in range(len(numbers)) if number not in first)
        label = numbers[-1]
        raise DataError(
            f"{first[label]}: label {label}, but no text has label {missing}", hint="count from 0"
        )
    return [f"LABEL_{number}" for number in numbers]


def class_numbers(rows: Sequence[LabelledText], names: Sequence[str]) -> list[int]:
    """The class of each row, a number from 0 on.

    Args:
        names: of the model's classes, by number.

    Raises:
        DataError: a label that is none of them; the message names file and line.
    """
    known = {name: number for number, name in enumerate(names)}
    lower = {name.lower(): number for name, number in known.items()}
    numbers = []
    for row in rows:
        label = row.label
        number = label if isinstance(label, int) else known.get(label, lower.get(label.lower(), -1))
        if not 0 <= number < len(names):
            listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise DataError(
                f"{row.where}: label {label!r} is no class of the model",
                hint=f"it has {listed}, or numbers 0 to {len(names) - 1}",
            )
        numbers.append(number)
    return numbers


def classification_examples(
    tokenizer: Any, rows: Sequence[LabelledText], names: Sequence[str], length: int
) -> Examples:
    """Rows as the tokenizer begins and ends a text ([CLS], [SEP], BOS), cut to ``length`` tokens, padded to
    the longest; the class of each.

    Raises:
        DataError: see :func:`class_numbers`.
        ModelError: ``length`` does not hold the tokenizer's own tokens.
    """
    targets = torch.tensor(class_numbers(rows, names))
    pairs = any(row.pair for row in rows)
    special_count = tokenizer.num_special_tokens_to_add(pair=pairs)
    if length < special_count + (2 if pairs else 1):
        raise ModelError(
            f"sequences of {length} tokens hold nothing but the tokenizer's own", hint="--sequence-length 64"
        )
    tokens, segments = [[0]] * len(rows), [[0]] * len(rows)
    for paired in (False, True):
        numbers = [number for number, row in enumerate(rows) if bool(row.pair) is paired]
        texts = [[rows[number].text for number in numbers]]
        if paired:
            texts.append([rows[number].pair for number in numbers])
        options = {"truncation": True, "max_length": length, "return_token_type_ids": True, "verbose": False}
        encoded = tokenizer(*texts, **options) if numbers else {"input_ids": [], "token_type_ids": []}
        for number, ids, types in zip(numbers, encoded["input_ids"], encoded["token_type_ids"], strict=True):
            tokens[number], segments[number] = ids, types
    types_of_pairs = _padded(segments, 0) if any(map(any, segments)) else None
    return Examples(_padded(tokens, PADDING), targets, types_of_pairs)


def _padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """int64 (N, S), S the longest row."""
    padded = torch.full((len(rows), max(map(len, rows))), fill, dtype=torch.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row)
    return padded


def labelled_record(stage: str, data: str, split: str, chosen: LabelledSplit) -> dict[str, Any]:
    """The record of labelled texts that a stage reads, as :func:`attar.data.seen.record` has it."""
    return {
        "stage": stage,
        "data": data,
        "split": split,
        "texts": len(chosen.rows),
        "held_out": not chosen.shared,
        "reason": chosen.shared,
        "sketch": sketch(_hashes(chosen.rows)),
    }


def labelled_note(chosen: LabelledSplit, records: Sequence[Mapping[str, Any]]) -> str:
    """Why labelled texts are not held out; empty if they are."""
    import numpy as np

    evaluated, sentences = np.unique(_hashes(chosen.rows)), []
    for item in records:
        if share := contained(evaluated, item.get("sketch", "")):
            percent = "all" if share > 0.995 else f"about {100 * share:.0f} %"
            sentences.append(f"{percent} of the texts were read by {item['stage']} ({item['data']})")
    if chosen.shared:
        sentences.append(f"nothing of the texts can be held out: {chosen.shared}")
    return "; ".join(dict.fromkeys(sentences))


def _hashes(rows: Sequence[LabelledText]) -> Hashes:
    """Hashes of every text by itself: one of a sentence, those of its runs of a longer text."""
    import numpy as np

    return np.concatenate([run_hashes(words(row.content), RUN) for row in rows])
