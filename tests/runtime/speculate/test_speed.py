"""The speed that the policy reaches in worlds with a known law, over plain and the best fixed drafts.

Asking costs what it does where a pass takes 0.4 ms.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

from attar.runtime.speculate.loss_budget import BEGINNINGS, BUDGET, LARGEST, LOSS
from attar.runtime.speculate.policy import DraftPolicy
from tests.cases import mostly_slow
from tests.runtime.speculate.worlds import (
    LARGE,
    TINY,
    Proposing,
    World,
    always,
    best_fixed,
    chain,
    switching,
)

PATHS = tuple(sorted({path for path in product(range(3), repeat=3) if sum(path) < 3}))
TREE = tuple(
    sorted({path[:depth] for path in PATHS for depth in (1, 2, 3)}, key=lambda path: (len(path), path))
)
ASKING, BEGIN, STEP = 0.03, 0.2, 0.02  # plain passes


def easy_or_hard(rng: random.Random, a: float) -> float:
    """Half of the positions are easy, as a head knows."""
    return min(1.9 * a, 1.0) if rng.random() < 0.5 else 0.1 * a


def proposing(kind: str, t: float) -> Proposing:
    return {
        "free chain": Proposing(chain(12), asking=ASKING * t),
        "free tree": Proposing(TREE, asking=ASKING * t),
        "draft model": Proposing(chain(8), asking=1e-9, step=0.1 * t),
        "block": Proposing(chain(7), asking=BEGIN * t, step=STEP * t),
        "confident block": Proposing(chain(7), asking=BEGIN * t, step=STEP * t, confidence=easy_or_hard),
        "tree of heads": Proposing(TREE, asking=BEGIN / 2 * t, step=STEP * t),
    }[kind]


def law(kind: str, a: float):
    return always(0.75 * a, 0.15 * a, 0.05 * a) if "tree" in kind else always(a)


KINDS = ["free chain", "free tree", "draft model", "block", "confident block", "tree of heads"]


CASES = list(product(KINDS, ["tiny", "large"], ["never", "often", "nearly always", "switching"]))
FAST = [case for case in CASES if case[1] == "tiny" and case[2] in ("never", "switching")]


@pytest.mark.few(6)
@pytest.mark.parametrize(("kind", "model", "text"), mostly_slow(CASES, FAST))
def test_as_chosen_is_near_the_best_fixed_drafts_and_never_below_plain(kind, model, text) -> None:
    times = {"tiny": TINY, "large": LARGE}[model]
    proposer = proposing(kind, times[1])
    laws = {
        "never": law(kind, 0.0),
        "often": law(kind, 0.6),
        "nearly always": law(kind, 0.9),
        "switching": switching(law(kind, 0.9), law(kind, 0.0), 150),
    }
    counts = [count for count in (1, 2, 3, 4, 6, 8, 12) if count <= len(proposer.tree)]
    best = best_fixed(times, laws[text], proposer, counts, tokens=2000)
    speed = World(times, laws[text], proposer).speed(3000)
    assert speed > 0.95 * best
    assert speed > 0.97


def whole_and_learnt(world: World) -> tuple[float, float]:
    """The speed over 2,000 tokens, and over the last 1,500."""
    first, last = world.speed(500), world.speed(1500)
    return 2000 / (500 / first + 1500 / last), last


@pytest.mark.few(1)
@pytest.mark.parametrize("begin", [0.5, 1.0])
@pytest.mark.parametrize("a", [0.0, 0.75, 0.9])
def test_a_block_as_dear_as_a_pass_is_tried_as_deep_as_it_pays(a, begin) -> None:
    """One draft never pays for the round that all depths share; 5 passes are lost before they are learnt."""
    block = Proposing(chain(7), asking=begin * TINY[1], step=1e-9)
    best = best_fixed(TINY, always(a), block, (1, 3, 5, 7), tokens=1500)
    worlds = [World(TINY, always(a), block, seed=seed) for seed in range(4)]
    whole, learnt = (sum(some) / 4 for some in zip(*map(whole_and_learnt, worlds), strict=True))
    assert whole > 0.97 and learnt > 0.95 * best
    assert a == 0.0 or best > 1.05


@pytest.mark.few(2)
@pytest.mark.parametrize("begin", [0.3, 1.6, 3.0, 7.0])
def test_a_dear_block_that_is_always_wrong_loses_no_more_than_the_largest_budget(begin) -> None:
    world = World(TINY, always(0.0), Proposing(chain(7), asking=begin * TINY[1], step=1e-9))
    worst = 0.0
    for _ in range(2000):
        world.turn()
        worst = max(worst, world.seconds / TINY[1] - (1 + LOSS) * world.position)
    assert worst < min(max(BEGINNINGS * begin, BUDGET), LARGEST) * 1.02
    assert worst > 1 or begin == 7.0, "seven drafts and the true token cannot pay for eight passes"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["free chain", "block"])
@pytest.mark.parametrize("load", ["jitter", "phases"])
def test_other_processes_cost_little_of_the_gain(kind, load) -> None:
    """Passes that take 0.5 to 2 times as long, or three times in every other 100."""
    noise, proposer = random.Random(0), proposing(kind, LARGE[1])
    loads = {
        "jitter": lambda number: 2 ** noise.uniform(-1, 1),
        "phases": lambda number: 1 + 2 * (number // 100 % 2),
    }
    for a in (0.0, 0.6, 0.9):
        best = best_fixed(LARGE, always(a), proposer, (1, 2, 3, 4, 6), tokens=1000)
        speed = World(LARGE, always(a), proposer, load=loads[load]).speed(2000)
        assert speed > max(0.85 * best, 0.97)


@pytest.mark.parametrize(("asking", "most"), [(0.03, 5), (0.1, 13)])
def test_text_that_turns_repetitive_is_noticed_after_the_pause(asking, most) -> None:
    """The first draft comes at most a pause after a match is there."""
    delays = []
    for start in range(100, 113):
        finds = lambda position, start=start: position >= start  # noqa: E731
        world = World(TINY, always(0.9), Proposing(chain(8), asking=asking * TINY[1], finds=finds))
        world.speed(start + 30)
        delays.append(next(index for index, drafts in enumerate(world.passes) if drafts) - start)
    assert max(delays) <= most


def test_levels_are_chosen_before_and_nodes_after() -> None:
    """A head that is often right at depth 1 alone is asked for no deeper tree, and rare ranks are not run."""
    shallow = Proposing(TREE, asking=0.05 * LARGE[1], step=0.02 * LARGE[1])
    world = World(LARGE, lambda position, depth, rank: (0.6, 0.35, 0.0)[rank] if depth == 1 else 0.0, shallow)
    world.speed(1500)
    policy: DraftPolicy = world.policy
    (kinds,) = policy.choose([0], [len(TREE)])
    assert sorted(kinds) == [1]
    (kept,) = policy.trim([0], [shallow.drafts(3)])
    assert kept is not None and kept.tokens and kept.parents == (0, 0)
