"""What the parts of ``benchmarks/prune.py`` share: one model, its text, the cells that are done."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import quality
from peers.job import Job
from peers.launch import Method, RunnerError, launch, with_method, write_tokens

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.errors import AttarError
from attar.measure.evaluate import measure_quality
from attar.measure.reference import Reference, make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject


@dataclass
class Bench:
    """One model, its text, and the cells that are done.

    Attributes:
        args: of the command line.
        checkpoint: the model.
        cache: finished cells by key.
    """

    args: argparse.Namespace
    checkpoint: Checkpoint
    cache: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """What a pruning leaves, until the next; of this process, because two may share a folder."""
        return Path(self.args.work) / f"out-{os.getpid()}"

    def clean(self) -> None:
        """Remove what the last pruning left."""
        for folder in self.out.parent.glob(f"{self.out.name}*"):
            shutil.rmtree(folder)

    @cached_property
    def digest(self) -> str:
        """What the cache knows the model by."""
        return quality.digest_of(self.checkpoint)

    @cached_property
    def settings(self) -> EvaluateSettings:
        """The text that every result is measured on."""
        data = self.args.test or self.args.data
        return EvaluateSettings(
            data=data, tokens=self.args.tokens, speed=False, sample="", runner="transformers"
        )

    @cached_property
    def reference(self) -> Reference:
        """The original on that text."""
        return make_reference(self.checkpoint, self.settings, memory_limit=2**32)

    def tokens(self, samples: int, length: int) -> Path:
        """The file of calibration rows that every tool is given."""
        file: Path = self.args.work / f"{self.digest[:16]}-{samples}x{length}-{self.args.seed}.safetensors"
        if not file.exists():
            name = str(self.checkpoint.path)
            write_tokens(name, file, samples=samples, length=length, seed=self.args.seed, data=self.args.data)
        return file

    def job(self, method: Method, **fields: Any) -> Job:
        """The job of a method on this model and its calibration rows."""
        args = self.args
        job = Job(
            model=str(self.checkpoint.path),
            tokens=str(self.tokens(args.samples, args.length)),
            out=str(self.out),
            method="",
            seed=args.seed,
            data=args.data,
            **fields,
        )
        return with_method(job, method)

    def key(self, part: str, method: Method, **more: Any) -> dict[str, Any]:
        """Everything that decides a cell."""
        args = self.args
        common = {
            name: getattr(args, name) for name in ("samples", "length", "data", "test", "tokens", "seed")
        }
        return {
            "part": part,
            "model": self.digest,
            "tool": method.tool,
            "method": method.label,
            **common,
            **more,
        }

    def cell(self, key: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """A cell from the cache, or measured now; None with ``--cached`` where there is none. A failure is
        kept with its reason."""
        text = json.dumps(key, sort_keys=True)
        again = not {key["tool"], f"{key['tool']}/{key['method']}"}.isdisjoint(self.args.again)
        if self.args.cached or (text in self.cache and not again):
            return self.cache.get(text)
        try:
            row = work()
        except (RunnerError, AttarError) as error:
            row = {"failed": str(error)}
        self.cache[text] = row
        quality.append_row(self.args.work / "prune.jsonl", {"key": key, "found": row})
        label = " ".join(
            str(key[name]) for name in ("part", "tool", "method", "sparsity", "ratio") if name in key
        )
        print(f"{label}: {row.get('failed') or figures(row)}", file=sys.stderr, flush=True)
        return row

    def measure(self, folder: Path) -> dict[str, Any]:
        """Perplexity, KL to the original and accuracy kept of a dense checkpoint."""
        result = measure_quality(load_subject(open_checkpoint(folder)), self.settings, self.reference)
        return {
            "perplexity": result.perplexity,
            "kl": result.kl_mean,
            "kl_p99": result.kl_p99,
            "kept": result.quality_kept,
        }

    def prune(self, method: Method, job: Job) -> dict[str, Any]:
        """Prune with a tool and measure what it left, which stays in ``job.out``."""
        self.clean()
        answer = launch(method.tool, job, self.args.limit, verb="prune")
        times = {
            name: answer[name] for name in ("seconds", "wall", "peak_rss_mb", "start_rss_mb", "versions")
        }
        return {**self.measure(Path(job.out)), **times}


def figures(row: dict[str, Any]) -> str:
    """A finished cell on one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, float))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table; the first column is text, the others are figures."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def number(value: Any, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None or math.isnan(value) else format(value, form)
