"""Loading: which runner runs what, and quantized checkpoints of every format on both runners against the
dense model that attar decodes from the same file."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.cli.main import main
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import MemoryNeededError, ModelError, SettingsError
from attar.kernels.build import warn_slower
from attar.kernels.product import default_activation_bits, default_threads
from attar.kernels.structures import library
from attar.models.loading.load import load_model
from attar.quantization.grids.ggml import GGML
from attar.runtime import loading
from attar.runtime.kv.evict import H2O, Streaming
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded, load
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.modules import Modules
from attar.runtime.runner.packed_model import DecodedLinear, PackedLinear, packed_model
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.quantization.packing import pack, save
from tests.runtime.fake_runner import FakeRunner

# Of the logits' norm, 3 layers of random weights: inputs rounded to integers of 8 or 16 bits, against weights
# that are rounded to bfloat16 when they are decoded.
INTEGERS = {8: 0.035, 16: 0.008}
FINE = {8: 0.035, 16: 5e-4}  # scales that are powers of two: nothing is rounded in decoding
ROUNDED = 0.012  # weights or activations rounded to bfloat16
SAME = 1e-5
WIDE = {"hidden_size": 256, "intermediate_size": 512}


def logits(runner, ids):
    blocks = tuple(range(-(-len(ids) // runner.block_size)))
    return runner.run(StepInput(ids, (TokenSpan(0, 0, len(ids), blocks, len(ids)),)))


def dense(checkpoint):
    """The decoded model; what a scheme does to activations is left out."""
    model = load_model(checkpoint, dtype=torch.float32)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    return model


def distances(checkpoint, *runners, **settings):
    """Between the logits of runners and of the dense model, as a part of their norm."""
    model = dense(checkpoint)
    rows = tiny_models.tokens(model, batch=1, length=24)
    wanted = tiny_models.logits(model, rows)[0]
    actual = {}
    for name in runners:
        loaded = load(checkpoint, runner=name, kv_tokens=64, **settings)
        assert isinstance(loaded.runner, Compiled if name == "compiled" else Modules)
        actual[name] = float((logits(loaded.runner, rows[0].tolist()) - wanted).norm() / wanted.norm())
    return actual


def kinds(loaded):
    layers = loaded.runner._program.weights.layers
    return {packed.kind for layer in layers for packed in (layer.qkv, layer.out, layer.gate_up, layer.down)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder):
    return save(folder / "llama")


def packed(folder, source, scheme, **changes):
    return pack(
        source, folder / f"{source.name}-{scheme}-{len(list(folder.iterdir()))}", scheme=scheme, **changes
    )[1]


SCHEMES = {  # lanes of the compiled runner, distance there, distance through modules
    "W4A16": ("int4", INTEGERS, INTEGERS),
    "W4A16_ASYM": ("int4", INTEGERS, INTEGERS),
    "W3A16": ("int4", INTEGERS, INTEGERS),
    "W8A16": ("int8", INTEGERS, INTEGERS),
    "W8A8": ("int8", INTEGERS, INTEGERS),
    "MXFP4A16": ("int8", FINE, FINE),
    "FP8": ("bf16", ROUNDED, SAME),
    "FP8_BLOCK": ("bf16", ROUNDED, SAME),
    "NF4": ("bf16", ROUNDED, SAME),
}


@needs_compiler
@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(folder, llama, scheme):
    kind, *bounds = SCHEMES[scheme]
    checkpoint = packed(folder, llama, scheme)
    for bits in (8, 16):
        measured = distances(checkpoint, "compiled", "modules", activations=bits)
        first, second = (bound[bits] if isinstance(bound, dict) else bound for bound in bounds)
        assert measured["compiled"] < first and measured["modules"] < second
    auto = load(checkpoint, kv_tokens=64)
    assert isinstance(auto.runner, Compiled) and auto.why == "" and kinds(auto) == {kind}


@needs_compiler
def test_kinds_that_differ_within_a_layer(folder, llama):
    checkpoint = packed(folder, llama, "W4A16", overrides=("down_proj=W8A16",), embedding_bits=8)
    assert max(distances(checkpoint, "compiled", "modules").values()) < INTEGERS[8]
    assert kinds(load(checkpoint, kv_tokens=64)) == {"int4", "int8"}


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(
    ("scheme", "target"),
    [("W4A16", "gptq"), ("W4A16_ASYM", "awq"), ("W8A16", "bitsandbytes"), ("FP8", "modelopt")],
)
def test_every_layout(folder, scheme, target):
    source = folder / "half"
    source = source if source.exists() else save(source, "qwen2", dtype=torch.float16)
    groups = {"group_size": 0} if target == "bitsandbytes" else {}
    checkpoint = export(
        packed(folder, source, scheme, **groups), folder / f"{scheme}-{target}", ExportSettings(format=target)
    )
    assert max(distances(checkpoint, "compiled", "modules").values()) < INTEGERS[8]


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M", "IQ4_XS"])
def test_gguf(folder, kind):
    source = folder / "wide"
    source = source if source.exists() else save(source, **WIDE)
    export(source, folder / f"{kind}.gguf", ExportSettings(format="gguf", type=kind, imatrix="none"))
    measured = distances(open_checkpoint(folder / f"{kind}.gguf"), "compiled", "modules")
    assert max(measured.values()) < INTEGERS[8]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8", "NF4"])
def test_families_that_only_modules_run(folder, family, scheme):
    source = folder / family
    changes = {"hidden_size": 128, "ffn_dim": 256, "intermediate_size": 256} if family == "opt" else {}
    source = source if source.exists() else save(source, family, **changes)
    checkpoint = packed(folder, source, scheme)
    loaded = load(checkpoint, kv_tokens=64)
    kept = [
        type(module)
        for module in loaded.runner.model.modules()
        if isinstance(module, PackedLinear | DecodedLinear)
    ]
    assert kept == [PackedLinear if scheme.startswith("W") else DecodedLinear] * len(kept) and len(kept) >= 12
    assert family in loaded.why
    bound = INTEGERS[8] if scheme.startswith("W") else SAME
    assert distances(checkpoint, "modules")["modules"] < bound


def test_a_quantized_model_keeps_its_size(folder, llama):
    """What modules hold for a 4-bit checkpoint: codes, not weights of 32 bits."""
    model = packed_model(packed(folder, llama, "W4A16"))
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    assert len(linears) == 21 and sum(linear.packed.nbytes for linear in linears) <= 5 / 8 * weights
    assert not any(parameter.dtype != torch.float32 for parameter in model.parameters())
    assert (
        load(packed(folder, llama, "W4A16"), runner="modules", dtype="float32", kv_tokens=16).runner
        is not None
    )


def test_a_tensor_without_a_place(folder, llama):
    checkpoint = packed(folder, llama, "W4A16")
    config = json.loads((checkpoint.path / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (checkpoint.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"layers\.2\."):
        packed_model(open_checkpoint(checkpoint.path))
    config |= {"num_hidden_layers": 3, "intermediate_size": 128}
    (checkpoint.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"but the config asks for \[.*128"):
        packed_model(open_checkpoint(checkpoint.path))


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "float32"}, "dtype is float32"),
        ({"kv_dtype": "fp8"}, "kv_dtype is fp8"),
        ({"block_size": 8}, "block_size is 8"),
        ({"eviction": Streaming(sinks=4, window=44)}, "Streaming evicts"),
    ],
)
def test_settings_that_the_compiled_runner_has_not(settings, words):
    loaded = load("attar:tiny", kv_tokens=256, **settings)
    assert isinstance(loaded.runner, Modules) and words in loaded.why
    with pytest.raises(ModelError, match=words):
        load("attar:tiny", runner="compiled", **settings)


@needs_compiler
def test_int8_keys_and_values_run_compiled():
    loaded = load("attar:tiny", kv_dtype="int8", kv_tokens=256)
    assert isinstance(loaded.runner, Compiled) and loaded.runner.capacity == 16


@needs_compiler
def test_weights_that_bfloat16_would_round(folder):
    for dtype, name in ((torch.float16, "F16"), (torch.float32, "F32")):
        source = save(folder / name, dtype=dtype)
        loaded = load(source, kv_tokens=64)
        assert isinstance(loaded.runner, Modules) and f"is {name}, which bfloat16 would round" in loaded.why
        assert isinstance(load(source, dtype="bfloat16", kv_tokens=64).runner, Compiled)


def test_without_kernels(monkeypatch, folder, llama):
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    loaded = load("attar:tiny", kv_tokens=64)
    assert isinstance(loaded.runner, Modules) and "no compiled kernels" in loaded.why
    measured = distances(packed(folder, llama, "W4A16"), "modules")  # the dense model rounds its weights
    assert measured["modules"] < ROUNDED


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"runner": "fast"}, "runner is 'fast', but must be auto, compiled, device or modules"),
        ({"weights": "int3"}, "weights is 'int3', but must be int8 or int4"),
        ({"weights": "int8", "runner": "modules"}, "runner is 'modules', but must be compiled"),
        ({"dtype": "int7"}, "dtype"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_settings_that_do_not_exist(settings, words):
    with pytest.raises(SettingsError, match=words):
        load("attar:tiny", **settings)


@needs_compiler
def test_weights_rounded_while_loading(folder, llama):
    model = dense(open_checkpoint(llama))
    rows = tiny_models.tokens(model, batch=1, length=24)
    wanted = tiny_models.logits(model, rows)[0]
    for kind, bound in (("int8", 0.035), ("int4", 0.5)):
        loaded = load(llama, weights=kind, kv_tokens=64)
        assert kinds(loaded) == {kind}
        assert (logits(loaded.runner, rows[0].tolist()) - wanted).norm() < bound * wanted.norm()
    with pytest.raises(ModelError, match="quantized already"):
        load(packed(folder, llama, "W4A16"), weights="int8")


@pytest.fixture
def warned(caplog):
    """What was warned of, message by message."""
    warn_slower.cache_clear()
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    warn_slower.cache_clear()


def test_a_fall_back_is_a_warning(monkeypatch, folder, llama, warned):
    """Once, with the reason; not where modules were asked for, nor where the compiled step runs."""
    load("attar:tiny", runner="modules", kv_tokens=16)
    if library() is not None:
        load("attar:tiny", kv_tokens=16)
    assert warned() == []
    load(save(folder / "F32again", dtype=torch.float32), kv_tokens=64)
    assert ["which bfloat16 would round" in line for line in warned()[:1]] == [library() is not None]
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    for _ in range(2):
        load("attar:tiny", kv_tokens=16)
        load(packed(folder, llama, "W4A16"), kv_tokens=16)
    start = (
        "attar:tiny runs through transformers' modules, slower than the compiled step: there are no compiled"
    )
    (tiny,) = [line for line in warned() if line.startswith("attar:tiny")]
    assert tiny.startswith(start) and tiny.endswith("ATTAR_KERNELS is off")
    assert sum("products of packed weights run in torch" in line for line in warned()) == 1


def test_searches_in_torch_are_a_warning(monkeypatch, warned):
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    for _ in range(2):
        GGML["Q4_K"].search(torch.randn(2, 256))
    (line,) = warned()
    assert line.startswith("scales are searched in torch") and line.endswith("ATTAR_KERNELS is off")


def test_every_verb_says_it_on_stderr(monkeypatch, capsys, warned):
    """The command prints what is logged."""
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    monkeypatch.setattr(
        sys,
        "argv",
        ["attar", "generate", "attar:tiny", "-p", "def ", "--max-tokens", "2", "--kv-tokens", "64"],
    )
    before = list(logging.getLogger("attar").handlers)
    try:
        with pytest.raises(SystemExit):
            main()
    finally:
        logging.getLogger("attar").handlers[:] = before
    message = capsys.readouterr()
    assert message.out.startswith("def ") and message.err.startswith(
        "warning: attar:tiny runs through transformers' "
    )
    assert message.err.count("\n") == 1


@needs_compiler
def test_a_description_has_the_facts(folder, llama):
    messages = LLM("attar:tiny", kv_tokens=256, speculate="ngram", activations=8).describe()
    threads = default_threads()
    assert (messages.runner, messages.why, messages.weights, messages.threads) == (
        "compiled",
        "",
        "bf16",
        threads,
    )
    assert (messages.activations, messages.kv_dtype, messages.kv_tokens) == ("bfloat16", "bfloat16", 256)
    assert messages.kv_bytes >= 256 * 2 * 2 and messages.speculation == "ngram, up to 40 tokens drafted"
    assert any(line.startswith("runner      compiled") for line in messages.lines())
    assert messages.to_dict()["prefix_cache"] is True
    fine = LLM("attar:tiny", kv_tokens=256, activations=16).describe()
    assert (fine.activations, fine.kv_dtype) == ("float32", "float16") and fine.kv_bytes == messages.kv_bytes
    assert LLM("attar:tiny", kv_tokens=256).describe() == (
        fine if default_activation_bits() == 16 else replace(messages, speculation="")
    )
    four = LLM(packed(folder, llama, "W4A16"), kv_tokens=64, kv_dtype="int8", activations=8).describe()
    assert (four.weights, four.activations, four.kv_dtype) == ("int4", "int8 and bfloat16", "int8")
    modules = LLM("attar:tiny", kv_tokens=64, runner="modules", eviction=H2O()).describe()
    assert (modules.runner, modules.why) == ("modules", "modules were asked for")
    assert (modules.weights, modules.activations, modules.kv_dtype) == ("float32", "float32", "float32")
    assert "runner      modules (modules were asked for)" in modules.lines() and not modules.prefix_cache
    for bits in (8, 16):
        coded = LLM(
            packed(folder, llama, "W4A16"), kv_tokens=64, runner="modules", activations=bits
        ).describe()
        assert (coded.weights, coded.activations) == ("int4", f"int{bits} and float32")


def test_a_runner_without_facts_is_described():
    assert LLM.of(Loaded(FakeRunner())).describe().lines()[1] == "runner      fakerunner"


def test_the_log_says_why(caplog):
    with caplog.at_level(logging.DEBUG, logger="attar.runtime.loading"):
        load("attar:tiny", runner="modules", kv_tokens=16)
    assert "attar:tiny runs through Modules: modules were asked for" in caplog.text


def test_end_tokens(llama, tmp_path):
    """generation_config.json goes before config.json."""
    assert load(llama, kv_tokens=16).ends == (0,)
    copied = save(tmp_path / "copy")
    (copied / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load(copied, kv_tokens=16).ends == (5, 7)


@needs_compiler
def test_a_fitting_default():
    """attar:tiny is bfloat16: it runs compiled, and says what transformers says where the margin is clear."""
    llm, plain = LLM("attar:tiny", kv_tokens=1024), load_model("attar:tiny", dtype=torch.float32)
    assert isinstance(llm.engine.runner, Compiled)
    text = "import os\n\ndef main(path):\n    with open(path) as file:\n        return file.read()\n"
    ids = llm.encode(text)
    wanted = tiny_models.logits(plain, torch.tensor([ids]))[0]
    actual = logits(load("attar:tiny", kv_tokens=256).runner, ids)
    margin = wanted.topk(2).values.diff(dim=1).abs()[:, 0]
    clear = margin > 0.1
    assert clear.sum() > 20 and torch.equal(actual.argmax(1)[clear], wanted.argmax(1)[clear])
    assert (actual - wanted).norm() < ROUNDED * wanted.norm()
    assert llm.generate(text, SamplingParams(temperature=0.0, max_tokens=4))[0].token_ids


@pytest.mark.parametrize("kv_tokens", [10**11, 2**60, 10**30])
@pytest.mark.parametrize("runner", ["compiled", "modules"])
def test_a_cache_that_cannot_fit_is_refused_before_anything_is_loaded(monkeypatch, runner, kv_tokens):
    """With both amounts, by every verb: they all load here, drafts too."""
    for name in ("_compiled", "_modules"):
        monkeypatch.setattr(loading, name, None)
    with pytest.raises(MemoryNeededError, match=r"KV cache of [0-9,]+ tokens needs .* and .* are free"):
        load("attar:tiny", runner=runner, kv_tokens=kv_tokens)
