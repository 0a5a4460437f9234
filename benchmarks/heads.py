"""Trained drafters compared: draft heads, a draft model, n-grams and suffix trees.

    python benchmarks/heads.py WORK --parts tiny [--minutes 20]
    python benchmarks/heads.py WORK --parts smollm2 --teacher MODEL --data DATA --questions question.jsonl
    python benchmarks/heads.py WORK --parts oracle
    python benchmarks/heads.py WORK --parts chosen

    tiny      each trained the same time on the same rows of the target's own; then on held-out text:
              tokens a pass at temperature 0 and 1 with a fixed number of drafts, acceptance at each position
              where those before it were accepted, milliseconds of a draft, tokens/s over plain decoding
    smollm2   the same for a real model: by task of Spec-Bench's questions, and along training tokens
    oracle    speed at a given acceptance by construction, on a 1.1 B shape in int4, with each head's own cost
              really run
    chosen    as the policy chooses, over plain decoding and over the best fixed number of drafts, on each
              kind of text

Drafters and finished cells stand in WORK; a run that was killed goes on from there. Timings of a method and
of plain decoding are interleaved. Kinds of drafters that this attar does not have are skipped by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import processor_time  # before attar
import torch

from attar.errors import AttarError

PARTS = {
    "tiny": "heads_drafting:tiny",
    "smollm2": "heads_drafting:smollm2",
    "oracle": "heads_oracle:oracle",
    "chosen": "heads_drafting:chosen",
}


def part(name: str) -> Callable[[argparse.Namespace], str]:
    """The function of a part: it returns Markdown."""
    module, _, function = PARTS[name].partition(":")
    chosen: Callable[[argparse.Namespace], str] = getattr(import_module(module), function)
    return chosen


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of drafters and finished cells; kept")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["tiny"])
    parser.add_argument("--minutes", type=float, default=20.0, help="of --threads cores, for each drafter")
    parser.add_argument("--steps", type=int, default=0, help="of each training instead of the minutes")
    parser.add_argument(
        "--drafters", nargs="+", help="kinds, or drafters that are there; else the part's own"
    )
    parser.add_argument("--teacher", default="attar:tiny")
    parser.add_argument("--data", default="python-stdlib", help="text or conversations to train on")
    parser.add_argument("--questions", type=Path, help="of smollm2: Spec-Bench's question.jsonl")
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.125, 0.25, 0.5, 1.0])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.0, help="0: by kind")
    parser.add_argument("--optimizer", default="", help="empty: by kind")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--samples", type=int, default=2048, help="rows that the target writes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafts", type=int, default=7, help="K")
    parser.add_argument("--draft-vocabulary", type=int, default=0, help="of heads that may have one; 0: all")
    parser.add_argument("--anchors", type=int, default=0, help="of block drafters; 0: their default")
    parser.add_argument("--state-cache", default="0", help="of the target's hidden states; 0: none")
    parser.add_argument("--draft-layers", type=float, default=0.4, help="of the draft model: kept of all")
    parser.add_argument("--prompts", type=int, default=8, help="of each set")
    parser.add_argument("--tokens", type=int, default=96, help="of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fixed", nargs="+", type=int, default=[1, 2, 4, 7], help="K, of chosen and oracle")
    parser.add_argument("--sets", nargs="+", default=["code", "prose", "json", "repetition", "random"])
    parser.add_argument("--chances", nargs="+", type=float, default=[0.6, 0.7, 0.8, 0.9], help="of oracle")
    parser.add_argument("--shape", choices=["S", "M"], default="M", help="of oracle's target")
    parser.add_argument("--group", type=int, default=32, help="inputs that share a scale in oracle's target")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of oracle's heads")
    parser.add_argument("--threads", type=int, default=2)
    processor_time.add_flag(parser)
    parser.add_argument("--cached", action="store_true", help="print what is done, and run nothing")
    parser.add_argument("--again", nargs="*", default=[], metavar="DRAFTER", help="measure once more")
    return parser


def main() -> None:
    """Print the tables."""
    parser = arguments()
    args = parser.parse_args()
    processor_time.check(parser, args)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    for name in args.parts:
        try:
            print(part(name)(args), end="\n\n", flush=True)
        except AttarError as error:
            raise SystemExit(f"{name}: {error}") from None


if __name__ == "__main__":
    main()
