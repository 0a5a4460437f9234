"""Block drafters in the compiled library draft what the module drafts."""

from __future__ import annotations

import math

import pytest
import torch

from attar.kernels.packed import unpack
from attar.runtime.completion import Completion
from attar.runtime.runner.compiled import compiled
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.heads.block_proposer import block_head
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.compiled_block import compiled_block_head
from attar.runtime.speculate.heads.own_tensors import own_tensors
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.distillation.heads.drafters import drafter_of

pytestmark = needs_compiler

CASES = [
    ("dflash", "llama3", {}, None),
    ("dspark", "qwen3", {}, range(3, 320, 3)),
    ("dspark", "llama2", {"markov_rank": 0}, None),
    ("dspark", "smollm", {"markov": "gated"}, range(3, 320, 3)),
    ("dspark", "gemma2", {}, None),
]


class GivenStates:
    """A context reader of given states."""

    def __init__(self, states):
        self.states, self.seen = states, {}

    def unread(self, request):
        start, stop = self.seen.get(request.sequence, 0), len(request.tokens) - 1
        self.seen[request.sequence] = stop
        return start, self.states[request.sequence][start:stop]

    def forget(self, sequence):
        self.seen.pop(sequence, None)


def heads_of(kind, family, changes, chosen, blocks=24, weights="int8"):
    """A drafter in the library, and the module with the weights that the library has."""
    model = tiny_models.build(family)
    runner = compiled(
        model.config, model.state_dict(), blocks=blocks, threads=2, kv_dtype="float32", weights=weights
    )
    picked = None if chosen is None else torch.tensor(list(chosen))
    torch.manual_seed(0)
    drafter = drafter_of(model, kind, chosen=picked, **changes).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # chains that differ
    own = own_tensors(runner, "target")
    fast = compiled_block_head(drafter, own, runner)
    packed_weights = fast.contexts.program.drafter
    drafter.fc.weight.copy_(unpack(packed_weights.context))
    if chosen is not None:
        drafter.lm_head.weight.copy_(unpack(packed_weights.model.head))
    if packed_weights.markov is not None:
        drafter.markov_head.markov_w2.weight.copy_(unpack(packed_weights.markov))
        drafter.markov_head.markov_w1.weight.copy_(packed_weights.previous)
    for layer, packed in zip(drafter.layers, packed_weights.model.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        for part, rows in zip(parts, unpack(packed.qkv).split([len(p.weight) for p in parts]), strict=True):
            part.weight.copy_(rows)
        attention.o_proj.weight.copy_(unpack(packed.out))
        gate, up = unpack(packed.gate_up).chunk(2)
        mlp.gate_proj.weight.copy_(gate)
        mlp.up_proj.weight.copy_(up)
        mlp.down_proj.weight.copy_(unpack(packed.down))
    return fast, block_head(drafter, own)


def states_of(head, lengths, seed=0):
    config = head.drafter.config
    generator = torch.Generator().manual_seed(seed)
    shape = (len(config.layers), config.hidden)
    return {row: torch.randn(n, *shape, generator=generator) for row, n in enumerate(lengths)}


def tokens_of_length(n, seed=0):
    return torch.randint(
        2, tiny_models.VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def rules_of(tokens, params, exact):
    completion = Completion("r", 0, tokens, params, seed=7, limit=100)
    return DraftRules(completion, Noise(7, 0, len(tokens))) if exact else completion


def proposed(head, states, lengths, params=None, exact=False, **more):
    proposer = ChainProposer(head, GivenStates(states), name="block")
    drafts = []
    for n in lengths:  # of a sequence that grows, beside another one
        requests = []
        for row in (0, 1):
            tokens = tokens_of_length(n + row)
            rules = None if params is None else rules_of(tokens, params, exact)
            requests.append(DraftRequest(row, tokens, 8, rules=rules, **more))
        drafts += proposer.propose(requests)
    for row in (0, 1):
        proposer.forget(row)
    return drafts


def same_drafts(fast, slow):
    assert len(fast) == len(slow)
    for one, other in zip(fast, slow, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.tokens == other.tokens and one.rule == other.rule
            if other.q is not None:
                for p, q in zip(one.q, other.q, strict=True):  # near a cut a token may be on either side
                    assert abs(p - q).sum() < 0.02
                one.check()


SETTINGS = [
    (None, False),
    (SamplingParams(temperature=0.8), False),
    (SamplingParams(temperature=1.3), True),
    (SamplingParams(temperature=0.9, top_p=0.8), True),
    (SamplingParams(temperature=0.7, repetition_penalty=1.3), False),
    (SamplingParams(temperature=0.0, min_tokens=40), False),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "family", "changes", "chosen"), CASES)
def test_drafts_are_those_of_the_module(kind, family, changes, chosen):
    fast, slow = heads_of(kind, family, changes, chosen)
    states = states_of(fast, [60, 60])
    for params, exact in SETTINGS:
        lengths = (1, 2, 23, 24, 40)
        drafts = proposed(fast, states, lengths, params, exact)
        same_drafts(drafts, proposed(slow, states, lengths, params, exact))
        assert any(draft is not None and len(set(draft.tokens)) > 1 for draft in drafts)


def test_a_drafter_of_a_target_in_int4_is_in_int4():
    fast, slow = heads_of("dspark", "qwen3", {}, range(3, 320, 3), weights="int4")
    weights = fast.contexts.program.drafter
    products = [weights.context, weights.model.head, weights.markov]
    products += [
        getattr(layer, name) for layer in weights.model.layers for name in ("qkv", "out", "gate_up", "down")
    ]
    assert {product.kind for product in products} == {"int4"}
    states = states_of(fast, (40, 41))
    for params, exact in SETTINGS[:3]:
        same_drafts(
            proposed(fast, states, (9, 30), params, exact), proposed(slow, states, (9, 30), params, exact)
        )


def test_a_chain_ends_where_it_does_not_pay():
    fast, slow = heads_of("dspark", "qwen3", {}, None)
    states, kept = states_of(fast, [60, 60]), set()
    for least in (0.05, 0.3, 0.5, 0.7):
        drafts = proposed(fast, states, (9, 30), min_chance=least)
        same_drafts(drafts, proposed(slow, states, (9, 30), min_chance=least))
        kept |= {0 if draft is None else len(draft) for draft in drafts}
    assert len(kept) > 1


def test_chances_are_corrected_where_they_are_compared():
    """Both heads end their chains by the corrected chances, and learn from those that were said."""
    fast, slow = heads_of("dspark", "qwen3", {}, None)
    states, tokens = states_of(fast, [60]), tokens_of_length(30)
    proposers = [ChainProposer(head, GivenStates(states), name="block") for head in (fast, slow)]
    (whole,) = proposers[0].propose([DraftRequest(0, tokens, 8)])
    said = list(proposers[0]._drafted[0].chances)
    request, kept = DraftRequest(0, tokens, 8, min_chance=0.99 * math.prod(said[:2])), []
    for accepted in (0, 0, 0, 3, 3, 3, 3):
        first, second = (proposer.propose([request])[0] for proposer in proposers)
        same_drafts([first], [second])
        kept.append(0 if first is None else len(first))
        for proposer in proposers:
            proposer.observe([DraftFeedback(0, first, (), [*whole.tokens[:accepted], -1])])
        factors = [proposer.correction.factors(0, 8) for proposer in proposers]
        assert factors[0] == pytest.approx(factors[1], rel=1e-4)
    assert kept == [2, 2, 2, 1, 2, 2, 2]


def test_ends_end_a_chain():
    fast, _ = heads_of("dspark", "qwen3", {}, None)
    states = states_of(fast, [60, 60])
    tokens = tokens_of_length(20)
    context = GivenStates(states)
    (full,) = ChainProposer(fast, context, name="block").propose([DraftRequest(0, tokens, 8)])
    proposer = ChainProposer(fast, context, name="block", ends=[full.tokens[1]])
    (short,) = proposer.propose([DraftRequest(0, tokens, 8)])
    assert short.tokens == full.tokens[: full.tokens.index(full.tokens[1]) + 1]


def test_without_slots_there_is_no_draft_and_forgetting_frees_them():
    fast, _ = heads_of("dspark", "qwen3", {}, None, blocks=2)
    states = dict.fromkeys(range(3), states_of(fast, [60])[0])
    proposer = ChainProposer(fast, GivenStates(states), name="block")
    requests = [DraftRequest(row, tokens_of_length(40), 8) for row in range(3)]
    drafts = proposer.propose(requests)
    assert drafts[0] is not None and drafts[2] is None
    assert proposer.propose(requests)[2] is None
    for row in range(3):
        proposer.forget(row)
    assert proposer.propose(requests[2:])[0].tokens == drafts[0].tokens
    for row in range(3):
        proposer.forget(row)
    assert sorted(fast.contexts._free) == list(range(fast.contexts.program.blocks))


def test_a_context_that_was_read_again_is_replaced():
    fast, slow = heads_of("dspark", "qwen3", {}, None)
    first, second = states_of(fast, [30])[0], states_of(fast, [30], seed=5)[0]
    tokens = tokens_of_length(25)
    drafts = []
    for head in (fast, slow):
        head.read(0, tokens, 0, first[:24])
        head.read(0, tokens, 16, second[16:24])
        context = GivenStates({0: first})
        context.seen[0] = 24
        drafts += ChainProposer(head, context, name="block").propose([DraftRequest(0, tokens, 8)])
    assert drafts[0].tokens == drafts[1].tokens


def test_a_context_may_begin_later():
    """Its first blocks were released."""
    fast, slow = heads_of("dspark", "qwen3", {}, None)
    states, tokens = states_of(fast, [60])[0], tokens_of_length(41)
    drafts = []
    for head in (fast, slow):
        context = GivenStates({0: states})
        context.seen[0] = 16
        proposer = ChainProposer(head, context, name="block")
        for n in (39, 41):
            drafts += proposer.propose([DraftRequest(0, tokens[:n], 8)])
    assert drafts[0].tokens == drafts[2].tokens and drafts[1].tokens == drafts[3].tokens
