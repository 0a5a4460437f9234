"""What a student keeps of its teacher: objectives, features, initial weights, tokens; one run, one student.

    python benchmarks/distill.py --parts objectives real [--teacher attar:tiny] [--data python-stdlib]
        [--steps 200] [--seeds 0 1 2] [--methods hard kl ...] [--work DIR] [--cached] [--again kl ...]

    objectives   the same student, tokens and schedule with each objective: held-out KL to the teacher,
                 next-token accuracy kept, and what it writes, judged by the teacher
    real         a student of half the size of a real model: the share of next-token accuracy kept along the
                 curve, and what a fit of it says of more tokens; a method is a student, options with ";":
                 --teacher DIR --data wiki.valid.txt --test whole:wiki.test.txt
                 --methods "keep_layers=0.5;layer_map=influence" --seen 16384 32768 65536 ...

Students and finished cells stand in WORK; a run that was killed goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from attar.errors import AttarError

PARTS = {"objectives": "distill_objectives:objectives", "real": "distill_real:real"}
WORK = Path("~/.cache/attar/distill").expanduser()


def part(name: str) -> Callable[[argparse.Namespace], str]:
    """The function of a part: it returns Markdown."""
    module, _, function = PARTS[name].partition(":")
    chosen: Callable[[argparse.Namespace], str] = getattr(import_module(module), function)
    return chosen


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["objectives"])
    parser.add_argument("--teacher", default="attar:tiny")
    parser.add_argument("--data", default="python-stdlib", help="text to learn from")
    parser.add_argument("--test", default="", help="text to measure on; empty: the held-out part of --data")
    parser.add_argument("--methods", nargs="*", help="the part's own by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--tokens", type=int, default=16_384, help="held-out")
    parser.add_argument(
        "--seen",
        nargs="+",
        type=int,
        default=[2**doubling for doubling in range(14, 21)],
        help="of real: tokens learned from, ascending; each stage goes on from the one before",
    )
    parser.add_argument(
        "--then",
        nargs="*",
        default=[],
        help="of real: options of attar quantize that the last point is rounded with, name=value;name=value",
    )
    parser.add_argument("--work", type=Path, default=WORK, help="folder of students and finished cells; kept")
    parser.add_argument("--cached", action="store_true", help="print what is done, and run nothing")
    parser.add_argument("--again", nargs="*", default=[], metavar="METHOD")
    return parser


def main() -> None:
    """Print the tables."""
    args = arguments().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name in args.parts:
        try:
            print(part(name)(args), end="\n\n", flush=True)
        except AttarError as error:
            raise SystemExit(f"{name}: {error}") from None


if __name__ == "__main__":
    main()
