"""DFlash and DSpark as chain heads: a pass of the drafter gives the states of all slots of a block.

    read      keys and values of newly decided positions, from the target's states, are kept (``cache.py``)
    begin     one pass over the blocks of all drafts: the anchor is the last decided token
    logits    of the next slot; DSpark adds the bias of the last drafted token, so that q is exactly what the
              token is drawn from
    confidence  of the next slot, from the tokens before it alone: a draft ends before the token is drawn

The target's head reads the slots of a group at once, as many as :data:`BYTES` of logits allow.

Letters: R drafts, B slots of a block, K of them that predict, H hidden size, V vocabulary of the target, v of
the head, r Markov rank, l layers, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attar.models.draft_heads.block_module import BlockDrafter
from attar.models.draft_heads.decoder_layer import attention
from attar.models.draft_heads.vocabulary import spread
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.heads.cache import HeadCache
from attar.runtime.speculate.heads.own_tensors import OwnTensors

BYTES = 1 << 26  # of logits that are made at once


class BlockHead:
    """A ``ChainHead`` (see ``chain.py``): DFlash, or DSpark without its confidence.

    Args:
        drafter: in evaluation mode.
        own: the target's embedding and head.
    """

    def __init__(self, drafter: BlockDrafter, target_tensors: OwnTensors) -> None:
        shape = drafter.config.shape
        if drafter.config.draft_vocabulary:
            target_tensors = replace(target_tensors, product=drafter.lm_head)
        self.drafter, self.target_tensors = drafter, target_tensors
        self.cache = HeadCache(shape.depth, shape.kv_heads, shape.head_dim)
        self._rows: dict[int, int] = {}  # of this round's drafts, by sequence
        self._hidden = torch.empty(0)  # (R, K, H)
        self._states = torch.empty(0)  # (R, r), of a recurrent Markov head
        self._logits: dict[int, Tensor] = {}  # (R, v) of slots, without bias

    @property
    def drafts(self) -> int:
        """K."""
        return self.drafter.config.drafts

    def read(self, sequence: int, tokens: Sequence[int], start: int, states: Tensor) -> None:
        """Keep the keys and values of decided positions."""
        positions = torch.arange(start, start + len(states), device=states.device)
        self.cache.write(sequence, start, *self.drafter.context(states, positions))

    def begin(self, drafts: Sequence[GrowingDraft]) -> None:
        """The states of all slots."""
        config, device = self.drafter.config, self.drafter.mask_embedding.device
        sequences = [draft.request.sequence for draft in drafts]
        self._rows = {sequence: row for row, sequence in enumerate(sequences)}
        contexts = [[part.to(device) for part in self.cache.read(sequence)] for sequence in sequences]
        ids = [draft.ids[draft.certain - 1] for draft in drafts]
        anchors = self.target_tensors.embed(torch.tensor(ids, device=device)).to(device)
        first = torch.tensor([[draft.certain - 1] for draft in drafts], device=device)
        positions = first + torch.arange(config.block, device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = [
                attention(q[row], torch.cat([keys[layer], k[row]]), torch.cat([values[layer], v[row]]))
                for row, (keys, values) in enumerate(contexts)
            ]
            return torch.stack(rows)

        x = self.drafter.slots(anchors)
        self._hidden = self.drafter(x, positions, attend)[:, config.skipped :]
        if self.drafter.markov_head is not None:
            self._states = self.drafter.markov_head.start(self._hidden[:, 0])
        self._logits = {}

    def logits(self, drafts: Sequence[GrowingDraft]) -> Tensor:
        """float32 (R, V) of the next slot of each draft."""
        rows, k = self._where(drafts)
        z = self._base(k)[rows]
        markov = self.drafter.markov_head
        if markov is not None:
            state, latent = markov.step(self._states[rows], self._before(drafts), self._hidden[rows, k])
            self._states[rows] = state
            z = z + markov.markov_w2(latent)
        chosen = self.drafter.chosen
        return z if chosen is None else spread(z, chosen, self.drafter.config.vocabulary)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.cache.forget(sequence)

    def _where(self, drafts: Sequence[GrowingDraft]) -> tuple[Tensor, int]:
        """Rows of the drafts int64 (R,), and the slot that all of them are at."""
        (k,) = {len(draft.tokens) for draft in drafts}
        rows = [self._rows[draft.request.sequence] for draft in drafts]
        return torch.tensor(rows, device=self._hidden.device), k

    def _before(self, drafts: Sequence[GrowingDraft]) -> Tensor:
        """The last token of each draft int64 (R,), the anchor where it has none."""
        tokens = [draft.tokens[-1] if draft.tokens else draft.ids[draft.certain - 1] for draft in drafts]
        return torch.tensor(tokens, device=self._hidden.device)

    def _base(self, k: int) -> Tensor:
        """The logits (R, v) of a slot, without bias."""
        if k not in self._logits:
            config = self.drafter.config
            size = config.draft_vocabulary or config.vocabulary
            count = max(1, BYTES // (4 * size * len(self._hidden)))
            hidden = self._hidden[:, k : k + count]
            z = (
                self.target_tensors.logits(hidden.flatten(0, 1))
                .to(hidden.device)
                .unflatten(0, hidden.shape[:2])
            )
            self._logits = {k + slot: z[:, slot] for slot in range(hidden.shape[1])}
        return self._logits[k]


class ConfidentBlockHead(BlockHead):
    """DSpark: a ``ConfidentHead`` (see ``chain.py``)."""

    def confidence(self, drafts: Sequence[GrowingDraft]) -> list[float]:
        """The chance that each draft's next token is accepted."""
        rows, k = self._where(drafts)
        chances: list[float] = self.drafter.confidence(
            self._hidden[rows, k], self._before(drafts), k
        ).tolist()
        return chances


def block_head(drafter: BlockDrafter, target_tensors: OwnTensors) -> BlockHead:
    """The chain head of a drafter."""
    return (ConfidentBlockHead if drafter.config.confidence else BlockHead)(drafter, target_tensors)
