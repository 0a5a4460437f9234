"""Continuous batching on a runner of integers, whose texts show any slot that was mixed up."""

import random

import pytest

from attar.errors import DataError, SettingsError
from attar.runtime.admission import BusyError, Limits
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.scheduler import Scheduler, divide
from attar.runtime.sequence import Request, Sequence, State
from tests.runtime.model import Runner, drawn, preempt_all, text

B = 4


class Engine:
    """The smallest loop: greedy texts, drafts that are right up to a point, texts collected by request."""

    def __init__(self, capacity=64, *, drafts=None, context=None, manager=None, **limits):
        self.runner = Runner(capacity, B)
        self.manager = manager or BlockManager(capacity, B)
        limits = {"step_tokens": 16, "sequences": 8, **limits}
        self.scheduler = Scheduler(self.manager, Limits(**limits), context=context, memory=self.runner)
        self.texts, self.prompts, self.drafts, self.now = {}, {}, drafts, 0.0

    def add(self, prompt, max_tokens=5, **options):
        name = options.pop("id", f"r{len(self.prompts)}")
        self.prompts[name] = (list(prompt), max_tokens)
        return self.scheduler.add(Request(id=name, prompt=list(prompt), max_tokens=max_tokens, **options))

    def step(self):
        """One step; None where there was none."""
        step = self.scheduler.build(self.scheduler.plan(self.now))
        self.now += 1
        if step is not None:
            assert step.count <= self.scheduler.limits.step_tokens
            limits = {sequence.id: sequence.limit for sequence in self.scheduler.running}
            assert all(span.stop < limits[span.sequence] for span in step.spans)  # drafts included
            states = self.runner.run(step)
            self.take(self.scheduler.commit(step), states)
        self.scheduler.check()
        return step

    def take(self, outputs, states):
        for output in outputs:
            sequence = output.sequence
            rows = [states[row] for row in output.rows]
            if output.draws:
                new = []
                for row, draft in zip(rows[-output.draws :], [*sequence.drafts, None], strict=True):
                    new.append(drawn(row, sequence.index))
                    if new[-1] != draft:
                        break
                self.scheduler.append(sequence, new[: sequence.limit - len(sequence.tokens)])
                if sequence.full:
                    self.texts.setdefault(sequence.request.id, {})[sequence.index] = sequence.generated
                    self.scheduler.finish(sequence, "length")
                elif self.drafts:
                    sequence.drafts = self.drafts(sequence)

    def finish(self, most=10_000):
        while not self.scheduler.idle:
            most -= 1
            assert most, "it never ends"
            self.step()
        for name, texts in self.texts.items():
            prompt, count = self.prompts[name]
            for index, got in texts.items():
                assert got == text(prompt, count, index), f"text {index} of {name}"
        assert self.manager.free + self.manager.cached == self.manager.capacity
        assert not self.runner.kept


def test_one_request_alone():
    engine = Engine()
    engine.add([3, 1, 4], 6)
    engine.finish()
    assert engine.texts["r0"] == {0: text([3, 1, 4], 6)}
    assert engine.runner.runs == 6 and engine.runner.tokens == 3 + 5


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode():
    engine = Engine(step_tokens=8)
    engine.add([1], 20)
    engine.step()
    engine.add(range(30), 3)
    counts = []
    for _ in range(5):
        counts.append([(span.count, span.wants) for span in engine.step().spans])
    assert counts == [[(1, 1), (7, 0)]] * 4 + [[(1, 1), (2, 1)]]
    engine.finish()


def test_a_cap_on_chunks_lets_the_next_prompt_in():
    engine = Engine(step_tokens=16, chunk=10)
    engine.add(range(30))
    engine.add(range(30, 40))
    assert [span.count for span in engine.step().spans] == [10, 6]
    engine.finish()


def test_a_text_goes_on_though_an_earlier_prompt_could_use_the_whole_step():
    long = Sequence(0, Request(id="a", prompt=range(40)), 99, list(range(40)))
    decodes = Sequence(1, Request(id="b", prompt=[1]), 99, [1, 5, 6], computed=2)
    verifies = Sequence(2, Request(id="c", prompt=[1]), 99, [1, 5, 6], computed=2, drafts=[7, 8])
    running = [long, decodes, verifies]
    assert divide(running, 10) == {0: 6, 1: 1, 2: 3}
    assert divide(running, 10, chunk=4) == {0: 4, 1: 1, 2: 3}
    assert divide(running, 3) == {0: 0, 1: 1, 2: 2}


def test_a_shared_prefix_is_computed_once():
    engine = Engine()
    prompt = list(range(12))
    engine.add(prompt, 2)
    engine.finish()
    before = engine.runner.tokens
    engine.add(prompt, 2)
    engine.add([*prompt, 7], 2)
    engine.finish()
    assert engine.runner.tokens - before == (4 + 1) + (1 + 1)
    engine.add(prompt, 2, salt="someone else")
    engine.finish()
    assert engine.runner.tokens - before == 7 + 13


def test_two_equal_prompts_at_once_are_kept_once():
    engine = Engine(step_tokens=64)
    engine.add(range(12), 2)
    engine.add(range(12), 2)
    engine.step()
    assert engine.manager.free == 64 - 3
    engine.finish()


def test_n_texts_fork_from_one_prompt():
    engine = Engine()
    engine.add(range(6), 5, n=4)
    engine.step()
    assert engine.runner.tokens == 6
    assert [sequence.index for sequence in engine.scheduler.running] == [0, 1, 2, 3]
    assert engine.manager.free == 64 - 2  # all four on the same blocks
    assert engine.runner.kept == dict.fromkeys(range(4), 6)
    engine.finish()
    assert sorted(engine.texts["r0"]) == [0, 1, 2, 3]


def test_n_texts_count_as_n_sequences_from_the_start():
    engine = Engine(sequences=4, step_tokens=32)
    engine.add(range(6), 5)
    engine.add(range(6), 5, n=4)
    engine.add(range(6), 5)
    engine.step()
    assert len(engine.scheduler.running) == 1  # and the small one behind does not overtake
    engine.finish()
    assert len(engine.texts["r1"]) == 4


def test_the_last_one_is_preempted_and_comes_back_first():
    engine = Engine(capacity=10, step_tokens=32)
    for number in range(3):
        engine.add([number] * 7, 9)
    engine.step()
    late = engine.add([9], 1)
    while not engine.scheduler.preemptions:
        engine.step()
    waiting = list(engine.scheduler.waiting)
    assert [sequence.id for sequence in waiting] == [2, late.id]
    assert waiting[0].computed == 0 and waiting[0].generated  # what it wrote is kept
    engine.finish()
    assert len(engine.texts) == 4


def test_priority_decides_who_starts_and_who_is_preempted():
    engine = Engine(capacity=6, sequences=2, step_tokens=32)
    engine.add([1] * 7, 9, priority=5)
    engine.add([2] * 7, 9, priority=1)
    engine.add([3] * 7, 9, priority=0)
    engine.step()
    assert [sequence.request.id for sequence in engine.scheduler.running] == ["r2", "r1"]
    while not engine.scheduler.preemptions:
        engine.step()
    assert next(iter(engine.scheduler.waiting)).request.id == "r1"
    engine.finish()


def test_longest_prefix_first_until_patience_ends():
    engine = Engine(sequences=1, prefix_first=True, patience_s=3)
    engine.add(range(12), 1, id="warm")
    engine.finish()
    engine.prompts.clear()
    start = engine.now
    engine.add([40] * 5, 9, id="runs", arrival=start)
    engine.step()
    engine.add([41] * 5, 1, id="cold", arrival=start)
    engine.add(range(12), 1, id="hit", arrival=start + 1)
    assert [s.request.id for s in engine.scheduler.waiting.ordered(start + 1)] == ["hit", "cold"]
    assert [s.request.id for s in engine.scheduler.waiting.ordered(start + 3)] == ["cold", "hit"]
    engine.prompts["warm"] = (list(range(12)), 1)
    engine.finish()


def test_who_was_preempted_goes_before_who_came_earlier():
    engine = Engine(sequences=2)
    engine.add([1] * 5, 9, arrival=1)
    second = engine.add([2] * 5, 9, arrival=2)
    engine.step()
    early = engine.add([3] * 5, 9, arrival=0)
    urgent = engine.add([4] * 5, 9, arrival=9, priority=-1)
    engine.scheduler._preempt(second)
    assert [s.id for s in engine.scheduler.waiting] == [urgent.id, second.id, early.id]
    engine.finish()


def test_drafts_go_with_the_blocks():
    engine = Engine()
    sequence = engine.add([1, 2], 9)
    engine.step()
    sequence.drafts, sequence.parents = [7, 8], [0, 0]
    engine.scheduler._preempt(sequence)
    assert (sequence.drafts, sequence.parents, sequence.computed) == ([], None, 0)
    sequence.drafts = [7]
    with pytest.raises(AssertionError, match="sequence 0 is waiting, but has drafts"):
        engine.scheduler.check()
    sequence.drafts = []
    engine.finish()


def test_a_tree_that_is_cut_loses_its_parents_with_its_drafts():
    engine = Engine(step_tokens=8)
    first, second = engine.add([1, 2], 4), engine.add([3], 20)
    engine.step()
    first.drafts, first.parents = [7, 8, 9], [0, 0, 1]  # the text has room for two
    second.drafts, second.parents = list(range(9)), [0] * 9  # five more fit in the step
    step = engine.scheduler.build(engine.scheduler.plan())
    assert (first.drafts, first.parents) == ([7, 8], [0, 0])
    assert (second.drafts, second.parents) == ([0, 1, 2, 3], [0] * 4)
    assert step.parents == ((-1, 0, 0), (-1, 0, 0, 0, 0))
    preempt_all(engine.scheduler, step)
    engine.finish()


def test_where_nothing_runs_any_more_the_next_one_starts_in_the_same_step():
    """The second is preempted for the first, which has no room all the same: then the second goes on."""
    engine = Engine(capacity=5, manager=BlockManager(5, B, most=8), step_tokens=32)
    first, second = engine.add(range(5), 30), engine.add([20, 21], 3)
    engine.step()
    first.drafts = [0] * 20
    step = engine.scheduler.build(engine.scheduler.plan())
    assert (first.reason, engine.scheduler.preemptions) == ("capacity", 1)
    assert [span.sequence for span in step.spans] == [second.id]
    preempt_all(engine.scheduler, step)
    engine.finish()


class Forgetful(Runner):
    """A runner that cannot fork for the third time."""

    def fork(self, sequence, child):
        if len(self.kept) == 3:
            raise MemoryError("no room for scores")
        super().fork(sequence, child)


def test_a_fork_that_fails_leaves_nothing_behind():
    engine = Engine()
    engine.runner = Forgetful(64, B)
    engine.scheduler = Scheduler(engine.manager, engine.scheduler.limits, memory=engine.runner)
    sequence = engine.add(range(6), 5, n=4)
    step = engine.scheduler.build(engine.scheduler.plan())
    states = engine.runner.run(step)
    assert engine.scheduler.commit(step) == [] and states
    assert engine.scheduler.ended() == [sequence] and sequence.width == 4  # all of the texts, or none
    assert sequence.reason == "error" and isinstance(sequence.failure, MemoryError)
    assert engine.scheduler.idle and not engine.runner.kept
    engine.scheduler.check()


def test_a_deadline_ends_all_texts_of_its_request_and_no_other():
    engine = Engine()
    engine.add(range(9), 50, n=2, deadline=4.0)
    engine.add(range(5), 50, deadline=4.5)
    engine.add(range(3), 9)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.ended() == []
    engine.step()  # at 4.0: on the dot
    assert [(s.request.id, s.reason) for s in engine.scheduler.ended()] == [("r0", "deadline")] * 2
    engine.step()
    assert [s.request.id for s in engine.scheduler.ended()] == ["r1"]
    engine.finish()
    assert list(engine.texts) == ["r2"]


def test_no_request_is_overtaken_for_ever():
    """Requests with a cached prefix keep coming; one without is served when its patience is over."""
    engine = Engine(sequences=1, prefix_first=True, patience_s=6)
    engine.add(range(12), 1, id="warm")
    engine.finish()
    start = engine.now
    cold = engine.add([40] * 5, 1, id="cold", arrival=start)
    for number in range(12):
        engine.add(range(12), 1, id=f"hit{number}", arrival=start + number)
        engine.step()
        assert cold.finished == (number >= 6)
    engine.finish()


def test_cancel_gives_everything_back():
    engine = Engine(sequences=4)
    engine.add(range(9), 50, n=3)
    engine.add(range(9), 5)
    engine.step()
    gone = engine.scheduler.cancel("r0")
    assert [sequence.reason for sequence in gone] == ["cancelled"] * 3
    assert engine.scheduler.cancel("r0") == [] and engine.scheduler.cancel("unknown") == []
    engine.scheduler.check()
    engine.finish()
    assert list(engine.texts) == ["r1"]


def test_a_deadline_ends_running_and_waiting_requests():
    engine = Engine(sequences=1)
    engine.add(range(9), 50, deadline=3.0)
    engine.add(range(9), 50, deadline=2.0)
    engine.add(range(9), 2)
    engine.finish()
    assert [(s.id, s.reason) for s in engine.scheduler.ended()] == [(1, "deadline"), (0, "deadline")]
    assert engine.scheduler.ended() == [] and list(engine.texts) == ["r2"]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_rejected_drafts_leave_no_trace(right):
    def drafts(sequence):
        prompt = list(sequence.request.prompt)
        ahead = text(prompt, len(sequence.generated) + 3, sequence.index)[len(sequence.generated) :]
        return [token if i < right else (token + 1) % 50 for i, token in enumerate(ahead)]

    engine = Engine(drafts=drafts, capacity=16)
    engine.add(range(7), 21, n=2)
    engine.add([2] * 5, 13)
    engine.finish()
    assert len(engine.texts["r0"]) == 2
    if right == 3:
        assert engine.runner.runs <= 8


def test_a_tree_of_drafts_follows_the_last_token():
    engine = Engine()
    first, second = engine.add([1, 2], 9), engine.add([3], 9)
    engine.step()
    first.drafts, first.parents = [7, 8, 9], [0, 0, 1]
    step = engine.scheduler.build(engine.scheduler.plan())
    assert step.parents == ((-1, 0, 0, 1), None)
    assert step.positions.tolist() == [2, 3, 3, 4, 1]
    assert [span.wants for span in step.spans] == [4, 1] and step.tokens[1:4] == [7, 8, 9]
    engine.scheduler.commit(step)
    engine.scheduler.append(first, [7])
    engine.scheduler.append(second, [5])
    assert (first.computed, first.drafts, first.parents) == (3, [], None)
    engine.scheduler.check()


def test_logits_of_a_prompt_come_once_though_it_is_cached_and_preempted():
    engine = Engine(step_tokens=8)
    engine.add(range(12), 2)
    engine.finish()
    sequence = engine.add(range(12), 8, logits_from=0)
    spans = []
    while sequence.state is not State.FINISHED:
        spans += [(span.start, span.wants) for span in engine.step().spans]
        if len(spans) in (1, 4):
            engine.scheduler._preempt(sequence)
    assert spans[:4] == [(0, 8), (0, 0), (8, 4), (12, 1)]
    assert sum(wants for _, wants in spans) == 12 + 7
    engine.finish()


def test_a_fork_does_not_hand_out_the_logits_of_its_prompt_again():
    engine = Engine()
    engine.add(range(6), 5, n=2, logits_from=0)
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[1])
    assert [span.wants for span in engine.step().spans] == [1, 1]
    engine.finish()


def test_what_can_never_run_is_refused_by_name():
    engine = Engine(capacity=4, context=100)
    with pytest.raises(DataError, match="prompt of request r0 is empty"):
        engine.add([])
    with pytest.raises(SettingsError, match=r"prompt \+ max_tokens is 22, but must be at most 17"):
        engine.add(range(12), 10)
    with pytest.raises(SettingsError, match="n is 9, but must be 1 to 8"):
        engine.add(range(3), 1, n=9)
    with pytest.raises(SettingsError, match="max_tokens is 0"):
        engine.add(range(3), 0)
    with pytest.raises(
        SettingsError, match="length of the prompt is 100, but must be below the model's context of 100"
    ):
        engine.add(range(100), 1)
    with pytest.raises(SettingsError, match="prompt"):
        engine.add(range(17), None)
    assert engine.scheduler.idle


def test_without_max_tokens_a_text_ends_with_context_or_pool():
    assert Engine(capacity=64, context=20).add(range(5), None).limit == 20
    assert Engine(capacity=4).add(range(5), None).limit == 17
    assert Engine(capacity=4, context=40).add(range(5), None).limit == 17
    assert Engine(capacity=64, context=20).add(range(5), 99).limit == 20
    engine = Engine(capacity=4)
    engine.add(range(5), None)
    engine.prompts["r0"] = (list(range(5)), 12)
    engine.finish()


def test_a_full_queue_is_busy():
    engine = Engine(sequences=1, waiting=2)
    engine.add(range(3))
    engine.add(range(3))
    with pytest.raises(BusyError, match="2 requests are waiting"):
        engine.add(range(3))
    engine = Engine(sequences=1, waiting_tokens=10)
    engine.add(range(20), 1)  # the first one may be as long as it likes
    with pytest.raises(BusyError, match="20 tokens are waiting, the limit is 10"):
        engine.add(range(3))


def test_limits_are_checked():
    with pytest.raises(SettingsError, match="chunk is 0, but must be at least 1"):
        Limits(chunk=0)
    with pytest.raises(SettingsError, match="sequences is 9, but must be at most step_tokens, 8"):
        Limits(sequences=9, step_tokens=8)
    with pytest.raises(SettingsError, match="patience_s"):
        Limits(patience_s=-1)


def test_a_failed_step_begins_again():
    engine = Engine()
    engine.add(range(9), 6)
    engine.add([5], 6, n=2)
    engine.step()
    for _ in range(2):
        step = engine.scheduler.build(engine.scheduler.plan())
        preempt_all(engine.scheduler, step)
        engine.runner.states = [None] * len(engine.runner.states)
        engine.manager.clear()
        engine.scheduler.check()
    engine.finish()
    assert len(engine.texts) == 2


def test_a_pool_smaller_than_declared_ends_the_request_and_not_the_engine():
    engine = Engine(capacity=4, manager=BlockManager(4, B, most=8))
    sequence = engine.add(range(5), 30)
    while not engine.scheduler.idle:
        engine.step()
    assert sequence.reason == "capacity" and engine.scheduler.ended() == [sequence]


def test_a_beam_can_be_forked_and_dropped():
    engine = Engine()
    first = engine.add(range(6), 9)
    engine.step()
    second = engine.scheduler.fork(first, index=1)
    engine.scheduler.check()
    engine.step()
    engine.scheduler.finish(second, "dropped")
    engine.finish()
    assert second.tokens[:7] == first.tokens[:7] and second.tokens[7] != first.tokens[7]


def test_check_finds_a_sequence_that_lost_its_place():
    engine = Engine()
    sequence = engine.add(range(6))
    engine.step()
    sequence.computed -= 1
    with pytest.raises(AssertionError, match="table of 0: 6 entries"):
        engine.scheduler.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("capacity", [9, 14, 40])
@pytest.mark.parametrize("prefix_first", [False, True])
def test_texts_stay_right_whatever_happens(capacity, prefix_first):
    draw = random.Random(capacity)

    def drafts(sequence):
        prompt, done = list(sequence.request.prompt), len(sequence.generated)
        ahead = text(prompt, done + 4, sequence.index)[done:]
        return [t if draw.random() < 0.8 else 1 for t in ahead[: draw.randrange(5)]]

    engine = Engine(capacity, drafts=drafts, step_tokens=11, chunk=7, sequences=6, prefix_first=prefix_first)
    for _ in range(1500):
        choice = draw.random()
        if choice < 0.3 and len(engine.scheduler.waiting) < 8:
            prompt = [0] * draw.randrange(8) + [draw.randrange(3) for _ in range(draw.randrange(1, 10))]
            engine.add(
                prompt,
                draw.randrange(1, 18),
                n=draw.choice([1, 1, 3]),
                priority=draw.randrange(2),
                arrival=engine.now,
                deadline=engine.now + draw.randrange(5, 60) if draw.random() < 0.2 else None,
            )
        elif choice < 0.35 and engine.prompts:
            engine.scheduler.cancel(draw.choice(list(engine.prompts)))
        elif choice < 0.36 and (step := engine.scheduler.build(engine.scheduler.plan(engine.now))):
            preempt_all(engine.scheduler, step)
        else:
            engine.step()
    engine.finish()
    assert len(engine.texts) > 30
    assert engine.scheduler.preemptions > 5 or capacity == 40
