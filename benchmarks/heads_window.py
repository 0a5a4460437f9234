"""Tokens a pass of a draft head that reads the whole prompt, or its last positions.

python benchmarks/heads_window.py MODEL HEAD [--windows 128 64 16] [--prompts 4]
"""

from __future__ import annotations

import argparse
import math
from typing import Any, cast

from attar.measure.speculation.profile import FixedPolicy, profile
from attar.measure.speculation.prompts import prompt_sets
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.speculate.build import make_speculator
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.speculator import Speculator

SETS = ("code", "prose", "json")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("--windows", nargs="+", type=float, default=[math.inf, 128, 64, 16])
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--tokens", type=int, default=128, help="of a completion")
    parser.add_argument("--drafts", type=int, default=7, help="K")
    args = parser.parse_args()
    loaded = load(args.model)
    speculator = make_speculator(SpeculationSettings(draft=args.head, speculate="draft"), loaded, args.model)
    assert speculator is not None, f"{args.head} drafts nothing"
    llm, proposer = LLM.of(loaded), cast(Any, speculator.proposer)
    sets = {
        kind: [llm.encode(text) for text in texts] for kind, texts in prompt_sets(SETS, args.prompts).items()
    }
    print(f"| read of the prompt | {' | '.join(SETS)} |\n|---{'|---' * len(SETS)}|")
    for window in args.windows:
        proposer.context.window = window
        fixed = Speculator(proposer, FixedPolicy(args.drafts), most=args.drafts)
        shown = profile(
            llm.engine, loaded.name, {"fixed": fixed}, sets, tokens=args.tokens, rounds=1, temperature=0.0
        )
        tokens = {row.set: row.tokens_per_pass for row in shown.rows if row.method == "fixed"}
        name = "all" if math.isinf(window) else f"{window:.0f}"
        print(f"| {name} | {' | '.join(f'{tokens[kind]:.2f}' for kind in SETS)} |", flush=True)


if __name__ == "__main__":
    main()
