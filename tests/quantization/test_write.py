"""From codes to a folder that transformers loads and attar reads back: every scheme, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from attar.checkpoint import open_checkpoint
from attar.errors import NumericsError
from attar.measure.evaluate import evaluate
from attar.measure.settings import EvaluateSettings
from attar.models.loading.load import load_model
from attar.quantization.grids import QuantizedTensor
from attar.quantization.methods.rtn import rtn
from attar.quantization.plan import plan
from attar.quantization.schemes import SCHEMES
from attar.quantization.write import file_bytes, write
from tests import tiny_models
from tests.quantization.packing import nearest, pack, save, settings

LIBRARY = [name for name in SCHEMES if name not in ("NF4", "INT8")]


def logits(model):
    return tiny_models.logits(model.eval(), tiny_models.tokens(model))


def theirs(folder, dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LIBRARY)
def test_transformers_computes_what_attar_computes(name, tmp_path):
    """Activation rounding included: the hooks have the library's numerics."""
    _, result = pack(save(tmp_path / "dense"), tmp_path / "out", scheme=name)
    assert torch.equal(logits(theirs(tmp_path / "out")), logits(load_model(result)))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["W4A16_ASYM", "W8A8_STATIC", "FP8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"])
def test_other_number_types(name, dtype, tmp_path):
    _, result = pack(save(tmp_path / "dense", dtype=dtype), tmp_path / "out", scheme=name)
    assert torch.equal(logits(theirs(tmp_path / "out", dtype)), logits(load_model(result)))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*LIBRARY, "NF4"])
@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_the_dense_weights_are_those_of_the_codes(name, family, tmp_path):
    """Also where the weight is stored as (K, N)."""
    folder = save(tmp_path / "dense", family, dtype=torch.float32)
    kept = {}

    def codes(stored, load):
        site = chosen.sites[stored]
        kept[stored] = rtn(load().T.contiguous() if site.transposed else load(), site.grid)
        return kept[stored]

    chosen = plan(open_checkpoint(folder), settings(scheme=name))
    _, result = pack(folder, tmp_path / "out", scheme=name, codes=codes)
    state = load_model(result).state_dict()
    assert kept
    for stored, quantized in kept.items():
        weight = state[stored].T if chosen.sites[stored].transposed else state[stored]
        assert torch.equal(weight, quantized.dequantize()), stored


@pytest.mark.few(4)
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("name", [*LIBRARY, "NF4"])
def test_the_bytes_of_the_files_are_known_before(name, more, tmp_path):
    changes = {"embedding_bits": 8, "kv_cache": "fp8"} if more and name != "NF4" else {}
    folder = save(tmp_path / "dense", tie_word_embeddings=True)
    chosen, _ = pack(folder, tmp_path / "out", scheme=name, **changes)
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert file_bytes(open_checkpoint(folder), chosen) == written


def test_static_scales_are_stored_and_used(tmp_path):
    chosen, result = pack(save(tmp_path / "dense"), tmp_path / "out", scheme="FP8", kv_cache="fp8")
    name = "model.layers.0.self_attn"
    for leaf in ("q_proj.input_scale", "k_scale", "v_scale"):
        assert result.tensors[f"{name}.{leaf}"].shape == (1,)
        assert result.load(f"{name}.{leaf}").item() > 0
    assert chosen.config["kv_cache_scheme"]["strategy"] == "tensor"
    before = logits(load_model(result))
    tensors = load_file(result.path / "model.safetensors")
    tensors[f"{name}.v_scale"] *= 3
    from safetensors.torch import save_file

    save_file(tensors, result.path / "model.safetensors", metadata={"format": "pt"})
    assert not torch.equal(logits(load_model(result.path)), before)


@pytest.mark.few(1)
@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama3", "phi3", "gemma2", "gemma3"])
def test_rounded_kv_caches_are_those_of_transformers(kv_cache, family, tmp_path):
    folder = tiny_models.save(tiny_models.build(family), tmp_path / "dense", dtype=torch.bfloat16)
    _, result = pack(folder, tmp_path / "out", kv_cache=kv_cache)
    _, plain = pack(folder, tmp_path / "plain")
    ours = logits(load_model(result))
    assert torch.equal(logits(theirs(tmp_path / "out")), ours)
    assert not torch.equal(logits(load_model(plain)), ours)


MIXED = {
    "scheme": "W4A16",
    "overrides": ("re:(q|k|v)_proj$=W8A16", "re:layers.1.*down_proj=FP8_DYNAMIC", "o_proj=dense"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("embedding_bits", [0, 8])
def test_mixed_schemes(embedding_bits, tmp_path):
    folder = save(tmp_path / "dense", tie_word_embeddings=True)
    chosen, result = pack(folder, tmp_path / "out", embedding_bits=embedding_bits, **MIXED)
    assert torch.equal(logits(theirs(tmp_path / "out")), logits(load_model(result)))
    assert chosen.config["format"] == "mixed-precision"
    assert result.tensors["model.layers.0.self_attn.o_proj.weight"].dtype == "BF16"
    assert result.tensors["model.layers.1.mlp.down_proj.weight"].dtype == "F8_E4M3"
    assert result.tensors["model.layers.0.mlp.down_proj.weight_packed"].dtype == "I32"


@pytest.mark.slow
def test_mixed_schemes_of_a_transposed_family(tmp_path):
    overrides = ("c_attn=FP8", "re:h.1.mlp.c_fc=NVFP4A16", "re:h.2.mlp.c_fc=W8A8")
    folder = save(tmp_path / "dense", "gpt2")
    _, result = pack(folder, tmp_path / "out", overrides=overrides, embedding_bits=8)
    dense, packed = logits(load_model(folder)).float(), logits(load_model(result)).float()
    assert (packed - dense).norm() < 0.5 * dense.norm()
    with pytest.raises(Exception, match="attar-transposed"):
        theirs(tmp_path / "out")


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_checkpoints_without_the_prefix(family, tmp_path):
    """Saved from the bare model: no "model." before the names."""
    sizes = {"n_embd": 128} if family == "gpt2" else {"hidden_size": 128, "intermediate_size": 256}
    model = tiny_models.build(family, tie_word_embeddings=True, **sizes)
    bare = model.base_model
    bare.config.architectures = [type(model).__name__]
    bare.save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense/config.json").read_text())
    config["architectures"] = [type(model).__name__]
    (tmp_path / "dense/config.json").write_text(json.dumps(config))
    wide = "c_fc" if family == "gpt2" else "re:(gate|up)_proj$"
    _, result = pack(tmp_path / "dense", tmp_path / "out", overrides=(f"{wide}=FP8",), kv_cache="fp8")
    assert not any(name.startswith(("model.", "transformer.")) for name in result.tensors)
    dense, packed = logits(load_model(tmp_path / "dense")), logits(load_model(result))
    assert 0 < (packed - dense).norm() < 0.5 * dense.norm()


def test_act_order_with_groups_of_distant_inputs(tmp_path):
    """``weight_g_idx``: each input names its group."""
    folder = save(tmp_path / "dense", dtype=torch.float32)
    checkpoint = open_checkpoint(folder)
    chosen = plan(checkpoint, settings(scheme="W4A16_ASYM"), group_order=True)
    order = {128: torch.randperm(128), 256: torch.randperm(256)}
    dense = {}

    def codes(stored, load):
        site, weight = chosen.sites[stored], load()
        permuted = order[weight.shape[1]]
        quantized = rtn(weight[:, permuted], site.grid)
        back = permuted.argsort()
        dense[stored] = quantized.dequantize()[:, back]
        group = (torch.arange(len(permuted)) // site.grid.group_size)[back]
        return QuantizedTensor(site.grid, quantized.codes[:, back], quantized.parameters, group)

    (tmp_path / "out").mkdir()
    write(checkpoint, chosen, codes, tmp_path / "out", tmp_path / "work")
    assert chosen.config["config_groups"]["group_0"]["weights"]["actorder"] == "group"
    state = load_model(tmp_path / "out").state_dict()
    assert dense and all(torch.equal(state[name], weight) for name, weight in dense.items())


def test_what_stays_dense_takes_the_type_asked_for(tmp_path):
    """A transform leaves float32 behind; the result is of the type of the original."""
    checkpoint = open_checkpoint(save(tmp_path / "dense", dtype=torch.float32))
    chosen = plan(checkpoint, settings(embedding_bits=8), dtype=torch.bfloat16)
    (tmp_path / "out").mkdir()
    codes = nearest(checkpoint, chosen)
    write(checkpoint, chosen, codes, tmp_path / "out", tmp_path / "work", dtype=torch.bfloat16)
    got = open_checkpoint(tmp_path / "out")
    assert {info.dtype for info in got.tensors.values()} == {"BF16", "I32", "I64", "I8"}
    assert got.config["dtype"] == "bfloat16"
    assert torch.equal(logits(theirs(tmp_path / "out")), logits(load_model(got)))


def test_evaluate_sees_what_the_scheme_does(tmp_path):
    """W8A8 with a static scale that is far too small loses the model, although its weights are fine."""
    from attar.quantization.calibration import ActivationRange

    folder = save(tmp_path / "dense")
    _, good = pack(folder, tmp_path / "good", scheme="W8A8_STATIC")
    real = ActivationRange.scale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationRange, "scale", lambda seen: real(seen) / 50)
        _, bad = pack(folder, tmp_path / "bad", scheme="W8A8_STATIC")
    (tmp_path / "text.txt").write_text("def f(a, b):\n    return [a + b for _ in range(10)]\n" * 40)
    text, exact = str(tmp_path / "text.txt"), "transformers"  # attar's own runners round in their own way
    asked = EvaluateSettings(
        data=text, tokens=256, sequence_length=64, batch_size=2, speed=False, sample="", runner=exact
    )
    kl = [evaluate(result, asked, reference=open_checkpoint(folder)).kl_mean for result in (good, bad)]
    assert kl[0] < 0.1 * kl[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("value", [None, 0.0, float("nan"), float("inf"), -1.0])
def test_a_bad_static_scale_is_named(value, tmp_path):
    checkpoint = open_checkpoint(save(tmp_path / "dense"))
    chosen = plan(checkpoint, settings(scheme="W8A8_STATIC"))
    scales = {site.module: 0.1 for site in chosen.sites.values()}
    scales["model.layers.1.mlp.up_proj"] = value
    (tmp_path / "out").mkdir()
    with pytest.raises(NumericsError, match=r"layers.1.mlp.up_proj: the scale"):
        write(
            checkpoint,
            chosen,
            nearest(checkpoint, chosen),
            tmp_path / "out",
            tmp_path / "work",
            input_scales=scales,
        )
    assert not list((tmp_path / "out").iterdir())
