"""Latent attention (MLA) in the compiled step: against transformers and against the modules runner, in both
forms, however the tokens come."""

import copy
import itertools
from functools import partial

import pytest
import torch

from attar.errors import ModelError, UsageError
from attar.kernels.packed import unpack
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.runner.compiled import Compiled, compiled
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.runner.latent import LatentProducts
from attar.runtime.runner.lora import read_lora
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from tests import tiny_mixtures, tiny_models
from tests.compiler import needs_compiler
from tests.marks import slow_but
from tests.quantization.packing import pack
from tests.runtime.driving import greedy
from tests.runtime.runner.compiled_steps import BLOCKS, LENGTH, in_bfloat16, logits_of, run, runner, tokens
from tests.runtime.runner.test_latent import build
from tests.runtime.runner.test_lora import generate, write_adapter
from tests.runtime.test_loading import logits as logits_of_runner

pytestmark = needs_compiler

FAMILIES = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu")
DENSE = {"first_k_dense_replace": 9, "num_hidden_layers": 2, "max_position_embeddings": 700}
CLOSE = {"rtol": 0, "atol": 1e-4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale_all_dim": 0.7, "mscale": 1.0}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}


def built(family="DeepseekV3", **changes):
    return in_bfloat16(build(family, **changes))


def in_chunks(actual, ids, *cuts, blocks=BLOCKS):
    pairs = itertools.pairwise([0, *cuts, len(ids)])
    return torch.cat([run(actual, (0, ids, a, b, blocks)) for a, b in pairs])


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threads", [1, 3])
def test_logits_of_every_family(family, threads):
    """Prompts in chunks and single tokens, which take either form, experts among them."""
    model, ids = built(family), tokens()
    actual = in_chunks(runner(model, threads=threads), ids, 1, 3, 35)
    torch.testing.assert_close(actual, logits_of(model, ids), **CLOSE)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("DeepseekV2", {"rope_parameters": YARN, "q_lora_rank": None}),
        ("DeepseekV2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
        ("DeepseekV3", {"rope_parameters": YARN, "rope_interleave": False, "attention_bias": True}),
        (
            "DeepseekV3",
            {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": False},
        ),
        ("DeepseekV3", {"v_head_dim": 20, "qk_nope_head_dim": 10, "kv_lora_rank": 48, **DENSE}),
    ],
)
def test_what_configs_say(family, changes):
    """YaRN with its scale, positions that turn halves, queries without latents, groups, odd heads."""
    model, ids = built(family, **changes), tokens()
    actual = in_chunks(runner(model), ids, 30, 31)
    torch.testing.assert_close(actual, logits_of(model, ids), **CLOSE)


@pytest.fixture(scope="module")
def long():
    """A dense model, 600 tokens, and their logits."""
    model, ids = built(**DENSE), tokens(600)
    return model, ids, logits_of(model, ids)


def test_keys_in_several_chunks_and_splits(long):
    """600 tokens: expanded at once, absorbed behind them, and by threads that divide the keys."""
    model, ids, want = long
    whole = run(runner(model), (0, ids, 0, 600, range(40)))
    torch.testing.assert_close(whole, want, **CLOSE)
    for threads in (1, 3):
        actual = runner(model, threads=threads)
        run(actual, (0, ids, 0, 590, range(40)))
        rows = torch.cat([run(actual, (0, ids, a, b, range(40))) for a, b in ((590, 591), (591, 600))])
        torch.testing.assert_close(rows, want[590:], **CLOSE)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weights": "int4", "group": 16, "kv_dtype": "float16"},
        {"kv_dtype": "bfloat16", "bits": 8},
        {"weights": "int8", "group": 16, "kv_dtype": "int8", "bits": 8},
    ],
)
def test_a_token_does_not_depend_on_its_batch(long, settings):
    """Bit by bit: alone or with others, drafts or single tokens, with any number of threads."""
    model, ids, _ = long
    other, blocks = tokens(90, seed=7), range(40)
    alone, busy = (runner(model, threads=threads, **settings) for threads in (3, 2))
    want = [
        run(alone, (0, ids, 0, 595, blocks)),
        *(run(alone, (0, ids, at, at + 1, blocks)) for at in range(595, 600)),
    ]
    first = run(busy, (1, other, 0, 90, range(40, 46)), (0, ids, 0, 595, blocks))[90:]
    many = [(n, other, 50, 51, [*range(40, 43), 43 + n]) for n in range(1, 6)]
    second = run(busy, *many, (0, ids, 595, 600, blocks))[5:]
    assert torch.equal(torch.cat([first, second]), torch.cat(want))


@pytest.mark.parametrize(
    ("kv_dtype", "bound"), [("float32", 1e-5), ("float16", 1e-3), ("bfloat16", 0.01), ("int8", 0.02)]
)
def test_logits_are_those_of_the_modules(long, kv_dtype, bound):
    """The same store on either runner: a prompt, a chunk behind it that expands, drafts, single tokens."""
    model, ids, _ = long
    modules = Modules(copy.deepcopy(model), blocks=60, kv_dtype=kv_dtype)
    assert modules.pool.geometry.latent == 32
    ours = runner(model, kv_dtype=kv_dtype)
    assert len(ours._program.pool) >= modules.pool.nbytes
    want, actual = (in_chunks(one, ids, 300, 594, 599, blocks=range(40)) for one in (modules, ours))
    error = float((actual - want).norm() / want.norm())
    assert error < bound, error


def test_both_take_the_same_form():
    """The compiled step counts multiplications as latent.py does: bits tell which form a span took."""
    model, ids = built(**DENSE), tokens(300)
    shape = LatentProducts(torch.empty(4 * 32, 32), nope=16, wide=16, rope=8)
    one, chunk = runner(model), runner(model)
    for each in (one, chunk):
        run(each, (0, ids, 0, 200, range(20)))
    changes = []
    for count in (2, 8, 16, 20, 24, 28, 40, 80):
        singles = torch.cat([run(one, (0, ids, at, at + 1, range(20))) for at in range(200, 200 + count)])
        same = torch.equal(run(chunk, (0, ids, 200, 200 + count, range(20))), singles)
        changes.append((same, not shape.expands(count, 200 + count)))
    assert all(same == absorbed for same, absorbed in changes) and len(set(changes)) == 2, changes


def test_a_tree_a_copy_and_the_path_that_is_kept(long):
    model, ids, _ = long
    left, right = tokens(2, seed=4), tokens(2, seed=5)
    actual = runner(model)
    run(actual, (0, ids, 0, 18, (0, 1)))
    row = [*ids[:19], *left, *right]
    rows = run(actual, (0, row, 18, 23, (0, 2)), parents=((-1, 0, 1, 0, 3),), copies=((1, 2),))
    for end, path in ((2, left), (4, right)):
        torch.testing.assert_close(rows[end], logits_of(model, ids[:19] + path)[-1], **CLOSE)
    actual.move([(2 * 16 + 5, 2 * 16 + 3), (2 * 16 + 6, 2 * 16 + 4)])
    chain = [*ids[:19], *right, 7]
    torch.testing.assert_close(
        run(actual, (0, chain, 21, 22, (0, 2)))[0], logits_of(model, chain)[-1], **CLOSE
    )
    torch.testing.assert_close(
        run(actual, (1, ids, 18, 19, (0, 1)))[0], logits_of(model, ids[:19])[-1], **CLOSE
    )


@pytest.mark.parametrize("weights", slow_but(("int4", "int8"), "int4"))
def test_codes_are_those_of_the_weights(weights):
    """Against transformers with the rounded weights in their places."""
    model, ids = built(**DENSE), tokens()
    actual = runner(model, weights=weights, group=16)
    with torch.no_grad():
        model.lm_head.weight.copy_(unpack(actual.weights.head))
        for layer, packed in zip(model.model.layers, actual.weights.layers, strict=True):
            attention, mlp, latents = layer.self_attn, layer.mlp, packed.latents
            assert {part.kind for part in latents.absorb} == {"bf16"}
            assert {part.kind for part in (*latents.up_keys, *latents.up_values)} == {weights}
            first = unpack(packed.qkv)
            attention.q_a_proj.weight.copy_(first[:32])
            attention.kv_a_proj_with_mqa.weight.copy_(first[32:])
            attention.q_b_proj.weight.copy_(unpack(latents.query))
            pairs = zip(latents.up_keys, latents.up_values, strict=True)
            attention.kv_b_proj.weight.copy_(torch.cat([unpack(part) for pair in pairs for part in pair]))
            attention.o_proj.weight.copy_(unpack(packed.out))
            for name, part in zip(("gate_proj", "up_proj"), unpack(packed.gate_up).chunk(2), strict=True):
                getattr(mlp, name).weight.copy_(part)
            mlp.down_proj.weight.copy_(unpack(packed.down))
    want = logits_of(model, ids)
    torch.testing.assert_close(run(actual, (0, ids, 0, LENGTH, BLOCKS)), want, rtol=0, atol=2e-3)
    rows = in_chunks(actual, ids, *range(1, LENGTH))  # of unrounded weights, U^T of rounded ones
    assert float((rows - want).norm() / want.norm()) < 0.3


@pytest.mark.parametrize("scheme", slow_but(("W4A16", "W4A16_ASYM", "W8A16"), "W4A16"))
def test_a_quantized_checkpoint_runs_as_its_modules(tmp_path, scheme):
    """Codes are kept, and U^T is their decoded form."""
    folder = tiny_models.save(
        build("DeepseekV3", first_k_dense_replace=9), tmp_path / "model", dtype=torch.bfloat16
    )
    checkpoint = pack(folder, tmp_path / "packed", scheme=scheme)[1]
    settings = {"activations": 16, "kv_dtype": "float32", "kv_tokens": 64}
    ours, modules = (load(checkpoint, runner=name, **settings).runner for name in ("auto", "modules"))
    assert isinstance(ours, Compiled)
    ids = tokens(24)
    want = logits_of_runner(modules, ids)
    torch.testing.assert_close(logits_of_runner(ours, ids), want, rtol=0, atol=4e-3 * float(want.abs().max()))
    kind = "int8" if scheme == "W8A16" else "int4"
    for layer in ours.weights.layers:
        assert {layer.qkv.kind, layer.latents.query.kind, layer.out.kind} == {kind}


PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder in bfloat16, prompts with a common beginning, and what transformers answers."""
    model = tiny_mixtures.build("deepseek_v3", q_lora_rank=32)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not name.endswith("inv_freq"):
                tensor.copy_(tensor.bfloat16().float())
    ids = tokens()
    prompts = [ids, ids[:34] + ids[:3], tokens(7, seed=2)]
    wanted = [greedy(model, prompt, 12) for prompt in prompts]
    folder = tiny_models.save(model, tmp_path_factory.mktemp("latent") / "model", dtype=torch.bfloat16)
    return folder, prompts, wanted


@pytest.mark.parametrize("speculate", [None, *slow_but(("ngram", "lookahead"), "ngram")])
def test_prefixes_drafts_and_chunks_change_no_token(saved, speculate):
    folder, prompts, wanted = saved
    limits = Limits(step_tokens=16, sequences=4, chunk=8)
    llm = LLM(folder, kv_dtype="float32", activations=16, kv_tokens=256, speculate=speculate, limits=limits)
    assert isinstance(llm.engine.runner, Compiled)
    ids = [list(result.token_ids) for result in llm.generate(prompts, PARAMS)]
    again = llm.generate(prompts[:2], PARAMS)
    assert ids == wanted and [list(result.token_ids) for result in again] == wanted[:2]
    assert llm.engine.scheduler.manager.stats.hit >= 64
    llm.engine.check()


@pytest.mark.slow
def test_it_drafts_for_itself(saved):
    """With part of its layers, which read latents too."""
    folder, prompts, wanted = saved
    llm = LLM(folder, kv_dtype="float32", activations=16, kv_tokens=256, speculate="self")
    assert [list(result.token_ids) for result in llm.generate(prompts, PARAMS)] == wanted


def test_adapters_change_the_projection_that_is_split(tmp_path):
    """Completions are peft's."""
    make = partial(tiny_models.build, "deepseek_v3", first_k_dense_replace=9)
    tiny_models.save(make(), tmp_path / "model", dtype=torch.bfloat16)
    stored = make().bfloat16().float()
    modules = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    wrapped = write_adapter(tmp_path / "lora", stored, 1, target_modules=modules)
    limits = Limits(sequences=8, step_tokens=24)
    settings = {"kv_dtype": "float32", "activations": 16, "kv_tokens": 512, "adapters": True}
    llm = LLM(str(tmp_path / "model"), runner="compiled", limits=limits, **settings)
    lora, adapter = llm.engine.runner.lora, read_lora(tmp_path / "lora")
    lora.add("a", lora.prepare(adapter))
    prompts = [tokens(17), tokens(3, seed=1)]
    first, plain = (generate(llm, [(prompt, key) for prompt in prompts]) for key in ("a", ""))
    with torch.no_grad():
        rows = [wrapped(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    assert [answer[0] for answer in first] == [int(row.argmax()) for row in rows] and first != plain


def test_what_is_refused(saved):
    model = built(**DENSE)
    with pytest.raises(UsageError, match="no latents"):
        runner(model, kv_dtype="int4")
    tensors = model.state_dict() | {"model.layers.0.self_attn.kv_b_proj.bias": torch.zeros(128)}
    with pytest.raises(ModelError, match="bias of kv_b_proj"):
        compiled(model.config, tensors, blocks=4)
    tensors = model.state_dict()
    tensors["model.layers.0.self_attn.kv_b_proj.weight"] = torch.zeros(96, 32)
    with pytest.raises(ModelError, match=r"kv_b_proj is \(96, 32\), not \(128, 32\)"):
        model_weights(model.config, tensors, tensors.__getitem__)
    with pytest.raises(ModelError, match=r"latents of 24 numbers"):
        runner(built(kv_lora_rank=24, **DENSE))
    folder = saved[0]
    for settings, why in (({"kv_dtype": "int4"}, "no latents"), ({"runner": "device"}, "latents")):
        with pytest.raises(ModelError, match=why):
            load(folder, **{"runner": "compiled", "kv_tokens": 64, **settings})
    assert isinstance(load(folder, kv_dtype="int4", kv_tokens=64).runner, Modules)
