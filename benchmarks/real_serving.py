"""The running half of ``benchmarks/real.py``: SmolLM2-135M-Instruct decoded, served, with less memory, and
with drafts.

    python benchmarks/real.py --parts speed --types Q4_1 Q4_K_M Q8_0
    python benchmarks/real.py --parts serving --rates 0 2
    python benchmarks/real.py --parts kv --lengths 4096 8192 --shares 0.5 0.2 0.1
    python benchmarks/real.py --parts speculation --methods ngram self

llama.cpp reads the same GGUF file in each. Files of other types than the package's are exported by attar and
kept in a folder, by default next to the peers' environments. Text is WikiText-2's test file, prompts are
Spec-Bench's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from decode import TASKS, rates
from decode_cases import CONTEXT, Attar, LlamaCpp, Runner
from peers import environments
from real_kv import kv
from serve import note, watched
from serve_load import make_load
from serve_pair import Server, servers

from attar.checkpoint import open_checkpoint
from attar.checkpoint.paths import resolve
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.measure.speculation.metrics import ProfileRow
from attar.measure.speculation.profile import profile
from attar.measure.speculation.prompts import SpecBenchQuestion, read_questions
from attar.measure.speculation.run import make_methods
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.runner.compiled import Compiled
from attar.runtime.speculate.settings import ALONE, ProfileSettings

__all__ = ["kv", "serving", "speculation", "speed"]

MODEL = "attar:smollm2"
NO_REPACK = "llama.cpp's, where its AMX code crashes"
PACKAGED = "Q4_1"  # the type of the package's file
DATA = Path(__file__).parents[2] / "shared" / "data"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def speed(rest: list[str]) -> str:
    """Decoding and prompts of both, in turn, round by round."""
    parser = _parser("speed")
    parser.add_argument("--types", nargs="+", default=["Q4_1", "Q4_K_M", "Q8_0"])
    parser.add_argument("--tasks", nargs="+", default=["decode 1", "decode 8", "prompt 512"], choices=TASKS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="steps of a timing")
    parser.add_argument("--no-repack", action="store_true", help=NO_REPACK)
    args, _ = parser.parse_known_args(rest)
    lines = [
        f"SmolLM2-135M-Instruct, {args.threads} threads, median of {args.rounds} rounds in turn (range)\n"
    ]
    lines += ["| file | task | attar, tokens/s | llama.cpp, tokens/s | times |", "|---|---|---|---|---|"]
    for kind in args.types:
        lines += _raced(gguf_file(kind, args.folder), kind, args)
    return "\n".join([*lines, _load()])


def _raced(file: Path, kind: str, args: argparse.Namespace) -> Iterator[str]:
    """A row for each task; a first round does not count."""
    torch.set_num_threads(args.threads)
    runner = load(file, kv_tokens=CONTEXT).runner
    assert isinstance(runner, Compiled), "the compiled step runs this file"
    both: dict[str, Runner] = {
        "attar": Attar(runner),
        "llama.cpp": LlamaCpp(file=str(file), threads=args.threads, repack=not args.no_repack),
    }
    speeds: dict[tuple[str, str], list[float]] = {(name, task): [] for name in both for task in args.tasks}
    for number in range(args.rounds + 1):
        for task in args.tasks:
            for name in list(both)[:: 1 if number % 2 else -1]:
                rate, _ = rates(both[name], task, args.tokens)
                speeds[name, task] += [rate] if number else []
    for engine in both.values():
        engine.close()
    for task in args.tasks:
        ours, theirs = speeds["attar", task], speeds["llama.cpp", task]
        yield f"| {kind} | {task} | {_middle(ours):,.0f} | {_middle(theirs):,.0f} | {_ratio(ours, theirs)} |"


def serving(rest: list[str]) -> str:
    """attar's server and llama-server, the same file and the same load, in turn."""
    parser = _parser("serving")
    parser.add_argument("--types", nargs="+", default=["Q4_1"])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[0.0, 2.0], help="requests/s; 0: all at once"
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int, default=8192)
    parser.add_argument("--no-repack", action="store_true", help=NO_REPACK)
    args, _ = parser.parse_known_args(rest)
    args.servers, args.unified = ["attar", "llama.cpp"], False
    lines = [
        f"SmolLM2-135M-Instruct, {args.rounds} x {args.requests} requests, {args.slots} slots, "
        f"{args.threads} threads; medians of the rounds, p50 / p99 of the requests\n",
        "| file | load | server | tokens/s | first piece, s | a token, ms | longest silence, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in args.types:
        for rate in args.rates:
            lines += _served(gguf_file(kind, args.folder), kind, rate, args)
    return "\n".join([*lines, _load()])


def _served(file: Path, kind: str, rate: float, args: argparse.Namespace) -> Iterator[str]:
    """A row for each server."""
    vocabulary = int(open_checkpoint(str(file)).config["vocab_size"])
    with servers(args, file) as both:
        for number in range(args.rounds + 1):  # the first does not count
            requests = make_load(number, args.requests if number else 8, rate, 4, 256, vocabulary)
            for server in both if number % 2 else both[::-1]:
                seen, seconds = asyncio.run(watched(server, requests))
                failed = [one.failed for one in seen if one.failed]
                assert not failed, f"{server.name}: {len(failed)} requests failed: {failed[0]}"
                if number:
                    note(server, seen, seconds)
    load_name = f"{rate:g} requests/s" if rate else "all at once"
    for server in both:
        yield f"| {kind} | {load_name} | {server.name} | {' | '.join(_cells(server))} |"


def _cells(server: Server) -> Iterator[str]:
    middle = {name: _middle(values) for name, values in server.numbers.items()}
    yield f"{middle['rate']:.0f}"
    yield f"{middle['first_50']:.3f} / {middle['first_99']:.3f}"
    yield f"{middle['token_50']:.1f} / {middle['token_99']:.1f}"
    yield f"{middle['silence_50']:.0f} / {middle['silence_99']:.0f}"


def speculation(rest: list[str]) -> str:
    """Spec-Bench's first turns through the chat template, greedy, each method in turn with plain decoding."""
    parser = _parser("speculation")
    parser.add_argument("--methods", nargs="*", default=["ngram", "self"], choices=ALONE)
    parser.add_argument("--drafts", nargs="*", default=[], help="draft models")
    parser.add_argument("--prompts", type=int, default=3, help="of each category")
    parser.add_argument("--categories", nargs="+", help="of these only")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args, _ = parser.parse_known_args(rest)
    torch.set_num_threads(args.threads)
    loaded = load(MODEL, kv_tokens=16384)
    chosen = ProfileSettings(speculate=tuple(args.methods), draft=tuple(args.drafts))
    methods = make_methods(MODEL, loaded, chosen, {"device": "cpu", "block_size": 16})
    llm = LLM.of(loaded)
    questions = read_questions(args.data / "spec-bench" / "question.jsonl")
    texts = categories(questions, args.prompts, args.categories)
    sets = {name: [_chat(llm, text) for text in turns] for name, turns in texts.items()}
    measured = profile(llm.engine, llm.name, methods, sets, tokens=args.tokens, rounds=args.rounds)
    lines = [
        f"SmolLM2-135M-Instruct Q4_1, greedy, {args.prompts} prompts of each category, {args.tokens} tokens, "
        f"{args.rounds} rounds in turn\n",
        "| Spec-Bench | method | tokens/s | speedup (95 %) | accepted | tokens a pass | same text |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_speculated, measured.rows), _load()])


def _chat(llm: LLM, text: str) -> list[int]:
    """Through the template, without the end of a question that the model's context cannot hold."""
    return llm.encode_chat([{"role": "user", "content": text}])[-6000:]


def categories(
    questions: Iterable[SpecBenchQuestion], count: int, only: Sequence[str] | None
) -> dict[str, list[str]]:
    """First turns by Spec-Bench's six categories: MT-Bench's eight are one, their questions in turn."""
    groups: dict[str, list[SpecBenchQuestion]] = {}
    for question in questions:
        name = "mt-bench" if question.category in MT_BENCH else question.category
        groups.setdefault(name, []).append(question)
    return {
        name: [question.turns[0] for question in some[:: max(len(some) // count, 1)][:count]]
        for name, some in groups.items()
        if only is None or name in only
    }


def _speculated(row: ProfileRow) -> str:
    gain = "-" if row.speedup is None else f"{row.speedup:.2f} ({row.low:.2f} to {row.high:.2f})"
    accepted = "-" if row.acceptance is None else f"{row.acceptance:.0%}"
    passes = "-" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}"
    same = f"{row.same}/{row.texts}"
    return f"| {row.set} | {row.method} | {row.tokens_per_s:.0f} | {gain} | {accepted} | {passes} | {same} |"


def gguf_file(kind: str, folder: Path) -> Path:
    """The package's file, or attar's export of it into another type, made once."""
    if kind == PACKAGED:
        return resolve(MODEL)
    file = folder / f"smollm2-{kind}.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        export(MODEL, file, ExportSettings(format="gguf", type=kind, imatrix="none"))
    return file


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"real.py --parts {name}", allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with spec-bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=environments.folder() / "files", help="of GGUF files")
    return parser


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of ratios of what stood side by side, with its range."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{_middle(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _load() -> str:
    return f"\nload average at the end: {os.getloadavg()[0]:.1f}"


PARTS: dict[str, Callable[[list[str]], str]] = {
    "speed": speed,
    "serving": serving,
    "kv": kv,
    "speculation": speculation,
}
