"""States and snapshots under random schedules, against states that are computed from all tokens."""

import random

import pytest

from attar.runtime.admission import Limits
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.state_snapshots import StateSnapshots
from attar.runtime.kv.state_store import SequenceState, StateStore
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Request

B = 4


def moved(state, tokens):
    """The model: a state after further tokens."""
    for token in tokens:
        state = (state * 6_364_136_223_846_793_005 + token + 1) % (2**61 - 1)
    return state


class Runner:
    """Moves states over tokens as ``runner/state_pass.py`` does, with a number for a state."""

    def __init__(self, snapshots):
        self.states, self.texts, self.saved = StateStore(snapshots), {}, 0

    def run(self, step):
        states, taken = {}, {}
        for index, span in enumerate(step.spans):
            before = self.states.before(span)
            text = self.texts[span.sequence]
            assert before.layers.get("number", 0) == moved(0, text[: before.position]), (
                f"a wrong state: {span}"
            )
            new = step.tokens[step.offsets[index] : step.offsets[index + 1]]
            kept = [*before.inputs.get("number", ())]
            inputs = [*kept[: span.start - before.position], *new]
            certain = max(span.stop - span.drafts, before.position)
            ends = [end for end in span.snapshots if before.position < end <= certain]

            def after(end, before=before, inputs=inputs, stop=span.stop):
                count = end - before.position
                number = moved(before.layers.get("number", 0), inputs[:count])
                return SequenceState(end, stop, {"number": number}, {"number": inputs[count:]})

            states[span.sequence] = after(certain)
            taken[span.sequence] = {end: after(end) for end in ends}
            self.saved += len(ends)
        self.states.update(states, taken)

    def fork(self, sequence, child):
        self.states.fork(sequence, child)
        self.texts[child] = self.texts[sequence]

    def forget(self, sequence):
        self.states.forget(sequence)


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(seed):
    """Requests with common prefixes, chunks, n completions, drafts of which some are right, preemption,
    cancelled requests, few snapshots and few blocks: each span begins from the state of its sequence's
    tokens."""
    draw = random.Random(seed)
    snapshots = StateSnapshots(B, most=draw.choice([1, 3, 100]), every=draw.choice([1, 2, 5]))
    runner = Runner(snapshots)
    manager = BlockManager(28, B, snapshots=snapshots)
    limits = Limits(step_tokens=24, chunk=9, sequences=5)
    scheduler = Scheduler(manager, limits, memory=runner)
    prefixes = [[draw.randrange(50) for _ in range(30)] for _ in range(2)]
    for turn in range(150):
        if draw.random() < 0.3 and len(scheduler.waiting) < 3:
            prompt = [*draw.choice(prefixes)[: draw.randrange(1, 30)], draw.randrange(50)]
            scheduler.add(Request(id=str(turn), prompt=prompt, max_tokens=12, n=draw.choice([1, 1, 3])))
        if draw.random() < 0.1 and scheduler.running:
            scheduler._preempt(draw.choice(scheduler.running))
        if draw.random() < 0.1 and scheduler.running:
            scheduler.cancel(draw.choice(scheduler.running).request.id)
        for sequence in scheduler.running:
            if sequence.decodes and sequence.width == 1 and draw.random() < 0.5:
                sequence.drafts = [draw.randrange(3) for _ in range(draw.randrange(3))]
        step = scheduler.build(scheduler.plan())
        if step is None:
            continue
        runner.texts |= {sequence.id: sequence.tokens for sequence in scheduler.running}
        runner.run(step)
        for output in scheduler.commit(step):
            if output.draws:
                advance(scheduler, output.sequence, draw)
        runner.texts |= {sequence.id: sequence.tokens for sequence in scheduler.running}
        scheduler.check()
        running = {sequence.id for sequence in scheduler.running}
        assert set(runner.states.sequences) <= running and len(snapshots) <= snapshots.most
    assert runner.saved and scheduler.preemptions and manager.stats.hit
    for sequence in [*scheduler.running, *scheduler.waiting]:
        scheduler.finish(sequence, "length")
    scheduler.check()
    manager.clear()
    assert not len(snapshots) and not runner.states.sequences


def advance(scheduler, sequence, draw):
    """Accept some of the drafts, and a token after them."""
    count = draw.randrange(len(sequence.drafts) + 1)
    tokens = [*sequence.drafts[:count], draw.randrange(3)]
    tokens = tokens[: sequence.limit - len(sequence.tokens)]
    if not tokens or draw.random() < 0.05:
        scheduler.finish(sequence, "stop")
    else:
        scheduler.append(sequence, tokens)


def test_due_ends_of_blocks():
    snapshots = StateSnapshots(B, most=9, every=3)
    assert snapshots.due(0, 30, prompt=22) == (12, 20, 24)  # every 12, and the prompt's last full block
    assert snapshots.due(12, 23, prompt=99) == () and snapshots.due(12, 24, prompt=99) == (24,)
    assert StateSnapshots(B, most=9, every=99).due(0, 8, prompt=8) == (4,)  # a token is always run


def test_the_least_recently_used_goes_first():
    snapshots = StateSnapshots(B, most=2)
    snapshots.take(0, {4: "a", 8: "b"})
    snapshots.publish(0, {4: 10, 8: 11})
    snapshots.start(1, 10)
    snapshots.take(0, {12: "c", 16: "not published"})
    snapshots.publish(0, {12: 12})
    assert list(snapshots) == [10, 12] and snapshots.started(1) == "a"
    snapshots.drop(10)
    assert snapshots.started(1) == "a" and list(snapshots) == [12]
    snapshots.take(1, {})
    assert snapshots.started(1) is None
