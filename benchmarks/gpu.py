"""Every verb on a device and on the CPU, with peers where they are installed: what `make gpu` runs.

    python benchmarks/gpu.py [--device cuda] [--model attar:tiny] [--out runs/gpu] [--seconds 600]

One process for each part, with a limit of its own; a part that fails or takes too long is a line of the
table, and the others go on. Nothing is installed and nothing fetched: a module or a peer that is missing
is named. Tables are rewritten after every part, in OUT/gpu.md and OUT/gpu.json; each part's output is in
OUT/NAME.log.

    seconds    of the whole process, imports and loading included, on the device and on the CPU
    result     ok · failed (the last line it said) · over its limit · no time left

Parts: tests/test_devices.py (results of the device against the CPU's), the device runner
(benchmarks/device.py: operators, products, steps, answers), kernels (gpu_kernels.py), the table of products
that the runner may choose by (attar bench --kernels), quantize (RTN, GPTQ, AWQ, YAQA and tuning), prune,
recover, distill, merge, export, evaluate, generate through transformers' modules; then quantization and
generation by peers.

Two parts run only where they are named, each for most of ten minutes, by estimate: recipes/half-depth.yaml
and half-int8.yaml with 33 M tokens of learning in steps of 32 rows, with which a card is busier than with
their own:

    python benchmarks/gpu.py --parts "recipe half-depth" --model org/name"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--data", "python-docs", "--samples", "16", "--sequence-length", "128")
BATCHES = ("--batch", "1", "--batch", "8", "--batch", "64")
STEPS = ("--data", "python-docs", "--steps", "10")
PATIENCE = 6  # times the limit of a part, on a CPU
PEERS = {"gptqmodel": "quantize", "auto_round": "quantize", "llmcompressor": "quantize", "mergekit": "merge"}
MERGE = """models:
  - {{model: {model}, parameters: {{weight: 0.5}}}}
  - {{model: {other}, parameters: {{weight: 0.5}}}}
merge_method: linear
dtype: bfloat16
"""
GENERATE = """
import sys, time, torch, transformers
model, device = sys.argv[1:]
network = transformers.AutoModelForCausalLM.from_pretrained(model).to(device).eval()
ids = torch.arange(2, 34, device=device)[None]
with torch.inference_mode():
    for _ in range(2):
        start = time.perf_counter()
        network.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False)
        print(f"{64 / (time.perf_counter() - start):.1f} tokens/s")
"""


@dataclass(frozen=True)
class Part:
    """A command.

    Attributes:
        name: in the table.
        command: after the Python that runs it; DEVICE and OUT stand for the device and the part's folder.
        seconds: at most, on each device.
        both: run on the CPU too.
        named: run only where it is named.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    both: bool = True
    named: bool = False


@dataclass(frozen=True)
class Line:
    """A row of the table; seconds are None where it was not run."""

    part: str
    device: str
    seconds: float | None
    result: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--seconds", type=float, help="for everything; 600, on a CPU an hour")
    parser.add_argument("--parts", nargs="+", help="only these")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seconds = options.seconds or (3600.0 if options.device == "cpu" else 600.0)
    end, lines = time.monotonic() + 0.95 * seconds, [*missing_peers()]
    for device in {options.device, "cpu"}:
        folder = options.out.resolve() / device
        folder.mkdir(exist_ok=True)
        (folder / "merge.yml").write_text(MERGE.format(model=options.model, other=folder / "quantize-rtn"))
    every = parts(options.model)
    wanted = [part for part in every if (part.name in options.parts if options.parts else not part.named)]
    for part in wanted:  # all on the device first: it is what is lent
        lines.append(run(part, options.device, options.out, end))
        report(options.device, lines, options.out)
    for part in wanted:
        if part.both and options.device != "cpu":
            lines.append(run(part, "cpu", options.out, end))
            report(options.device, lines, options.out)
    print((options.out / "gpu.md").read_text())
    sys.exit(any(line.result.startswith(("failed", "over")) for line in lines))


def parts(model: str) -> list[Part]:
    """In the order of what matters most; later ones take what earlier ones made."""

    def verb(name: str, *arguments: str) -> tuple[str, ...]:
        return ("-m", "attar.cli.main", name, *arguments)

    out = ("-o", "OUT", "--device", "DEVICE")
    quantize = ("quantize", model, *out, "--scheme", "W4A16", "--group-size", "64")
    return [
        Part(
            "tests",
            ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_devices.py"),
            150,
            both=False,
        ),
        *(
            Part(
                f"device {part}",
                ("benchmarks/device.py", "--part", part, "--device", "DEVICE"),
                limit,
                both=False,
            )
            for part, limit in (("operators", 60), ("products", 60), ("steps", 90), ("answers", 60))
        ),
        kernels("operators", 90),
        kernels("speed", 90),
        kernels("gptq", 90),
        Part("table of products", verb("bench", model, "--kernels", "--device", "DEVICE", *BATCHES), 120),
        Part("quantize rtn", verb(*quantize, "--method", "rtn"), 60),
        Part("quantize gptq", verb(*quantize, "--method", "gptq", *SMALL), 90),
        Part("quantize awq", verb(*quantize, "--method", "awq", *SMALL), 90),
        Part("quantize yaqa", verb(*quantize, "--effort", "good", "--tune", "16", *SMALL), 120),
        Part("prune", verb("prune", model, *out, "--method", "heads", "--ratio", "0.25", *SMALL), 60),
        Part("recover", verb("recover", "PRUNED", *out, "--teacher", model, *STEPS), 90),
        Part("distill", verb("distill", model, *out, "--layers", "4", *STEPS), 90),
        Part("merge", verb("merge", "RECIPE", *out), 60),
        Part("export", verb("export", "QUANTIZED", *out, "--format", "gptq"), 90),
        Part("evaluate", verb("evaluate", model, "--device", "DEVICE", "--tokens", "2048"), 60),
        Part(
            "generate",
            verb(
                "generate",
                model,
                "-p",
                "The",
                "--device",
                "DEVICE",
                "--runner",
                "modules",
                "--max-tokens",
                "64",
            ),
            60,
        ),
        Part("dense", verb("export", model, *out, "--format", "dense"), 60),
        Part("generate by transformers", ("-c", GENERATE, "DENSE", "DEVICE"), 60),
        recipe("half-depth", model, "distill", 4000),
        recipe("half-int8", model, "recover", 2000),
    ]


def recipe(name: str, model: str, stage: str, steps: int) -> Part:
    """A recipe whose stage learns in so many steps of 32 rows."""
    settings = {"model": model, f"stages.{stage}.steps": steps, f"stages.{stage}.batch_size": 32}
    words = [word for pair in settings.items() for word in ("--set", "=".join(map(str, pair)))]
    command = ("-m", "attar.cli.main", "run", f"recipes/{name}.yaml", "-o", "OUT", *words)
    return Part(f"recipe {name}", command, 560, both=False, named=True)


def kernels(part: str, seconds: float) -> Part:
    """A part of gpu_kernels.py; its table is in OUT/DEVICE/kernels-PART.md."""
    command = ("benchmarks/gpu_kernels.py", part, "--device", "DEVICE", "--out", "OUT")
    return Part(f"kernels {part}", command, seconds, both=False)


def missing_peers() -> list[Line]:
    """Peers that are not installed here."""
    absent = [name for name in PEERS if importlib.util.find_spec(name) is None]
    return [Line(f"{PEERS[name]} by {name}", "", None, "skipped: not installed") for name in absent]


def run(part: Part, device: str, out: Path, end: float) -> Line:
    """A part on a device, within its time and what is left of all."""
    left = min(part.seconds * (PATIENCE if device == "cpu" else 1), end - time.monotonic())
    if left < 5:
        return Line(part.name, device, None, "no time left")
    log, start = out / f"{part.name}-{device}.log".replace(" ", "-").replace(":", ""), time.monotonic()
    folder = out.resolve() / device
    variables = {"DEVICE": device, "OUT": str(folder / part.name.replace(" ", "-"))}
    variables |= {
        "PRUNED": str(folder / "prune"),
        "DENSE": str(folder / "dense"),
        "QUANTIZED": str(folder / "quantize-gptq"),
        "RECIPE": str(folder / "merge.yml"),
    }
    command = [sys.executable, *(variables.get(word, word) for word in part.command)]
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ATTAR_DEVICE": device}
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=variables, timeout=left
            )
            outcome = "ok" if done.returncode == 0 else f"failed: {last_line(log)}"
        except subprocess.TimeoutExpired:
            outcome = f"over its {left:.0f} s"
    return Line(part.name, device, round(time.monotonic() - start, 1), outcome)


def last_line(log: Path) -> str:
    """What a failed process said last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no output"


def table(device: str, lines: Sequence[Line]) -> str:
    """Markdown."""
    rows = [
        f"| {x.part} | {x.device} | {'' if x.seconds is None else x.seconds} | {x.result} |" for x in lines
    ]
    return "\n".join(
        [
            f"# Device paths on {device}",
            "",
            "| part | device | seconds | result |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def report(device: str, lines: Sequence[Line], out: Path) -> None:
    """Both files."""
    (out / "gpu.md").write_text(table(device, lines))
    (out / "gpu.json").write_text(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
