"""Adapters of running models: against peft, merged weights, and each other in one step."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.errors import AttarError, CheckpointError, ModelError, NumericsError, SettingsError
from attar.merging.adapters.apply import AdaptedCheckpoint
from attar.models.loading.adapter_files import CONFIG, WEIGHTS
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.runner.lora import LoraAdapter, LoraUpdate, read_lora
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.marks import slow_but
from tests.runtime.test_loading import packed, save

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [[5, 9, 30, 7, 77, 12, 3, 44, 9, 9, 2, 18, 100, 101, 102, 103, 9], [8, 8, 8], [60, 61, 62, 63, 64]]


def write_adapter(folder, model, seed, **settings):
    """An adapter of peft's with every factor filled; peft's model."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 12, **settings}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def llm_of(folder, **options):
    return LLM(
        str(folder), runner="modules", kv_tokens=2048, limits=Limits(sequences=8, step_tokens=24), **options
    )


def generate(llm, jobs):
    """Token ids of (prompt, adapter) pairs that run together."""
    ids = [llm.engine.add(prompt, GREEDY, adapter=adapter, salt=adapter) for prompt, adapter in jobs]
    tokens = {id: [] for id in ids}
    while not llm.engine.idle:
        for event in llm.engine.step():
            assert event.failure is None, event.failure
            tokens[event.request] += event.token_ids
    llm.engine.check()
    return [tokens[id] for id in ids]


def slow_greedy(model, prompt):
    """The model itself, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


CASES = {
    "attention": ("llama3", {"target_modules": ["q_proj", "v_proj"]}),
    "all, rslora": ("llama3", {"target_modules": "all-linear", "use_rslora": True}),
    "patterns, bias": (
        "qwen2",
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"down_proj": 2, "layers.1.self_attn.q_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 30},
            "lora_bias": True,
        },
    ),
    "head": ("smollm", {"target_modules": ["lm_head", "gate_proj"]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "fused": ("phi3", {"target_modules": ["qkv_proj"]}),
    "latents": ("deepseek_v3", {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_peft(tmp_path, case):
    family, settings = CASES[case]
    tiny_models.save(tiny_models.build(family), tmp_path / "model")
    wrapped = write_adapter(tmp_path / "lora", tiny_models.build(family), 1, **settings)
    llm = llm_of(tmp_path / "model")
    llm.engine.runner.lora.add("a", read_lora(tmp_path / "lora"))
    actual = generate(llm, [(prompt, "a") for prompt in PROMPTS])
    expected = [slow_greedy(wrapped, prompt) for prompt in PROMPTS]
    assert actual == expected
    assert actual != generate(llm, [(prompt, "") for prompt in PROMPTS]), "the adapter changes the answers"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and two adapters of different modules and ranks."""
    place = tmp_path_factory.mktemp("lora")
    tiny_models.save(tiny_models.build("llama3"), place / "model")
    write_adapter(place / "a", tiny_models.build("llama3"), 1, target_modules="all-linear")
    write_adapter(place / "b", tiny_models.build("llama3"), 2, r=2, target_modules=["q_proj", "up_proj"])
    return place


@pytest.fixture
def adapted(folders):
    """The model with both adapters."""
    llm = llm_of(folders / "model")
    for key in "ab":
        llm.engine.runner.lora.add(key, read_lora(folders / key))
    return llm


@pytest.mark.slow
def test_a_mixed_batch_is_each_request_alone(adapted):
    """With chunked prompts, decoding and prefills in one step."""
    jobs = [(prompt, key) for prompt in PROMPTS for key in ("a", "", "b")]
    alone = [generate(adapted, [job])[0] for job in jobs]
    assert generate(adapted, jobs) == alone == generate(adapted, jobs)
    assert len({tuple(tokens) for tokens in alone[:3]}) == 3


def test_the_answers_are_those_of_merged_weights(folders, adapted, tmp_path):
    view = AdaptedCheckpoint(open_checkpoint(folders / "model"), folders / "a")
    merged = tiny_models.build("llama3")
    names = merged.state_dict()
    merged.load_state_dict({name: view.load(name) for name in view.tensors if name in names}, strict=False)
    tiny_models.save(merged, tmp_path / "merged")
    expected = generate(llm_of(tmp_path / "merged"), [(prompt, "") for prompt in PROMPTS])
    assert generate(adapted, [(prompt, "a") for prompt in PROMPTS]) == expected


def test_a_prefix_of_one_adapter_is_never_anothers(adapted):
    manager = adapted.engine.scheduler.manager
    first = generate(adapted, [(PROMPTS[0], "a")])
    assert generate(adapted, [(PROMPTS[0], "a")]) == first and manager.stats.hit == 16
    for key in ("b", ""):
        generate(adapted, [(PROMPTS[0], key)])
    assert manager.stats.hit == 16


@pytest.mark.slow
def test_with_speculation_the_answers_are_the_same(folders, adapted):
    jobs = [([7, 8, 9] * 6, key) for key in ("a", "", "b")]
    expected = generate(adapted, jobs)
    for options in ({"speculate": "suffix"}, {"speculate": "self"}):
        llm = llm_of(folders / "model", drafts=3, **options)
        for key in "ab":
            llm.engine.runner.lora.add(key, read_lora(folders / key))
        assert generate(llm, jobs) == expected == generate(llm, jobs)
        assert llm.engine.speculator.failure is None and llm.engine.speculator.counts.drafts


def test_an_adapter_that_was_removed_leaves_nothing(folders, adapted):
    lora = adapted.engine.runner.lora
    plain = generate(llm_of(folders / "model"), [(PROMPTS[0], "")])
    lora.remove("a")
    assert generate(adapted, [(PROMPTS[0], "")]) == plain
    with pytest.raises(SettingsError, match="one that is loaded"):
        adapted.engine.add(PROMPTS[0], GREEDY, adapter="a")
    lora.remove("b")
    assert not lora.adapters and not lora._hooks and not lora._updates
    assert not any(module._forward_hooks for module in adapted.engine.runner.model.modules())


def test_a_step_with_an_adapter_that_is_gone_fails_alone(adapted):
    expected = generate(adapted, [(PROMPTS[1], "b")])
    ids = [adapted.engine.add(PROMPTS[1], GREEDY, adapter=key, salt=key) for key in "ab"]
    adapted.engine.runner.lora.remove("a")
    tokens, reasons = {id: [] for id in ids}, {}
    while not adapted.engine.idle:
        for event in adapted.engine.step():
            tokens[event.request] += event.token_ids
            reasons[event.request] = event.finish_reason
    adapted.engine.check()
    assert reasons == {ids[0]: "error", ids[1]: "length"} and tokens[ids[1]] == expected[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["W4A16", "NF4"])
def test_packed_models_run_adapters_too(tmp_path, scheme):
    """Linears stay codes; the update is that of float32."""
    source = save(tmp_path / "model", "llama3", hidden_size=128)
    llm = LLM(packed(tmp_path, source, scheme), runner="modules", kv_tokens=1024)
    path, runner = "model.layers.0.self_attn.q_proj", llm.engine.runner
    module = runner.model.get_submodule(path)
    assert not isinstance(module, torch.nn.Linear)
    x = torch.randn(3, 128)
    before = module(x)
    A, B = torch.randn(2, 128), torch.randn(128, 2)
    runner.lora.add("a", LoraAdapter("a", {path: LoraUpdate(A, B)}, ""))
    step = StepInput([1, 2, 3], (TokenSpan(0, 0, 1, (0,)), TokenSpan(1, 0, 2, (1,), 1, None, "a")))
    with runner.lora.applied(step):
        after = module(x[None])[0]
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1:], before[1:] + x[1:] @ A.T @ B.T, rtol=1e-4, atol=1e-4)


def broken(folder, target, **config):
    """A copy of an adapter with other fields in its config."""
    target.mkdir()
    known = json.loads((folder / CONFIG).read_text())
    (target / CONFIG).write_text(json.dumps(known | config))
    (target / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    return target


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "DoRA's magnitudes"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A of 'model.embed_tokens'"),
    ],
)
def test_what_cannot_be_added_is_refused_by_name(tmp_path, settings, words):
    write_adapter(tmp_path / "lora", tiny_models.build("llama3"), 1, **settings)
    with pytest.raises(ModelError, match=words) as caught:
        read_lora(tmp_path / "lora")
    assert "attar merge" in (caught.value.hint or "")


def test_whole_tensors_are_refused(adapted, tmp_path):
    model = tiny_models.build("llama3")
    wrapped = write_adapter(tmp_path / "lora", model, 1, target_modules=["q_proj"], modules_to_save=["norm"])
    adapted.engine.runner.lora.add("same", read_lora(tmp_path / "lora"))
    with torch.no_grad():
        wrapped.base_model.model.model.norm.modules_to_save["default"].weight.mul_(2)
    wrapped.save_pretrained(tmp_path / "lora")
    with pytest.raises(ModelError, match=r"a whole tensor .modules_to_save., 'model.norm.weight'"):
        adapted.engine.runner.lora.add("other", read_lora(tmp_path / "lora"))


def test_damaged_adapters_are_refused_by_name(folders, adapted, tmp_path):
    cases = {
        "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        "rank": ({"r": 3}, "but rank 3"),
        "layers": ({"layer_replication": [[0, 1]]}, "layer_replication"),
    }
    for name, (config, words) in cases.items():
        with pytest.raises(ModelError, match=words):
            read_lora(broken(folders / "b", tmp_path / name, **config))
    with pytest.raises(CheckpointError, match=f"no {CONFIG}"):
        read_lora(tmp_path)
    tensors = load_file(folders / "b" / WEIGHTS)
    key = next(key for key in tensors if "lora_A" in key)

    def changed(name, **change):
        folder = broken(folders / "b", tmp_path / name)
        kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(kept, folder / WEIGHTS)
        return folder

    with pytest.raises(NumericsError, match="lora_A"):
        read_lora(changed("nan", **{key: tensors[key] * float("nan")}))
    with pytest.raises(ModelError, match="has no lora_A"):
        read_lora(changed("half", **{key: None}))
    lora = adapted.engine.runner.lora
    wide = tiny_models.build("qwen3")
    write_adapter(tmp_path / "other", wide, 1, target_modules=["q_proj"])
    for folder, words in (
        (tmp_path / "other", "inputs and .* outputs for 'model.layers.0.self_attn.q_proj'"),
        (changed("renamed", **{key: None, key.replace("layers.0", "layers.9"): tensors[key]}), "has no lora"),
    ):
        with pytest.raises(AttarError, match=words):
            lora.add("c", read_lora(folder))
    moved = {name.replace("layers.0", "layers.9"): tensor for name, tensor in tensors.items()}
    folder = broken(folders / "b", tmp_path / "moved")
    save_file(moved, folder / WEIGHTS)
    with pytest.raises(ModelError, match=r"'model.layers.9.* and the model has no such module"):
        lora.add("c", read_lora(folder))
    assert sorted(lora.adapters) == ["a", "b"]


def test_modules_that_run_on_other_rows_are_an_error(adapted):
    """Experts run on a part of the tokens: never silently wrong."""
    runner = adapted.engine.runner
    layer = runner.model.model.layers[0].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(torch.cat([x, x], dim=1))[:, : x.shape[1]]
    adapted.engine.add(PROMPTS[1], GREEDY, adapter="b")
    events = [event for _ in range(2) for event in adapted.engine.step()]
    assert "runs on 6 rows of 3" in str(events[-1].failure)
    layer.forward = forward
    adapted.engine.check()


# in the compiled step, and in that of a device


@pytest.fixture(params=slow_but(("compiled", "device"), "compiled"))
def step_of(request, monkeypatch):
    """What ``compiled_of`` runs."""
    monkeypatch.setitem(globals(), "RUNNER", request.param)
    return request.param


RUNNER = "compiled"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A model in bfloat16, and two adapters; also with a tied head."""
    place = tmp_path_factory.mktemp("compiled")
    for name, family in (("model", "llama3"), ("tied", "qwen3")):
        tiny_models.save(tiny_models.build(family).to(torch.bfloat16), place / name)
        first, second = (tiny_models.build(family).to(torch.bfloat16).float() for _ in range(2))
        write_adapter(place / f"{name}-a", first, 1, target_modules="all-linear")
        targets = ["q_proj", "up_proj", "lm_head"]
        write_adapter(place / f"{name}-b", second, 2, r=2, target_modules=targets)
    return place


def compiled_of(folder, adapters=(), **options):
    limits = Limits(sequences=8, step_tokens=24)
    llm = LLM(str(folder), runner=RUNNER, kv_tokens=2048, limits=limits, adapters=True, **options)
    lora = llm.engine.runner.lora
    for key, path in adapters:
        lora.add(key, lora.prepare(read_lora(path)))
    return llm


def merged_in(folder, adapter, target):
    """The model with an adapter in its weights, in bfloat16, on disk."""
    view = AdaptedCheckpoint(open_checkpoint(folder), adapter)
    config = json.loads((folder / "config.json").read_text())
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    config["tie_word_embeddings"] = view.config.get("tie_word_embeddings", False)
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: view.load(name).contiguous() for name in view.tensors}, target / "model.safetensors")
    return target


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("name", ["model", "tied"])
def test_the_compiled_step_is_that_of_merged_weights(dense, tmp_path, name, step_of):
    """Bit for bit in a mixed batch: chunked prompts, decoding, each adapter and none."""
    adapters = [(key, dense / f"{name}-{key}") for key in "ab"]
    llm = compiled_of(dense / name, adapters)
    jobs = [(prompt, key) for prompt in PROMPTS for key in ("a", "", "b")]
    expected = {"": generate(compiled_of(dense / name), [(prompt, "") for prompt in PROMPTS])}
    for key, path in adapters:
        merged = compiled_of(merged_in(dense / name, path, tmp_path / key))
        expected[key] = generate(merged, [(prompt, "") for prompt in PROMPTS])
    actual = generate(llm, jobs)
    for column, key in enumerate(("a", "", "b")):
        assert actual[column::3] == expected[key]
    assert actual == generate(llm, jobs), "with cached prefixes too"
    assert expected["a"] != expected[""] != expected["b"]


@needs_compiler
def test_logits_of_a_mixed_step_are_in_the_order_of_its_spans(dense, step_of):
    llm = compiled_of(dense / "model", [("a", dense / "model-a")])
    runner = llm.engine.runner
    spans = [(0, "a", 2), (1, "", 1), (2, "a", 3)]
    tokens = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]

    def step(rows):
        parts = [TokenSpan(n, 0, 3, (n,), spans[n][2], None, spans[n][1]) for n in rows]
        return StepInput([token for n in rows for token in tokens[n]], tuple(parts))

    alone = torch.cat([runner.run(step([n])) for n in range(3)])
    torch.testing.assert_close(runner.run(step(range(3))), alone)


@needs_compiler
def test_compiled_adapters_come_and_go(dense, step_of):
    llm = compiled_of(dense / "model", [("a", dense / "model-a")], speculate="suffix", drafts=3)
    prompt = [7, 8, 9] * 6
    plain = generate(compiled_of(dense / "model"), [(prompt, "")])
    adapted_ids = generate(llm, [(prompt, "a")])
    assert generate(llm, [(prompt, "")]) == plain != adapted_ids
    lora = llm.engine.runner.lora
    lora.remove("a")
    with pytest.raises(SettingsError, match="one that is loaded"):
        llm.engine.add(prompt, GREEDY, adapter="a")
    lora.add("a", lora.prepare(read_lora(dense / "model-a")))
    assert generate(llm, [(prompt, "a")]) == adapted_ids and generate(llm, [(prompt, "")]) == plain


@needs_compiler
def test_what_the_compiled_step_cannot_add(dense, tmp_path, step_of):
    lora = compiled_of(dense / "model").engine.runner.lora
    with pytest.raises(ModelError, match=r"inputs and .* outputs for"):
        lora.prepare(read_lora(dense / "tied-a"))
    model = tiny_models.build("llama3")
    wrapped = write_adapter(tmp_path / "norm", model, 1, target_modules=["q_proj"], modules_to_save=["norm"])
    with torch.no_grad():
        wrapped.base_model.model.model.norm.modules_to_save["default"].weight.mul_(2)
    wrapped.save_pretrained(tmp_path / "norm")
    with pytest.raises(ModelError, match="a whole tensor"):
        lora.prepare(read_lora(tmp_path / "norm"))
    source = save(tmp_path / "model", "llama3", hidden_size=128)
    loaded = LLM(packed(tmp_path, source, "W4A16"), kv_tokens=256, adapters=True)
    assert "only modules add LoRA adapters" in loaded.describe().why
