"""Drives a runner by hand: block tables out of a shuffled list, spans of any cut, greedy tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from attar.runtime.step import StepInput, TokenSpan


@dataclass
class Driven:
    """A sequence: its tokens, how many are computed, its block table."""

    number: int
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Driver:
    """Allocates blocks, never twice, and runs the given spans in one step."""

    def __init__(self, runner, seed=0):
        self.runner = runner
        self.free = list(range(runner.capacity))
        random.Random(seed).shuffle(self.free)
        self.count = 0

    def add(self, tokens, shared=None, upto=0):
        """A new sequence; places [0, upto) are another one's, whole blocks as they are."""
        size = self.runner.block_size
        assert upto % size == 0
        blocks = list(shared.blocks[: upto // size]) if shared else []
        result = Driven(self.count, list(tokens), upto, blocks)
        self.count += 1
        return result

    def fork(self, parent):
        """A copy that shares all blocks; the partial tail is copied. Returns (sequence, copies)."""
        child = self.add(parent.tokens)
        child.computed, child.blocks = parent.computed, list(parent.blocks)
        copies = ()
        if parent.computed % self.runner.block_size:
            tail = self.free.pop()
            copies = ((child.blocks[-1], tail),)
            child.blocks[-1] = tail
        return child, copies

    def span(self, sequence, stop, wants):
        while len(sequence.blocks) * self.runner.block_size < stop:
            sequence.blocks.append(self.free.pop())
        return TokenSpan(sequence.number, sequence.computed, stop, tuple(sequence.blocks), wants)

    def run(self, *parts, copies=()):
        """Parts are (sequence, tokens to run, None: all that are left); the last logits of each, or None."""
        spans, tokens, done = [], [], []
        for sequence, count in parts:
            stop = len(sequence.tokens) if count is None else sequence.computed + count
            whole = stop == len(sequence.tokens)
            spans.append(self.span(sequence, stop, int(whole)))
            tokens += sequence.tokens[sequence.computed : stop]
            done.append(whole)
            sequence.computed = stop
        step = StepInput(tokens, tuple(spans), tuple(copies))
        step.check(self.runner.block_size, self.runner.capacity)
        rows = iter(self.runner.run(step))
        return [next(rows) if whole else None for whole in done]

    def extend(self, *sequences, count, cut=None, copies=()):
        """Greedy: ``count`` tokens for each; prompts run in chunks of ``cut``. The new tokens of each."""
        ends = {one.number: len(one.tokens) + count for one in sequences}
        while left := [one for one in sequences if len(one.tokens) < ends[one.number]]:
            chunks = [None if cut is None else min(cut, len(one.tokens) - one.computed) for one in left]
            result = self.run(*zip(left, chunks, strict=True), copies=copies)
            copies = ()
            for one, row in zip(left, result, strict=True):
                if row is not None:
                    one.tokens.append(int(row.argmax()))
        return [one.tokens[-count:] for one in sequences]


@torch.no_grad()
def greedy(model, prompt, count):
    """The tokens of plain transformers."""
    rows = torch.tensor([prompt])
    generated = model.generate(
        input_ids=rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
    )
    return generated[0, len(prompt) :].tolist()
