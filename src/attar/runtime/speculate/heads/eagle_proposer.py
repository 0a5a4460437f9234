"""EAGLE and EAGLE-3 as proposers of chains (``models/draft_heads/eagle_module.py``, ``eagle3.py``).

    entry i    of the pair (state i, token i + 1): its keys and values are the cache's for decided tokens,
               made of the target's states, and scratch for drafts, made of the head's own
    x_n        is predicted behind entry n - 2, the last whose token is decided; x_(n+k) behind entry
               n - 2 + k, of draft x_(n+k-1) and what entry n - 3 + k made

An entry is kept under the position of its state, so all of a prefix depends on that prefix alone. The drafts
of a round are thrown away: those that are accepted are read again with the target's states.

Letters: n tokens of a sequence, R rows, D drafts of a sequence that were run, H hidden size, K kv heads, d
head dimension, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attar.models.draft_heads.decoder_layer import rotary
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.heads.cache import HeadCache
from attar.runtime.speculate.heads.own_tensors import OwnTensors

ROWS = 256  # decided positions that are read at once


@dataclass
class DraftEntries:
    """Keys and values of the drafts of a sequence that were run in this round.

    Attributes:
        position: of the first entry behind the decided ones.
        kept: keys and values (D, K, d) of each layer that has any.
    """

    sequence: int
    position: int
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """D."""
        return len(self.kept[0][0]) if self.kept else 0

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add entries (R, K, d) of a layer; all of them."""
        if layer in self.kept:
            before = self.kept[layer]
            keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
        self.kept[layer] = keys, values
        return keys, values


@dataclass(frozen=True)
class DraftLevel:
    """Drafts of one depth of a sequence, which are run together.

    Attributes:
        tokens: R of them.
        states: (R, H), what the entry before each made.
        depth: of the drafts, from 0 on.
        seen: bool (R, D + R), the drafts that each attends to, itself the last; None: all.
    """

    entries: DraftEntries
    tokens: Sequence[int]
    states: Tensor
    depth: int
    seen: Tensor | None = None


class EagleDrafter:
    """A head with the decided entries of its sequences.

    Args:
        head: ``EagleHead`` or ``Eagle3Head``.
        own: the target's embedding and head.
    """

    def __init__(self, head: Any, target_tensors: OwnTensors) -> None:
        shape = head.config.shape
        self.head, self.target_tensors, self.shape = head, target_tensors, shape
        self.cache = HeadCache(shape.depth, shape.kv_heads, shape.head_dim)
        self._last: dict[int, Tensor] = {}

    def read(self, sequence: int, tokens: Sequence[int], start: int, states: Tensor) -> None:
        """States (count, m, H) of decided positions from ``start`` on, with the tokens after them."""
        after = torch.tensor(list(tokens[start + 1 : start + 1 + len(states)]))
        e, g = self.target_tensors.embed(after), self.head.project(states)
        if self.shape.depth == 1:  # all but the last are keys and values alone
            turn = rotary(torch.arange(start, start + len(e) - 1, device=e.device), self.shape)
            x, _ = self.head.inputs(e[:-1], g[:-1])
            keys, values = self.head.layers[0].self_attn.keys_values(x, turn)
            self.cache.write(sequence, start, keys[None], values[None])
            start, e, g = start + len(e) - 1, e[-1:], g[-1:]
        for begin in range(0, len(e), ROWS):
            self._read(sequence, start + begin, e[begin : begin + ROWS], g[begin : begin + ROWS])

    def _read(self, sequence: int, start: int, e: Tensor, g: Tensor) -> None:
        """Embeddings and projected states (n, H) of decided positions."""
        turn = rotary(torch.arange(start, start + len(e), device=e.device), self.shape)
        past_keys, past_values = self.cache.before(sequence, start)
        causal = torch.ones(len(e), len(e), dtype=torch.bool, device=g.device).tril()
        kept = list[tuple[Tensor, Tensor]]()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.append((k, v))
            return attend_both(q, (past_keys[layer], past_values[layer]), (k, v), causal)

        self._last[sequence] = self.head.run(e, g, turn, attend)[-1]
        keys, values = zip(*kept, strict=True)
        self.cache.write(sequence, start, torch.stack(keys), torch.stack(values))

    def last(self, sequence: int) -> Tensor:
        """What the last decided entry made (H,)."""
        return self._last[sequence]

    def entries(self, sequence: int, tokens: Sequence[int]) -> DraftEntries:
        """Of a new round."""
        return DraftEntries(sequence, len(tokens) - 1)

    def run(self, levels: Sequence[DraftLevel]) -> Tensor:
        """What drafts make (R, H), of all levels one after the other; their keys and values are added."""
        states = torch.cat([level.states for level in levels])
        tokens = torch.tensor([token for level in levels for token in level.tokens])
        positions = [level.entries.position + level.depth for level in levels for _ in level.tokens]
        turn = rotary(torch.tensor(positions, device=states.device), self.shape)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads, start = [], 0
            for level in levels:
                rows = slice(start, start + len(level.tokens))
                start = rows.stop
                drafts = level.entries.add(layer, k[rows], v[rows])
                keys, values = self.cache.read(level.entries.sequence)
                heads.append(attend_both(q[rows], (keys[layer], values[layer]), drafts, level.seen))
            return torch.cat(heads)

        out: Tensor = self.head.run(
            self.target_tensors.embed(tokens), self.head.fed_back(states), turn, attend
        )
        return out

    def logits(self, outputs: Tensor) -> Tensor:
        """float32 (R, V) of what entries made (R, H); -inf: cannot be drafted."""
        logits: Tensor = self.head.logits(outputs, self.target_tensors.logits)
        return logits.float()

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.cache.forget(sequence)
        self._last.pop(sequence, None)


def attend_both(
    q: Tensor,
    past: tuple[Tensor, Tensor],
    drafts: tuple[Tensor, Tensor] | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Heads (R, h d) of queries (R, h, d) that attend to all of the past and to some drafts.

    Args:
        past: keys and values (t, K, d).
        drafts: keys and values (D, K, d).
        seen: bool (R, D); None: all.
    """
    R, _, d = q.shape
    q = (q * d**-0.5).unflatten(1, (past[0].shape[1], -1)).transpose(0, 1).flatten(1, 2)  # (K, R h / K, d)
    scores = [q @ past[0].movedim(0, -1)]
    if drafts is not None:
        draft_scores = q @ drafts[0].movedim(0, -1)
        if seen is not None:
            draft_scores = (
                draft_scores.unflatten(1, (R, -1)).masked_fill(~seen[None, :, None], -torch.inf).flatten(1, 2)
            )
        scores.append(draft_scores)
    p = torch.cat(scores, -1).softmax(-1)
    t = past[0].shape[0]
    out = p[..., :t] @ past[1].transpose(0, 1)
    if drafts is not None:
        out = out + p[..., t:] @ drafts[1].transpose(0, 1)
    return out.unflatten(1, (R, -1)).transpose(0, 1).flatten(1)


class EagleChain:
    """A ``ChainHead`` (see ``chain.py``)."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter = drafter
        self._entries: dict[int, DraftEntries] = {}
        self._outputs: dict[int, Tensor] = {}  # (H,) of the last entry, drafts included

    @property
    def drafts(self) -> int:
        """Most tokens of a chain."""
        most: int = self.drafter.head.config.drafts
        return most

    def read(self, sequence: int, tokens: Sequence[int], start: int, states: Tensor) -> None:
        """See :meth:`EagleDrafter.read`."""
        self.drafter.read(sequence, tokens, start, states)

    def begin(self, drafts: Sequence[GrowingDraft]) -> None:
        """A round of drafts begins."""
        requests = [draft.request for draft in drafts]
        self._entries = {
            request.sequence: self.drafter.entries(request.sequence, request.tokens) for request in requests
        }
        self._outputs = {request.sequence: self.drafter.last(request.sequence) for request in requests}

    def logits(self, drafts: Sequence[GrowingDraft]) -> Tensor:
        """float32 (R, V) of the next token of each draft."""
        levels = []
        for draft in drafts:
            if draft.tokens:
                sequence, depth = draft.request.sequence, len(draft.tokens) - 1
                entries, state = self._entries[sequence], self._outputs[sequence][None]
                levels.append(DraftLevel(entries, draft.tokens[-1:], state, depth))
        if levels:
            outputs = self.drafter.run(levels)
            self._outputs |= {level.entries.sequence: row for level, row in zip(levels, outputs, strict=True)}
        return self.drafter.logits(torch.stack([self._outputs[draft.request.sequence] for draft in drafts]))

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.drafter.forget(sequence)
