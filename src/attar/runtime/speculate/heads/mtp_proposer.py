"""A model's own multi-token prediction head as a proposer of chains (``models/mtp_head.py``).

    entry i    of the pair (state i, token i + 1), in the cache of transformers' block: made of the target's
               states for decided tokens, of the head's own for drafts
    x_n        is predicted behind entry n - 2, the last whose token is decided, x_(n+k) behind n - 2 + k

As with EAGLE (``eagle_proposer.py``): the drafts' entries are cut off in the next round, and those that were
accepted are read again with the target's states. One layer of the head drafts all depths.

Letters: n tokens of a sequence, R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from attar.checkpoint.geometry import geometry
from attar.checkpoint.open import open_checkpoint
from attar.errors import ModelError
from attar.models.mtp_head import MtpHead, load_mtp_head
from attar.runtime.loading import Loaded
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.context import WINDOW, ContextReader
from attar.runtime.speculate.heads.own_tensors import OwnTensors, own_tensors

DRAFTS = 4  # of a chain at most


@dataclass
class DecidedEntries:
    """The entries of a sequence.

    Attributes:
        first: position of the first; ``count`` are decided, those behind them are drafts.
        last: (H,) of the last decided one.
    """

    cache: Any
    first: int
    count: int
    last: Tensor


class MtpChain:
    """A ``ChainHead`` (see ``chain.py``)."""

    drafts = DRAFTS

    def __init__(self, head: MtpHead, target_tensors: OwnTensors) -> None:
        self.head, self.target_tensors = head, target_tensors
        self._entries: dict[int, DecidedEntries] = {}
        self._outputs: dict[int, Tensor] = {}  # (H,) of the last entry, drafts included

    def read(self, sequence: int, tokens: Sequence[int], start: int, states: Tensor) -> None:
        """States (count, 1, H) of decided positions from ``start`` on, with the tokens after them."""
        known = self._entries.get(sequence)
        if known is None or not known.first <= start <= known.first + known.count:
            known = DecidedEntries(DynamicCache(config=self.head.block.config), start, 0, states[0, 0])
            self._entries[sequence] = known
        known.count = start - known.first
        self._cut(known)
        known.last = self._run(known, tokens[start + 1 : start + 1 + len(states)], states[:, 0])[-1]
        known.count += len(states)

    def begin(self, drafts: Sequence[GrowingDraft]) -> None:
        """A round of drafts begins."""
        self._outputs = {}
        for draft in drafts:
            known = self._entries[draft.request.sequence]
            self._cut(known)
            self._outputs[draft.request.sequence] = known.last

    def logits(self, drafts: Sequence[GrowingDraft]) -> Tensor:
        """float32 (R, V) of the next token of each draft."""
        for draft in drafts:
            if draft.tokens:
                sequence = draft.request.sequence
                state = self.head.fed_back(self._outputs[sequence])[None]
                self._outputs[sequence] = self._run(self._entries[sequence], draft.tokens[-1:], state)[-1]
        outputs = torch.stack([self._outputs[draft.request.sequence] for draft in drafts])
        return self.target_tensors.logits(self.head.norm(outputs)).float()

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._entries.pop(sequence, None)
        self._outputs.pop(sequence, None)

    def _run(self, known: DecidedEntries, tokens: Sequence[int], states: Tensor) -> Tensor:
        """What entries behind all others make (T, H), of tokens and the states before them."""
        start = known.first + known.cache.get_seq_length()
        positions = torch.arange(start, start + len(tokens), device=states.device)
        return self.head(
            self.target_tensors.embed(torch.tensor(list(tokens))), states, positions, known.cache
        )

    def _cut(self, known: DecidedEntries) -> None:
        """Without the entries of drafts."""
        drafts = known.cache.get_seq_length() - known.count
        if drafts:
            known.cache.crop(-drafts)


def load_mtp_proposer(target: Loaded, model: Any) -> ChainProposer:
    """The proposer of a model's own head; the target's runner keeps the states that it reads from now on.

    Args:
        model: what the target was loaded from.

    Raises:
        ModelError: the model has no head, one of another form, or its runner keeps no states.
    """
    checkpoint, runner = open_checkpoint(model), target.runner
    head = load_mtp_head(checkpoint)
    keep = getattr(runner, "keep_hidden", None)
    if keep is None:
        raise ModelError(f"{target.name}: its runner keeps no hidden states, which its head reads")
    layers = (geometry(checkpoint.config, "float32").layers or 0,)
    pool = keep(layers)
    chain = MtpChain(head.to(pool.states.device), own_tensors(runner, target.name))
    context = ContextReader(pool, runner.block_size, layers, WINDOW)
    return ChainProposer(chain, context, name="mtp", ends=target.ends)
