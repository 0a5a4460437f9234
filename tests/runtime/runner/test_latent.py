"""MLA on a cache of latents: both forms against attention by hand, whole models against transformers."""

import copy
import itertools

import pytest
import torch
import transformers

from attar.errors import ModelError
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.runner.latent import LatentProducts, cache_latents
from attar.runtime.runner.modules import Modules
from attar.runtime.runner.packed_model import PackedLinear
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.quantization.packing import pack
from tests.runtime.test_loading import dense, logits

LENGTH = 30
SIZES = {"nope": 16, "wide": 12, "rope": 8}
FAMILIES = {
    "DeepseekV2": {"first_k_dense_replace": 1, "n_routed_experts": 8},
    "DeepseekV3": {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    "Glm4MoeLite": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    "MiniCPM3": {},
    "Youtu": {},
}
SHARED = tiny_models.SHARED | tiny_models.MLA | {"num_attention_heads": 4, "num_key_value_heads": 4}
SHARED |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "moe_intermediate_size": 32}
SHARED |= {"num_experts_per_tok": 2, "n_shared_experts": 1}


def by_hand(latent, q, rows, seen, scaling):
    """Sums over keys and values of every head, in float64."""
    q, rows, U, V = (x.double() for x in (q, rows[:, 0], latent.up_keys, latent.up_values))
    r, c = rows.split([latent.rope, latent.rank], dim=1)
    keys = torch.cat([torch.einsum("hkr,nr->hnk", U, c), r.expand(latent.heads, -1, -1)], dim=-1)
    p = (torch.einsum("thk,hnk->htn", q, keys) * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("htn,hvr,nr->thv", p, V, c).float()


@pytest.mark.parametrize(("t", "n"), [(1, 1), (1, 40), (3, 40), (40, 40), (25, 40)])
@pytest.mark.parametrize("expands", [False, True])
def test_both_forms_are_attention_over_every_heads_keys(t, n, expands, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    latent = LatentProducts(torch.randn(3 * 28, 20, generator=draw) / 4, **SIZES)
    q, rows = torch.randn(t, 3, 24, generator=draw), torch.randn(n, 1, 28, generator=draw)
    monkeypatch.setattr(LatentProducts, "expands", lambda *_: expands)
    seen = torch.ones(t, n, dtype=torch.bool).tril(n - t)
    wanted = by_hand(latent, q, rows, seen, 0.3)
    actual = latent.attend(q, rows, None if t == 1 else seen, 0.3, causal=False)
    torch.testing.assert_close(actual, wanted, atol=2e-6, rtol=1e-5)
    if t == n:
        torch.testing.assert_close(latent.attend(q, rows, None, 0.3, causal=True), actual)


def test_many_queries_expand_what_they_read():
    """DeepSeek-V3's sizes: from about 170 queries a span on, or for a whole prompt."""
    latent = LatentProducts(torch.empty(256, 512), nope=128, wide=128, rope=64)
    assert not latent.expands(1, 1 << 20) and not latent.expands(64, 4096) and latent.expands(512, 4096)
    assert latent.expands(300, 300)


def build(family, **changes):
    config = getattr(transformers, f"{family}Config")(**{**SHARED, **FAMILIES[family], **changes})
    return tiny_models.randomize(getattr(transformers, f"{family}ForCausalLM")(config)).eval()


def in_chunks(runner, ids, *cuts):
    spans = [TokenSpan(0, a, b, tuple(range(8)), b - a) for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    return torch.cat([runner.run(StepInput(ids[one.offset : one.end], (one,))) for one in spans])


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(family):
    """Prompts in chunks and single tokens, which take either form."""
    plain = build(family)
    ids = tiny_models.tokens(plain, batch=1, length=LENGTH)
    runner = Modules(copy.deepcopy(plain), blocks=8, block_size=4)
    geometry = runner.pool.geometry
    assert (geometry.kv_heads, geometry.head_dim, geometry.latent) == (1, 40, 32)
    assert runner.pool.nbytes == 3 * 32 * 40 * 4
    actual = in_chunks(runner, ids[0].tolist(), 11, 12, 27, 28, 29)
    torch.testing.assert_close(actual, tiny_models.logits(plain, ids)[0], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kv_dtype", "bound"), [("bfloat16", 0.02), ("int8", 0.03), ("fp8", 0.08), ("int4", 0.3)]
)
def test_other_stores(kv_dtype, bound):
    """Of a dense model: no router turns where rounding moves its scores."""
    plain = build("MiniCPM3")
    ids = tiny_models.tokens(plain, batch=1, length=LENGTH)
    runner = Modules(copy.deepcopy(plain), blocks=8, block_size=4, kv_dtype=kv_dtype)
    actual = in_chunks(runner, ids[0].tolist(), 20, 25)
    want = tiny_models.logits(plain, ids)[0]
    assert 0 < float((actual - want).norm() / want.norm()) < bound


@pytest.mark.slow
def test_a_projection_of_codes_is_decoded_once(tmp_path):
    """W4A16: near the decoded model, which is rounded to bfloat16; the cache is one of latents."""
    folder = tiny_models.save(build("DeepseekV3"), tmp_path / "model", dtype=torch.bfloat16)
    checkpoint = pack(folder, tmp_path / "packed", scheme="W4A16")[1]
    model = dense(checkpoint)
    ids = tiny_models.tokens(model, batch=1, length=24)
    runner = load(checkpoint, runner="modules", activations=16, kv_dtype="float32", kv_tokens=64).runner
    attention = runner.model.model.layers[0].self_attn
    assert isinstance(attention.kv_b_proj, PackedLinear) and runner.pool.geometry.latent == 32
    torch.testing.assert_close(
        attention.latent.weight, model.model.layers[0].self_attn.kv_b_proj.weight, atol=1e-5, rtol=2**-8
    )
    want = tiny_models.logits(model, ids)[0]
    part = (logits(runner, ids[0].tolist()) - want).norm(dim=1) / want.norm(dim=1)
    assert part[:5].median() < 0.012


def test_what_is_no_plain_projection_stays_expanded():
    """A projection with a hook (activations that are rounded): keys and values of every head, as before."""
    plain = build("DeepseekV3")
    ids = tiny_models.tokens(plain, batch=1, length=LENGTH)
    hooked = copy.deepcopy(plain)
    hooked.model.layers[1].self_attn.kv_b_proj.register_forward_pre_hook(lambda _, args: (args[0] * 1.0,))
    assert not cache_latents(hooked)
    runner = Modules(hooked, blocks=8, block_size=4)
    assert (runner.pool.geometry.kv_heads, runner.pool.geometry.head_dim) == (4, 24)
    actual = in_chunks(runner, ids[0].tolist(), 20, 25)
    torch.testing.assert_close(actual, tiny_models.logits(plain, ids)[0], atol=3e-5, rtol=1e-4)


def test_a_runner_may_be_made_again():
    plain = build("DeepseekV2")
    ids = tiny_models.tokens(plain, batch=1, length=9)[0].tolist()
    first, second = (in_chunks(Modules(plain, blocks=8, block_size=4), ids) for _ in range(2))
    assert torch.equal(first, second)


def test_attention_that_chooses_what_it_reads_is_refused(tmp_path):
    """DeepSeek-V3.2's indexer keeps keys of its own."""
    sizes = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "n_routed_experts": 8, "n_group": 1}
    config = transformers.DeepseekV32Config(**{**SHARED, **sizes, "topk_group": 1})
    model = tiny_models.randomize(transformers.DeepseekV32ForCausalLM(config)).eval()
    with pytest.raises(ModelError, match="DeepseekV32ForCausalLM: its attention chooses what it reads"):
        LLM(tiny_models.save(model, tmp_path / "model"))
