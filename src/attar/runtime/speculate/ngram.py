"""Drafts from what was written before: where the text's end occurred already, it goes on as it did there.

    own text     the longest match of the last tokens, of ``longest`` at most, the latest of equals first;
    up to
                 ``branches`` continuations that differ, as one tree
    shared       what followed the last ``context`` tokens in other texts of the same tenant (``grams.py``),
                 token by token; where the own text says nothing as long

Acceptance is counted by how many tokens matched before a draft (its kind), for that decides it: on Python
code the first draft is right in 24 % of matches of one token, 51 % of two, 63 % of four, 80 % of eight and
more (``benchmarks/speculate.py --parts ngram``). So matches of one token are proposed too, and the chooser
drops them where they do not pay.

Asking costs microseconds: a new token is one entry in a chain for each of three lengths (the links of LZ77,
with the tokens themselves as keys), a wish walks at most WALK links. No model, no q: drafts are fixed.

Source: prompt lookup (Saxena, 2023; transformers takes the first match of 2 tokens, vLLM the longest,
earliest). Differs: latest, not earliest, occurrence: 1.65 against 1.56 tokens a pass on that code, matches
of up to 8 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.grams import SharedNgrams
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.trie import DraftBuilder

LENGTHS = (4, 2, 1)  # of the keys, the longest first
WALK = 16  # occurrences looked at for each length
NEAR = 4  # tokens of a continuation that are looked at in any case
OWN, OTHER, SHARED = 1, 2, 3  # groups of kinds: the best match, a branch beside it, other texts


class NgramIndex:
    """Where every token of a text was, and what was before it.

    Args:
        tokens: of the text so far.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._last: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in LENGTHS)
        self._before: tuple[list[int], ...] = tuple([] for _ in LENGTHS)
        self.reach = 1 << 30  # tokens of a continuation, as it has paid
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens; O(1) for each."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size, last, before in zip(LENGTHS, self._last, self._before, strict=True):
                key = tuple(self.tokens[max(end - size, 0) :])
                before.append(last.get(key, 0))
                last[key] = end

    def matches(self, longest: int) -> list[tuple[int, int]]:
        """(tokens that match, where it goes on) of earlier occurrences of the text's end: the longest match
        first, of equal ones the latest; at most WALK of each length of key.
        """
        end = len(self.tokens)
        found: dict[int, int] = {}
        for size, before in zip(LENGTHS, self._before, strict=True):
            place = before[-1] if end > size else 0
            for _ in range(WALK):
                if place < size:
                    break
                if place not in found:
                    found[place] = self._length(place, longest)
                place = before[place - 1]
        return sorted(((count, place) for place, count in found.items()), reverse=True)

    def onwards(self, place: int, reach: int) -> list[int]:
        """The tokens from ``place`` on; what would lie behind the end repeats, as the text seems to do."""
        period = len(self.tokens) - place
        return [self.tokens[place + ahead % period] for ahead in range(reach)]

    def copy(self) -> NgramIndex:
        """Another index of the same tokens."""
        child = NgramIndex()
        child.tokens, child.reach = self.tokens.copy(), self.reach
        child._last = tuple(each.copy() for each in self._last)
        child._before = tuple(each.copy() for each in self._before)
        return child

    def _length(self, place: int, longest: int) -> int:
        """How many tokens before ``place`` are as those at the end."""
        end, count = len(self.tokens), 0
        while count < min(longest, place) and self.tokens[place - count - 1] == self.tokens[end - count - 1]:
            count += 1
        return count


class NgramProposer:
    """Proposes what followed before.

    Args:
        longest: most tokens of a match; longer ones are as good.
        shortest: fewest.
        reach: tokens of a continuation at most.
        branches: continuations at most.
        ends: tokens that end a text: nothing is proposed behind one.
        shared: what other texts said; None: only the own text is looked at.
    """

    name, free, draws, looks = "ngram", True, False, False

    def __init__(
        self,
        *,
        longest: int = 16,
        shortest: int = 1,
        reach: int = 16,
        branches: int = 3,
        ends: Sequence[int] = (),
        shared: SharedNgrams | None = None,
    ) -> None:
        self.longest, self.shortest, self.reach, self.branches = longest, shortest, reach, branches
        self.ends, self.shared = frozenset(ends), shared
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft | None]:
        """A tree of at most ``most`` drafts for each wish."""
        return [self._proposed(wish) for wish in wishes]

    def observe(self, news: Sequence[DraftFeedback]) -> None:
        """How deep the drafts were that were run says how far the next ones look ahead."""
        for each in news:
            if each.sequence in self._indices:
                depth = 0 if each.draft is None else len(each.draft.counts)
                self._indices[each.sequence].reach = min(2 * depth + NEAR, self.reach)

    def fork(self, sequence: int, child: int) -> None:
        """``child`` begins with the tokens of ``sequence``."""
        if sequence in self._indices:
            self._indices[child] = self._indices[sequence].copy()

    def forget(self, sequence: int) -> None:
        """A sequence ended; what it said stays in the shared grams."""
        self._indices.pop(sequence, None)

    def _proposed(self, wish: DraftRequest) -> Draft | None:
        index = self._followed(wish)
        tree = DraftBuilder(self.ends, wish.most)
        matches = [each for each in index.matches(self.longest) if each[0] >= self.shortest]
        strong = [each for each in matches if not self.shared or each[0] >= self.shared.context]
        reach = min(index.reach, self.reach)
        self._grow(tree, index, strong, reach)
        if self.shared is not None and tree.roots < self.branches:
            for guess in self.shared.continuations(wish.salt, index.tokens, reach):
                if guess[0] in tree or tree.roots < self.branches:
                    tree.add(guess, [kind_of(SHARED, depth) for depth in range(1, len(guess) + 1)])
        self._grow(tree, index, matches[len(strong) :], reach)
        return tree.draft()

    def _grow(
        self, tree: DraftBuilder, index: NgramIndex, matches: Sequence[tuple[int, int]], reach: int
    ) -> None:
        for count, place in matches:
            if tree.roots >= self.branches and index.tokens[place] not in tree:
                continue
            group = OTHER if tree.roots else OWN
            guess = index.onwards(place, reach)
            tree.add(guess, [kind_of(group, count + ahead) for ahead in range(len(guess))])

    def _followed(self, wish: DraftRequest) -> NgramIndex:
        """The sequence's index, up to its last token; what is new is shared."""
        index = self._indices.setdefault(wish.sequence, NgramIndex())
        seen, now = len(index.tokens), len(wish.tokens)
        if now > seen:
            index.extend(wish.tokens[seen:])
            if self.shared is not None:
                self.shared.add(wish.salt, index.tokens, seen)
        return index
