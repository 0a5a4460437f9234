"""Drafting of ``benchmarks/heads.py`` measured: each drafter beside plain decoding, on held-out prompts."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from heads_training import DRAFT_MODEL, HEADS, all_trained

from attar.checkpoint.hashing import identity
from attar.errors import AttarError
from attar.measure.speculation.metrics import ProfileRow
from attar.measure.speculation.profile import FixedPolicy, profile
from attar.measure.speculation.prompts import prompt_sets, question_sets, read_questions
from attar.progress import Terminal
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.speculate.build import make_speculator
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.speculator import Speculator

SUFFIX, UNTRAINED = "suffix", ("ngram", "suffix")
CHOSEN = "chosen"
Prompts = Mapping[str, Sequence[Sequence[int]]]


def tiny(args: argparse.Namespace) -> str:
    """The table of attar:tiny, or of another model on text."""
    drafters = _trained(args, args.minutes)
    sets = _texts(args, ("code",))
    lines = [_training(drafters, args), "", *_table_head(args)]
    lines += [
        line for name, options in _methods(drafters, args) for line in _lines(name, options, sets, args)
    ]
    return "\n".join([*lines, "", *_reports(drafters)])


def smollm2(args: argparse.Namespace) -> str:
    """The table of a real model by task, and the curve over training tokens."""
    names = tuple(args.drafters or ("eagle3", "dspark"))
    curves = {part: all_trained(names, args.minutes * part, args) for part in sorted(args.fractions)}
    drafters = curves[max(curves)]
    sets = _questions(args)
    lines = [_training(drafters, args), "", *_table_head(args)]
    lines += [
        line for name, options in _methods(drafters, args) for line in _lines(name, options, sets, args)
    ]
    lines += [
        "",
        "| drafter | minutes | tokens of training | tokens a pass, T = 0 | T = 1 |",
        "|---|---|---|---|---|",
    ]
    for part, cells in curves.items():
        for cell in cells:
            means = [
                _mean_tokens(
                    measured(cell["name"], {"draft": cell["folder"], "speculate": "draft"}, sets, T, args)
                )
                for T in (0.0, 1.0)
            ]
            lines.append(
                f"| {cell['name']} | {args.minutes * part:.0f} | {cell['tokens']:,} | {' | '.join(means)} |"
            )
    return "\n".join([*lines, "", *_reports(drafters)])


def chosen(args: argparse.Namespace) -> str:
    """As chosen, over plain decoding and over the best fixed number of drafts, on each kind of text."""
    drafters = _trained(args, args.minutes)
    sets = _texts(args, tuple(args.sets))
    lines = [
        "| drafter | text | chosen / plain | 95 % | best fixed | chosen / best fixed |",
        "|---|---|---|---|---|---|",
    ]
    for name, options in _methods(drafters, args):
        rows = measured(name, options, sets, 0.0, args, fixed=tuple(args.fixed))
        for kind in sets if rows else ():
            speeds = {row["method"]: row for row in rows if row["set"] == kind}
            own = speeds[CHOSEN]
            best = max(
                ("plain", *(f"K {K}" for K in args.fixed)), key=lambda way: speeds[way]["speedup"] or 1.0
            )
            lines.append(
                f"| {name} | {kind} | {own['speedup']:.3f} | {own['low']:.3f} to {own['high']:.3f} | {best} "
                f"| {own['speedup'] / (speeds[best]['speedup'] or 1.0):.3f} |"
            )
    return "\n".join(lines)


def measured(
    name: str,
    options: dict[str, Any],
    sets: Prompts,
    temperature: float,
    args: argparse.Namespace,
    fixed: tuple[int, ...] = (),
) -> list[dict[str, Any]]:
    """Rows of the profile of a drafter, fixed and as chosen, interleaved with plain decoding; kept in WORK.
    Empty where this attar does not have it, or with ``--cached`` where it was not measured.

    Args:
        options: of :class:`SpeculationSettings`.
        fixed: numbers of drafts; none: that of the command line.
    """
    counts = fixed or (args.drafts,)
    wanted = {"temperature": temperature, "tokens": args.tokens, "rounds": args.rounds, "fixed": counts}
    prompts = {kind: [list(row) for row in rows] for kind, rows in sets.items()}
    key = identity("heads-measured", 1, {**wanted, **options, "prompts": prompts}, [args.teacher])
    file = args.work / f"measured-{re.sub(r'[^a-z0-9+]', '-', name)}-{key[:12]}.json"
    if file.exists() and name not in args.again:
        return list(json.loads(file.read_text()))
    if args.cached:
        return []
    try:
        rows = _profiled(options, sets, temperature, counts, args)
    except AttarError as error:
        print(f"skipped: {name}: {error}", flush=True)
        return []
    file.write_text(json.dumps(rows))
    return rows


def _profiled(
    options: dict[str, Any],
    sets: Prompts,
    temperature: float,
    counts: Sequence[int],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    loaded = load(args.teacher)
    speculator = make_speculator(SpeculationSettings(**options), loaded, args.teacher)
    assert speculator is not None, f"{options} drafts nothing"
    methods = {CHOSEN: speculator}
    for K in counts:  # one proposer: it keeps its state by sequence, and a runner the states of one
        methods[f"K {K}"] = Speculator(speculator.proposer, FixedPolicy(K), most=K)
    engine = LLM.of(loaded).engine
    shown = profile(
        engine,
        loaded.name,
        methods,
        sets,
        tokens=args.tokens,
        rounds=args.rounds,
        temperature=temperature,
        progress=Terminal(),
    )
    loaded.runner.close()
    return [_plain_row(row) for row in shown.rows]


def _plain_row(row: ProfileRow) -> dict[str, Any]:
    """What the tables show of a row: milliseconds are of one proposal."""
    passes = (row.tokens_per_pass or 1.0) / row.tokens_per_s
    return {
        **{name: getattr(row, name) for name in ("set", "method", "speedup", "low", "high", "tokens_per_s")},
        "tokens_per_pass": row.tokens_per_pass,
        "texts": row.texts,
        "same": row.same,
        "positions": by_position(row.histogram),
        "draft_ms": 1e3 * row.draft_share * passes,
    }


def by_position(histogram: Sequence[int]) -> list[float]:
    """Acceptance of each position where those before it were accepted, of passes with 0, 1, ... accepted.

    The last position that any pass reached: all that have so many, by as many as had one fewer or more.
    """
    reached = [sum(histogram[accepted:]) for accepted in range(len(histogram))]
    return [later / before for before, later in pairwise(reached)]


def _trained(args: argparse.Namespace, minutes: float) -> list[dict[str, Any]]:
    names = [name for name in args.drafters or (*HEADS, DRAFT_MODEL) if name not in UNTRAINED]
    return all_trained(tuple(name for name in names if not _ready(name)), minutes, args)


def _ready(name: str) -> bool:
    """Whether a drafter is one that is there, and not the name of a kind."""
    return ":" in name or Path(name).is_dir()


def _methods(
    drafters: Sequence[dict[str, Any]], args: argparse.Namespace
) -> list[tuple[str, dict[str, Any]]]:
    """Names and options: without training, each drafter, and each head in a tree with suffixes."""
    named = args.drafters or UNTRAINED
    untrained = [(name, {"speculate": name}) for name in UNTRAINED if name in named or args.drafters is None]
    folders = {cell["name"]: cell["folder"] for cell in drafters}
    folders |= {name: name for name in named if _ready(name)}
    alone = [(name, {"draft": folder, "speculate": "draft"}) for name, folder in folders.items()]
    both = [(f"{name} + suffix", {"draft": folder, "speculate": SUFFIX}) for name, folder in folders.items()]
    return [*untrained, *alone, *both]


def _texts(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, list[list[int]]]:
    llm = LLM.of(load(args.teacher))
    return {
        kind: [llm.encode(text) for text in texts] for kind, texts in prompt_sets(names, args.prompts).items()
    }


def _questions(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Spec-Bench's questions by task, as a person says them to a chat model."""
    if args.questions is None:
        raise AttarError("--questions is missing", hint="Spec-Bench's question.jsonl")
    llm = LLM.of(load(args.teacher))
    chat = getattr(llm.tokenizer, "chat_template", None)
    sets = question_sets(read_questions(args.questions), args.prompts)

    def encoded(text: str) -> list[int]:
        return llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.encode(text)

    return {task: [encoded(text) for text in texts] for task, texts in sets.items()}


def _lines(name: str, options: dict[str, Any], sets: Prompts, args: argparse.Namespace) -> list[str]:
    """A line of the table for each set; none where the drafter is skipped."""
    cold, warm = (measured(name, options, sets, T, args) for T in (0.0, 1.0))
    return [_line(name, kind, cold, warm, args) for kind in sets] if cold and warm else []


def _table_head(args: argparse.Namespace) -> list[str]:
    positions = "a at position 1, 2, ..."
    columns = [
        "drafter",
        "text",
        "tokens a pass, T = 0",
        "T = 1",
        f"T = 0: {positions}",
        f"T = 1: {positions}",
    ]
    columns += ["draft, ms", "tok/s, plain", f"tok/s, K {args.drafts}", "chosen / plain", "same text"]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _line(name: str, kind: str, cold: list[Any], warm: list[Any], args: argparse.Namespace) -> str:
    (plain, fixed, own), (_, hot, _) = (
        [
            next(row for row in rows if (row["set"], row["method"]) == (kind, way))
            for way in ("plain", f"K {args.drafts}", CHOSEN)
        ]
        for rows in (cold, warm)
    )
    cells = [name, kind, f"{fixed['tokens_per_pass']:.2f}", f"{hot['tokens_per_pass']:.2f}"]
    cells += [" ".join(f"{a:.2f}" for a in row["positions"]) for row in (fixed, hot)]
    cells += [f"{fixed['draft_ms']:.2f}", f"{plain['tokens_per_s']:.0f}", f"{fixed['tokens_per_s']:.0f}"]
    cells += [
        f"{own['speedup']:.2f} ({own['low']:.2f} to {own['high']:.2f})",
        f"{own['same']}/{own['texts']}",
    ]
    return f"| {' | '.join(cells)} |"


def _mean_tokens(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens a pass with the fixed number of drafts, mean over the sets."""
    values = [row["tokens_per_pass"] for row in rows if row["method"].startswith("K ")]
    return f"{sum(values) / len(values):.2f}" if values else "-"


def _training(drafters: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """A table of what the drafters learned from."""
    lines = ["| drafter | parameters | steps | tokens | minutes |", "|---|---|---|---|---|"]
    for cell in drafters:
        lines.append(
            f"| {cell['name']} | {cell['parameters']:,} | {cell['steps']} | {cell['tokens']:,} "
            f"| {cell['seconds'] / 60:.1f} |"
        )
    note = (
        f"{args.teacher}, {args.samples} rows of {args.length} tokens that it wrote, {args.threads} threads"
    )
    return "\n".join([note, "", *lines])


def _reports(drafters: Sequence[dict[str, Any]]) -> list[str]:
    """What the cards say of held-out rows of the target: acceptances, calibration."""
    lines = []
    for cell in drafters:
        values = {key: value for key, value in cell["report"].items() if not isinstance(value, dict)}
        if values:
            lines.append(f"* {cell['name']}, by its card: {json.dumps(values)}")
    return lines
