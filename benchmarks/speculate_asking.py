"""What asking a proposer costs where it has nothing to draft: the time of the processor in the engine's loop.

    ask        the plan and note of the speculator in passes of attar:tiny, asked in each, beside the pass:
               most passes only look whether there are drafts, some are planned and measured; and their mean
    rest       the same in passes of a pause
    as chosen  the mean over all passes, with the pauses that the policy makes
    notice     tokens until the first draft, after text turned repetitive, by what asking takes

A run is 256 tokens; of each figure the median of its passes, of these the smallest over the runs: other
processes make passes and the code around them slower, never faster.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from attar.measure.speculation.profile import second_engine
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.build import make_speculator
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import LossBudget
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.suffix import SuffixProposer

TOKENS, FIRST = 256, 40  # of a run; passes before the first that counts
PLAN, NOTE, PASS = range(3)


def print_asking_figures(runs: int) -> None:
    """Of suffix trees that find matches, and propose nothing."""
    loaded = load("attar:tiny")
    llm = LLM.of(loaded)
    each, pausing = (_speculator(loaded, pauses) for pauses in (False, True))
    turns = [(_run(llm, each), _run(llm, pausing)) for _ in range(runs)]
    asked, chosen = ([turn[which] for turn in turns] for which in (0, 1))
    plan, note, whole = (min(statistics.median(column[FIRST:]) for column in one) for one in _columns(asked))
    every = min(statistics.fmean(p + n for p, n, _ in rows[FIRST:]) for rows in asked)
    mean = min(statistics.fmean(p + n for p, n, _ in rows[FIRST:]) for rows in chosen)
    rest = min(statistics.median(sorted(p + n for p, n, _ in rows)[: len(rows) // 4]) for rows in chosen)
    print(
        f"a pass of the runner {whole:.0f} us; asked in each: plan {plan:.1f}, note {note:.1f} us,", end=" "
    )
    print(f"{(plan + note) / whole:.1%} of a pass; {every:.1f} us in the mean, {every / whole:.1%}")
    print(f"as chosen: {mean:.1f} us a pass in the mean, {mean / whole:.1%}; in a pause {rest:.1f} us")
    for share in (0.01, 0.03, 0.1):
        print(f"asking takes {share:.0%} of a pass: the first draft after {_noticed(share)} tokens at most")


def _speculator(loaded: Any, pauses: bool) -> Any:
    speculator = make_speculator(SpeculationSettings(speculate="suffix"), loaded)
    assert speculator is not None
    speculator.proposer = SuffixProposer(factor=0.0)
    if not pauses:
        speculator.policy.budget, speculator.policy.share = LossBudget(math.inf), math.inf
    return speculator


def _columns(runs: list[list[tuple[float, float, float]]]) -> list[list[list[float]]]:
    return [[[row[which] for row in rows] for rows in runs] for which in (PLAN, NOTE, PASS)]


def _run(llm: LLM, speculator: Any) -> list[tuple[float, float, float]]:
    """Microseconds of plan, note and the runner in each pass."""
    engine, rows = second_engine(llm.engine, speculator), list[list[float]]()
    parts = [(speculator, "add_drafts"), (speculator, "note"), (engine.runner, "run")]
    for which, (owner, name) in enumerate(parts):
        _meter(owner, name, rows, which)
    draws = random.Random(0)
    prompt = [draws.randrange(5, engine.vocabulary) for _ in range(200)]
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    while not engine.idle:
        rows.append([0.0, 0.0, 0.0])
        engine.step()
    for owner, name in parts:
        delattr(owner, name)  # the method again
    return [(1e6 * plan, 1e6 * note, 1e6 * whole) for plan, note, whole in rows]


def _meter(owner: Any, name: str, rows: list[list[float]], which: int) -> None:
    call: Callable[..., Any] = getattr(owner, name)

    def metered(*given: Any, **named: Any) -> Any:
        began = time.thread_time()
        result = call(*given, **named)
        rows[-1][which] += time.thread_time() - began
        return result

    setattr(owner, name, metered)


def _noticed(share: float) -> int:
    """The most passes from a proposal in vain to the next, where asking takes this share of a pass."""
    policy = DraftPolicy(Latency({1: 1.0, 8: 2.0}))
    return 1 + policy.passes_to_skip(1, share)
