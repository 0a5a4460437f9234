"""What pruning costs and brings: attar's methods, llm-compressor's on the same rows, in one run.

    python benchmarks/prune.py --parts zeros time units speed recipe [--model attar:tiny|DIR]
        [--data valid.txt --test test.txt] [--work DIR] [--cached] [--again attar/alps ...]

    zeros   magnitude, Wanda, SparseGPT, ALPS and mended masks at each sparsity: perplexity, KL to the
            original in nats a token, next-token accuracy kept; peers on the same calibration rows
    time    SparseGPT: seconds of the call and peak memory, by turns with the peer; for a shape of 1.1 B
            parameters from a few layers
    units   neurons, heads, hidden width, layers and a mixed plan with the same share of parameters removed:
            before and after a recovery of equal tokens
    speed   decoding of random models with 2:4 and 50 % zeros over dense ones, by benchmarks/decode.py
    recipe  recipes/half-int8.yaml on the model: accuracy kept and size over float32, stage by stage

Every pruning is a process of its own; what it leaves is measured here by the same code in float32. A peer's
weights are rounded to the type in which the model is stored, as attar's are. Cells that are done stand in
WORK/prune.jsonl at once, and a run that was killed goes on from there; ``--again`` measures a tool's, or one
method's, anew. A method is ``name,setting=value,...``, as in benchmarks/quality.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import quality
from prune_cells import Bench

from attar.checkpoint import open_checkpoint
from attar.errors import AttarError

PARTS = {
    "zeros": "prune_zeros:zeros",
    "time": "prune_zeros:time",
    "units": "prune_units:units",
    "speed": "prune_gains:speed",
    "recipe": "prune_gains:recipe",
}
WORK = Path("~/.cache/attar/prune").expanduser()


def part(name: str) -> Callable[[Bench], str]:
    """The function of a part: it returns Markdown."""
    module, _, function = PARTS[name].partition(":")
    part: Callable[[Bench], str] = getattr(import_module(module), function)
    return part


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["zeros"])
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--data", default="python-stdlib", help="calibration text")
    parser.add_argument("--test", default="", help="the text to measure on; empty: --data's held-out part")
    parser.add_argument("--samples", type=int, default=64, help="calibration rows")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--tokens", type=int, default=16_384, help="held-out")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of rows")
    parser.add_argument("--sparsities", nargs="+", default=["0.5", "0.7", "2:4", "4:8"])
    parser.add_argument("--methods", nargs="*", help="attar's; the part's own by default")
    parser.add_argument("--peers", nargs="*", default=["llmcompressor"])
    parser.add_argument("--rounds", type=int, default=2, help="of time and speed: each once in a round")
    parser.add_argument("--shape", default="1.1b", help="of time: the large model's")
    parser.add_argument(
        "--layers", nargs="*", type=int, default=[2, 4], help="of time: the layers of that shape"
    )
    parser.add_argument(
        "--ratios", nargs="+", type=float, default=[0.25, 0.5], help="of units: parameters removed"
    )
    parser.add_argument("--steps", type=int, default=100, help="of units: of the recovery")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of models and finished cells; kept")
    parser.add_argument("--cached", action="store_true", help="print what is done, and run nothing")
    parser.add_argument("--again", nargs="*", default=[], metavar="TOOL[/METHOD]")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that one run may take")
    return parser


def main() -> None:
    """Print the tables."""
    args = arguments().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, open_checkpoint(args.model), quality.read_cache(args.work / "prune.jsonl"))
    for name in args.parts:
        try:
            print(part(name)(bench), end="\n\n", flush=True)
        except AttarError as error:
            raise SystemExit(f"{name}: {error}") from None
        finally:
            bench.clean()


if __name__ == "__main__":
    main()
