"""What ``headlines.py`` measures: models that are made once, cells that are kept, values with intervals.

Shares of right answers are paired: both models answer the same questions in the runner that serves them.
Trainings have as many steps as fit into ``--minutes`` of the process's own time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import heads
import heads_drafting
import heads_training
import quality
import real_kv
import torch
from heads_prompts import write_prompts
from kv import first_tokens
from real_serving import categories
from real_table import NORMED, sha256_text
from specialists import mean_loss
from torch import Tensor

import attar
from attar.checkpoint import open_checkpoint
from attar.checkpoint.card import Card
from attar.errors import AttarError, DataError
from attar.measure.evaluate import measure_quality
from attar.measure.metrics import agreement, hits
from attar.measure.reference import Reference, make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.speculation.metrics import T95, speedup
from attar.measure.speculation.prompts import read_questions
from attar.measure.subject import Subject, load_subject
from attar.measure.tasks import answer_tasks
from attar.models.loading.load import load_model, load_tokenizer
from attar.recipe.machine import machine
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.settings import ALONE
from attar.runtime.tokenizer import PromptTokenizer

SETS = dict.fromkeys(("ARC-Easy", "ARC-Challenge", "openbookqa", "piqa"), "acc")
SETS |= dict.fromkeys((*NORMED, "openbookqa"), "acc_norm")
ACCURACY = ("questions", "tokens", "samples")  # options of the command line, that decide such cells
PAGED = ("requests", "rounds", "threads", "processor_time")
LENGTH, BATCH = 256, 8  # of calibration rows and of trainings
POOL, RESERVED = 4096, 512  # tokens of the paged pool; of a static slot: the longest request
SHARED = 1500  # tokens of the system prompt
DRAWS = 3  # masks of DARE
Found = dict[str, Any]


@dataclass
class Bench:
    """One model, and the cells that are done, by key."""

    args: argparse.Namespace
    cells: dict[str, Found]

    @cached_property
    def digest(self) -> str:
        """Of the model's weights."""
        return quality.digest_of(open_checkpoint(self.args.model))

    @cached_property
    def model(self) -> Path:
        """The folder of the model; of a GGUF file, its decoding to bf16."""
        source = open_checkpoint(self.args.model)
        if source.weight_files[0].suffix != ".gguf":
            return source.path
        folder: Path = self.args.work / "models" / f"dense-{sha256_text(self.digest)[:12]}"
        return folder if folder.exists() else attar.export(source, folder, format="dense").path

    @property
    def valid(self) -> str:
        """The text to calibrate on and to learn from."""
        return str(self.args.data / "wikitext-2" / "valid.txt")

    @cached_property
    def settings(self) -> EvaluateSettings:
        """The text and the questions that are measured on."""
        files = tuple(str(self.args.data / "choices" / f"{name}.test.jsonl") for name in SETS)
        text: Found = {"data": str(self.args.data / "wikitext-2" / "test.txt"), "tokens": self.args.tokens}
        text |= {"tasks": files, "tasks_limit": self.args.questions}
        return EvaluateSettings(**text, noise_floor=False, speed=False, sample="", answers=0)

    @cached_property
    def reference(self) -> Reference:
        """The original on the text, in exact arithmetic."""
        return make_reference(self.model, replace(self.settings, tasks=()), memory_limit=2**31)

    @cached_property
    def heads(self) -> argparse.Namespace:
        """The options of ``heads.py``; drafters of a chat model learn from what people ask."""
        args, work, data = self.args, self.args.work / "heads", "python-stdlib"
        work.mkdir(parents=True, exist_ok=True)
        if getattr(load_tokenizer(self.model), "chat_template", None):
            data = str(work / "prompts.jsonl")
            write_prompts(args.data, args.data / "spec-bench" / "question.jsonl", Path(data), 700)
        given = {"teacher": self.model, "data": data, "minutes": args.minutes, "samples": args.rows}
        given |= {"tokens": args.completion, "rounds": args.rounds, "threads": args.threads}
        texts = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        return heads.arguments().parse_args([str(work), *texts, "--draft-layers", "0.1"])

    @cached_property
    def prompts(self) -> dict[str, list[list[int]]]:
        """First turns of Spec-Bench, as many of each of its six kinds, in one set."""
        questions = read_questions(self.args.data / "spec-bench" / "question.jsonl")
        tokenizer = PromptTokenizer(load_tokenizer(self.model))
        chat = getattr(tokenizer.tokenizer, "chat_template", None)
        encode = (lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])) if chat else None
        room = self.context - self.args.completion
        texts = [text for kind in categories(questions, self.args.prompts, None).values() for text in kind]
        return {"Spec-Bench": [(encode or tokenizer.encode)(text)[-room:] for text in texts]}

    @property
    def context(self) -> int:
        """Tokens that the model can attend to, without a small reserve."""
        return int(open_checkpoint(self.model).config["max_position_embeddings"]) - 64

    def cell(self, name: str, options: Sequence[str], work: Callable[[], Found]) -> Found | None:
        """A cell from the file, or measured now; None with ``--cached`` where there is none. A failure is
        kept with its reason."""
        key = {"cell": name, "model": self.digest, **{one: getattr(self.args, one) for one in options}}
        text = json.dumps(key, sort_keys=True)
        if self.args.cached or (text in self.cells and name not in self.args.again):
            return self.cells.get(text)
        try:
            row = work()
        except AttarError as error:
            row = {"failed": str(error)}
        self.cells[text] = row | {"cpu": machine()["cpu"], "load": os.getloadavg()[0]}
        quality.append_row(self.args.work / "headlines.jsonl", {"key": key, "found": self.cells[text]})
        print(f"{name}: {row.get('note') or row.get('failed', 'done')}", file=sys.stderr, flush=True)
        return self.cells[text]

    def needed(self, name: str, options: Sequence[str], work: Callable[[], Found]) -> Found:
        """A cell that another is made of. Raises DataError where it failed."""
        row = self.cell(name, options, work)
        if row is None or "failed" in row:
            raise DataError(f"{name}: {(row or {}).get('failed', 'not measured')}")
        return row

    def passages(self, length: int, count: int) -> list[list[int]]:
        """Token ids of WikiText's test text. Raises DataError where it, or the context, is too short."""
        if length > self.context:
            raise DataError(f"{length:,} tokens, but the context has room for {self.context:,}")
        real_kv.MODEL = str(self.model)
        try:
            return real_kv.passages("wikitext", length, count, self.args.data)
        except SystemExit as error:
            raise DataError(str(error)) from None

    def made(self, verb: str, source: Path, **settings: Any) -> Path:
        """What a verb makes of a model, calibrated on WikiText's valid text; made once."""
        settings |= {"data": self.valid, "samples": self.args.samples, "sequence_length": LENGTH, "seed": 0}
        folder = self.folder(verb, source.name, settings)
        return folder if folder.exists() else getattr(attar, verb)(source, folder, **settings).path

    def trained(self, verb: str, source: Path, **settings: Any) -> tuple[Path, str]:
        """What a verb trains of a model in ``--minutes``, once; and how many tokens it saw."""
        common = {"data": self.valid, "sequence_length": LENGTH, "batch_size": BATCH, "device": "cpu"}
        settings = common | settings
        folder = self.folder(verb, source.name, settings, self.args.minutes)
        threads = self.args.threads

        def train(out: Path, clock: Any, steps: int = 2 * heads_training.PROBED) -> None:
            getattr(attar, verb)(source, out, progress=clock, steps=steps, **settings)

        if not folder.exists():
            steps = heads_training.steps_within(self.args.minutes, folder, threads, train)
            train(folder, heads_training.StepClock(threads), steps)
        card = Card.read(folder)
        assert card is not None, f"{folder} has no card"
        return folder, f"; saw {card.settings['steps'] * settings['batch_size'] * LENGTH:,} tokens"

    def folder(self, verb: str, *parts: Any) -> Path:
        """Of what a verb makes with these settings."""
        return Path(self.args.work) / "models" / f"{verb}-{sha256_text([self.digest, verb, *parts])[:12]}"


def interval(value: float, reach: float, note: str) -> Found:
    """A cell."""
    return {"value": value, "low": value - reach, "high": value + reach, "note": note}


def share(ours: Tensor, theirs: Tensor, note: str, spare: float = 1.0) -> Found:
    """R = sum a / sum b of paired units (n,), per cent, with 95 % by the delta method: r_i = a_i - R b_i,
    SE = sqrt(n / (n - 1) sum r_i^2 + spare) / sum b.

    Args:
        spare: 1 for hits, so that models that agree everywhere still have an error (``uncertainty.py``).

    Raises:
        DataError: nothing to be a share of.
    """
    a, b = ours.double(), theirs.double()
    if not b.sum() > 0:
        raise DataError("the original, or the specialist, wins nothing here", hint="measure or train longer")
    ratio, count = float(a.sum() / b.sum()), len(a)
    variance = float((a - ratio * b).square().sum()) * count / max(count - 1, 1)
    return interval(100 * ratio, 196 * (variance + spare) ** 0.5 / float(b.sum()), note)


def kept(bench: Bench, folder: Path, trained: str = "") -> Found:
    """Right answers as a share of the original's, and the share of its likeliest tokens that stay."""
    original = bench.needed(
        "original", ACCURACY, lambda: answers(bench, load_subject(bench.model, runner="auto"))
    )
    subject = load_subject(folder, runner="auto")
    marks = ["".join(row["right"]) for row in (answers(bench, subject), original)]
    ours, theirs = (torch.tensor([mark == "1" for mark in row]) for row in marks)
    top = measure_quality(subject, bench.settings, bench.reference).top1_agreement
    size = open_checkpoint(folder).nbytes / open_checkpoint(bench.model).nbytes
    counts = f"{int(ours.sum()):,} right of {len(ours):,}, the original {int(theirs.sum()):,}"
    return share(ours, theirs, f"top-1 kept {top:.1%}; {counts}; {size:.0%} of its bytes{trained}")


def answers(bench: Bench, subject: Subject) -> Found:
    """Whether each question of each set is answered rightly: 1 or 0."""
    tasks = answer_tasks(subject, bench.settings).values()
    rows = [getattr(task, kind) for task, kind in zip(tasks, SETS.values(), strict=True)]
    return {"right": ["".join(str(int(right)) for right in row) for row in rows]}


def compressed(
    bench: Bench, zeros: str = "sparsegpt", sparsity: float = 0.0, half: bool = False, **rounding: str
) -> Found:
    """What is kept by zeros without training, by ALPS' zeros after a recovery, or by a student of half the
    layers; both learn from the model's predictions. Then rounded: 4 bits in groups of 64, for 128 does not
    divide SmolLM2's width."""
    folder, note = bench.model, ""
    if half:
        shape = {"keep_layers": 0.5, "layer_map": "influence", "optimizer": "muon"}
        folder, note = bench.trained("distill", folder, **shape)
    if sparsity:
        folder = bench.made("prune", folder, method=zeros, sparsity=sparsity)
    if sparsity and zeros == "alps":
        teacher = {"teacher": str(bench.model), "batch_size": 2, "learning_rate": 3e-4}
        folder, note = bench.trained("recover", folder, **teacher)
    if rounding:
        group = {"group_size": 64} if rounding["scheme"] == "W4A16" else {}
        folder = bench.made("quantize", folder, check_tokens=0, **group, **rounding)
    return kept(bench, folder, note)


def cache_kept(bench: Bench, kind: str) -> Found:
    """Right next tokens behind a long prompt, as a share of those with the full cache in float32."""
    right, same, tail = list[tuple[int, int]](), list[Tensor](), min(128, bench.args.length // 4)
    for text in bench.passages(bench.args.length, bench.args.texts):
        prompt, given, labels = text[:-tail], text[-tail:], torch.tensor(text[1 - tail :])
        if kind == "H2O":
            full, less = real_kv.tails(prompt, given, [kind], [0.2]).values()
        else:
            full, less = (real_kv.behind(prompt, given, name) for name in ("float32", kind))
        right.append((int(hits(less[:-1], labels).sum()), int(hits(full[:-1], labels).sum())))
        same.append(agreement(full, less))
    top = torch.cat(same).double().mean()
    ours, theirs = torch.tensor(right).T
    return share(ours, theirs, f"top-1 kept {top:.1%} of {tail} tokens behind each of {len(right)} prompts")


def paged(bench: Bench) -> Found:
    """Seconds of a load in each round: paged with continuous batching, and static: groups of requests in
    slots of the longest, that end together. Padding costs no time here, which favours static. ``filled`` is
    the share of the sequences' blocks that holds tokens, ``pool`` that of all blocks which sequences hold,
    means over the steps in which requests wait."""
    engine = LLM(str(bench.model), kv_tokens=POOL, prefix_cache=False).engine
    manager, queue = engine.scheduler.manager, engine.scheduler.waiting
    result: dict[str, list[float]] = {"paged": [], "static": [], "filled": [], "pool": []}
    for turn in range(bench.args.rounds + 1):  # the first does not count
        draw, load = random.Random(turn), []
        for _ in range(bench.args.requests):
            prompt = [draw.randrange(1, engine.vocabulary) for _ in range(draw.randint(32, 256))]
            load.append((prompt, SamplingParams(max_tokens=draw.randint(16, 256), ignore_eos=True)))
        for way, group in list({"paged": len(load), "static": POOL // RESERVED}.items())[:: (-1) ** turn]:
            began, used = time.perf_counter(), list[tuple[float, float]]()
            for start in range(0, len(load), group):
                for prompt, params in load[start : start + group]:
                    engine.add(prompt, params)
                while not engine.idle:
                    engine.step()
                    if queue and way == "paged":
                        used.append(
                            (sum(manager.table(one).length for one in manager.sequences), manager.usage)
                        )
            result[way] += [time.perf_counter() - began] if turn else []
            if turn and used:
                tokens, shares = map(sum, zip(*used, strict=True))
                result["filled"].append(100 * tokens / (shares * POOL))
                result["pool"].append(100 * shares / len(used))
    if not result["pool"]:
        raise DataError(f"{len(load)} requests fit into {POOL:,} tokens at once", hint="more --requests")
    return result


def paged_usage(bench: Bench) -> Found:
    """The share of the allocated blocks that holds tokens: the mean of the rounds, by Student's t."""
    row = bench.needed("load", PAGED, lambda: paged(bench))
    values, pool = row["filled"], statistics.fmean(row["pool"])
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    note = f"{pool:.0f} % of {POOL:,} tokens allocated while requests wait"
    return interval(statistics.fmean(values), T95[min(max(len(values) - 2, 0), 29)] * spread, note)


def paged_throughput(bench: Bench) -> Found:
    """Of the same requests in the same memory."""
    row = bench.needed("load", PAGED, lambda: paged(bench))
    note = f"static: {POOL // RESERVED} slots of {RESERVED} tokens, that start and end together"
    return vars(speedup(row["static"], row["paged"])) | {"note": note}


def prefix(bench: Bench) -> Found:
    """How much of the time to the first token a cached system prompt saves, per cent."""
    length, ways = min(SHARED, bench.context - 320), {"without": False, "with": True}
    (text,) = bench.passages(length + 320, 1)
    llms = {name: LLM(str(bench.model), kv_tokens=POOL, prefix_cache=reuse) for name, reuse in ways.items()}
    gain = speedup(*first_tokens(llms, text[:length], text[length:]).values())
    saved = {name: 100 * (1 - 1 / getattr(gain, name)) for name in ("value", "low", "high")}
    return saved | {"note": f"{length:,} tokens shared, 32 of the request's own"}


def profiled(bench: Bench, kind: str, options: Found, temperature: float) -> dict[str, Found]:
    """Rows of the profile of a drafter, by method."""
    bench.heads.again = [kind]
    rows = heads_drafting.measured(kind, options, bench.prompts, temperature, bench.heads)
    if not rows:
        raise DataError(f"{kind} does not draft for this model; the reason is printed above")
    return {row["method"]: row for row in rows}


def speculated(bench: Bench, kind: str) -> Found:
    """Over plain decoding, as the policy chooses the number of drafts, greedy, on Spec-Bench."""
    note, options = "", {"speculate": kind}
    if kind not in ALONE:
        cell = heads_training.trained(kind, bench.args.minutes, bench.heads)
        assert cell is not None, f"no training of {kind}"
        note, options = f"; saw {cell['tokens']:,} tokens", {"draft": cell["folder"], "speculate": "draft"}
    rows = profiled(bench, kind, options, 0.0)
    chosen, fixed = rows[heads_drafting.CHOSEN], rows[f"K {bench.heads.drafts}"]
    note = (
        f"tokens a pass {chosen['tokens_per_pass'] or 1:.2f} as chosen, {fixed['tokens_per_pass'] or 1:.2f} "
        f"with {bench.heads.drafts} drafts ({fixed['speedup']:.2f}x){note}"
    )
    return {**{name: chosen[name] for name in ("low", "high")}, "value": chosen["speedup"], "note": note}


def lossless(bench: Bench, temperature: float) -> Found:
    """Completions that are plain decoding's, token for token, per cent: counted, without an interval."""
    same = texts = 0
    for kind in ("ngram", "lookahead"):
        for method, row in profiled(bench, kind, {"speculate": kind}, temperature).items():
            same, texts = same + (method != "plain") * row["same"], texts + (method != "plain") * row["texts"]
    return interval(100 * same / texts, 0.0, f"{same} of {texts} completions")


def dare(bench: Bench, density: float) -> Found:
    """What is left of a specialist's gain on its text where that share of its changes stays, rescaled."""
    specialist, trained = bench.trained("recover", bench.model, alpha=0.0)
    rows = torch.tensor(bench.passages(LENGTH, 8 * bench.args.texts))

    def losses(folder: Path) -> Tensor:
        model = load_model(folder, dtype=torch.float32)
        return torch.tensor([mean_loss(model, row[None]) for row in rows])

    models = [{"model": str(specialist), "parameters": {"weight": 1.0, "density": density}}]
    config: Found = {"merge_method": "dare_linear", "base_model": str(bench.model), "models": models}
    out, base, full = bench.folder("merge", density), losses(bench.model), losses(specialist)
    merges = (attar.merge({**config, "dtype": "float32"}, out, seed=n, force=True) for n in range(DRAWS))
    gains = [base - losses(merged.path) for merged in merges]
    found = share(torch.stack(gains).mean(0), base - full, "", spare=0.0)
    masks = [100 * float(gain.sum() / (base - full).sum()) for gain in gains]
    drawn = T95[DRAWS - 2] * statistics.stdev(masks) / DRAWS**0.5  # what other masks would give
    drawings = ", ".join(f"{mask:.1f}" for mask in masks)
    note = f"masks {drawings}; loss {base.mean():.3f} to {full.mean():.3f} nats{trained}"
    return interval(found["value"], math.hypot(found["high"] - found["value"], drawn), note)
