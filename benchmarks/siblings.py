"""Tokens a pass with siblings of a draft model's chain: counted, not timed.

    python benchmarks/siblings.py                      attar:tiny, drafts by part of its own layers
    python benchmarks/siblings.py --share 0.5 --drafts 2

Passes cost as on a device where further tokens are nearly free: 5 % more for 31 of them, a tenth of a pass
for a step of the draft. So this is an upper bound on what siblings add; where further tokens are
expensive, they are not run.
"""

from __future__ import annotations

import argparse
from itertools import islice

from attar.data.python_text import texts
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import LEVELS
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.self_speculation import load_self_draft
from attar.runtime.speculate.speculator import Speculator

MODES = {"greedy": {"temperature": 0.0}, "coupled": {"temperature": 0.8}, "exact": {"temperature": 0.8}}
START = 300  # characters of a prompt


class FixedChain(DraftPolicy):
    """Chains of K drafts always, and the siblings that pay on such a device."""

    def __init__(self, count: int) -> None:
        super().__init__(Latency({1: 1.0, 32: 1.05}, {1: 0.1}), most=32)
        self.count = count

    def choose(self, sequences, limits, prompt_tokens=0, branches=1):
        chosen = super().choose(sequences, limits, prompt_tokens, branches)
        return [
            {kind for kind in kinds if kind % LEVELS <= self.count} | set(range(1, self.count + 1))
            for kinds in chosen
        ]

    def note(self, feedback, seconds, drafting=0.0, prompt_tokens=0, steps=0, prefilled=False):
        for one in feedback:
            self._learn(one)


def counted(prompts: list[str], mode: str, branches: int, options: argparse.Namespace) -> tuple[float, float]:
    """Tokens and drafts of a pass."""
    target = load(options.model, kv_tokens=16384)
    draft = load_self_draft(options.model, target, way="layers", share=options.share, branches=branches)
    drafter = Speculator(
        draft, FixedChain(options.drafts), most=32, verification="exact" if mode == "exact" else "coupled"
    )
    llm = LLM.of(target, speculator=drafter)
    params = [
        SamplingParams(max_tokens=options.tokens, ignore_eos=True, seed=seed, **MODES[mode])
        for seed in range(len(prompts))
    ]
    llm.generate(prompts, params)
    assert drafter.failure is None, drafter.failure
    counts = drafter.counts
    return 1 + counts.accepted / counts.drafts, counts.drafted / counts.drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--share", type=float, default=0.75, help="of the layers that draft")
    parser.add_argument("--drafts", type=int, default=4, help="K")
    parser.add_argument("--branches", type=int, nargs="*", default=[1, 2, 3, 4, 6])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=300)
    options = parser.parse_args()
    prompts = [text[:START] for _, text in islice(texts("evaluation"), options.prompts)]
    print("| branches | " + " | ".join(MODES) + " |\n|---|" + "---|" * len(MODES))
    for branches in options.branches:
        cells = ["{:.2f} of {:.1f}".format(*counted(prompts, mode, branches, options)) for mode in MODES]
        print(f"| {branches} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
