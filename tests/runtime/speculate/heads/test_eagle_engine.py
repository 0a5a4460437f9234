"""EAGLE in the engine, with states that the runner keeps: texts are those of plain decoding, whatever comes
together; and an easy target, whose drafts are accepted."""

from __future__ import annotations

import copy

import pytest
import torch

from attar.errors import ModelError
from attar.models.draft_heads.decoder_layer import DraftLayerShape
from attar.models.draft_heads.eagle3_module import Eagle3Config, Eagle3Head
from attar.models.draft_heads.eagle_module import EagleConfig, EagleHead
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.device.runner import device_runner
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.heads.eagle_proposer import EagleChain, EagleDrafter
from attar.runtime.speculate.heads.eagle_tree import EagleTreeProposer
from attar.runtime.speculate.heads.own_tensors import own_tensors
from attar.runtime.speculate.policy import DraftPolicy
from tests import tiny_models
from tests.compiler import no_compiler
from tests.marks import slow_but
from tests.runtime.speculate.proposing import speculator

SHAPE = DraftLayerShape(depth=1, heads=8, kv_heads=4, head_dim=8, intermediate=96, head_norms=False)
COMMON = {"hidden": 64, "vocabulary": 320, "shape": SHAPE, "drafts": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, repetition_penalty=1.3)


def easy_model():
    """What it says hangs almost on the last token alone."""
    model = tiny_models.build("llama3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def easy_head(model, sharp=40.0):
    """f^ is the embedding of the last token, which the target's norm only scales."""
    head = EagleHead(EagleConfig(layers=(3,), **COMMON))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.fc.weight[:, :64] = sharp * torch.diag(model.model.norm.weight)
    return head.eval().requires_grad_(False)


def random_head(seed=0):
    head = Eagle3Head(Eagle3Config(layers=(0, 1, 2), **COMMON))
    return tiny_models.randomize(head, seed).eval().requires_grad_(False)


def runner_of(model, kind="modules", blocks=96, block_size=4):
    if kind == "compiled":
        options = {"kv_dtype": "float32", "bits": 16, "blocks": blocks, "block_size": 16, "threads": 1}
        return compiled(model.config, model.state_dict(), **options)
    if kind == "device":
        return device_runner(model.config, model.state_dict(), kv_dtype="float32", blocks=blocks)
    return Modules(copy.deepcopy(model), blocks=blocks, block_size=block_size)


def llm_of(runner, head=None, width=1, limits=None, **options):
    drafting = None
    if head is not None:
        context = ContextReader(runner.keep_hidden(head.config.layers), runner.block_size, head.config.layers)
        drafter = EagleDrafter(head, own_tensors(runner, "target"))
        if width > 1:
            proposer = EagleTreeProposer(drafter, context, name="eagle", width=width)
        else:
            proposer = ChainProposer(EagleChain(drafter), context, name="eagle")
        drafting = speculator(proposer, most=12, **options)
    return LLM.of(Loaded(runner), limits=limits, speculator=drafting)


def prompts(model, lengths=(13, 5, 21)):
    return [tiny_models.tokens(model, batch=1, length=n, seed=n)[0].tolist() for n in lengths]


def answers(llm, asked, params=GREEDY):
    texts = [text.token_ids for result in llm.generate(asked, params) for text in result.samples]
    llm.engine.check()
    drafting = llm.engine.speculator
    assert drafting is None or drafting.failure is None
    return texts


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", slow_but(("modules", "compiled", "device"), "modules", "compiled"))
def test_drafts_of_an_easy_target_are_accepted(kind, width):
    if kind == "compiled" and no_compiler():
        pytest.skip("no compiler")
    model = easy_model()
    asked, wanted = prompts(model), None
    wanted = answers(llm_of(runner_of(model, kind)), asked)
    llm = llm_of(
        runner_of(model, kind), easy_head(model), width, Limits(step_tokens=48, sequences=3, chunk=8)
    )
    assert answers(llm, asked) == wanted
    counts = llm.engine.speculator.counts
    assert counts.accepted > 0.9 * (sum(map(len, wanted)) - counts.drafts - 3) and counts.drafts < 24
    assert [answers(llm, [one])[0] for one in asked] == wanted  # what the first run published


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("easy", [True, False])
def test_texts_are_those_of_plain_decoding(easy, width):
    """Greedy, with penalties, and coupled draws of several completions, in a pool so small that some are
    preempted."""
    model = easy_model()
    asked = prompts(model)
    coupled = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, seed=5, n=2, top_p=0.9)
    for params in (GREEDY, PENALISED, coupled):
        wanted = answers(llm_of(runner_of(model)), asked, params)
        head = easy_head(model) if easy else random_head()
        limits = Limits(step_tokens=40, sequences=6, chunk=8)
        llm = llm_of(runner_of(model, blocks=26), head, width, limits)
        assert answers(llm, asked, params) == wanted
        assert llm.engine.speculator.counts.drafts > 5


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [1, 3])
def test_exact_draws_are_chains_with_their_q(width):
    model = easy_model()
    llm = llm_of(runner_of(model), easy_head(model), width, verification="exact")
    drawn = []
    propose = llm.engine.speculator.proposer.propose

    def recorded(requests):
        drafts = propose(requests)
        drawn.extend(draft for draft in drafts if draft is not None)
        return drafts

    llm.engine.speculator.proposer.propose = recorded
    params = SamplingParams(temperature=0.7, max_tokens=16, ignore_eos=True)
    answers(llm, prompts(model), params)
    assert drawn and all(draft.is_chain and draft.rule == "iid" and draft.q is not None for draft in drawn)
    for draft in drawn:
        draft.check()
    assert llm.engine.speculator.counts.accepted > 0


@pytest.mark.slow
def test_draft_logits_do_not_depend_on_chunks_prefixes_and_drafts(monkeypatch):
    """By the tokens before them: of a prompt in one piece, in chunks, and from the prefix cache."""
    model = easy_model()
    seen: dict[tuple[int, ...], list[torch.Tensor]] = {}
    begin = EagleChain.begin

    def recorded(self, drafts):
        begin(self, drafts)
        for draft in drafts:
            last = self.drafter.last(draft.request.sequence)
            seen.setdefault(tuple(draft.request.tokens), []).append(self.drafter.logits(last[None])[0])

    monkeypatch.setattr(EagleChain, "begin", recorded)
    monkeypatch.setattr(DraftPolicy, "prefill_pays", lambda *_: True)  # though no draft is ever accepted
    head, asked = random_head(), prompts(model, (37,))
    for limits in (
        Limits(step_tokens=64, sequences=2, chunk=64),
        Limits(step_tokens=16, sequences=2, chunk=7),
    ):
        llm = llm_of(runner_of(model), head, limits=limits)
        for _ in range(2):  # the second time from the prefix cache
            answers(llm, asked)
    several = [rows for rows in seen.values() if len(rows) == 4]
    assert len(several) > 5
    for first, *others in several:
        for other in others:
            torch.testing.assert_close(other, first, rtol=0.02, atol=0.02)  # states are kept in bfloat16


def test_a_runner_without_an_embedding_is_refused():
    with pytest.raises(ModelError, match="target: draft heads share the embedding"):
        own_tensors(object(), "target")


def test_own_tensors_are_those_of_the_model():
    model = tiny_models.build("gemma2")
    states, tokens = torch.randn(3, 64), torch.tensor([5, 9])
    wanted = torch.tanh(model.lm_head(states) / 30.0) * 30.0
    for kind in ("modules", "device", *(["compiled"] if not no_compiler() else [])):
        own = own_tensors(runner_of(tiny_models.build("gemma2"), kind), "target")
        torch.testing.assert_close(own.logits(states), wanted.detach(), rtol=0.02, atol=0.03)
        table = model.model.embed_tokens.weight[tokens].detach()
        torch.testing.assert_close(own.embed(tokens), table, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_coupled_texts_of_50_seeds_are_those_of_plain_decoding(width):
    model, seeds = easy_model(), 50
    asked = prompts(model, (9,)) * seeds
    params = [SamplingParams(max_tokens=8, ignore_eos=True, seed=seed) for seed in range(seeds)]
    wanted = answers(llm_of(runner_of(model, blocks=400)), asked, params)
    llm = llm_of(runner_of(model, blocks=400), easy_head(model, 8.0), width)
    assert answers(llm, asked, params) == wanted and len(set(wanted)) == seeds
    assert llm.engine.speculator.counts.accepted > 0
