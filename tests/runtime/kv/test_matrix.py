"""Walks the table of ``kv/compose.py``: every pair runs through the scheduler, or is refused.

A scenario is a store, an eviction, a model and a runner, and all that scheduling can do with them at once:
two requests with a common beginning, one of two texts, prompts in chunks, a preemption in the middle,
chains and trees of drafts, hidden states for a draft head. Texts are given, so that only logits and hidden
states are compared: with one request alone, in one chunk.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from attar.errors import ModelError, SettingsError
from attar.runtime.admission import Limits
from attar.runtime.execution import pack_due
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.compose import EVICTIONS, FEATURES, MODELS, RUNNERS, SCHEDULING, STORES, reason
from attar.runtime.kv.evict import H2O, Reread, SnapKV, Streaming
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.modules import Modules
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Request
from attar.runtime.step import slots
from tests import tiny_models
from tests.compiler import no_compiler

B, PROMPT, GIVEN = 32, 70, 12
LAYERS, LAST = (0, 3), 7  # a window of 8 keeps so many tokens
METHODS = {
    "reread": Reread(capacity=50, recent=8, sinks=2, stride=1),
    "streaming": Streaming(sinks=2, window=40),
    "h2o": H2O(heavy=40, recent=32, slack=4),
    "snapkv": SnapKV(capacity=60, window=8),
}
FORMATS = {"dense": "float32", "kivi": "kivi4", "mixed": "int4"} | {
    name: name for name in ("int8", "fp8", "int4")
}
# What these keep depends on how the tokens came (SnapKV's after a preemption: what was generated votes too);
# in codes of a byte a last digit may fall on the other side. Logits of other tokens are off by 1.4.
BOUNDS = {
    "int8": 0.01,
    "fp8": 0.04,
    "int4": 0.25,
    "mixed": 0.25,
    "kivi": 0.25,
    "h2o": 0.25,
    "snapkv": 0.5,
    "reread": 0.5,
}


def scenarios():
    """All (store, eviction or None, model or None, runner) in which no pair is refused."""
    for store, method, model, runner in itertools.product(
        STORES, (None, *EVICTIONS), (None, *MODELS), RUNNERS
    ):
        parts = [part for part in (store, method, model, runner) if part]
        four = store in ("int4", "mixed")
        alone = four and {"latents", "compiled"} <= {*parts}  # any two of these work together
        if not alone and not any(reason(*pair) for pair in itertools.combinations(parts, 2)):
            yield store, method, model, runner


def scheduling(parts):
    """What scheduling does with them: all that none of them refuses."""
    return [one for one in SCHEDULING if not any(reason(one, part) for part in parts if part)]


@functools.cache
def model(kind):
    family = {"sliding_window": "mistral", "learned_positions": "gpt2", "latents": "deepseek_v3"}
    family["states"] = "qwen3_5"
    dense = {"first_k_dense_replace": 9} if kind == "latents" else {}  # no router turns by a last digit
    built = tiny_models.build(family.get(kind, "llama3"), **dense)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return built


def runner_of(store, method, kind, runner):
    settings = {"blocks": 24, "block_size": B, "kv_dtype": FORMATS[store]}
    if store == "mixed":
        settings["basis"] = mixed_basis(kind)
    if runner == "compiled":
        result = model(kind)
        return compiled(result.config, result.state_dict(), bits=16, threads=1, **settings)
    return Modules(model(kind), eviction=METHODS.get(method), **settings)


@functools.cache
def mixed_basis(kind):
    """Every second layer in int8, the first in int4."""
    basis = Modules(model(kind), blocks=24, block_size=B, kv_dtype="int4").pool.store.basis
    layers = len(basis.factors)
    return replace(basis, formats=("int4", "int8") * (layers // 2) + ("int4",) * (layers % 2))


def tokens(seed, count):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_models.VOCABULARY, (count,), generator=drawn).tolist()


SHARED = tokens(0, 64)
TEXTS = {
    "a": (SHARED + tokens(1, PROMPT - 64), [tokens(2, GIVEN), tokens(3, GIVEN)]),
    "b": (SHARED + tokens(4, PROMPT - 64), [tokens(5, GIVEN)]),
}


class Drive:
    """Runs texts that are given; ``rows[name, index]`` are the logits behind the prompt and each token."""

    def __init__(self, runner, on, chunk=None):
        window, sinks = getattr(runner, "lookback", (getattr(runner, "window", None), 0))
        most = runner.most(chunk or 512) if isinstance(runner, Modules) else None
        reuse = "prefix_reuse" in on
        snapshots = getattr(getattr(runner, "states", None), "snapshots", None)
        bounds = {"window": window, "sinks": sinks, "most": most}
        self.manager = BlockManager(24, B, reuse=reuse, snapshots=snapshots, **bounds)
        limits = Limits(step_tokens=512, chunk=chunk, sequences=8)
        self.scheduler = Scheduler(self.manager, limits, memory=runner)
        self.runner, self.on, self.rows, self.turns = runner, on, {}, 0
        self.states = {}  # behind the last blocks of each text
        kept = "hidden_states" in on or (not on and getattr(runner, "eviction", None) is None)
        self.pool = runner.keep_hidden(LAYERS) if kept else None

    def add(self, name, n):
        self.scheduler.add(Request(id=name, prompt=TEXTS[name][0], max_tokens=GIVEN + 1, n=n))

    def step(self):
        step = self.scheduler.build(self.scheduler.plan())
        step.check(B, 24)
        logits = self.runner.run(step)
        for output in self.scheduler.commit(step):
            if output.draws:
                self.take(output, logits[output.rows[-output.draws :]])
        if getattr(self.runner, "eviction", None):
            pack_due(self.scheduler, self.runner.eviction, self.runner)
        self.scheduler.check()
        self.turns += 1
        if "preemption" in self.on and self.turns == 7:
            self.scheduler._preempt(self.scheduler.running[-1])

    def take(self, output, logits):
        """Keeps the logits of the path that the text takes, and proposes drafts for the next step."""
        sequence, given = output.sequence, TEXTS[output.sequence.request.id][1][output.sequence.index]
        rows, done = self.rows.setdefault((sequence.request.id, sequence.index), []), len(sequence.generated)
        path = [0]  # rows of the last token and of the drafts that are right
        parents = sequence.parents or range(len(sequence.drafts))
        for index, (draft, parent) in enumerate(zip(sequence.drafts, parents, strict=True), 1):
            if parent == path[-1] and draft == given[done + len(path) - 1]:
                path.append(index)
        rows += [logits[row] for row in path[: GIVEN + 1 - len(rows)]]
        if len(rows) > GIVEN:
            if self.pool is not None:
                self.states[sequence.request.id, sequence.index] = self.last_states(sequence)
            return self.scheduler.finish(sequence, "length")
        contiguous = path == list(range(len(path)))
        assert contiguous, "the right branch of these trees comes first"
        self.scheduler.append(sequence, given[done : len(rows)])
        self.propose(sequence, given[len(rows) : len(rows) + 2])
        return None

    def last_states(self, sequence):
        """Of the last LAST tokens that are decided and have been run, whatever drafts the last step had."""
        stop = PROMPT + GIVEN - 3
        return self.pool.read(slots(self.manager.readable(sequence.id), stop - LAST, stop, B))

    def propose(self, sequence, right):
        if self.turns % 2 and "speculation" in self.on:
            sequence.drafts = [*right[:1], 7]
        elif "tree" in self.on and len(right) == 2:
            sequence.drafts, sequence.parents = [right[0], right[1], 8, 9], [0, 1, 0, 3]

    def finish(self):
        while not self.scheduler.idle:
            self.step()
        assert self.manager.free + self.manager.cached == 24
        return {name: (torch.stack(rows), self.states.get(name)) for name, rows in self.rows.items()}


def alone(runner, name, index):
    """The same sequence alone."""
    drive = Drive(runner, ())
    drive.add(name, 1)
    only = TEXTS[name][1]
    only[0], only[index] = only[index], only[0]
    actual = drive.finish()[name, 0]
    only[0], only[index] = only[index], only[0]
    return actual


@pytest.mark.few(3)
@pytest.mark.parametrize("parts", scenarios(), ids=lambda parts: "-".join(part for part in parts if part))
def test_what_the_table_allows_works(parts):
    if parts[3] == "compiled" and no_compiler():
        pytest.skip("no C++ compiler")
    on, runner = scheduling(parts), runner_of(*parts)
    drive = Drive(runner, on, chunk=24)
    drive.add("a", 2)
    for _ in range(4):
        drive.step()
    drive.add("b", 1)
    actual = drive.finish()
    assert drive.scheduler.preemptions == 1
    assert ("prefix_reuse" in on) == (drive.manager.stats.hit >= 64)
    bound = sum(bound for part, bound in BOUNDS.items() if part in parts)
    for (name, index), (rows, states) in actual.items():
        want, wanted_states = alone(runner, name, index)
        if "hidden_states" in on:
            off = (states - wanted_states).norm() / wanted_states.norm()
            assert off < (bound or 0.01), f"states of text {index} of {name} are off by {off:.2g}"
        assert rows.shape == want.shape == (GIVEN + 1, tiny_models.VOCABULARY)
        error = float((rows - want).norm() / want.norm())
        assert error < (bound or 1e-4), f"text {index} of {name} is off by {error:.2g}"
    assert {name: len(rows) for name, (rows, _) in actual.items()} == {
        ("a", 0): 13,
        ("a", 1): 13,
        ("b", 0): 13,
    }


def test_every_pair_that_is_allowed_is_in_a_scenario():
    seen = set()
    for parts in scenarios():
        every = [*(part for part in parts if part), *scheduling(parts)]
        seen |= {frozenset(pair) for pair in itertools.combinations(every, 2)}
    allowed = {frozenset(pair) for pair in itertools.combinations(FEATURES, 2) if reason(*pair) is None}
    # these say something of different models
    assert allowed - seen == {frozenset(pair) for pair in itertools.combinations(MODELS, 2)}


def refused():
    """Every store and model with every method and runner that the table refuses for them."""
    for one, two in itertools.product((*STORES, *MODELS), EVICTIONS):
        if reason(one, two):
            yield one, two


@pytest.mark.parametrize(("one", "two"), refused())
def test_what_the_table_refuses_is_refused_when_it_is_loaded(one, two):
    parts = (one if one in STORES else "dense", two, one if one in MODELS else None, "modules")
    with pytest.raises((SettingsError, ModelError)) as actual:
        runner_of(*parts)
    messages = str(actual.value)
    assert reason(one, two) in messages or "rotate" in messages or "rotary" in messages
