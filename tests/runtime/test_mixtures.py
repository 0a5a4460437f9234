"""Mixtures of experts through the engine: saved, loaded, and answered as transformers does."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.modules import Modules
from attar.runtime.runner.packed_model import PackedLinear
from attar.runtime.sampling.params import SamplingParams
from tests import tiny_mixtures, tiny_models
from tests.compiler import needs_compiler
from tests.formats.test_mxfp4_experts import packed as mxfp4
from tests.quantization.packing import pack
from tests.runtime.driving import greedy
from tests.runtime.test_loading import dense, logits

pytestmark = needs_compiler

COMPILED = ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss")
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders by family, bfloat16, and what transformers answers to two prompts with a common start."""
    made = {}

    def get(family):
        if family not in made:
            model = tiny_mixtures.build(family).bfloat16().float()
            folder = tiny_models.save(
                model, tmp_path_factory.mktemp("mixtures") / family, dtype=torch.bfloat16
            )
            ids = tiny_models.tokens(model, batch=1, length=40)[0].tolist()
            prompts = [ids, ids[:34] + ids[:3]]
            made[family] = folder, prompts, [greedy(model.float(), prompt, 12) for prompt in prompts]
        return made[family]

    return get


def answers(llm, prompts):
    """Greedy tokens; the second prompt reads the first one's blocks."""
    results = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    llm.engine.check()
    return [list(result.token_ids) for result in results]


@pytest.mark.slow
def test_a_router_may_be_float32_and_experts_may_not(saved, tmp_path):
    """The router is not rounded; experts would be."""
    folder, prompts, wanted = saved("gpt_oss")
    for ending, compiled in (("mlp.router.weight", True), ("mlp.experts.down_proj", False)):
        tensors = load_file(folder / "model.safetensors")
        changed = {k: v.float() if k.endswith(ending) else v for k, v in tensors.items()}
        copied = shutil.copytree(folder, tmp_path / ending)
        save_file(changed, copied / "model.safetensors", {"format": "pt"})
        llm = LLM(copied, kv_dtype="float32", kv_tokens=256)
        assert isinstance(llm.engine.runner, Compiled) == compiled
        assert answers(llm, prompts[:1]) == wanted[:1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe"])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_quantized_mixtures_on_both_runners(tmp_path, family, scheme):
    """Codes of every expert are kept: near the decoded model, as dense families are (test_loading.py)."""
    folder = tiny_models.save(tiny_models.build(family), tmp_path / "model", dtype=torch.bfloat16)
    checkpoint = pack(folder, tmp_path / "packed", scheme=scheme)[1]
    model, settings = dense(checkpoint), {"activations": 16, "kv_dtype": "float32", "kv_tokens": 64}
    ids = tiny_models.tokens(model, batch=1, length=24)
    want = tiny_models.logits(model, ids)[0]
    ours, modules = (
        logits(load(checkpoint, runner=name, **settings).runner, ids[0].tolist())
        for name in ("compiled", "modules")
    )
    part = (modules - want).norm(dim=1) / want.norm(dim=1)
    assert 0 < part[:5].median() < 0.012  # decoding rounds to bfloat16, and later a router may turn
    torch.testing.assert_close(ours, modules, rtol=0, atol=2e-3 * float(want.abs().max()))
    weights = load(checkpoint, kv_tokens=64).runner.weights
    kind = "int8" if scheme == "W8A16" else "int4"
    assert {packed.kind for layer in weights.layers for packed in layer.products} == {kind}
    modules = load(checkpoint, kv_tokens=64, runner="modules").runner.model
    codes = sum(isinstance(module, PackedLinear) for module in modules.modules())
    assert codes == sum(name.endswith("weight_packed") for name in checkpoint.tensors)


def test_mxfp4_experts_keep_their_codes(tmp_path):
    """gpt-oss as it is published: twice a 4-bit float is a whole number, so that nothing is rounded."""
    mxfp4(tmp_path)
    ids = list(range(5, 29))
    settings = {"activations": 16, "kv_dtype": "float32", "kv_tokens": 64}
    ours, modules = (load(tmp_path, runner=name, **settings).runner for name in ("compiled", "modules"))
    for layer in ours.weights.layers:
        assert {packed.kind for packed in (*layer.mixture.gate_up, *layer.mixture.down)} == {"int8"}
    want = logits(modules, ids)
    torch.testing.assert_close(logits(ours, ids), want, rtol=0, atol=2e-3 * float(want.abs().max()))


def together(llm, prompts):
    return [list(result.token_ids) for result in llm.generate(prompts, PARAMS)]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", COMPILED)
def test_saved_mixtures_run_compiled(saved, family):
    """Alone and together, in chunks, with drafts and a shared prefix."""
    folder, prompts, wanted = saved(family)
    settings = {"kv_dtype": "float32", "activations": 16, "kv_tokens": 256}
    llm = LLM(folder, **settings)
    assert isinstance(llm.engine.runner, Compiled)
    assert answers(llm, prompts) == wanted
    drafting = LLM(folder, speculate="ngram", limits=Limits(step_tokens=16, sequences=4, chunk=8), **settings)
    assert together(drafting, prompts) == wanted


@pytest.mark.slow
def test_drafts_batches_and_formats_change_no_token_of_rounded_experts(saved):
    """Of integer products and rounded caches the numbers are the same alone and in company."""
    folder, prompts, _ = saved("qwen3_moe")
    for kv_dtype in ("int8", "bfloat16"):
        settings = {"weights": "int4", "kv_dtype": kv_dtype, "kv_tokens": 256}
        want = answers(LLM(folder, prefix_cache=False, **settings), prompts)
        drafting = LLM(
            folder, speculate="ngram", limits=Limits(step_tokens=16, sequences=4, chunk=8), **settings
        )
        assert together(drafting, prompts) == want == answers(drafting, prompts)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["deepseek_v3", "llama4"])
def test_other_mixtures_run_through_modules(saved, family):
    folder, prompts, wanted = saved(family)
    llm = LLM(folder, kv_tokens=256, dtype="float32")
    assert isinstance(llm.engine.runner, Modules)
    assert answers(llm, prompts) == wanted
