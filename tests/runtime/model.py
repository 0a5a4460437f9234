"""A runner without a model: a slot holds a number made of its token, its position and the slot before it.

So any wrong slot, order, copy or position changes every token that follows. ``text`` says what must come out.
"""

import numpy as np

M = 2**61 - 1
VOCABULARY = 50


def mixed(state, token, position):
    return (state * 6_364_136_223_846_793_005 + token * 1_442_695_040_888_963_407 + position + 1) % M


def drawn(state, index=0):
    """The token that text ``index`` takes after a state."""
    return (state // 7 + index * 13) % VOCABULARY


def text(prompt, count, index=0):
    """The ``count`` tokens that follow a prompt."""
    state, tokens = 0, list(prompt)
    for position, token in enumerate(prompt):
        state = mixed(state, token, position)
    while len(tokens) < len(prompt) + count:
        tokens.append(drawn(state, index))
        state = mixed(state, tokens[-1], len(tokens) - 1)
    return tokens[len(prompt) :]


class Runner:
    """Runs steps on integers; ``run`` returns states, one for each wanted row."""

    def __init__(self, capacity, block_size):
        self.block_size, self.capacity = block_size, capacity
        self.states = [None] * (capacity * block_size)
        self.kept, self.runs, self.tokens = {}, 0, 0

    def run(self, step):
        B = self.block_size
        step.check(B, self.capacity)
        for old, new in step.copies:
            self.states[new * B : new * B + B] = self.states[old * B : old * B + B]
        self.runs, self.tokens = self.runs + 1, self.tokens + step.count
        wanted, offset = [], 0
        for span in step.spans:
            slots = np.concatenate([[-1], span.context(B)])[
                span.offset :
            ].tolist()  # the one before comes first
            state = self.states[slots[0]] if span.start else 0
            assert state is not None, f"{span} reads a slot that was never written"
            results = []
            for i in range(span.count):
                state = mixed(state, step.tokens[offset + i], span.start + i)
                self.states[slots[i + 1]] = state
                results.append(state)
            offset += span.count
            wanted += results[span.count - span.wants :]
            assert span.start == 0 or self.kept.get(span.sequence, span.start) >= span.start
            self.kept[span.sequence] = span.stop
        return wanted

    def fork(self, sequence, child):
        self.kept[child] = self.kept[sequence]

    def forget(self, sequence):
        self.kept.pop(sequence, None)


def preempt_all(scheduler, step):
    """A step failed: what it would have written is not there, so its sequences begin again."""
    for span in step.spans:
        if span.sequence in scheduler._live:
            scheduler._preempt(scheduler._live[span.sequence])
