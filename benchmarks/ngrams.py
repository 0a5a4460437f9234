"""What suffix trees replaced: n-gram drafts, the continuations of earlier occurrences of the last tokens.

    own        the longest match of the last tokens, at most ``longest``, the latest of equal ones first;
               up to ``branches`` different continuations as one tree
    shared     the tokens after the last ``context`` tokens in other sequences of the tenant, token by token;
               where the own sequence has no match of that length

The acceptance rate is counted by the number of tokens that matched before a draft (its kind), on which it
depends most: on Python code the first draft is accepted in 24 % of matches of one token, 51 % of two, 63 % of
four, 80 % of eight and more (``benchmarks/speculate.py --parts ngram``). So matches of one token are proposed
too, and the policy drops them where they do not pay.

A proposal takes microseconds: a new token adds a link to a chain for each of three lengths (the hash chains
of LZ77, with the tokens themselves as keys), a request follows at most WALK links. Drafts are fixed: no q.

Sources: prompt lookup (Saxena, 2023; transformers takes the first match of 2 tokens, vLLM the longest,
earliest). Differs: the latest, not the earliest occurrence: 1.65 against 1.56 tokens a pass on that code,
matches of up to 8 tokens. The shared table: llama.cpp's ngram-mod (a rolling-hash table, 24 tokens a key, 16
MB for all requests). Differs: salts; exact keys; several continuations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attar.runtime.speculate.draft import Draft, DraftBuilder, kind_of
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest

LENGTHS = (4, 2, 1)  # of the keys, the longest first
WALK = 16  # occurrences that are compared for each length
NEAR = 4  # tokens of a continuation that are proposed in any case
NEXT = 3  # continuations of a key of the shared table
OWN, OTHER, SHARED = 1, 2, 3  # groups of kinds: the best match, a branch next to it, other sequences


class SharedNgrams:
    """The tokens that followed n tokens in any sequence of a tenant: a bounded table for all its requests.

    Keys are the tokens themselves with the tenant's salt, so tenants share nothing and keys never collide. A
    key holds the last NEXT different tokens that followed it, the latest first. The least recently used keys
    are dropped.

    Args:
        context: tokens of a key.
        most: keys at most; about 250 bytes each.
    """

    def __init__(self, context: int = 3, most: int = 1 << 16) -> None:
        self.context, self.most = context, most
        self._next: OrderedDict[tuple[str, tuple[int, ...]], tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    def add(self, salt: str, tokens: Sequence[int], start: int = 0) -> None:
        """Add tokens [start, end) of a sequence, each under the ``context`` tokens before it."""
        for index in range(max(start, self.context), len(tokens)):
            key = (salt, tuple(tokens[index - self.context : index]))
            token, known = tokens[index], self._next.pop(key, ())
            self._next[key] = (token, *(other for other in known if other != token))[:NEXT]
            if len(self._next) > self.most:
                self._next.popitem(last=False)

    def after(self, salt: str, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens that followed the last tokens, the latest first; may be empty."""
        key = (salt, tuple(tokens[-self.context :]))
        if key not in self._next:
            return ()
        self._next.move_to_end(key)
        return self._next[key]

    def continuations(self, salt: str, tokens: Sequence[int], reach: int) -> list[list[int]]:
        """Continuations of ``reach`` tokens at most, one for each token that followed, the latest first."""
        return [self._continued(salt, tokens, first, reach) for first in self.after(salt, tokens)]

    def _continued(self, salt: str, tokens: Sequence[int], first: int, reach: int) -> list[int]:
        context, continuation = [*tokens[-self.context :], first], [first]
        while len(continuation) < reach:
            known = self.after(salt, context)
            if not known:
                break
            continuation.append(known[0])
            context.append(known[0])
        return continuation


class NgramIndex:
    """The earlier occurrences of every n-gram of one sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reach = 1 << 30  # tokens of a continuation, adapted to what was run
        self._last: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in LENGTHS)
        self._before: tuple[list[int], ...] = tuple([] for _ in LENGTHS)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; O(1) a token."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size, last, before in zip(LENGTHS, self._last, self._before, strict=True):
                key = tuple(self.tokens[max(end - size, 0) :])
                before.append(last.get(key, 0))
                last[key] = end

    def matches(self, longest: int) -> list[tuple[int, int]]:
        """(tokens that match, index of the continuation) of earlier occurrences of the sequence's end.

        The longest match first, of equal ones the latest; at most WALK of each length of key.
        """
        end = len(self.tokens)
        lengths: dict[int, int] = {}  # by index
        for size, before in zip(LENGTHS, self._before, strict=True):
            index = before[-1] if end > size else 0
            for _ in range(WALK):
                if index < size:
                    break
                if index not in lengths:
                    lengths[index] = self._match_length(index, longest)
                index = before[index - 1]
        return sorted(((count, index) for index, count in lengths.items()), reverse=True)

    def continuation(self, index: int, reach: int) -> list[int]:
        """The tokens from ``index`` on; beyond the end they repeat with the period of the match."""
        period = len(self.tokens) - index
        return [self.tokens[index + ahead % period] for ahead in range(reach)]

    def _match_length(self, index: int, longest: int) -> int:
        """How many tokens before ``index`` are equal to those at the end."""
        end, count = len(self.tokens), 0
        while count < min(longest, index) and self.tokens[index - count - 1] == self.tokens[end - count - 1]:
            count += 1
        return count


class NgramProposer:
    """Proposes the continuations of earlier n-grams.

    Args:
        longest: most tokens of a match; longer ones are not distinguished.
        shortest: fewest tokens of a match.
        reach: tokens of a continuation at most.
        branches: continuations at most.
        ends: end tokens: nothing is proposed after one.
        shared: table of other sequences; None: none.
    """

    name, is_free_of_compute, samples_from_q, needs_full_tree = "ngram", True, False, False

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

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A tree of at most ``most`` drafts for each request."""
        return [self._proposed(request) for request in requests]

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Adapt the length of the next continuations to the depth of the drafts that were run."""
        for one in feedback:
            if one.sequence in self._indices:
                depth = 0 if one.draft is None else len(one.draft.counts)
                self._indices[one.sequence].reach = min(2 * depth + NEAR, self.reach)

    def forget(self, sequence: int) -> None:
        """A sequence ended; its n-grams stay in the shared table."""
        self._indices.pop(sequence, None)

    def _proposed(self, request: DraftRequest) -> Draft | None:
        index = self._updated(request)
        tree = DraftBuilder(self.ends, request.most)
        matches = [match for match in index.matches(self.longest) if match[0] >= self.shortest]
        strong = [match for match in matches if not self.shared or match[0] >= self.shared.context]
        reach = min(index.reach, self.reach)
        self._grow(tree, index, strong, reach)
        if self.shared is not None and tree.roots < self.branches:
            for tokens in self.shared.continuations(request.salt, index.tokens, reach):
                if tokens[0] in tree or tree.roots < self.branches:
                    tree.add(tokens, [kind_of(SHARED, depth) for depth in range(1, len(tokens) + 1)])
        self._grow(tree, index, matches[len(strong) :], reach)
        return tree.draft()

    def _grow(
        self, tree: DraftBuilder, index: NgramIndex, matches: Sequence[tuple[int, int]], reach: int
    ) -> None:
        for count, start in matches:
            if tree.roots >= self.branches and index.tokens[start] not in tree:
                continue
            group = OTHER if tree.roots else OWN
            tokens = index.continuation(start, reach)
            tree.add(tokens, [kind_of(group, count + ahead) for ahead in range(len(tokens))])

    def _updated(self, request: DraftRequest) -> NgramIndex:
        """The sequence's index, up to its last token; new n-grams go to the shared table."""
        index = self._indices.setdefault(request.sequence, NgramIndex())
        known, count = len(index.tokens), len(request.tokens)
        if count > known:
            index.extend(request.tokens[known:])
            if self.shared is not None:
                self.shared.add(request.salt, index.tokens, known)
        return index
