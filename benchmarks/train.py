"""Time and memory of a step of distillation: attar against TRL's GKD trainer, and a cached against an online
teacher. The tools take turns step by step, so both see the same machine.

    python benchmarks/train.py [--parts peers signals] [--vocabularies 4096 49152 131072] [--depth 15 30]
        [--batch-size 4] [--length 256] [--steps 4] [--precision bf16] [--work DIR] [--cached] [--again]

    peers     forward KL of a Llama of SmolLM2-135M's shape with half of its layers to the whole one, built
              from configs with random weights, for each vocabulary. The first step is not counted.
                s/step    median of the steps' seconds; cpu: of the seconds of all threads
                tokens/s  of text, by the median
                peak      largest resident set during the steps, MB, with weights, gradients and optimizer
                loss      of the first step: the same models and rows give the same
    signals   attar:tiny's half, or --model's, with the teacher in every step and with its stored predictions
              (teacher_top), which are all written before the first step: steps/s, and the exact held-out KL.

Finished cells stand in WORK/train.jsonl and are not measured again without ``--again``. Threads are what
OMP_NUM_THREADS says, for all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from peers import environments
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import attar
from attar.checkpoint import open_checkpoint
from attar.data.packing import pack
from attar.models.loading.load import load_model, load_tokenizer
from attar.models.surgery.cut_model import keep_layers

HERE = Path(__file__).parent
WORK = Path("~/.cache/attar/train").expanduser()
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
RUNNERS = {"attar": "attar_train_run.py", "trl": "trl_run.py"}


class StepRunner:
    """A tool's process, a step at a time."""

    def __init__(self, tool: str, job: Mapping[str, Any]) -> None:
        self.tool = tool
        python = sys.executable if tool == "attar" else environments.python(tool)
        self.process = subprocess.Popen(
            [str(python), str(HERE / "peers" / RUNNERS[tool]), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        """Its next line.

        Raises:
            SystemExit: it ended instead; says why.
        """
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            lines = [line for line in self.process.stderr.read().splitlines() if line.strip()]
            raise SystemExit(f"{self.tool}: {lines[-1] if lines else 'ended without an answer'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self) -> dict[str, Any]:
        """One step; the process must have said that it is ready."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.read()


def take_turns(
    jobs: Mapping[str, tuple[str, Mapping[str, Any]]], steps: int
) -> dict[str, list[dict[str, Any]]]:
    """The lines of each job's steps (and its last one, where it has more to say), the jobs in turns; every
    second step in reverse order.

    Args:
        jobs: by name: tool and job.
    """
    runners = {name: StepRunner(tool, job) for name, (tool, job) in jobs.items()}
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in runners}
    try:
        for number in range(steps):
            for runner in runners.values():
                assert runner.read()["ready"]
            for name in list(runners)[:: -1 if number % 2 else 1]:
                lines[name].append(runners[name].step())
        for name, runner in runners.items():
            if jobs[name][1].get("held_out"):
                lines[name].append(runner.read())
    finally:
        for runner in runners.values():
            runner.process.kill()
            runner.process.wait()
    return lines


def summary(lines: list[dict[str, Any]], tokens: int) -> dict[str, float]:
    """Medians over the steps after the first; the largest peak."""
    steps = [line for line in lines if "seconds" in line]
    later = steps[1:] or steps
    seconds = statistics.median(line["seconds"] for line in later)
    return {
        "seconds": seconds,
        "cpu": statistics.median(line["cpu"] for line in later),
        "tokens_per_s": tokens / seconds,
        "peak_mb": max(line["peak_mb"] for line in steps),
        "loss": steps[0]["loss"],
        **({"held_out": lines[-1]["held_out"]} if "held_out" in lines[-1] else {}),
    }


class Cells:
    """Finished measurements in a file, by what they depend on."""

    def __init__(self, file: Path, again: bool) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file.exists() and not again else []
        self.rows = {json.dumps(row["key"], sort_keys=True): row["cell"] for row in map(json.loads, lines)}

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """A finished cell."""
        return self.rows.get(json.dumps(key, sort_keys=True))

    def add(self, key: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
        """Keep a cell."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps({"key": key, "cell": cell}) + "\n")
        return cell


def models(work: Path, vocabulary: int, depth: tuple[int, int]) -> tuple[Path, Path]:
    """Student and teacher of random weights, each written once, with attar:tiny's tokenizer. The teacher is
    stored in bfloat16, as models are released; the student in float32, in which it is trained."""
    folders = []
    for seed, layers in enumerate(depth):
        folder = work / f"llama-{vocabulary}-{layers}{'-teacher' * seed}"
        folders.append(folder)
        if (folder / "model.safetensors").exists():
            continue
        torch.manual_seed(seed)
        config = LlamaConfig(
            **SMOLLM2, vocab_size=vocabulary, num_hidden_layers=layers, tie_word_embeddings=True
        )
        stored = torch.bfloat16 if seed else torch.float32
        LlamaForCausalLM(config).to(stored).save_pretrained(folder)
        for name in ("tokenizer_config.json", "tokenizer.json"):
            shutil.copy(open_checkpoint("attar:tiny").path / name, folder / name)
    return folders[0], folders[1]


def random_rows(file: Path, vocabulary: int, count: int, length: int) -> Path:
    """A file of random tokens int64 (count, length)."""
    generator = torch.Generator().manual_seed(0)
    save_file({"tokens": torch.randint(3, vocabulary, (count, length), generator=generator)}, file)
    return file


def peers(args: argparse.Namespace, cells: Cells) -> str:
    """The table against TRL."""
    head = "| vocabulary | tool | s/step | cpu | tokens/s | peak, MB | loss | tokens/s, times | peak, share |"
    lines = [head, "|---:|---|---:|---:|---:|---:|---:|---:|---:|"]
    for vocabulary in args.vocabularies:
        names = ("depth", "batch_size", "length", "steps", "precision")
        key = {"part": "peers", "vocabulary": vocabulary, **{name: getattr(args, name) for name in names}}
        cell = cells.find(key) or (None if args.cached else cells.add(key, against_trl(args, vocabulary)))
        for tool, row in (cell or {}).items():
            ours, theirs = cell["attar"], cell["trl"]
            gains = "|  "
            if tool == "attar":
                gains = (
                    f"{theirs['seconds'] / ours['seconds']:.2f} | {ours['peak_mb'] / theirs['peak_mb']:.2f}"
                )
            figures = (
                f"{row['seconds']:.2f} | {row['cpu']:.2f} | {row['tokens_per_s']:.0f} | {row['peak_mb']:.0f}"
            )
            lines.append(f"| {vocabulary} | {tool} | {figures} | {row['loss']:.4f} | {gains} |")
    return "\n".join(lines)


def against_trl(args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Both tools on one vocabulary."""
    student, teacher = models(args.work, vocabulary, tuple(args.depth))
    rows = random_rows(args.work / "rows.safetensors", vocabulary, args.steps * args.batch_size, args.length)
    job = {"student": str(student), "teacher": str(teacher), "tokens": str(rows), "steps": args.steps}
    job |= {"batch_size": args.batch_size, "precision": args.precision}
    lines = take_turns({tool: (tool, job) for tool in ("attar", "trl")}, args.steps)
    return {tool: summary(lines[tool], args.batch_size * args.length) for tool in lines}


def signals(args: argparse.Namespace, cells: Cells) -> str:
    """The table of a cached against an online teacher."""
    names = ("model", "batch_size", "length", "signal_steps", "precision", "teacher_top")
    key = {"part": "signals", **{name: getattr(args, name) for name in names}}
    cell = cells.find(key) or (None if args.cached else cells.add(key, online_and_cached(args)))
    lines = ["| signal | s/step | cpu | steps/s, times | held-out KL |", "|---|---:|---:|---:|---:|"]
    for name, row in (cell or {}).items():
        times = cell["online"]["seconds"] / row["seconds"]
        lines.append(
            f"| {name} | {row['seconds']:.3f} | {row['cpu']:.3f} | {times:.2f} | {row['held_out']:.4f} |"
        )
    return "\n".join(lines)


def online_and_cached(args: argparse.Namespace) -> dict[str, Any]:
    """One student with both signals, on the same rows in the same order."""
    source = open_checkpoint(args.model)
    tokenizer, student = load_tokenizer(source), args.work / "student"
    whole = load_model(source, dtype=torch.float32)
    half = keep_layers(whole, range(0, whole.config.num_hidden_layers, 2))
    half.save_pretrained(student)
    tokenizer.save_pretrained(student)
    files = {}
    for name, split, count in (
        ("tokens", "train", args.signal_steps * args.batch_size),
        ("held_out", "calibration", 32),
    ):
        rows = pack(tokenizer, "python-stdlib", split, length=args.length, rows=count, seed=0).rows
        files[name] = str(args.work / f"{name}.safetensors")
        save_file({"tokens": rows.contiguous()}, files[name])
    job = {"student": str(student), "teacher": str(source.path), "steps": args.signal_steps, **files}
    job |= {"batch_size": args.batch_size, "precision": args.precision}
    cached = {**job, "settings": {"teacher_top": args.teacher_top}, "cache": str(args.work / "predictions")}
    lines = take_turns({"online": ("attar", job), "cached": ("attar", cached)}, args.signal_steps)
    return {name: summary(lines[name], args.batch_size * args.length) for name in lines}


PARTS = {"peers": peers, "signals": signals}


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[4096, 49152, 131072])
    parser.add_argument("--depth", nargs=2, type=int, default=[15, 30], help="layers of student and teacher")
    parser.add_argument("--model", default="attar:tiny", help="the teacher of signals")
    parser.add_argument("--teacher-top", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--signal-steps", type=int, default=100)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--cached", action="store_true", help="print what is done, and run nothing")
    parser.add_argument("--again", action="store_true", help="measure again")
    return parser


def main() -> None:
    """Print the tables."""
    args = arguments().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    cells = Cells(args.work / "train.jsonl", args.again)
    for name in args.parts:
        print(f"{PARTS[name](args, cells)}\n", flush=True)
    print(f"attar {attar.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
