"""A model's own multi-token prediction head drafts: completions are those of plain decoding, and what it
computes entry by entry is what one pass over all of them gives."""

import pytest
import torch
from transformers import DynamicCache, modeling_layers

from attar.checkpoint.open import open_checkpoint
from attar.errors import ModelError, SettingsError
from attar.models.mtp_head import load_mtp_head
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.heads.mtp_proposer import MtpChain, load_mtp_proposer
from attar.runtime.speculate.heads.own_tensors import OwnTensors
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.settings import SpeculationSettings
from attar.verbs import quantize
from tests import tiny_models, tiny_mtp
from tests.cases import mostly_slow
from tests.runtime.speculate.proposing import speculator

LENGTH = 9
PROMPTS = [[5, 9, 12, 7, 5, 9], [8, 8, 31]]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=tiny_mtp.HEADS)
def folder(request, tmp_path_factory):
    return tiny_mtp.save(request.param, tmp_path_factory.mktemp("model") / request.param)


def chain_of(folder):
    checkpoint = open_checkpoint(folder)
    table = checkpoint.load("model.embed_tokens.weight")
    return MtpChain(load_mtp_head(checkpoint), OwnTensors(table, lambda states: states @ table.T))


def drafted(chain, tokens, following):
    """The logits of a round that drafts the given tokens."""
    draft = GrowingDraft(DraftRequest(0, tokens, 4), list(tokens), len(tokens), 4, frozenset(), 0.0, 1)
    chain.begin([draft])
    rows = [chain.logits([draft])[0]]
    for token in following:
        draft.tokens.append(token)
        rows.append(chain.logits([draft])[0])
    return torch.stack(rows)


@torch.no_grad()
def test_entries_one_by_one_are_those_of_one_pass(folder):
    """A round of drafts leaves nothing behind, and reading in parts changes nothing."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 300, (LENGTH,), generator=generator).tolist()
    states = torch.randn(LENGTH - 1, 1, 64, generator=generator)
    once, parts = chain_of(folder), chain_of(folder)
    once.read(0, tokens, 0, states)
    parts.read(0, tokens[:5], 0, states[:4])
    drafted(parts, tokens[:5], [3, 7])
    parts.read(0, tokens, 4, states[4:])
    wanted = drafted(once, tokens, [3, 7, 1])
    torch.testing.assert_close(drafted(parts, tokens, [3, 7, 1]), wanted, **CLOSE)
    assert not torch.allclose(wanted[0], wanted[1])


@torch.no_grad()
@pytest.mark.skipif(not hasattr(modeling_layers, "MtpLayer"), reason="transformers has none yet")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_it_computes_what_transformers_does(family, tmp_path):
    """transformers' own layer, its tensors by their stored names."""
    checkpoint = open_checkpoint(tiny_mtp.save(family, tmp_path / "model"))
    head = load_mtp_head(checkpoint)
    layer = modeling_layers.MtpLayer(head.block.config, type(head.block.layers[0]), type(head.norm), 0)
    stored = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
    state = {
        f"{own}.weight": checkpoint.load(f"model.layers.3.{name}.weight") for own, name in stored.items()
    }
    block = head.block.layers[0].state_dict()
    layer.load_state_dict({**state, **{f"mtp_block.{name}": tensor for name, tensor in block.items()}})
    e, h = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(3, 9)
    turn = head.block.rotary_emb(e[None], position_ids=positions[None])
    wanted = layer.eval()(e[None], h[None], turn, None, positions[None], None)[0]
    outputs = head.norm(head(e, h, positions, DynamicCache(config=head.block.config)))
    torch.testing.assert_close(outputs, wanted, **CLOSE)


@torch.no_grad()
def test_a_draft_of_its_own_state_is_an_entry_like_all(folder):
    """The state that a draft leaves, read as if it were the target's, gives the same logits."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 300, (LENGTH,), generator=generator).tolist()
    states = torch.randn(LENGTH - 1, 1, 64, generator=generator)
    chain, other = chain_of(folder), chain_of(folder)
    chain.read(0, tokens, 0, states)
    state = chain.head.fed_back(chain._entries[0].last)
    other.read(0, [*tokens, 11], 0, torch.cat([states, state[None, None]]))
    wanted = drafted(other, [*tokens, 11], [])[0]
    torch.testing.assert_close(drafted(chain, tokens, [11])[1], wanted, **CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("family", "runner"),
    mostly_slow(
        [("deepseek_v3", "modules"), ("qwen2", "modules"), ("qwen2", "device"), ("glm4_moe", "device")],
        [("deepseek_v3", "modules"), ("qwen2", "modules")],
    ),
)
def test_completions_are_those_of_plain_decoding(family, runner, temperature, tmp_path):
    folder = tiny_mtp.save(family, tmp_path / "model")
    params = SamplingParams(temperature=temperature, max_tokens=16, ignore_eos=True, seed=3)
    loaded = [load(folder, kv_tokens=512, dtype="float32", runner=runner) for _ in range(2)]
    drafting = speculator(load_mtp_proposer(loaded[1], folder), most=4)
    plain, llm = LLM.of(loaded[0]), LLM.of(loaded[1], speculator=drafting)
    texts = [[one.token_ids for one in model.generate(PROMPTS, params)] for model in (plain, llm)]
    llm.engine.check()
    assert texts[0] == texts[1] and drafting.failure is None and drafting.counts.drafts > 8


def test_a_quantized_head_drafts_as_decoded(tmp_path):
    folder = tiny_mtp.save("qwen2", tmp_path / "model")
    coded = quantize(folder, tmp_path / "coded", method="rtn", scheme="W8A16", group_size=32, check_tokens=0)
    head, dense = load_mtp_head(coded), load_mtp_head(open_checkpoint(folder))
    weights = [one.block.layers[0].mlp.up_proj.weight for one in (head, dense)]
    assert 0 < (weights[0] - weights[1]).norm() / weights[1].norm() < 0.01


def test_a_model_without_a_head_is_refused(tmp_path):
    folder = tiny_models.save(tiny_models.build("qwen2"), tmp_path / "model")
    with pytest.raises(ModelError, match="has no multi-token prediction head"):
        LLM(folder, speculate="mtp", kv_tokens=256)
    with pytest.raises(SettingsError, match="eviction"):
        SpeculationSettings(speculate="mtp").check_with({"snapkv": ("eviction", "snapkv")})
