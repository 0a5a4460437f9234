"""Lookahead decoding: the target guesses its own n-grams in a Jacobi window that is part of every pass.

    window    R rows of W columns, R = 1 while it begins and N - 1 when it is warm. Cell (r, c) guesses the
              token c + r + 1 positions after the last decided one. (0, c) follows (0, c - 1), (r, c) follows
              (r - 1, c), (0, 0) the last token: so the target's choice after (R - 1, c) is a new row
    pool      column c and its choice are N tokens in a row: the first is a key, the N - 1 after it a guess;
              G guesses a key, the latest first; KEYS keys, the least recently used are dropped
    guesses   what the pool holds under the last token, each a chain that follows it

All form one tree of fixed tokens. Equal siblings are one node, because what follows has the same context: a
guess that begins like the window shares its cells, and a cell of row 1 that equals the next of row 0 is that
cell. Every node may be accepted, the window's too. A guess that matches in full gives N tokens: its N - 1 and
the target's own after them.

After a pass that gave n + 1 tokens: with a new row and a warm window row 0 is dropped, which moves the window
by one position; the other n (n + 1 where no row was dropped) leading columns are dropped, and as many are
added on the right, from the pool where it has a next token, else a random token of the sequence (only speed
depends on it).

A pass runs W (N - 1) + G (N - 1) drafts at most, whatever is accepted; the policy runs all or none
(``DraftPolicy.select``). Sampling changes nothing: the window moves by the target's likeliest tokens.

Source: Fu et al. 2024 (arXiv 2402.02057), ``lade/decoding.py``. Differs: the tree merges equal nodes;
columns keep their positions when several tokens come at once; a full match gives N tokens, there N - 1;
keys are the column's own first token.
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
        """A guess was seen: it becomes the latest of its key."""
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
    """The rows of one sequence, and where its cells are in the draft under way.

    Args:
        columns: W.
        size: N.
        pool: fills columns, and is fed by them.
        seed: of the tokens drawn where the pool has none.
    """

    def __init__(self, columns: int, size: int, pool: NgramPool, seed: int = 0) -> None:
        self.columns, self.size, self.pool = columns, size, pool
        self.rows: list[list[int]] = []
        self.text: list[int] = []
        self.cells: list[int] = []  # nodes of the newest row in the current draft; empty: not in it
        self._random = random.Random(seed)

    @property
    def warm(self) -> bool:
        return len(self.rows) == self.size - 1

    def follow(self, tokens: Sequence[int]) -> None:
        """The sequence's tokens so far; new ones are added to the pool. The first call begins the window."""
        start = max(len(self.text) - self.size + 1, 0)
        self.text += tokens[len(self.text) :]
        for index in range(start, len(self.text) - self.size + 1):
            self.pool.add(self.text[index], self.text[index + 1 : index + self.size])
        if not self.rows:
            self.rows = [[]]
            self._fill()

    def plant(self, tree: DraftBuilder) -> None:
        """Add the cells to the tree, column by column; ``cells`` is set only where all of them fit."""
        above = tree.add(self.rows[0], [kind_of(WINDOW, 1)] * self.columns)
        whole = len(above) == self.columns
        for row in self.rows[1:]:
            if not whole:
                break
            below = [
                tree.add([token], [kind_of(WINDOW, 2)], node) for token, node in zip(row, above, strict=True)
            ]
            whole = all(below)
            above = [node for nodes in below for node in nodes]
        self.cells = above if whole else []

    def advance(self, accepted: int, choices: Sequence[int]) -> None:
        """Move the window after a pass with ``accepted`` drafts and the token after them.

        Args:
            choices: the target's likeliest token after 0 and every draft; used where the window was in it.
        """
        gone = accepted + 1
        if self.cells and choices:
            newest = [choices[node] for node in self.cells]
            if self.warm:
                for key, *guess in zip(*self.rows, newest, strict=True):
                    self.pool.add(key, guess)
                del self.rows[0]
                gone -= 1
            self.rows.append(newest)
        self.cells = []
        self.rows = [row[gone:] for row in self.rows]
        self._fill()

    def _fill(self) -> None:
        """Makes all rows W long."""
        while len(self.rows[0]) < self.columns:
            before = self.rows[0][-1] if self.rows[0] else self.text[-1]
            for row in self.rows:
                known = self.pool.after(before)
                row.append(known[0][0] if known else self._random.choice(self.text))
                before = row[-1]


class LookaheadProposer:
    """Proposes window and guesses.

    Args:
        columns: W.
        size: N, tokens of an n-gram, 2 or more.
        guesses: G.
        ends: tokens that end a sequence: nothing is proposed after one.
        seed: of what the window begins with.
    """

    name, free, draws, learns_tree = "lookahead", True, False, True

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
        """The tree of each request; the window only where all of it and the guesses fit in ``most``."""
        return [self._proposed(request) for request in requests]

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Moves the windows on."""
        for one in feedback:
            if one.sequence in self._windows:
                window = self._windows[one.sequence]
                if one.draft is None:
                    window.cells = []  # proposed, but not run
                window.advance(len(one.tokens) - 1, one.choices)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._windows.pop(sequence, None)

    def _proposed(self, request: DraftRequest) -> Draft | None:
        window = self._windows.get(request.sequence)
        if window is None:
            window = LookaheadWindow(self.columns, self.size, NgramPool(self.guesses), self.seed)
            self._windows[request.sequence] = window
        window.follow(request.tokens)
        tree = DraftBuilder(self.ends, request.most)
        kinds = [kind_of(GUESS, depth) for depth in range(1, self.size)]
        for guess in window.pool.after(request.tokens[-1]):
            tree.add(guess, kinds)
        window.plant(tree)
        return tree.draft()
