"""Lookahead decoding: the target generates n-grams by Jacobi iteration in a window of every pass.

    window    R rows of W columns, R = 1 at first and N - 1 when warm. Cell (r, c) guesses the token
              c + r + 1 positions after the last decided one. (0, c) follows (0, c - 1), (r, c) follows
              (r - 1, c), (0, 0) the last token: the target's choices after row R - 1 are a new row
    pool      column c and its new choice are an n-gram: the first token is the key, the others the guess;
              at most G guesses a key, the latest first, and KEYS keys, the least recently used dropped
    guesses   those of the pool under the last token, each a chain that follows it

All are one tree of fixed drafts. Equal siblings are one node, as their context is the same: a guess that
begins like the window shares its cells, and a cell of row 1 may be the next cell of row 0. Every node may be
accepted, those of the window too. A guess that matches completely yields N tokens: its N - 1 and the target's
next one.

After a pass with n + 1 new tokens, a warm window with a new row drops row 0, which moves it by one position;
then the n leading columns (n + 1 if no row was dropped) are dropped. New columns on the right continue with
the pool's latest guess, else with a random token of the sequence (only speed depends on it).

A pass runs at most W (N - 1) + G (N - 1) drafts; the policy runs all or none (``DraftPolicy.select``). With
sampling the window still advances by the target's likeliest tokens.

Source: Fu et al. 2024 (arXiv 2402.02057), ``lade/decoding.py``. Differs: equal nodes of the tree are merged;
columns keep their positions when several tokens are accepted; a complete match gives N tokens, there N - 1;
the key is the column's own first token.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from attar.runtime.speculate.draft import Draft, DraftBuilder, kind_of
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest

KEYS = 4096
GUESS, WINDOW = 4, 5  # groups of kinds


class NgramPool:
    """Continuations by the token before them.

    Args:
        per_key: guesses of a key at most.
        most: keys at most.
    """

    def __init__(self, per_key: int, most: int = KEYS) -> None:
        self.per_key, self.most = per_key, most
        self._guesses: OrderedDict[int, tuple[tuple[int, ...], ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._guesses)

    def add(self, key: int, guess: Sequence[int]) -> None:
        """Add a guess as the latest of its key."""
        guess = tuple(guess)
        known = self._guesses.pop(key, ())
        self._guesses[key] = (guess, *(other for other in known if other != guess))[: self.per_key]
        if len(self._guesses) > self.most:
            self._guesses.popitem(last=False)

    def after(self, key: int) -> tuple[tuple[int, ...], ...]:
        """Guesses of a key, the latest first."""
        if key not in self._guesses:
            return ()
        self._guesses.move_to_end(key)
        return self._guesses[key]


class LookaheadWindow:
    """The window of one sequence, and the nodes of its cells in the current draft.

    Args:
        columns: W.
        size: N.
        pool: its guesses fill new columns, and columns become its guesses.
        seed: of the random tokens where the pool has no guess.
    """

    def __init__(self, columns: int, size: int, pool: NgramPool, seed: int = 0) -> None:
        self.columns, self.size, self.pool = columns, size, pool
        self.rows: list[list[int]] = []
        self.tokens: list[int] = []
        self.cells: list[int] = []  # nodes of the last row in the current draft; empty: not in it
        self._random = random.Random(seed)

    @property
    def warm(self) -> bool:
        return len(self.rows) == self.size - 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the sequence's tokens so far: new n-grams enter the pool. The first call fills the window."""
        start = max(len(self.tokens) - self.size + 1, 0)
        self.tokens += tokens[len(self.tokens) :]
        for index in range(start, len(self.tokens) - self.size + 1):
            self.pool.add(self.tokens[index], self.tokens[index + 1 : index + self.size])
        if not self.rows:
            self.rows = [[]]
            self._fill()

    def add_to(self, tree: DraftBuilder) -> None:
        """Add the cells to the tree, column by column; unless all fit, the window does not advance."""
        above = tree.add(self.rows[0], [kind_of(WINDOW, 1)] * self.columns)
        complete = len(above) == self.columns
        for row in self.rows[1:]:
            if not complete:
                break
            below = [
                tree.add([token], [kind_of(WINDOW, 2)], node) for token, node in zip(row, above, strict=True)
            ]
            complete = all(below)
            above = [node for nodes in below for node in nodes]
        self.cells = above if complete else []

    def advance(self, accepted: int, choices: Sequence[int]) -> None:
        """Advance after a pass with ``accepted`` drafts and the token after them.

        Args:
            choices: the target's likeliest token after nodes 0..n; unused if the window was not run.
        """
        dropped = accepted + 1
        if self.cells and choices:
            newest = [choices[node] for node in self.cells]
            if self.warm:
                for key, *guess in zip(*self.rows, newest, strict=True):
                    self.pool.add(key, guess)
                del self.rows[0]
                dropped -= 1
            self.rows.append(newest)
        self.cells = []
        self.rows = [row[dropped:] for row in self.rows]
        self._fill()

    def _fill(self) -> None:
        """Extend all rows to W columns."""
        while len(self.rows[0]) < self.columns:
            before = self.rows[0][-1] if self.rows[0] else self.tokens[-1]
            for row in self.rows:
                known = self.pool.after(before)
                row.append(known[0][0] if known else self._random.choice(self.tokens))
                before = row[-1]


class LookaheadProposer:
    """Proposes the window and the guesses.

    Args:
        columns: W.
        size: N, tokens of an n-gram, 2 or more.
        guesses: G.
        ends: end tokens: nothing is proposed after one.
        seed: of the window's first tokens.
    """

    name, is_free_of_compute, samples_from_q, needs_full_tree = "lookahead", True, False, True

    def __init__(
        self, columns: int = 5, size: int = 4, guesses: int = 5, ends: Sequence[int] = (), seed: int = 0
    ) -> None:
        assert columns >= 1 and size >= 2 and guesses >= 1, f"W {columns}, N {size}, G {guesses}"
        self.columns, self.size, self.guesses = columns, size, guesses
        self.ends, self.seed = frozenset(ends), seed
        self._windows: dict[int, LookaheadWindow] = {}

    @property
    def drafts(self) -> int:
        """Most drafts of a pass."""
        return (self.columns + self.guesses) * (self.size - 1)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """The tree of each request; the window only where ``most`` allows all of it and the guesses."""
        return [self._proposed(request) for request in requests]

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Advance the windows."""
        for verified in feedback:
            if verified.sequence in self._windows:
                window = self._windows[verified.sequence]
                if verified.draft is None:
                    window.cells = []  # proposed, but not run
                window.advance(len(verified.tokens) - 1, verified.choices)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._windows.pop(sequence, None)

    def _proposed(self, request: DraftRequest) -> Draft | None:
        window = self._windows.get(request.sequence)
        if window is None:
            window = LookaheadWindow(self.columns, self.size, NgramPool(self.guesses), self.seed)
            self._windows[request.sequence] = window
        window.extend(request.tokens)
        tree = DraftBuilder(self.ends, request.most)
        kinds = [kind_of(GUESS, depth) for depth in range(1, self.size)]
        for guess in window.pool.after(request.tokens[-1]):
            tree.add(guess, kinds)
        window.add_to(tree)
        return tree.draft()
