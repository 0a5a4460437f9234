"""All that scheduler and cache can do, at random, on a runner that knows what every slot must hold."""

import random

import pytest

from attar.runtime.admission import BusyError, Limits
from attar.runtime.execution import pack_due
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.evict import H2O, SnapKV
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Request, State
from attar.runtime.step import FREED
from tests.runtime.model import preempt_all

B, CAPACITY, CHUNK = 4, 22, 7


class Chain:
    """Numbers of prefixes: two places hold the same if and only if all tokens up to them are the same."""

    def __init__(self):
        self.numbers = {}

    def of(self, tokens, salt):
        results = [self.numbers.setdefault(("salt", salt), len(self.numbers))]
        for token in tokens:
            results.append(self.numbers.setdefault((results[-1], token), len(self.numbers)))
        return results[1:]

    def next(self, tokens, salt, index):
        """The token that text ``index`` takes behind these."""
        return (self.of(tokens, salt)[-1] * 7919 + index) % 3


class Runner:
    """Keeps numbers of prefixes in its slots, and checks all that a span may read."""

    def __init__(self, chain, draw):
        self.chain, self.draw, self.sequences = chain, draw, {}
        self.pool, self.held, self.fails = [None] * CAPACITY * B, {}, False
        self.least = 0  # SnapKV packs longer prompts only

    def run(self, step):
        step.check(B, CAPACITY)
        for old, new in step.copies:
            self.pool[new * B : new * B + B] = self.pool[old * B : old * B + B]
        for span in step.spans:
            sequence = self.sequences[span.sequence]
            numbers = self.chain.of([*sequence.tokens, *sequence.drafts], sequence.request.salt)
            held = self.held.setdefault(span.sequence, numbers[: span.start])
            assert len(held) >= span.offset, "a place is skipped"
            del held[span.offset :]
            self.verify(span.blocks, held)
            held += numbers[span.start : span.stop]
            for index, slot in enumerate(span.slots(B).tolist(), span.offset):
                self.pool[slot] = held[index]

    def verify(self, blocks, held):
        for index, number in enumerate(held):
            block = blocks[index // B]
            assert block == FREED or self.pool[block * B + index % B] == number, f"place {index} is mixed up"

    def pack(self, packing):
        prompt, held = self.sequences[packing.sequence].prompt, self.held[packing.sequence]
        assert prompt > self.least, "a prompt that fits is packed"
        del held[packing.length :]  # of rejected drafts
        self.verify(packing.old, held)
        positions = sorted(self.draw.sample(range(len(held)), packing.kept))
        held[:] = [held[index] for index in positions]
        for index, number in enumerate(held):
            self.pool[packing.new[index // B] * B + index % B] = number

    def fork(self, sequence, child):
        if self.fails:
            raise MemoryError("no room for scores")
        self.held[child] = list(self.held[sequence])

    def forget(self, sequence):
        self.held.pop(sequence, None)


class World:
    """One scheduler, and turns of everything that may happen to it."""

    def __init__(self, seed, *, drafts=True, eviction=None, **options):
        self.draw, self.chain, self.drafts, self.eviction = random.Random(seed), Chain(), drafts, eviction
        self.runner = Runner(self.chain, self.draw)
        self.runner.least = eviction.budget if isinstance(eviction, SnapKV) else 0
        most = None if eviction is None else eviction.most(CHUNK, B)
        self.manager = BlockManager(CAPACITY, B, most=most, **options)
        limits = Limits(step_tokens=12, chunk=CHUNK, sequences=7, waiting=9, prefix_first=seed % 2 == 1)
        self.scheduler = Scheduler(self.manager, limits, memory=self.runner)
        self.runner.sequences = self.scheduler._live
        self.now, self.names, self.finished, self.packed, self.forks = 0.0, 0, 0, 0, 0

    def add(self):
        draw = self.draw
        prompt = [0] * draw.randrange(14) + [draw.randrange(2) for _ in range(draw.randrange(1, 10))]
        self.names += 1
        options = {"priority": draw.randrange(2), "salt": draw.choice(["", "", "tenant"])}
        late = self.now + draw.randrange(4, 40) if draw.random() < 0.2 else None
        request = Request(
            id=str(self.names),
            prompt=prompt,
            max_tokens=draw.randrange(1, 16),
            n=draw.choice([1, 1, 1, 3]),
            arrival=self.now,
            deadline=late,
            **options,
        )
        try:
            self.scheduler.add(request)
        except BusyError:
            assert len(self.scheduler.waiting) >= 9  # who was preempted comes on top

    def step(self):
        self.now += 1
        step = self.scheduler.build(self.scheduler.plan(self.now))
        if step is not None:
            choice = self.draw.random()
            if choice < 0.02:
                preempt_all(self.scheduler, step)
            else:
                self.run(step, fails=choice < 0.05)

    def run(self, step, fails):
        self.runner.run(step)
        self.runner.fails = fails
        outputs = self.scheduler.commit(step)
        self.runner.fails = False
        for output in outputs:
            if output.draws:
                self.take(output.sequence)
        if self.eviction is not None:
            before = [self.manager.table(sequence).length for sequence in self.manager.sequences]
            pack_due(self.scheduler, self.eviction, self.runner)
            self.packed += before != [
                self.manager.table(sequence).length for sequence in self.manager.sequences
            ]

    def take(self, sequence):
        new, salt = [], sequence.request.salt
        for draft in [*sequence.drafts, None]:
            new.append(self.chain.next([*sequence.tokens, *new], salt, sequence.index))
            if new[-1] != draft:
                break
        self.scheduler.append(sequence, new[: sequence.limit - len(sequence.tokens)])
        if sequence.full:
            self.finished += 1
            self.scheduler.finish(sequence, "length")
        elif self.drafts and self.draw.random() < 0.5:
            drafts = []
            for _ in range(self.draw.randrange(4)):
                right = self.chain.next([*sequence.tokens, *drafts], salt, sequence.index)
                drafts.append(right if self.draw.random() < 0.8 else 1)
            sequence.drafts = drafts

    def turn(self):
        choice, running = self.draw.random(), self.scheduler.running
        if choice < 0.2:
            self.add()
        elif choice < 0.23:
            self.scheduler.cancel(str(self.draw.randrange(max(self.names - 12, 0), self.names + 1)))
        elif choice < 0.25 and running:
            self.scheduler.finish(self.draw.choice(running), "stop")
        elif choice < 0.27 and running and len(running) < 7:
            self.beam(self.draw.choice(running))
        elif choice < 0.271:
            self.manager.clear()
        else:
            self.step()

    def beam(self, sequence):
        """A fork in the middle of a text; not of one that will fork by itself."""
        if sequence.width == 1 and sequence.state is State.RUNNING:
            self.scheduler.fork(sequence, index=self.draw.randrange(4))
            self.forks += 1

    def drain(self):
        while not self.scheduler.idle:
            self.step()
        self.scheduler.check()
        assert self.manager.free + self.manager.cached == CAPACITY
        self.manager.clear()
        assert self.manager.free == CAPACITY and not self.runner.held


KINDS = {
    "plain": {},
    "window": {"window": 9, "sinks": 3},
    "h2o": {"eviction": H2O(heavy=5, recent=5, slack=2), "reuse": False, "drafts": False},
    "snapkv": {"eviction": SnapKV(capacity=9, window=2, kernel=1)},
}


def lived(kind, turns, seed):
    world = World(seed, **KINDS[kind])
    for turn in range(turns):
        world.turn()
        if turn % 20 == 0:
            world.scheduler.check()
    world.drain()
    least = turns // 400
    assert min(world.finished, world.forks, world.scheduler.preemptions) > least, "the world was too quiet"
    assert world.eviction is None or world.packed > least
    assert not world.manager.reuse or world.manager.stats.hit > turns // 4


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_and_nothing_is_mixed_up(kind):
    for seed in (0, 1):
        lived(kind, 800, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_in_a_hundred_thousand_operations(kind):
    lived(kind, 25_000, 2)
    lived(kind, 25_000, 3)
