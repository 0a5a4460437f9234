"""Proposers of ``speculate.py`` without a model: an oracle, and n-grams over given sequences."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ngrams
from ngrams import NgramIndex, NgramProposer, SharedNgrams

from attar.data.python_text import texts
from attar.models.loading.load import load_tokenizer
from attar.runtime.speculate.draft import LEVELS, Draft, DraftBuilder
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, Proposer
from attar.runtime.speculate.suffix import SuffixProposer
from attar.runtime.speculate.suffix_tree import suffix_tree

START = 64  # tokens of a prompt


class Oracle:
    """Knows the output of plain decoding, and drafts each token correctly with a given probability.

    Args:
        texts: prompts with their continuations.
        chance: a; 0: always wrong.
        step: run for every draft, as a draft model would be; None: drafts are free.
        vocabulary: of the wrong tokens.
    """

    samples_from_q, needs_full_tree = False, False

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        chance: float,
        step: Callable[[int], None] | None = None,
        vocabulary: int = 32000,
        seed: int = 0,
    ) -> None:
        self.texts, self.chance, self.step = [list(text) for text in texts], chance, step
        self.vocabulary, self._draws = vocabulary, random.Random(seed)
        self.name, self.is_free_of_compute = "oracle", step is None

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._proposed(request) for request in requests]

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass

    def _proposed(self, request: DraftRequest) -> Draft | None:
        done = len(request.tokens)
        text = next((all for all in self.texts if all[:done] == list(request.tokens)), None)
        if text is None:
            return None
        ahead = text[done : done + request.most]
        if self.step is not None:
            for offset in range(len(ahead)):
                self.step(done + offset)
        right = (self._draws.random() < self.chance for _ in ahead)
        tokens = [t if good else (t + 1) % self.vocabulary for t, good in zip(ahead, right, strict=True)]
        return Draft.chain(tokens) if tokens else None


class Earliest(NgramProposer):
    """Of equal matches the first in the text, as vLLM takes it."""

    def _grow(
        self, tree: DraftBuilder, index: NgramIndex, matches: Sequence[tuple[int, int]], reach: int
    ) -> None:
        super()._grow(tree, index, sorted(matches, key=lambda match: (-match[0], match[1])), reach)


def code(count: int, length: int) -> list[list[int]]:
    """Token ids of source files, by attar:tiny's tokenizer."""
    tokenizer: Any = load_tokenizer("attar:tiny")
    rows = []
    for _, text in texts("evaluation"):
        ids = tokenizer(text, verbose=False)["input_ids"][:length]
        if len(ids) == length:
            rows.append(ids)
        if len(rows) == count:
            break
    return rows


def print_ngram_figures(count: int, length: int, most: int) -> None:
    """Tokens a pass as if the target generated the text, and how often a first draft is right."""
    ids = code(count, length)
    print(f"n-grams on {len(ids)} files of code, {length} tokens each, {most} drafts at most")
    ways: dict[str, Callable[[], NgramProposer]] = {
        "latest, 1 branch": lambda: NgramProposer(branches=1),
        "earliest, 1 branch": lambda: Earliest(branches=1),
        "latest, 3 branches": lambda: NgramProposer(branches=3),
        "latest, 3 branches, shared": lambda: NgramProposer(branches=3, shared=SharedNgrams()),
    }
    walk = ngrams.WALK
    for name, make in ways.items():
        ngrams.WALK = length if name.startswith("earliest") else walk
        proposer, tokens, passes = make(), 0, 0
        for number, text in enumerate(ids):
            tokens += len(text) - START
            passes += _followed(proposer, number, text, most)
        print(f"  {name:28}{tokens / passes:6.2f} tokens a pass")
    ngrams.WALK = walk
    _print_by_match(ids)


def print_suffix_figures(count: int, length: int, most: int) -> None:
    """Suffix trees and n-grams: tokens a pass as if the target generated the text, and the time of asking."""
    ids = code(count, length)
    print(f"{len(ids)} files of code, {length} tokens each, {most} drafts at most")
    ways: dict[str, Callable[[], Proposer]] = {
        "n-grams, 3 branches, shared": lambda: NgramProposer(branches=3, shared=SharedNgrams()),
        "suffix trees": SuffixProposer,
        "suffix trees, factor 1": lambda: SuffixProposer(factor=1.0),
    }
    suffix_tree()  # compiles
    for name, make in ways.items():
        proposer, tokens, passes, clock = make(), 0, 0, Clock()
        for number, text in enumerate(ids):
            tokens += len(text) - START
            passes += _followed(proposer, number, text, most, clock)
        asking, drafts = 1e6 * statistics.median(clock.seconds), clock.drafts / passes
        print(
            f"  {name:28}{tokens / passes:6.2f} tokens, {drafts:5.2f} drafts a pass,"
            f"{asking:5.1f} us to ask (median)"
        )


LATENCIES = {  # milliseconds of a pass over n tokens, measured: docs/speculation.md
    "attar:tiny": {1: 0.366, 2: 0.366, 3: 0.547, 5: 0.631, 9: 0.944},
    "1.1 B int4": {1: 18.1, 3: 20.6, 4: 20.6, 5: 22.8, 7: 28.5},
}


def print_policy_figures(count: int, length: int) -> None:
    """As the policy chooses, with the times of LATENCIES and without that of asking: nothing is measured."""
    generator = random.Random(0)
    record = [generator.randrange(4000) for _ in range(60)]
    records = [[token if generator.random() < 0.95 else generator.randrange(4000) for token in record * 20]
               for _ in range(4)]  # fmt: skip
    noise = [[generator.randrange(300) for _ in range(length)] for _ in range(4)]
    sets = {"code": code(count, length), "records": [row[:length] for row in records], "noise": noise}
    ways: dict[str, Callable[[], Proposer]] = {
        "n-grams": lambda: NgramProposer(shared=SharedNgrams()),
        "suffix trees": SuffixProposer,
    }
    for model, times in LATENCIES.items():
        for name, rows in sets.items():
            shown = [f"{way} {_speedup(make(), rows, times):5.2f}" for way, make in ways.items()]
            print(f"  {model:12}{name:9} speedup, as chosen: {', '.join(shown)}")


def _speedup(proposer: Proposer, rows: Sequence[Sequence[int]], times: dict[int, float]) -> float:
    """Of sequences that the target generates as they are."""
    policy, seconds, tokens, pause = DraftPolicy(Latency(times), 40), 0.0, 0, 0
    for number, row in enumerate(rows):
        done = START
        while done < len(row):
            draft, start, pause = None, done, pause - 1
            if pause < 0 and policy.open:
                (found,) = proposer.propose([DraftRequest(number, row[:done], 40)])
                (draft,) = policy.select([number], [found])
            path = [] if draft is None else _accepted(draft, row[done:-1])
            done += len(path) + 1
            took = policy.latency.target(1, 1 + len(draft or ()))
            feedback = [DraftFeedback(number, draft, tuple(path), row[start:done])]
            policy.note(feedback, took)
            proposer.observe(feedback)
            pause = policy.budget.closed_passes if pause < 0 else pause
            seconds, tokens = seconds + took, tokens + done - start
        proposer.forget(number)
        policy.forget(number)
    return tokens / seconds * times[1]


def _accepted(draft: Draft, text: Sequence[int]) -> list[int]:
    """Nodes of the draft that are the text."""
    node, path = 0, list[int]()
    for token in text:
        node = next((child for child in draft.children(node) if draft.tokens[child - 1] == token), 0)
        if not node:
            break
        path.append(node)
    return path


@dataclass
class Clock:
    """What a proposer took and gave."""

    seconds: list[float] = field(default_factory=list)
    drafts: int = 0


def _followed(
    proposer: Proposer, number: int, text: Sequence[int], most: int, clock: Clock | None = None
) -> int:
    """Passes that a sequence takes."""
    done, passes, clock = START, 0, clock or Clock()
    while done < len(text):
        request = DraftRequest(number, text[:done], most)
        began = time.perf_counter()
        draft = proposer.propose([request])[0]
        clock.seconds.append(time.perf_counter() - began)
        clock.drafts += len(draft or ())
        node = 0
        while draft is not None and done < len(text) - 1:
            hits = [child for child in draft.children(node) if draft.tokens[child - 1] == text[done]]
            if not hits:
                break
            node, done = hits[0], done + 1
        done, passes = done + 1, passes + 1
    proposer.forget(number)
    return passes


def _print_by_match(ids: Sequence[Sequence[int]]) -> None:
    """At every position of the sequences."""
    seen: Counter[int] = Counter()
    right: Counter[int] = Counter()
    for number, text in enumerate(ids):
        proposer = NgramProposer(branches=1)
        for done in range(START, len(text)):
            draft = proposer.propose([DraftRequest(number, text[:done], 1)])[0]
            if draft is not None and draft.kinds is not None:
                matched = draft.kinds[0] % LEVELS
                seen[matched] += 1
                right[matched] += draft.tokens[0] == text[done]
    groups = [(n, n) for n in (1, 2, 3, 4, 5, 6, 7)] + [(8, LEVELS)]
    for low, high in groups:
        total = sum(seen[n] for n in range(low, high + 1))
        if total:
            share = sum(right[n] for n in range(low, high + 1)) / total
            name = f"{low}" if low == high else f"{low} and more"
            print(f"  first draft right where {name:10} tokens match: {share:5.1%} of {total}")
