"""What every stage writes after the same prompt, greedily, with the differences from the original marked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

from attar.measure.numbers import percent
from attar.measure.report.markup import Child, Markup, el
from attar.measure.report.svg import verb_class
from attar.measure.run_folder import RunRecord, StageRecord


def sample_cards(run: RunRecord) -> Markup | None:
    """A card per stage that has a sample; None where none has."""
    stages = [stage for stage in run.stages if stage.text("sample") is not None]
    if not stages:
        return None
    base = run.original.text("sample")
    return el(
        "div", [_card(stage, None if stage is run.original else base) for stage in stages], class_="samples"
    )


def differences(base: str, text: str) -> Iterator[tuple[str, str]]:
    """Pieces of ``text`` in order, compared with ``base`` word by word, and what each is: ``same``, ``new``
    (added, or in the place of something else), or ``gone``: of ``base``, with nothing in its place.
    """
    ours, theirs = _words(text), _words(base)
    for kind, first, last, start, end in SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if kind == "delete":
            yield "".join(theirs[first:last]), "gone"
        else:
            yield "".join(ours[start:end]), "same" if kind == "equal" else "new"


def same_start(base: str, text: str) -> float:
    """The fraction of the longer text before the first difference, 0 to 1; 1 only where both are equal."""
    equal = next(
        (i for i, (a, b) in enumerate(zip(base, text, strict=False)) if a != b), min(len(base), len(text))
    )
    return equal / max(len(base), len(text)) if base or text else 1.0


def _note(same: float) -> str:
    if same == 1.0:
        return "word for word"
    return f"the same for its first {percent(same)} %" if same >= 0.005 else "differs from the start"


def _words(text: str) -> list[str]:
    return re.findall(r"\s+|\w+|[^\w\s]", text)


def _marked(piece: str, kind: str) -> Child:
    return piece if kind == "same" else el("del" if kind == "gone" else "mark", piece)


def _card(stage: StageRecord, base: str | None) -> Markup:
    sample = stage.text("sample") or ""
    if base is None:
        note = ""
        body: list[Child] = [sample]
    else:
        body = [_marked(piece, kind) for piece, kind in differences(base, sample)]
        note = _note(same_start(base, sample))
    head = el(
        "figcaption", el("i", class_=f"dot {verb_class(stage.verb)}"), el("b", stage.name), el("small", note)
    )
    prompt = el("span", stage.text("prompt"), class_="prompt") if stage.text("prompt") else None
    return el("figure", head, el("pre", prompt, body), class_="sample")
