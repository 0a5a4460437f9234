"""A block drafter in the compiled library: its weights, and the pool with the contexts of the sequences.

Weights are rounded to int8 with a scale for each group: a draft that is worse by that only costs time. The
target's embedding, and its head where the vocabulary is not reduced, are those of its own runner.

Letters: n tokens, B tokens of a block, K drafts, V vocabulary of the target, v of the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attar.kernels.decode import LayerWeights, ModelWeights, Program
from attar.kernels.draft_block import DraftedBlocks, DrafterWeights, DraftProgram, DraftSpan
from attar.kernels.packed import GROUPS, PackedWeight, pack
from attar.models.draft_heads.block_drafter import BlockDrafter
from attar.models.draft_heads.decoder_layer import HeadLayer, LayerShape
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.warp import SamplingRow, warp
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.noise import DraftRules

BLOCK_SIZE = 16  # slots of a block of the pool


def drafter_weights(head: BlockDrafter, target: ModelWeights, context: int) -> DrafterWeights | None:
    """A drafter for a target; None where the library does not run it.

    Args:
        context: most tokens of a sequence.
    """
    config, shape, markov = head.config, head.config.shape, head.markov_head
    if config.hidden % 16 or shape.head_dim % 2 or (markov is not None and markov.kind != "plain"):
        return None
    table = rotary_table(shape, context + config.block)
    model = ModelWeights(
        embedding=target.embedding,
        embedding_scale=target.embedding_scale,
        mask=_float32(head.mask_embedding),
        norm=_float32(head.norm.weight),
        head=_packed(head.lm_head.weight) if config.draft_vocabulary else target.head,
        final_soft_cap=target.final_soft_cap,
        layers=tuple(_layer(layer, table) for layer in head.layers),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        eps=shape.eps,
        scale=shape.head_dim**-0.5,
    )
    confidence, temperatures = None, config.temperatures or (1.0,) * config.drafts
    if head.confidence_head is not None:
        linear = head.confidence_head.proj
        confidence = _float32(torch.cat([linear.weight[0], linear.bias]))
    return DrafterWeights(
        model=model,
        context=_packed(head.fc.weight),
        context_norm=_float32(head.hidden_norm.weight),
        drafts=config.drafts,
        skipped=config.skipped,
        chosen=head.chosen,
        previous=None if markov is None else markov.markov_w1.weight.detach().bfloat16().contiguous(),
        markov=None if markov is None else _packed(markov.markov_w2.weight),
        confidence=confidence,
        calibration=None if confidence is None else torch.tensor(temperatures),
    )


def rotary_table(shape: LayerShape, context: int) -> Tensor:
    """float32 (context, d): cosines of half a head, then sines."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    angles = torch.arange(context)[:, None] * shape.rope_theta ** (-half / shape.head_dim)
    return torch.cat([angles.cos(), angles.sin()], 1).contiguous()


class CompiledBlock:
    """Contexts and rounds of a drafter.

    A sequence for which the pool has no slots left is not drafted for.

    Args:
        tokens: of the pool.
        beside: the target's program, whose threads draft, too.
    """

    def __init__(self, weights: DrafterWeights, tokens: int, beside: Program | None = None) -> None:
        blocks = -(-tokens // BLOCK_SIZE)
        self.program = DraftProgram(weights, blocks, BLOCK_SIZE, beside=beside, bits=8, kv_dtype="bfloat16")
        self._free = list(range(blocks))
        self._tables: dict[int, list[int]] = {}
        self._spans: dict[int, tuple[int, int]] = {}  # positions [first, stop) in the pool

    def read(self, sequence: int, start: int, states: Tensor) -> None:
        """States (count, m, H) of decided positions from ``start`` on; what was behind them is gone."""
        first, stop = self._spans.get(sequence, (start, start))
        if not first <= start <= stop:
            self.forget(sequence)
            first = start
        stop = start + len(states)
        if not self._reserve(sequence, stop - first + self.program.drafter.block):
            self.forget(sequence)
            return
        self._spans[sequence] = first, stop
        positions = np.arange(start, stop)
        self.program.write_context(states.flatten(1), positions, self._slots(sequence, positions - first))

    def draft(self, drafts: Sequence[GrowingDraft]) -> None:
        """Complete the chains of greedy requests, and of those that are drawn at a plain temperature; the
        others stay open, and those without a context are closed."""
        rows = [None if draft.request.rules is None else draft.request.rules.row() for draft in drafts]
        chosen = []
        for draft, row in zip(drafts, rows, strict=True):
            if not self._has_context(draft):
                draft.open = False
            elif draft.branches == 1 and not draft.doubt and plain(row):
                chosen.append((draft, row))
        if not chosen:
            return
        drafted = self.program.draft([self._span(draft, row) for draft, row in chosen])
        for index, (draft, row) in enumerate(chosen):
            self._complete(draft, row, drafted, index)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._free += self._tables.pop(sequence, [])
        self._spans.pop(sequence, None)

    def _has_context(self, draft: GrowingDraft) -> bool:
        """Whether all positions before the last token are in the pool, from some first one on."""
        if len(draft.request.tokens) == 1 and draft.request.sequence not in self._spans:
            self.read(draft.request.sequence, 0, torch.empty(0, 1, 1))
        span = self._spans.get(draft.request.sequence)
        return span is not None and span[1] == len(draft.request.tokens) - 1

    def _span(self, draft: GrowingDraft, row: SamplingRow | None) -> DraftSpan:
        request, sequence = draft.request, draft.request.sequence
        first, stop = self._spans[sequence]
        temperature = 0.0 if row is None else row.params.temperature
        keys = [request.rules.key(k) for k in range(draft.most)] if temperature and request.rules else []
        return DraftSpan(
            last=request.tokens[-1],
            position=stop,
            past=stop - first,
            table=self._tables[sequence],
            most=draft.most,
            temperature=temperature,
            keys=keys,
        )

    def _complete(
        self, draft: GrowingDraft, row: SamplingRow | None, drafted: DraftedBlocks, index: int
    ) -> None:
        """The chain up to its first end token, with its q where it was drawn."""
        tokens = drafted.tokens[index, : drafted.counts[index]].tolist()
        stop = next((k + 1 for k, token in enumerate(tokens) if token in draft.ends), len(tokens))
        draft.tokens, draft.siblings, draft.open = tokens[:stop], [[]] * stop, False
        if row is not None and not row.params.greedy and isinstance(draft.request.rules, DraftRules):
            p = warp(drafted.logits[index, :stop], [row] * stop)
            chosen, size = self.program.drafter.chosen, len(self.program.weights.embedding)
            if chosen is not None:
                p = torch.zeros(stop, size).index_copy_(1, chosen, p)
            draft.q = list(p.numpy())

    def _reserve(self, sequence: int, entries: int) -> bool:
        """Slots for so many entries."""
        table = self._tables.setdefault(sequence, [])
        needed = -(-entries // BLOCK_SIZE) - len(table)
        if needed > len(self._free):
            return False
        table += [self._free.pop() for _ in range(needed)]
        return True

    def _slots(self, sequence: int, entries: NDArray[np.int64]) -> NDArray[np.int64]:
        table = np.asarray(self._tables[sequence], dtype=np.int64)
        return table[entries // BLOCK_SIZE] * BLOCK_SIZE + entries % BLOCK_SIZE


def plain(row: SamplingRow | None) -> bool:
    """Whether a row takes the likeliest token, or draws at a temperature, and nothing else."""
    if row is None:
        return True
    params: SamplingParams = row.params
    cuts = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return not row.adjusts and (params.greedy or not cuts)


def _layer(layer: HeadLayer, table: Tensor) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return LayerWeights(
        before_attention=_float32(layer.input_layernorm.weight),
        before_mlp=_float32(layer.post_attention_layernorm.weight),
        qkv=_packed(torch.cat(qkv)),
        out=_packed(attention.o_proj.weight),
        gate_up=_packed(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
        down=_packed(mlp.down_proj.weight),
        rotary=table,
        query_norm=_float32(attention.q_norm.weight),
        key_norm=_float32(attention.k_norm.weight),
    )


def _packed(weight: Tensor) -> PackedWeight:
    """int8 in the largest group that divides the inputs; bfloat16 where none does."""
    group = next((group for group in reversed(GROUPS) if weight.shape[1] % group == 0), 0)
    return pack(weight.detach(), "int8", group=group) if group else pack(weight.detach(), "bf16")


def _float32(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()
