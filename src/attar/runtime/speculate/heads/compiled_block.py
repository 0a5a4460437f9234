"""A block drafter in the compiled library: its weights, the contexts of sequences, whole chains in one call.

Weights are rounded to int4 where the target's are, else to int8, with a scale for each group: a draft that is
worse by that only costs time. The target's embedding, and its head where the vocabulary is not reduced, are
those of its own runner, whose threads draft, too. A sequence's context is in slots of a pool of the drafter's
own.

Letters: n tokens, B tokens of a block, K drafts, m layers of the target, H hidden size, V vocabulary of the
target, v of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import numpy as np
import torch
from torch import Tensor

from attar.kernels.decode import LayerWeights, ModelWeights
from attar.kernels.draft_block import DrafterWeights, DraftProgram, DraftSpan
from attar.kernels.packed import GROUPS, Kind, PackedWeight, pack
from attar.models.draft_heads.block_module import BlockDrafter
from attar.models.draft_heads.decoder_layer import DraftLayerShape, HeadLayer, rotary
from attar.runtime.runner.compiled import Compiled
from attar.runtime.sampling.warp import SamplingRow, warp
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.heads.block_proposer import BlockHead, ConfidentBlockHead
from attar.runtime.speculate.heads.own_tensors import OwnTensors
from attar.runtime.speculate.noise import DraftRules
from attar.runtime.speculate.proposer import DraftRequest


def drafter_weights(head: BlockDrafter, target: ModelWeights, context: int) -> DrafterWeights | None:
    """A drafter for a target; None where the library does not run it.

    Args:
        context: most tokens of a sequence.
    """
    config, shape = head.config, head.config.shape
    kind: Kind = "int4" if target.layers[-1].products[0].kind == "int4" else "int8"
    markov = head.markov_head if head.markov_head is not None and head.markov_head.kind == "plain" else None
    if config.hidden % 16 or shape.head_dim % 2:
        return None
    table = rotary_table(shape, context + config.block)
    model = ModelWeights(
        embedding=target.embedding,
        mask=_float32(head.mask_embedding),
        norm=_float32(head.norm.weight),
        head=_packed(head.lm_head.weight, kind) if config.draft_vocabulary else target.head,
        final_soft_cap=target.final_soft_cap,
        layers=tuple(_layer(layer, table, kind) for layer in head.layers),
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
        if markov is None:  # its part is not read here
            confidence = torch.cat([confidence[: config.hidden], confidence[-1:]])
    return DrafterWeights(
        model=model,
        context=_packed(head.fc.weight, kind),
        context_norm=_float32(head.hidden_norm.weight),
        drafts=config.drafts,
        skipped=config.skipped,
        chosen=head.chosen,
        previous=None if markov is None else markov.markov_w1.weight.detach().bfloat16().contiguous(),
        markov=None if markov is None else _packed(markov.markov_w2.weight, kind),
        confidence=confidence,
        calibration=None if confidence is None else torch.tensor(temperatures),
    )


def rotary_table(shape: DraftLayerShape, context: int) -> Tensor:
    """float32 (context, d): cosines of half a head, then sines."""
    half = shape.head_dim // 2
    cosines, sines = rotary(torch.arange(context), shape)
    return torch.cat([cosines[:, 0, :half], sines[:, 0, :half]], 1).contiguous()


class DraftContexts:
    """Keys and values of the decided positions of each sequence, in the pool of a drafter.

    A sequence for which the pool has no slots left has no context.

    Attributes:
        program: the drafter.
    """

    def __init__(self, program: DraftProgram) -> None:
        self.program = program
        self._free = list(range(program.blocks))
        self._tables: dict[int, list[int]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}  # positions [first, stop)

    def read(self, sequence: int, start: int, states: Tensor) -> None:
        """States (count, m, H) of decided positions from ``start`` on; what was behind them is gone."""
        first, stop = self._ranges.get(sequence, (start, start))
        if not first <= start <= stop:
            self.forget(sequence)
            first = start
        stop = start + len(states)
        if not self._reserve(sequence, stop - first + self.program.drafter.block):
            self.forget(sequence)
            return
        self._ranges[sequence] = first, stop
        positions = np.arange(start, stop)
        table = np.asarray(self._tables[sequence], dtype=np.int64)
        entries, size = positions - first, self.program.block_size
        self.program.write_context(
            states.flatten(1), positions, table[entries // size] * size + entries % size
        )

    def span(self, request: DraftRequest, most: int) -> DraftSpan | None:
        """A block behind all tokens of a request; None where its context is not in the pool."""
        sequence, position = request.sequence, len(request.tokens) - 1
        if not position and self._reserve(sequence, self.program.drafter.block):
            self._ranges[sequence] = 0, 0
        first, stop = self._ranges.get(sequence, (0, -1))
        if stop != position:
            return None
        table = self._tables[sequence]
        return DraftSpan(
            last=request.tokens[-1], position=position, past=stop - first, table=table, most=most
        )

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._free += self._tables.pop(sequence, [])
        self._ranges.pop(sequence, None)

    def _reserve(self, sequence: int, entries: int) -> bool:
        """Slots for so many entries."""
        table = self._tables.setdefault(sequence, [])
        needed = -(-entries // self.program.block_size) - len(table)
        if needed > len(self._free):
            return False
        table += [self._free.pop() for _ in range(needed)]
        return True


class CompiledBlockHead(BlockHead):
    """A ``ChainHead`` that runs the drafter in the compiled library.

    Chains of greedy requests, and of those that draw at a plain temperature, are complete when the round has
    begun; of the others it has the states and logits, and the rest is a :class:`BlockHead`'s.
    """

    def __init__(self, drafter: BlockDrafter, target_tensors: OwnTensors, program: DraftProgram) -> None:
        super().__init__(drafter, target_tensors)
        self.contexts = DraftContexts(program)
        markov = drafter.markov_head
        self._draws = markov is None or markov.kind == "plain"

    def read(self, sequence: int, tokens: Sequence[int], start: int, states: Tensor) -> None:
        """Keep the keys and values of decided positions."""
        self.contexts.read(sequence, start, states)

    def begin(self, drafts: Sequence[GrowingDraft]) -> None:
        """Draft the chains that the library draws; read the slots of the others."""
        drawn, others = list[_Round](), list[_Round]()
        for draft in drafts:
            rules = draft.request.rules
            span, row = self.contexts.span(draft.request, draft.most), rules.row() if rules else None
            if span is None:
                draft.open = False
                continue
            alone = draft.branches == 1 and not draft.min_confidence and plain(row)
            (drawn if self._draws and alone else others).append((draft, span, row))
        if drawn:
            self._draw(drawn)
        if others:
            logits, self._hidden = self.contexts.program.states([span for _, span, _ in others])
            self._rows = {draft.request.sequence: row for row, (draft, _, _) in enumerate(others)}
            self._logits = {k: logits[:, k] for k in range(logits.shape[1])}
            if self.drafter.markov_head is not None:
                self._states = self.drafter.markov_head.start(self._hidden[:, 0])

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.contexts.forget(sequence)

    def _draw(self, rounds: Sequence[_Round]) -> None:
        """Complete the chains, each up to its first end token, with q where they are drawn from it."""
        drafted = self.contexts.program.draft([_with_rules(*draft_round) for draft_round in rounds])
        for index, (draft, _, row) in enumerate(rounds):
            tokens = drafted.tokens[index, : drafted.counts[index]].tolist()
            count = next((k + 1 for k, token in enumerate(tokens) if token in draft.ends), len(tokens))
            draft.tokens, draft.siblings, draft.open = tokens[:count], [[]] * count, False
            if count:
                draft.chances = _chances_of(drafted.survival[index, :count].tolist())
            if row is not None and not row.params.greedy and isinstance(draft.request.rules, DraftRules):
                q, chosen = warp(drafted.logits[index, :count], [row] * count), self.drafter.chosen
                if chosen is not None:
                    q = q.new_zeros(count, self.drafter.config.vocabulary).index_copy_(1, chosen, q)
                draft.q = list(q.numpy())


class ConfidentCompiledHead(CompiledBlockHead, ConfidentBlockHead):
    """The same with confidence: a ``ConfidentHead`` (see ``chain.py``)."""


_Round = tuple[GrowingDraft, DraftSpan, SamplingRow | None]


def compiled_block_head(
    drafter: BlockDrafter, target_tensors: OwnTensors, target: Compiled
) -> CompiledBlockHead | None:
    """The head of a compiled target; None where the library does not run it."""
    context = target.context or target.capacity * target.block_size
    weights = drafter_weights(drafter, target.weights, context)
    if weights is None:
        return None
    program = target.drafting(weights)
    head_class = ConfidentCompiledHead if drafter.config.confidence else CompiledBlockHead
    return head_class(drafter, target_tensors, program)


def _with_rules(draft: GrowingDraft, span: DraftSpan, row: SamplingRow | None) -> DraftSpan:
    """A block with the temperature and the noise of its request, and its lowest survivals: the library
    multiplies the chances without their factors."""
    request = draft.request
    factors = draft.factors or [1.0] * draft.most
    least = (
        tuple(request.min_chance / factor for factor in accumulate(factors, mul))
        if request.min_chance > 0
        else ()
    )
    if row is None or row.params.greedy or request.rules is None:
        return replace(span, least=least)
    keys = tuple(request.rules.key(k) for k in range(draft.most))
    return replace(span, least=least, temperature=row.params.temperature, keys=keys)


def _chances_of(survival: Sequence[float]) -> list[float]:
    """The chance of each token of a chain, of the products of those up to it."""
    before = [1.0, *survival[:-1]]
    return [later / sooner if sooner else 0.0 for sooner, later in zip(before, survival, strict=True)]


def plain(row: SamplingRow | None) -> bool:
    """Whether a row takes the likeliest token, or draws at a temperature, and nothing else."""
    if row is None:
        return True
    params = row.params
    cuts = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return not row.adjusts and (params.greedy or not cuts)


def _layer(layer: HeadLayer, table: Tensor, kind: Kind) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = attention.shape.head_norms
    return LayerWeights(
        before_attention=_float32(layer.input_layernorm.weight),
        before_mlp=_float32(layer.post_attention_layernorm.weight),
        qkv=_packed(torch.cat([part.weight for part in qkv]), kind, _joined([part.bias for part in qkv])),
        out=_packed(attention.o_proj.weight, kind),
        gate_up=_packed(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), kind),
        down=_packed(mlp.down_proj.weight, kind),
        rotary=table,
        query_norm=_float32(attention.q_norm.weight) if norms else None,
        key_norm=_float32(attention.k_norm.weight) if norms else None,
    )


def _packed(weight: Tensor, kind: Kind, bias: Tensor | None = None) -> PackedWeight:
    """int4 in small groups, int8 in the largest that divides the inputs; bfloat16 where none does."""
    groups = (32, 16) if kind == "int4" else reversed(GROUPS)
    group = next((group for group in groups if weight.shape[1] % group == 0), 0)
    if group:
        return pack(weight.detach(), kind, group=group, bias=bias)
    return pack(weight.detach(), "bf16", bias=bias)


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    parts = [bias.detach() for bias in biases if bias is not None]
    return torch.cat(parts) if parts else None


def _float32(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()
