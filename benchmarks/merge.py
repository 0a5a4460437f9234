"""Time and memory of merging: attar against mergekit, the same checkpoints and YAML, and a plain copy.

    python benchmarks/merge.py [--layers 22] [--cases linear:2 ties:3 ...] [--rounds 2] [--no-peer]
        [--work DIR]
    python benchmarks/merge.py --sparse [--gigabytes 2 20] [--cases linear:2] [--work DIR]

The checkpoints are Llamas of TinyLlama's shape in bf16: a base of random weights N(0, 0.02^2), and models
that differ from it by N(0, 0.002^2). ``linear:2`` merges two of them, ``ties:3`` three with the base. Every
merge is a process of its own; a round runs the tools one after the other, every second round in reverse. The
smallest time and the largest peak of the rounds are printed:

    wall     from the start of the process until the call returns, imports included
    call     seconds in the call
    peak     largest resident set (VmHWM, MB); pages of mapped files count
    own      the largest part of it seen that is no mapped file (RssAnon, looked at every 20 ms)
    copy     a plain copy: every input read, one output written; with fsync, which attar also does
    differ   the share of the numbers that are not the same in both outputs, and in how many tensors. TIES
             decides between entries of equal size, which bf16 has many of, in another order; the sums of
             SLERP are taken in another order

All inputs lie in the page cache. Threads are what OMP_NUM_THREADS says, for both.

``--sparse`` merges checkpoints of zeros in files without blocks on the disk, to see what memory a merge needs
as the checkpoints grow; the output does lie on the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from peers import environments
from safetensors import safe_open
from torch import Tensor

from attar.checkpoint import open_checkpoint

HERE = Path(__file__).parent
OURS, PEER = "attar", "mergekit"
CASES = ("linear:2", "linear:3", "slerp:2", "ties:2", "ties:3", "dare_ties:2", "dare_ties:3")
TINYLLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "vocab_size": 32000}
LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
HEADS = 4  # for keys and values
BLOCK = 8 << 20  # bytes of a plain copy's buffer


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama with a head of its own, in the order in which they are stored."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    kept = width // config["num_attention_heads"] * HEADS
    layer = {
        "input_layernorm": (width,),
        "mlp.down_proj": (width, inner),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "post_attention_layernorm": (width,),
        "self_attn.k_proj": (kept, width),
        "self_attn.o_proj": (width, width),
        "self_attn.q_proj": (width, width),
        "self_attn.v_proj": (kept, width),
    }
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (config["vocab_size"], width)}
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], width)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (width,)}


def nbytes(config: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint in bf16."""
    return 2 * sum(math.prod(shape) for shape in shapes(config).values())


def write(
    folder: Path, config: Mapping[str, Any], value: Callable[[str, tuple[int, ...]], Tensor] | None
) -> Path:
    """Write a checkpoint tensor by tensor, with attar:tiny's tokenizer.

    Args:
        value: a tensor's values by name and shape; None: zeros that take no room on the disk.
    """
    folder.mkdir(parents=True)
    header, end = {}, 0
    for name, shape in shapes(config).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if value is None:
            file.truncate(8 + len(text) + end)
        else:
            for name, shape in shapes(config).items():
                file.write(value(name, shape).contiguous().view(torch.uint8).numpy().data)
    usual = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    more = {"num_key_value_heads": HEADS, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**usual, **more, **config}, indent=2))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(open_checkpoint("attar:tiny").path / name, folder / name)
    return folder


def make_models(work: Path, layers: int, count: int) -> list[Path]:
    """The base and ``count`` models that were made from it, each written once."""
    config = {**TINYLLAMA, "num_hidden_layers": layers}
    folders = [work / f"llama-{layers}-{name}" for name in ("base", "one", "two", "three")][: count + 1]
    for number, folder in enumerate(folders):
        if (folder / "tokenizer.json").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        generator = torch.Generator().manual_seed(number)

        def value(
            name: str, shape: tuple[int, ...], number: int = number, generator: torch.Generator = generator
        ) -> Tensor:
            drawn = torch.randn(shape, generator=generator)
            if number == 0:
                return drawn.mul_(0.02).bfloat16()
            with safe_open(folders[0] / "model.safetensors", framework="pt") as base:
                return drawn.mul_(0.002).add_(base.get_tensor(name)).bfloat16()

        write(folder, config, value)
    return folders


def make_zeros(work: Path, gigabytes: float, count: int) -> list[Path]:
    """``count + 1`` checkpoints of zeros, in sparse files of about ``gb`` 10^9 bytes."""
    one, two = (nbytes({**LARGE, "num_hidden_layers": layers}) for layers in (1, 2))
    layers = max(round((gigabytes * 1e9 - one) / (two - one)) + 1, 1)
    config = {**LARGE, "num_hidden_layers": layers}
    folders = [work / f"zeros-{gigabytes:g}-{number}" for number in range(count + 1)]
    for folder in folders:
        if not (folder / "tokenizer.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            write(folder, config, None)
    return folders


@dataclass(frozen=True)
class Case:
    """A merge.

    Attributes:
        method: as in YAML.
        count: models that are merged; methods with a base have it in addition, SLERP among them.
    """

    method: str
    count: int

    @property
    def label(self) -> str:
        """As it was asked for."""
        return f"{self.method}:{self.count}"

    def inputs(self, models: list[Path]) -> list[Path]:
        """The folders that are read."""
        return models[1 : self.count + 1] if self.method in ("linear", "slerp") else models[: self.count + 1]

    def yaml(self, models: list[Path]) -> str:
        """mergekit's YAML."""
        given = {"linear": {"weight": 0.4}, "ties": {"weight": 0.4, "density": 0.3}, "slerp": {}}
        parameters = given.get(self.method, {"weight": 0.4, "density": 0.4})
        listed = [
            {"model": str(model), **({"parameters": parameters} if parameters else {})}
            for model in models[1 : self.count + 1]
        ]
        config: dict[str, Any] = {"merge_method": self.method, "dtype": "bfloat16", "models": listed}
        if self.method == "slerp":
            config |= {"base_model": str(models[1]), "parameters": {"t": 0.4}}
        elif self.method != "linear":
            config["base_model"] = str(models[0])
        return json.dumps(config, indent=1)  # JSON is YAML


def parse_case(text: str) -> Case:
    """A case from ``method:count``."""
    method, _, count = text.partition(":")
    if not count.isdigit() or not 2 <= int(count) <= 3 or (method == "slerp" and count != "2"):
        raise SystemExit(f"no case {text!r}; cases are {', '.join(CASES)}")
    return Case(method, int(count))


@dataclass
class RunCost:
    """What the runs of one tool took: the smallest times, the largest peaks."""

    wall: float = math.inf
    call: float = math.inf
    peak: float = 0.0
    own: float = 0.0
    errors: list[str] = field(default_factory=list)

    def add(self, line: dict[str, Any], own: float) -> None:
        """Count a run."""
        if "error" in line:
            self.errors.append(line["error"])
            return
        self.wall, self.call = min(self.wall, line["wall"]), min(self.call, line["seconds"])
        self.peak, self.own = max(self.peak, line["peak_rss_mb"]), max(self.own, own)


def run(tool: str, config: Path, out: Path) -> tuple[dict[str, Any], float]:
    """Merge in a process of its own; its line, and the most anonymous memory that was seen, in MB."""
    command = [sys.executable, HERE / "peers" / "attar_merge_run.py"]
    if tool == PEER:
        command = [environments.python(PEER), HERE / "peers" / "mergekit_run.py"]
    job: dict[str, Any] = {"runs": [{"config": str(config), "out": str(out), "seed": 0}]}
    os.sync()
    job["started"] = time.time()
    child = subprocess.Popen(
        [*map(str, command), json.dumps(job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    seen = [0.0]
    watcher = threading.Thread(target=watch, args=(child, seen))
    watcher.start()
    output, complaint = child.communicate()
    watcher.join()
    if child.returncode or not output:
        last = [line for line in complaint.splitlines() if line.strip()][-1:]
        return {"error": last[0] if last else f"exit code {child.returncode}"}, seen[0]
    line: dict[str, Any] = json.loads(output.splitlines()[-1])
    return line, seen[0]


def watch(child: subprocess.Popen[str], seen: list[float]) -> None:
    """Note the largest RssAnon of a process, in MB, until it ends."""
    status = Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        try:
            match = re.search(r"RssAnon:\s+(\d+)", status.read_text())
        except OSError:
            return
        if match:
            seen[0] = max(seen[0], int(match[1]) * 1024 / 1e6)
        time.sleep(0.02)


def plain_copy(inputs: list[Path], out: Path) -> tuple[float, float]:
    """Seconds to read all inputs and write one of them, without and with fsync."""
    os.sync()
    buffer = memoryview(bytearray(BLOCK))
    start = time.perf_counter()
    with out.open("wb", buffering=0) as target:
        for number, folder in enumerate(inputs):
            with (folder / "model.safetensors").open("rb", buffering=0) as source:
                while got := source.readinto(buffer):
                    if number == 0:
                        target.write(buffer[:got])
        plain = time.perf_counter() - start
        os.fsync(target.fileno())
    synced = time.perf_counter() - start
    out.unlink()
    return plain, synced


def same(one: Path, other: Path) -> str:
    """What share of the numbers of two checkpoints differs, and in how many tensors."""
    first, second = open_checkpoint(one), open_checkpoint(other)
    if sorted(first.tensors) != sorted(second.tensors):
        return "other tensors"
    total = differ = tensors = 0
    for name in sorted(first.tensors):
        mine, theirs = first.load(name), second.load(name)
        unequal = int((mine != theirs).sum()) if mine.dtype == theirs.dtype else mine.numel()
        total, differ, tensors = total + mine.numel(), differ + unequal, tensors + bool(unequal)
    return f"{differ / total:.1e} in {tensors} of {len(first.tensors)}" if differ else "none"


def measure(case: Case, models: list[Path], work: Path, tools: list[str], rounds: int) -> str:
    """The lines of one case."""
    config, outs = work / f"{case.label}.yml", {tool: work / f"{tool}-out" for tool in tools}
    config.write_text(case.yaml(models))
    runs = {tool: RunCost() for tool in tools}
    copies: list[tuple[float, float]] = []
    agreed = ""
    for number in range(rounds):
        copies.append(plain_copy(case.inputs(models), work / "copy"))
        for tool in tools if number % 2 == 0 else tools[::-1]:
            runs[tool].add(*run(tool, config, outs[tool]))
            if number or len(tools) == 1:
                shutil.rmtree(outs[tool], ignore_errors=True)
        if not number and all(out.exists() for out in outs.values()):
            agreed = same(*outs.values()) if len(tools) == 2 and "dare" not in case.method else ""
            for out in outs.values():
                shutil.rmtree(out)
    copy, synced = (min(seconds) for seconds in zip(*copies, strict=True))
    lines = []
    for tool in tools:
        cost = runs[tool]
        if cost.errors:
            lines.append(f"| {case.label} | {tool} | {cost.errors[0]} | | | | | |")
            continue
        times = f"{cost.wall:.1f} | {cost.call:.1f} | {cost.peak:.0f} | {cost.own:.0f}"
        lines.append(f"| {case.label} | {tool} | {times} | {copy:.1f}, {synced:.1f} | {agreed} |")
    return "\n".join(lines)


def check_space(work: Path, needed: float) -> None:
    """Refuse a disk that is too small.

    Raises:
        SystemExit: less is free than will be written.
    """
    free = shutil.disk_usage(work).free
    if free < needed:
        raise SystemExit(f"{work}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed")


def sparse(args: argparse.Namespace, work: Path) -> None:
    """Peak memory as the checkpoints grow."""
    print("| GB | case | tool | wall, s | call, s | peak, MB | own, MB | copy and with fsync, s | differ |")
    print("|---|---|---|---|---|---|---|---|---|")
    tools = [OURS] if args.no_peer else [OURS, PEER]
    for case in map(parse_case, args.cases or ["linear:2"]):
        for size in args.gigabytes:
            check_space(work, len(tools) * size * 1.1e9)
            models = make_zeros(work, size, case.count)
            for line in measure(case, models, work, tools, args.rounds or 1).splitlines():
                print(f"| {size:g} {line}", flush=True)


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22, help="of the checkpoints: 22 are 1.1 B parameters")
    parser.add_argument("--cases", nargs="+", help=f"of {' '.join(CASES)}")
    parser.add_argument("--rounds", type=int, help="2, or 1 with --sparse")
    parser.add_argument("--no-peer", action="store_true", help="attar alone")
    parser.add_argument("--work", type=Path, help="folder for what is written meanwhile; kept")
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[2.0, 20.0])
    return parser


def main() -> None:
    """Print the table."""
    args = arguments().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        if args.sparse:
            sparse(args, work)
            return
        cases = [parse_case(text) for text in args.cases or CASES]
        size = nbytes({**TINYLLAMA, "num_hidden_layers": args.layers})
        check_space(work, 6.2 * size)
        models = make_models(work, args.layers, max(case.count for case in cases))
        tools = [OURS] if args.no_peer else [OURS, PEER]
        threads = os.environ.get("OMP_NUM_THREADS") or os.cpu_count()
        peer = "" if args.no_peer else f", mergekit {environments.version(PEER)}"
        print(f"{size / 1e9:.2f} GB a checkpoint{peer}, {threads} threads, {platform.machine()}\n")
        print("| case | tool | wall, s | call, s | peak, MB | own, MB | copy and with fsync, s | differ |")
        print("|---|---|---|---|---|---|---|---|")
        for case in cases:
            print(measure(case, models, work, tools, args.rounds or 2), flush=True)


if __name__ == "__main__":
    main()
