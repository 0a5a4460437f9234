"""Time and memory of quantization: attar and other tools, the same model, calibration tokens and bits.

    python benchmarks/quantize.py [--model attar:tiny|DIR] [--shape 1.1b] [--methods rtn gptq,refine=0 awq]
        [--peers llmcompressor gptqmodel] [--samples 128 --length 512] [--rounds 1]

Every run is a process of its own; a round runs every tool once for each method, tools interleaved, every
second round in reverse. The smallest time and the largest peak of the rounds are printed:

    call    seconds in the tool's quantize call
    wall    from the start of the process until the model stands on disk in the tool's own format: imports and
            loading included
    peak    largest resident set (VmHWM, MB) until then; start: the same when the call began
    error   output error, ||block'(h) - block(h)||^2 / ||block(h) - h||^2, the mean over the blocks; h are the
            original's hidden states on calibration rows, block' has the quantized weights. It does not depend
            on how scales were folded, so AWQ compares with the others

Threads are what OMP_NUM_THREADS says. attar's own comparison at the end is off: no other tool makes one.
``--shape 1.1b`` makes a random Llama of 1.1 B parameters in bf16 (22 layers, 2048 wide), to be measured like
any other; what it measures is time and memory, not quality. The first run of GPTQModel compiles a C++
extension, once for each environment: give it a run before, or two rounds.
"""

from __future__ import annotations

import argparse
import copy
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from peers.job import Job, load_tokens
from peers.launch import OURS, Method, RunnerError, launch, parse_method, with_method, write_tokens
from torch import Tensor, nn

from attar.checkpoint import open_checkpoint
from attar.errors import AttarError
from attar.models.anatomy.discover import discover
from attar.models.loading.load import load_model
from attar.models.loading.stored import stored_names

SHAPES: dict[str, dict[str, int]] = {
    "1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 2048,
    },
}
KNOWN: dict[str, tuple[str, ...]] = {
    "llmcompressor": ("rtn", "gptq", "awq"),
    "gptqmodel": ("rtn", "gptq", "awq"),
    "auto-round": ("rtn", "autoround"),
}
"""Which methods of the weight-only schemes a peer has."""


PLAIN = "gptq,scales=absmax,refine=0"
"""The paper's GPTQ, which is the peers'; ours goes on from there by default."""


@dataclass(frozen=True)
class Run:
    """What one process took."""

    seconds: float
    wall: float
    peak: float
    start: float
    error: float


def make_model(shape: str, folder: Path) -> Path:
    """A random Llama (weights N(0, 0.02^2), bf16) with attar's tokenizer, made once.

    Raises:
        SystemExit: no such shape.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape not in SHAPES:
        raise SystemExit(f"no shape {shape}; there are {', '.join(SHAPES)}")
    out = folder / f"llama-{shape}"
    if (out / "tokenizer.json").is_file():
        return out
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], initializer_range=0.02))
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(out)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(open_checkpoint("attar:tiny").path / name, out / name)
    return out


def plan(methods: list[Method], rounds: int) -> list[tuple[int, Method]]:
    """(round, method) in the order in which they run: every second round backwards."""
    return [(i, method) for i in range(rounds) for method in (methods if i % 2 == 0 else methods[::-1])]


def chosen(args: argparse.Namespace) -> list[Method]:
    """Each method with every tool that has it, attar first."""
    methods = []
    for text in args.methods:
        plain = text.split(",")[0]
        methods.append(parse_method(OURS, text))
        methods += [parse_method(peer, plain) for peer in args.peers if plain in KNOWN[peer]]
    return list(dict.fromkeys(methods))


def output_error(model: nn.Module, folder: Path, rows: Tensor) -> float:
    """The mean over the blocks of ||block'(h) - block(h)||^2 / ||block(h) - h||^2.

    Args:
        model: the original in float32; its hooks are removed again.
        folder: a dense checkpoint of the quantized weights; one block of it is in memory at a time.
        rows: int64 (B, S) tokens.
    """
    stored = open_checkpoint(folder)
    names = stored_names(model, stored)
    errors: list[float] = []
    handles = []
    for block in discover(model).blocks:

        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: Any,
            name: str = block.name,
        ) -> None:
            twin = copy.deepcopy(module)
            twin._forward_hooks.clear()
            twin._forward_hooks_with_kwargs.clear()
            twin.load_state_dict(
                {part: stored.load(names[f"{name}.{part}"]) for part, _ in module.named_parameters()},
                strict=False,
            )
            hidden = args[0] if args else kwargs["hidden_states"]
            before, after = (_first(value).double() for value in (output, twin(*args, **kwargs)))
            change = (before - hidden.double()).square().sum()
            errors.append(float((after - before).square().sum() / change))

        handles.append(block.module.register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.inference_mode():
            model(rows, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sum(errors) / len(errors)


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def run(method: Method, job: Job, limit: float) -> Run:
    """Quantize once, and compare with the original, which is loaded only then."""
    out = Path(job.out)
    for folder in (out, Path(f"{out}-packed")):
        shutil.rmtree(folder, ignore_errors=True)
    answer = launch(method.tool, with_method(job, method), limit)
    original = load_model(job.model, dtype=torch.float32)
    error = output_error(original, out, load_tokens(job)[:4])
    return Run(answer["seconds"], answer["wall"], answer["peak_rss_mb"], answer["start_rss_mb"], error)


def table(runs: dict[Method, list[Run]]) -> str:
    """Markdown: a row a tool and method, with the smallest times and the largest peak of its runs, and its
    time in multiples of attar's first row of that method."""
    lines = [
        "| method | tool | call, s | wall, s | peak, MB | start, MB | output error | call, times attar's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours: dict[str, float] = {}
    for method, done in runs.items():
        if not done:
            continue
        call = min(run.seconds for run in done)
        if method.tool == OURS:
            ours.setdefault(method.name, call)
        times = f"{call / ours[method.name]:.2f}" if ours.get(method.name) else "–"
        lines.append(
            f"| {method.label} | {method.tool} | {call:.2f} | {min(run.wall for run in done):.1f} "
            f"| {max(run.peak for run in done):.0f} | {max(run.start for run in done):.0f} "
            f"| {done[-1].error:.3e} | {times} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="a random model of this shape, instead of --model"
    )
    parser.add_argument("--methods", nargs="+", default=["rtn", PLAIN, "gptq", "awq"])
    parser.add_argument("--peers", nargs="*", default=[], choices=list(KNOWN))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=200, help="of learned rounding")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data", default="python-stdlib")
    parser.add_argument("--dtype", default="auto", help="in which the peers load the model")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds that one run may take")
    parser.add_argument("--work", type=Path, help="folder for models and tokens; kept")
    return parser


def main() -> None:
    """Print the table."""
    args = arguments().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        source = str(make_model(args.shape, work)) if args.shape else args.model
        checkpoint = open_checkpoint(source)
        tokens = work / "tokens.safetensors"
        write_tokens(source, tokens, samples=args.samples, length=args.length, seed=0, data=args.data)
        job = Job(
            model=str(checkpoint.path),
            tokens=str(tokens),
            out=str(work / "out"),
            method="",
            bits=args.bits,
            group_size=args.group,
            iterations=args.iterations,
            dtype=args.dtype,
            data=args.data,
            save=True,
        )
        methods = chosen(args)
        runs: dict[Method, list[Run]] = {method: [] for method in methods}
        for number, method in plan(methods, args.rounds):
            label = f"round {number + 1}: {method.tool} {method.label}"
            try:
                runs[method].append(run(method, job, args.limit))
            except (RunnerError, AttarError) as error:
                print(f"{label}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{label}: {runs[method][-1]}", file=sys.stderr, flush=True)
        for name in ("out", "out-packed"):
            shutil.rmtree(work / name, ignore_errors=True)
    print(
        f"{checkpoint.name}, W{args.bits} g{args.group}, calibration {args.samples} x {args.length}, "
        f"rounds: {args.rounds}, threads: {torch.get_num_threads()}, {platform.machine()}\n"
    )
    print(table(runs))


if __name__ == "__main__":
    main()
