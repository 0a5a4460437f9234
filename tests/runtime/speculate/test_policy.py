"""How many drafts pay, against worlds whose acceptance and times are known."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from attar.runtime.speculate.acceptance import FIRST, AcceptanceRates
from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import BUDGET, LOSS, REOPENS, LossBudget
from attar.runtime.speculate.policy import MAX_SKIPPED_PASSES, PLAIN_EVERY, SHARE, DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback

MOST = 16


def drafted(policy, sequences, limits=None, **others):
    """K of each sequence."""
    return [len(kinds) for kinds in policy.choose(sequences, limits or [MOST] * len(sequences), **others)]


class World:
    """Passes take 1 + slope (tokens - 1), a step of the draft ``step``; a draft is accepted with a(place)."""

    def __init__(self, a, slope, step=0.0, batch=1, known=True, seed=0):
        self.a, self.slope, self.step, self.batch = (
            a if callable(a) else lambda position: a,
            slope,
            step,
            batch,
        )
        sizes = [batch << power for power in range(7)]
        table = {size: self.time(size) for size in sizes} if known else None
        self.policy = DraftPolicy(Latency(table, {1: step, batch: step} if known and step else None), MOST)
        self.random, self.spent, self.places, self.drafted = random.Random(seed), 0.0, [0] * batch, []
        self.lost = [0.0]  # after every pass, in plain passes

    def time(self, tokens):
        return 1 + self.slope * (tokens - 1)

    def run(self, tokens):
        """Tokens a plain pass's time, until every sequence has that many more."""
        begun, spent = list(self.places), self.spent
        while min(self.places) < begun[0] + tokens:
            self.turn()
        result = sum(self.places) - sum(begun)
        return result / self.batch / ((self.spent - spent) / self.time(self.batch))

    def turn(self):
        counts = drafted(self.policy, range(self.batch))
        news, result = [], 0
        for index, count in enumerate(counts):
            accepted = 0
            while accepted < count and self.random.random() < self.a(self.places[index]):
                accepted += 1
            self.places[index] += accepted + 1
            result += accepted + 1
            draft = Draft.chain([7] * count) if count else None
            news.append(DraftFeedback(index, draft, tuple(range(1, accepted + 1)), [7] * (accepted + 1)))
        target, draft = self.time(self.batch + sum(counts)), max(counts) * self.step
        self.spent += target + draft
        self.lost.append(self.lost[-1] + (target + draft) / self.time(self.batch) - result / self.batch)
        self.drafted.append(counts)
        self.policy.note(news, target, draft)

    def best(self, a):
        """Tokens a plain pass's time with the best fixed K, of all sequences alike."""
        plain = self.time(self.batch)
        times = [self.time(self.batch * (k + 1)) + k * self.step for k in range(MOST + 1)]
        return max(sum(a**i for i in range(k + 1)) * plain / time for k, time in enumerate(times))


@pytest.mark.few(3)
@pytest.mark.parametrize("a", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(("slope", "step"), [(0.02, 0.05), (0.1, 0.0), (0.1, 0.2), (0.3, 0.05), (0.8, 0.5)])
def test_within_five_percent_of_the_best_fixed_length(a, slope, step):
    world = World(a, slope, step)
    assert world.run(2000) > 0.95 * world.best(a)


def test_a_batch_is_chosen_together():
    world = World(0.7, 0.03, 0.05, batch=8)
    assert world.run(300) > 0.95 * world.best(0.7)


@pytest.mark.few(4)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("slope", "step"), [(0.02, 0.0), (0.1, 0.05), (0.3, 0.7), (0.8, 0.5), (1.0, 1.0)])
def test_where_nothing_is_accepted_500_tokens_lose_little(slope, step, known):
    """Times are measured before serving; where they are not, learning them costs one pass more."""
    assert World(0.0, slope, step, known=known).run(500) > 1 / (1.03 if known else 1.05)


@pytest.mark.few(1)
@pytest.mark.parametrize("a", [0.0, 0.4, lambda position: 0.95 if position % 300 < 150 else 0.0])
def test_over_any_stretch_the_loss_is_bounded_by_the_budget(a):
    world = World(a, 0.3, 0.3)
    world.run(2000)
    worst = low = -math.inf
    tokens = 0.0
    for before, after, counts in zip(world.lost[:-1], world.lost[1:], world.drafted, strict=True):
        low = max(low, -(before - LOSS * tokens))
        tokens += world.time(1 + counts[0]) + counts[0] * 0.3 - (after - before)
        worst = max(worst, after - LOSS * tokens + low)
    assert worst <= BUDGET + 1e-6


def test_trials_alone_lose_little():
    world = World(0.0, 0.5)
    world.policy.budget = LossBudget(math.inf)
    world.run(3000)
    c = world.time(2) - 1
    trials = sum(count > 0 for (count,) in world.drafted[50:])
    assert trials >= 3, "it keeps looking"
    lost = sum(world.time(1 + count) - 1 for (count,) in world.drafted)
    assert lost < c * (math.log2(c / SHARE) + 1) + SHARE * 3000 + 4, "and 4 for what FIRST promised"


def test_it_follows_a_change_of_regime():
    world = World(lambda position: 0.0 if position < 500 else 0.9, 0.1, 0.05)
    assert world.run(500) > 0.97
    world.run(250)
    assert world.run(500) > 0.9 * world.best(0.9)
    world.a = lambda position: 0.0
    assert world.run(500) > 0.97


def test_more_drafts_go_where_more_are_accepted():
    policy = DraftPolicy(Latency({2: 1.0, 64: 4.0}), MOST)
    for _ in range(60):
        policy.acceptance.note(0, kind_of(0, 1), True)
        policy.acceptance.note(1, kind_of(0, 1), False)
    many, few = drafted(policy, [0, 1])
    assert many >= 4 > few
    assert drafted(policy, [0, 1], [2, MOST])[0] <= 2, "a limit is a limit"


def test_prefill_in_the_batch_makes_drafts_expensive():
    latency = Latency({1: 1.0, 16: 1.1, 512: 20.0, 1024: 60.0})
    policy = DraftPolicy(latency, MOST)
    (alone,), (neighbour,) = drafted(policy, [0]), drafted(DraftPolicy(latency, MOST), [0], prompt_tokens=512)
    assert alone > 2 * neighbour > 0


def test_an_empty_budget_stops_everything_until_it_is_filled():
    policy = DraftPolicy(Latency({1: 1.0, 16: 1.5}), MOST)
    assert drafted(policy, [0])[0] > 0
    policy.budget.note(BUDGET + 1.0, 0.0)
    assert not policy.open and drafted(policy, [0]) == [0]
    closed = 0
    while not policy.open:
        policy.note([DraftFeedback(0, None, (), [1])], 1.0)
        closed += 1
    assert closed == math.ceil((1.0 + REOPENS * BUDGET) / LOSS), "not before it can pay for something"
    for _ in range(400):
        policy.note([DraftFeedback(0, None, (), [1])], 1.0)
    assert policy.open and policy.budget.left == BUDGET


def test_nothing_is_drafted_before_plain_passes_have_set_the_times():
    latency = Latency({1: 1.0, 8: 2.0, 16: 3.0}, settle=3)
    policy = DraftPolicy(latency, MOST)
    for seconds in (1.4, 9.0, 1.5):
        assert not policy.open and drafted(policy, [0]) == [0]
        policy.note([DraftFeedback(0, None, (), [1])], seconds)
    assert policy.open and drafted(policy, [0])[0] > 0
    assert [latency.target(*size) for size in ((1, 1), (1, 8), (8, 16))] == pytest.approx([1.4, 2.4, 3.4])


def test_a_plain_pass_is_measured_now_and_then_where_the_gain_is_sure_too():
    world = World(0.95, 0.02)
    world.run(8000)
    plain = [number for number, counts in enumerate(world.drafted) if counts == [0]]
    gaps = [after - before for before, after in pairwise(plain)]
    assert max(gaps) == PLAIN_EVERY + 1


@pytest.mark.parametrize("seconds", [SHARE / 2, 0.05, 0.5, 4.0])
def test_empty_proposals_take_their_share_of_the_time_and_what_the_budget_has(seconds):
    policy = DraftPolicy(Latency({1: 1.0, 16: 1.5}), MOST)
    passes, asked = 0, 0.0
    while passes < 900:
        policy.note([DraftFeedback(0, None, (), [1])], 1.0, drafting=seconds)
        passes, asked = passes + 1 + policy.passes_to_skip(1, seconds), asked + min(seconds, BUDGET / 2)
    assert policy.open and asked > 0.9 * min(seconds * passes, 0.5 * SHARE * passes)
    assert asked <= (SHARE * passes + seconds if seconds < 0.1 else LOSS * passes + BUDGET)
    assert (policy.budget.left == BUDGET) == (seconds < 0.1)


def test_drafts_are_charged_with_the_time_that_passes_take_in_the_mean():
    """Half of the passes are slow, with or without drafts: that is no draft's fault."""
    policy, noise = DraftPolicy(Latency({1: 1.0, 5: 1.2, 16: 2.0}), MOST), random.Random(0)
    for turn in range(200):
        draft = Draft.chain([7] * 4) if turn % 5 else None
        path = (1,) if draft and turn % 2 else ()
        seconds = (1.2 if draft else 1.0) * noise.choice((0.7, 1.3))
        policy.note([DraftFeedback(0, draft, path, [7] * (len(path) + 1))], seconds)
        assert policy.budget.left > BUDGET / 2
    policy.note([DraftFeedback(0, Draft.chain([7] * 4), (), [7])], 900.0)
    assert policy.budget.left > BUDGET / 2, "nor a hiccup"


def test_what_a_confident_proposer_would_not_draft_counts_as_rejected():
    policy = DraftPolicy(Latency({1: 1.0, 16: 1.5}), MOST)
    for turn in range(400):
        sure = turn % 2 == 0
        draft, path = (Draft.chain([7, 7]), (1, 2)) if sure else (None, ())
        feedback = DraftFeedback(
            0, draft, path, [7] * (len(path) + 1), stopped_by_confidence=2 if sure else 0
        )
        policy.note([feedback], 1.0, drafting=0.01)
    first, second, third = policy.acceptance.rates(0, 0, 3)
    assert first == pytest.approx(0.5, abs=0.05) and second > 0.9 and third < 0.1
    policy.note([DraftFeedback(0, Draft.chain([7, 7]), (1,), [7, 7], stopped_by_confidence=2)], 1.0)
    assert policy.acceptance.rates(0, 0, 3)[2] == pytest.approx(third, abs=0.05), "its turn did not come"


def test_a_proposal_with_drafts_is_charged():
    policy = DraftPolicy(Latency({1: 1.0, 16: 1.0}), MOST)
    policy.note([DraftFeedback(0, Draft.chain([7]), (), [1])], 1.0, drafting=0.5)
    assert policy.budget.left == pytest.approx(BUDGET - 0.5 + LOSS)


def test_trees_are_cut_to_the_nodes_that_pay():
    policy = DraftPolicy(Latency({1: 1.0, 32: 2.0}), MOST)
    strong, weak = kind_of(1, 8), kind_of(2, 1)
    for _ in range(200):
        policy.acceptance.note(0, strong, True)
        policy.acceptance.note(0, weak, False)
    draft = Draft((5, 6, 7, 8, 9), (0, 0, 1, 2, 3), kinds=(strong, weak, strong, strong, strong))
    (kept,) = policy.select([0], [draft])
    assert (kept.tokens, kept.parents, kept.kinds) == ((5, 7, 9), (0, 1, 2), (strong,) * 3)
    assert policy.select([0], [None]) == [None]


def test_a_whole_tree_is_run_or_not():
    policy = DraftPolicy(Latency({1: 1.0, 32: 1.5}), MOST)
    draft = Draft(tuple(range(24)), (0,) * 24)
    assert policy.select([0], [draft], complete=True) == [draft]
    for _ in range(300):
        policy.note([DraftFeedback(0, draft, (), [1])], 1.5)
    assert sum(policy.select([0], [draft], complete=True) != [None] for _ in range(20)) <= 1


def test_every_child_of_an_accepted_node_teaches_and_no_other():
    policy = DraftPolicy(Latency({1: 1.0}), MOST)
    draft = Draft((1, 2, 3, 4, 5), (0, 0, 1, 2, 3), kinds=(1, 2, 3, 4, 5))
    policy.note([DraftFeedback(0, draft, (1,), [1, 9])], 1.0)
    seen = [policy.acceptance.seen(kind) for kind in range(1, 6)]
    assert seen == [True, True, True, False, False]
    assert draft.pruned([]) is None and draft.pruned(range(1, 6)) is draft


def test_acceptance_is_learnt_by_level_and_passed_on():
    acceptance = AcceptanceRates()
    assert acceptance.rates(0, 0, 3) == [FIRST] * 3
    rng = random.Random(0)
    for _ in range(2000):
        for level, a in enumerate((0.9, 0.5, 0.2), 1):
            acceptance.note(1, kind_of(0, level), rng.random() < a)
    rates = acceptance.rates(9, 0, 3)
    assert rates == pytest.approx([0.9, 0.5, 0.2], abs=0.12), "a new request starts with the pool's rates"
    for _ in range(50):
        acceptance.note(2, 1, False)
    first, second, _ = acceptance.rates(2, 0, 3)
    assert first < 0.15 and second < first, "its own drafts move it, deeper levels along"
    acceptance.forget(2)
    assert acceptance.rates(2, 0, 9) == acceptance.rates(99, 0, 9)


def test_forgotten_sequences_leave_nothing():
    world = World(0.5, 0.1)
    world.run(50)
    for sequence in (0, 1, 2):
        world.policy.forget(sequence)
    assert not world.policy._trials and not world.policy.acceptance._own


def test_what_was_true_long_ago_is_forgotten():
    acceptance = AcceptanceRates()
    for drafts, accepted in ((400, True), (80, False)):
        for _ in range(drafts):
            acceptance.note(0, 1, accepted)
    assert acceptance.rates(0, 0, 1)[0] < 0.15
    assert acceptance.rates(1, 0, 1)[0] < 0.6, "the pool too, later"


def test_a_pass_stakes_half_of_the_budget():
    policy = DraftPolicy(Latency({1: 1.0, 11: 6.0}), MOST)
    for depth in range(1, 11):
        for _ in range(200):
            policy.acceptance.note(0, kind_of(0, depth), True)
    lengths = []
    for _ in range(6):
        (count,) = drafted(policy, [0], [10])
        lengths.append(count)
        policy.budget.note(1.0 + count / 2, 1.0)
    assert lengths[:3] == [5, 2, 1] and policy.budget.open and policy.budget.left > 0


def test_a_closed_budget_is_skipped_until_it_opens() -> None:
    policy = DraftPolicy(Latency({1: 1.0, 16: 1.5}), MOST)
    budget = policy.budget
    assert (budget.closed_passes, policy.passes_to_skip(1, 0.0), policy.passes_to_skip(0, 0.0)) == (0, 0, 0)
    budget.note(BUDGET + 1.0, 0.0)
    budget.note(100, 100)
    assert 0 < budget.left < REOPENS * BUDGET and not budget.open, "closed, though something is in it"
    passes = math.ceil((REOPENS * BUDGET - budget.left) / LOSS)
    assert budget.closed_passes == passes
    assert policy.passes_to_skip(1, 0.0) == passes and budget.open and policy.passes_to_skip(1, 0.0) == 0


def rejecting(loss):
    """Of a chain of one draft that costs ``loss`` when it begins and was always wrong."""
    policy = DraftPolicy(Latency({1: 1.0, 16: 1.0}, {1: 1e-9}, begin={1: loss}), MOST)
    for _ in range(300):
        policy.acceptance.note(0, kind_of(0, 1), False)
    policy.note([DraftFeedback(0, None, (), [1])], 1.0)
    return policy


def test_one_that_runs_a_model_is_asked_when_the_next_trial_is_due():
    policy, asking = rejecting(0.3), 0.12
    gaps = []
    for _ in range(6):
        start = policy.passes
        while drafted(policy, [0], [1]) == [0]:
            policy.note([DraftFeedback(0, None, (), [1])], 1.0)
            policy.passes_to_skip(1, asking, is_lookup=False)
        gaps.append(policy.passes - start)
        policy.note([DraftFeedback(0, Draft.chain([7]), (), [7])], 1.0, drafting=0.3)
    assert gaps == [0, 2, 4, 8, 16, 32], "a failure doubles the gap, of which skipped passes are a part"
    assert policy.passes_to_skip(1, asking) == MAX_SKIPPED_PASSES, "one that looks at the text"


def test_a_trial_that_the_budget_refuses_runs_once_the_budget_holds_its_loss():
    policy = rejecting(1.0)
    policy.budget.ensure_capacity(1.0)
    policy.budget.note(policy.budget.left - 1.0, 0.0)
    passes = 0
    while drafted(policy, [0], [1]) == [0]:
        passes += 1
        policy.note([DraftFeedback(0, None, (), [1])], 1.0)
    missing = (2 * 1.0 - 1.0) / LOSS
    assert missing - 1 <= passes < 4 * missing and policy.budget.left > 1.5


def test_a_pass_right_after_a_prefill_teaches_no_times():
    policy = DraftPolicy(Latency({1: 1.0, 16: 2.0}), MOST)
    drafts = [DraftFeedback(0, Draft.chain([7] * 3), (), [7])]
    before = policy.latency.target(1, 4)
    policy.note(drafts, 9.0, prefilled=True)
    assert policy.latency.target(1, 4) == before
    policy.note(drafts, 9.0)
    assert policy.latency.target(1, 4) > before


def test_a_draft_survives_with_all_on_its_path_whatever_the_order_of_the_levels() -> None:
    policy = DraftPolicy(Latency(), MOST)
    kinds = tuple(kind_of(*item) for item in ((1, 3), (1, 1), (2, 2), (1, 2)))
    table = {1: [0.5, 0.6, 0.7], 2: [0.1, 0.2]}
    policy.acceptance.rates = lambda sequence, group, levels: table[group][:levels]
    candidates = policy._nodes(4, 0, Draft((5, 6, 7, 8), (0, 1, 0, 2), kinds=kinds))
    assert [one.survival for one in candidates] == pytest.approx([0.7, 0.35, 0.2, 0.21])
    assert [(one.row, one.depth, one.node) for one in candidates] == [
        (4, 1, 1),
        (4, 2, 2),
        (4, 1, 3),
        (4, 3, 4),
    ]


def test_a_free_draft_is_tried_however_often_it_has_failed():
    policy = DraftPolicy(Latency({1: 1.0, 32: 4.1}))
    draft = Draft.chain([7] * 8)

    def turn(right):
        (kept,) = policy.select([0], [draft])
        path = tuple(range(1, len(kept) + 1)) if kept and right else ()
        policy.note([DraftFeedback(0, kept, path, [7] * (len(path) + 1))], 1 + 0.1 * len(kept or ()))
        return len(kept or ())

    for _ in range(1500):
        turn(False)
    assert sum(turn(True) for _ in range(4 * round(0.1 / SHARE))) > 0


def test_a_block_is_paid_once_and_a_step_for_each_depth():
    """Rounds of the same seconds at depth 4: what begins a round makes short drafts dear, not long ones."""
    table = {1: 1.0, 16: 1.3}
    steps = DraftPolicy(Latency(table, {1: 0.1}), MOST)
    block = DraftPolicy(Latency(table, {1: 0.0}, begin={1: 0.4}), MOST)
    for policy in (steps, block):
        for depth in range(1, MOST + 1):
            for _ in range(200):
                policy.acceptance.note(0, kind_of(0, depth), random.Random(depth).random() < 2)
    for policy in (steps, block):
        for _ in range(60):
            policy.acceptance.note(0, kind_of(0, 1), False)
    (few,), (many,) = drafted(steps, [0]), drafted(block, [0])
    assert steps.latency.draft(1) == 0.1 and block.latency.draft(1, first=True) == 0.4
    assert 0 < few <= many
    assert steps.latency.draft(1, first=True) + 3 * steps.latency.draft(1) == pytest.approx(0.4)


@pytest.mark.parametrize("begin", [0.2, 3.0])
def test_what_begins_a_round_is_charged_and_learnt(begin):
    latency = Latency({1: 1.0, 16: 1.2}, {1: 0.05}, begin={1: begin})
    policy = DraftPolicy(latency, MOST)
    assert drafted(policy, [0])[0] > 1
    assert (policy.min_chance > 0) == (begin < 1), "none pays for three passes: that was a trial"
    real = 0.8 * (latency.draft(1, first=True) + 3 * latency.draft(1))
    for _ in range(200):
        latency.note_draft(1, real, 4)
    assert latency.draft(1, first=True) + 3 * latency.draft(1) == pytest.approx(real, rel=0.05)
    assert latency.draft(1) == 0.05, "a step is a step"


def test_least_is_what_a_draft_takes_at_the_speed_that_is_reached():
    policy = DraftPolicy(Latency({1: 1.0, 11: 2.0}), MOST)
    for depth in range(1, 4):
        for _ in range(300):
            policy.acceptance.note(0, kind_of(0, depth), True)
    (count,) = drafted(policy, [0], [3])
    gain = sum(math.prod(policy.acceptance.rates(0, 0, 3)[:depth]) for depth in (1, 2, 3))
    assert count == 3 and policy.min_chance == pytest.approx((1 + gain) / 1.3 * 0.1, rel=1e-3)
    dear = DraftPolicy(Latency({1: 1.0, 11: 90.0}), MOST)
    assert drafted(dear, [0]) == [0] and dear.min_chance == 0.0


def test_trees_that_were_made_are_cut_to_what_pays_and_never_to_nothing():
    policy = DraftPolicy(Latency({1: 1.0, 32: 2.0}), MOST)
    strong, weak = kind_of(1, 8), kind_of(2, 1)
    for _ in range(200):
        policy.acceptance.note(0, strong, True)
        policy.acceptance.note(0, weak, False)
    fixed = Draft((5, 6, 7), (0, 0, 1), kinds=(strong, weak, strong))
    hopeless = Draft((5, 6), (0, 1), kinds=(weak, weak))
    drawn = Draft.chain((5, 6), np.full((2, 9), 1 / 9))
    kept = policy.trim([0, 1, 2, 3], [fixed, hopeless, drawn, None])
    assert kept[0].tokens == (5, 7) and kept[0].parents == (0, 1)
    assert kept[1].tokens == (5,), "it was made, and is a trial"
    assert kept[2] is drawn and kept[3] is None, "what was drawn stays"
    assert DraftPolicy(Latency(), MOST).trim([0], [fixed]) == [fixed]
