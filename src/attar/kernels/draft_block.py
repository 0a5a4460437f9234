"""Blocks of drafts in one call: the layers of a DFlash or DSpark head, its context, and its Markov loop.

The layers are a :class:`attar.kernels.decode.Program` whose tokens are blocks: the last decided token, then
mask tokens, which see each other both ways and the keys and values of earlier positions. Those are written
from the target's hidden states. csrc/decode/draft_block.h has the formulas.

Letters: R blocks of a round, B tokens of a block, K drafts, H hidden size, m layers of the target, r rank of
the Markov head, V vocabulary of the target, v of the head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attar.errors import ModelError
from attar.kernels import structures
from attar.kernels.decode import ModelWeights, Program
from attar.kernels.packed import PackedWeight
from attar.kernels.structures import StepTokens, address, batch_struct, linear_struct

CHUNK = 256  # positions whose states are read at a time


@dataclass(frozen=True, kw_only=True)
class DrafterWeights:
    """A block drafter.

    Attributes:
        model: its layers, the embeddings of the target and of masks, and the head (v, H) behind its norm.
        context: W_c (H, m H).
        context_norm: float32 (H,).
        drafts: K, most tokens of a chain.
        skipped: slots in front that predict nothing: 0 (DSpark) or 1 (DFlash); B is ``drafts + skipped``.
        chosen: int64 (v,) the target's id of each token; None: the same.
        previous: W1 bfloat16 (V, r); None: no Markov head.
        markov: W2 (v, r).
        confidence: float32 (H + r + 1,), the bias last; None: no confidence.
        calibration: float32 (K,) temperatures of the confidence.
    """

    model: ModelWeights
    context: PackedWeight
    context_norm: Tensor
    drafts: int
    skipped: int
    chosen: Tensor | None = None
    previous: Tensor | None = None
    markov: PackedWeight | None = None
    confidence: Tensor | None = None
    calibration: Tensor | None = None

    @property
    def block(self) -> int:
        """B."""
        return self.drafts + self.skipped

    @property
    def rank(self) -> int:
        """r; 0: no Markov head."""
        return 0 if self.previous is None else self.previous.shape[1]


@dataclass(frozen=True, kw_only=True)
class DraftSpan:
    """A sequence to draft for, with n tokens.

    Attributes:
        last: token n - 1.
        position: n - 1, where it is.
        past: keys of earlier positions in the pool.
        table: blocks of the pool, with room for ``past`` and a block.
        most: drafts at most.
        temperature: 0: the likeliest tokens.
        keys: of the noise of each draft; not used at temperature 0.
        least: of each draft: the chain ends where the survival is lower; empty: never.
    """

    last: int
    position: int
    past: int
    table: Sequence[int]
    most: int
    temperature: float = 0.0
    keys: Sequence[int] = ()
    least: Sequence[float] = ()


@dataclass(frozen=True)
class DraftedBlocks:
    """Drafts of a round.

    Attributes:
        tokens: int64 (R, K), of which ``counts`` are drafts.
        counts: int64 (R,).
        logits: float32 (R, K, v), the Markov head's along the drafted tokens included, where they
            are drafts.
        survival: float32 (R, K) where they are drafts; ones without confidence.
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    logits: Tensor
    survival: NDArray[np.float32]


class DraftProgram(Program):
    """A drafter with its pool; see :class:`attar.kernels.decode.Program`.

    Args:
        settings: of ``Program``.

    Raises:
        ModelError: the parts do not fit.
    """

    def __init__(self, weights: DrafterWeights, blocks: int, block_size: int = 16, **settings: Any) -> None:
        _check(weights)
        super().__init__(weights.model, blocks, block_size, **settings)
        self.drafter, none = weights, structures.LinearStruct()
        self._both_ways = np.ones((weights.block, weights.block), dtype=np.bool_)
        self._drafter = structures.DrafterStruct(
            context=linear_struct(weights.context),
            context_norm=weights.context_norm.data_ptr(),
            rank=weights.rank,
            previous=address(weights.previous),
            markov=none if weights.markov is None else linear_struct(weights.markov),
            chosen=address(weights.chosen),
            confidence=address(weights.confidence),
            calibration=address(weights.calibration),
        )

    def write_context(self, states: Tensor, positions: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Keys and values of decided positions from states (n, m H), to slots of the pool.

        Raises:
            MemoryError: no memory for intermediate results; some positions may be written.
            IndexError: a position or a slot is out of bounds.
        """
        assert self._library is not None and self._handle is not None, "write_context after close"
        states = states.float().contiguous()
        assert states.shape == (len(slots), self.drafter.context.columns), f"states {tuple(states.shape)}"
        assert len(positions) == len(slots), f"{len(positions)} positions of {len(slots)} slots"
        positions, slots = (np.ascontiguousarray(array, dtype=np.int64) for array in (positions, slots))
        for at in range(0, len(slots), CHUNK):
            part = states[at : at + CHUNK]
            rows = structures.ContextStruct(
                len(part), part.data_ptr(), positions[at:].ctypes.data, slots[at:].ctypes.data
            )
            code = self._library.attar_write_context(
                self._handle, ctypes.byref(self._drafter), ctypes.byref(rows)
            )
            structures.raise_for(code, "a drafter's context")

    def draft(self, spans: Sequence[DraftSpan]) -> DraftedBlocks:
        """A block for each sequence. The keys and values of the block's tokens are of this round only.

        Raises:
            MemoryError: no memory for intermediate results; the same round may be run again.
            IndexError: a token, a position or a block is out of bounds; nothing is done.
        """
        R, K = len(spans), min(max(span.most for span in spans), self.drafter.drafts)
        logits, rows = torch.empty(R, K, self.weights.vocabulary), R * K
        keys, least = [0] * rows, [0.0] * rows
        for row, span in enumerate(spans):
            keys[row * K : row * K + len(span.keys[:K])] = span.keys[:K]
            least[row * K : row * K + len(span.least[:K])] = span.least[:K]
        ints, int_addresses = structures.joined(
            {
                "token": [0] * rows,
                "count": [0] * R,
                "last": [span.last for span in spans],
                "most": [span.most for span in spans],
            },
            np.int64,
        )
        floats, float_addresses = structures.joined(
            {
                "survival": [1.0] * rows,
                "temperature": [span.temperature for span in spans],
                "least": least,
            },
            np.float32,
        )
        noise = np.array(keys, np.uint64)
        drawn = structures.RoundStruct(R, K, key=noise.ctypes.data, **int_addresses, **float_addresses)
        self._run(spans, logits, drawn)
        tokens, counts = ints[:rows].reshape(R, K), ints[rows : rows + R]
        return DraftedBlocks(tokens, counts, logits, floats[:rows].reshape(R, K))

    def states(self, spans: Sequence[DraftSpan]) -> tuple[Tensor, Tensor]:
        """What a block is drawn from, without the Markov head: logits float32 (R, K, v), and the states that
        they and the confidence are of, behind the final norm, (R, K, H).

        Raises:
            MemoryError: see :meth:`draft`.
        """
        R, K = len(spans), min(max(span.most for span in spans), self.drafter.drafts)
        logits = torch.empty(R, K, self.weights.vocabulary)
        states = torch.empty(R, K, self.weights.hidden)
        self._run(spans, logits, structures.RoundStruct(R, K, states=states.data_ptr()))
        return logits, states

    def _run(self, spans: Sequence[DraftSpan], logits: Tensor, drawn: structures.RoundStruct) -> None:
        assert self._library is not None and self._handle is not None, "a round after close"
        batch, arrays = batch_struct(self._tokens(spans, logits.shape[1]), logits)
        parts = (ctypes.byref(struct) for struct in (self._drafter, batch, drawn))
        structures.raise_for(self._library.attar_draft(self._handle, *parts), "a block of drafts")
        del arrays

    def _tokens(self, spans: Sequence[DraftSpan], K: int) -> StepTokens:
        """Blocks as a step: the last decided token and mask tokens, all of which see each other."""
        B, skipped, size = self.drafter.block, self.drafter.skipped, self.block_size
        ids, positions, slots = list[int](), list[int](), list[int]()
        masks = [-1] * (B - 1)
        for span in spans:
            stop = span.past + B
            assert len(span.table) * size >= stop, "a table without room for the block"
            ids += [span.last, *masks]
            positions += range(span.position, span.position + B)
            slots += [span.table[entry // size] * size + entry % size for entry in range(span.past, stop)]
        starts = range(skipped, len(ids), B)
        return StepTokens(
            ids=ids,
            positions=positions,
            slots=slots,
            counts=[B] * len(spans),
            past=[span.past for span in spans],
            blocks=[span.table for span in spans],
            rows=[row for start in starts for row in range(start, start + K)],
            trees=[self._both_ways] * len(spans),
        )


def _check(weights: DrafterWeights) -> None:
    """What the library does not check."""
    hidden, r, v = weights.model.hidden, weights.rank, weights.model.vocabulary
    if weights.context.rows != hidden:
        raise ModelError(f"a drafter's context has {weights.context.rows} channels, not {hidden}")
    assert weights.drafts >= 1 and weights.skipped in (0, 1), f"{weights.drafts} drafts"
    assert weights.model.mask is not None, "a drafter without an embedding of masks"
    if (weights.markov is None) != (weights.previous is None):
        raise ModelError("a Markov head has two matrices")
    if weights.markov is not None and (weights.markov.rows, weights.markov.columns) != (v, r):
        raise ModelError(f"a Markov head of {weights.markov.rows} x {weights.markov.columns}, not {v} x {r}")
    pairs: list[tuple[Tensor | None, torch.dtype, tuple[int, ...]]] = [
        (weights.context_norm, torch.float32, (hidden,)),
        (weights.chosen, torch.int64, (v,)),
        (weights.confidence, torch.float32, (hidden + r + 1,)),
        (weights.calibration, torch.float32, (weights.drafts,)),
    ]
    for tensor, dtype, shape in pairs:
        fits = tensor is None or (tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous())
        assert fits, f"a drafter's tensor of {dtype} {shape}"
    assert weights.previous is None or weights.previous.dtype == torch.bfloat16, "W1 is bfloat16"
    assert weights.previous is None or weights.previous.is_contiguous(), "W1 is contiguous"
    ids = len(weights.model.embedding)
    assert weights.previous is None or len(weights.previous) >= ids, f"W1 has fewer than {ids} rows"
    chosen = weights.chosen
    if chosen is not None and not 0 <= int(chosen.min()) <= int(chosen.max()) < ids:
        raise ModelError(f"a drafter's map of tokens leaves the target's {ids:,}")
    assert (weights.confidence is None) == (weights.calibration is None), "confidence and its temperatures"
