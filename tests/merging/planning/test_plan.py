"""Plans: which tensors go where, under which parameters and types, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attar.errors import AttarError, ModelError, RecipeError
from attar.merging.config.documents import parse_configs
from attar.merging.methods import METHODS
from attar.merging.planning.plan import InputTensor, MergePlan, OutputTensor, make_plan
from tests import tiny_models
from tests.merging.views import FakeView, plan_of, view

LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"


def by_name(plan: MergePlan) -> dict[str, OutputTensor]:
    return {output.name: output for output in plan.outputs}


def refused(text: str, *views: FakeView) -> AttarError:
    with pytest.raises(AttarError) as caught:
        plan_of(text, *views)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_keeps_its_tensors(family: str) -> None:
    a, b = view("a", family), view("b", family)
    plan = plan_of(LINEAR, a, b)
    assert sorted(by_name(plan)) == sorted(a.tensors)
    for output in plan.outputs:
        assert output.shape == tuple(a.tensors[output.name].shape)
        if not output.copied:
            assert output.inputs == (InputTensor(0, output.name), InputTensor(1, output.name))
            assert (output.base, output.per_model) == (None, {"weight": (0.5, 0.5)})
    assert plan.config == {**{k: v for k, v in a.config.items() if k != "torch_dtype"}, "dtype": "float32"}
    assert plan.notes == ()


def test_order_does_not_depend_on_the_order_of_the_shards() -> None:
    a, b = view("a"), view("b")
    turned = FakeView("a", a.config, dict(reversed(a.tensors.items())))
    names = [output.name for output in plan_of(LINEAR, a, b).outputs]
    assert names == [output.name for output in plan_of(LINEAR, turned, b).outputs]
    assert (names[0], names[-1]) == ("model.embed_tokens.weight", "model.norm.weight")
    layers = [output.layer for output in plan_of(LINEAR, a, b).outputs if output.layer is not None]
    assert layers == sorted(layers)


TIES = """\
merge_method: ties
base_model: base
models:
  - {model: a, parameters: {weight: 0.5, density: [0.2, 0.6]}}
  - {model: base}
  - {model: b, parameters: {weight: [{filter: mlp, value: 2}, {value: 1}]}}
parameters:
  density: 0.9
  lambda: [{filter: self_attn, value: [0, 1]}]
"""


def test_parameters_of_a_merge_with_a_base() -> None:
    plan = plan_of(TIES, view("a"), view("base"), view("b"))
    assert (plan.labels, plan.base, plan.donor) == (("a", "base", "b"), 1, 1)
    outputs = by_name(plan)
    middle = outputs["model.layers.1.mlp.up_proj.weight"]
    assert middle.inputs == (InputTensor(0, middle.name), InputTensor(2, middle.name))
    assert middle.base == InputTensor(1, middle.name)
    assert middle.per_model == {"weight": (0.5, 2.0), "density": (pytest.approx(0.4), 0.9)}
    assert middle.shared == {"normalize": True, "rescale": False, "int8_mask": False, "lambda": 1.0}
    assert (middle.kind, middle.layer) == ("layer", 1)
    assert outputs["model.layers.1.self_attn.q_proj.weight"].shared["lambda"] == 0.5
    assert outputs["model.layers.2.self_attn.q_proj.weight"].shared["lambda"] == 1.0
    for name, kind in (("model.embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
        assert outputs[name].per_model == {"weight": (0.5, 1.0), "density": (0.2, 0.9)}
        assert (outputs[name].kind, outputs[name].aligned) == (kind, True)
    METHODS["ties"].check(middle.shared, middle.per_model)


def test_a_base_that_is_not_listed_is_read_all_the_same() -> None:
    text = "merge_method: slerp\nbase_model: base\nmodels: [{model: a}]\nparameters: {t: [0, 1]}\n"
    outputs = by_name(plan_of(text, view("a"), view("base")))
    assert outputs["model.norm.weight"].base == InputTensor(1, "model.norm.weight")
    assert [outputs[f"model.layers.{n}.mlp.up_proj.weight"].shared["t"] for n in range(3)] == [0, 0.5, 1]
    assert outputs["lm_head.weight"].shared["t"] == 0


def test_what_becomes_of_a_base_that_is_no_base() -> None:
    karcher = "merge_method: karcher\nbase_model: base\nmodels: [{model: a}, {model: b}]\n"
    views = view("a"), view("b"), view("base")
    output = plan_of(karcher, *views).outputs[0]
    assert (len(output.inputs), output.base) == (3, None)
    assert len(plan_of(karcher.replace("{model: b}", "{model: base}"), *views).outputs[0].inputs) == 2
    plan = plan_of(LINEAR + "base_model: base", *views)
    assert (len(plan.outputs[0].inputs), plan.donor) == (2, 2)


STACKED = """\
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 2]}]
  - sources:
      - model: b
        layer_range: [1, 3]
        parameters: {scale: [{filter: layers.2., value: 0.5}, {filter: lm_head, value: 3}]}
"""


def test_layers_are_stacked_and_renumbered() -> None:
    plan = plan_of(STACKED, view("a"), view("b"))
    outputs = by_name(plan)
    up = "mlp.up_proj.weight"
    inputs = [outputs[f"model.layers.{n}.{up}"].inputs[0] for n in range(4)]
    assert inputs == [
        InputTensor(model, f"model.layers.{n}.{up}") for model, n in ((0, 0), (0, 1), (1, 1), (1, 2))
    ]
    scales = [outputs[f"model.layers.{n}.{up}"].per_model["scale"] for n in range(4)]
    assert scales == [(None,), (None,), (None,), (0.5,)]  # filters see the input's name, not the output's
    assert outputs["model.embed_tokens.weight"].inputs[0].model == 0
    assert outputs["lm_head.weight"].inputs[0].model == 1
    assert outputs["lm_head.weight"].per_model["scale"] == (3,)
    assert plan.config["num_hidden_layers"] == 4
    assert len(plan.outputs) == 3 + 4 * 9


def test_depth_is_that_of_the_slice() -> None:
    text = """\
merge_method: linear
slices:
  - sources: [{model: a, layer_range: [0, 1]}, {model: b, layer_range: [2, 3]}]
    parameters: {weight: [1, 2]}
  - sources: [{model: a, layer_range: [0, 3]}]
parameters: {weight: [5, 7]}
"""
    outputs = by_name(plan_of(text, view("a"), view("b")))
    weights = [outputs[f"model.layers.{n}.mlp.up_proj.weight"].per_model["weight"] for n in range(4)]
    assert weights == [(2, 2), (5,), (6,), (7,)]
    assert outputs["model.embed_tokens.weight"].per_model["weight"] == (1, 1)
    assert outputs["model.norm.weight"].per_model["weight"] == (5,)


def test_filters_of_shared_parameters_see_the_outputs_name() -> None:
    text = """\
merge_method: linear
slices: [{sources: [{model: a, layer_range: [1, 3]}]}]
parameters: {weight: 1, normalize: [{filter: layers.0., value: false}]}
"""
    outputs = by_name(plan_of(text, view("a")))
    assert [outputs[f"model.layers.{n}.mlp.up_proj.weight"].shared["normalize"] for n in range(2)] == [
        False,
        True,
    ]


def test_lists_by_layer_follow_the_slices() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    a = view("a").with_config(layer_types=kinds, eos_token_id=[1, 2, 3])
    b = view("b").with_config(layer_types=kinds)
    plan = plan_of(STACKED, a, b)
    assert plan.config["layer_types"] == [kinds[n] for n in (0, 1, 1, 2)]
    assert plan.config["eos_token_id"] == [1, 2, 3]
    assert a.config["layer_types"] == kinds


def test_a_base_of_a_slice() -> None:
    text = """\
merge_method: task_arithmetic
base_model: base
slices:
  - sources: [{model: a, layer_range: [1, 3]}, {model: b, layer_range: [1, 3]}]
parameters: {weight: 1}
"""
    views = view("a"), view("b"), view("base")
    name = "model.layers.0.mlp.up_proj.weight"
    assert by_name(plan_of(text, *views))[name].base == InputTensor(2, "model.layers.1.mlp.up_proj.weight")
    shifted = text.replace("model: b, layer_range: [1, 3]", "model: b, layer_range: [0, 2]")
    assert refused(shifted, *views).message.startswith("merge.yml:4: the sources have different layers")
    given = shifted.replace("sources: [", "sources: [{model: base, layer_range: [0, 2]}, ")
    assert by_name(plan_of(given, *views))[name].base == InputTensor(0, "model.layers.0.mlp.up_proj.weight")


def test_a_slice_of_the_base_alone_passes() -> None:
    text = """\
merge_method: slerp
base_model: a
slices:
  - sources: [{model: b, layer_range: [0, 1]}]
  - sources: [{model: a, layer_range: [1, 2]}, {model: b, layer_range: [1, 2]}]
  - sources: [{model: a, layer_range: [2, 3]}]
parameters: {t: 0.5}
"""
    plan = plan_of(text, view("a"), view("b"))
    outputs = by_name(plan)
    layers = [outputs[f"model.layers.{n}.mlp.up_proj.weight"] for n in range(3)]
    assert [(layer.copied, layer.inputs[0].model, layer.base is None) for layer in layers] == [
        (False, 0, False),
        (False, 0, False),
        (True, 1, True),
    ]
    assert plan.labels == ("b", "a")
    assert plan.notes == (
        "merge.yml:4: the base model a is no source of this slice; its layers 0 to 0 are taken",
        "merge.yml:6: the base model alone: the layers of a are taken as they are",
    )


@pytest.mark.parametrize(
    ("keys", "compat", "dtype", "work"),
    [
        ("", "mergekit", "bfloat16", "bfloat16"),
        ("dtype: float32", "mergekit", "float32", "float32"),
        ("dtype: float32\nout_dtype: float16", "mergekit", "float16", "float32"),
        ("out_dtype: float16", "mergekit", "float16", "bfloat16"),
        ("", "paper", "bfloat16", "float32"),
        ("dtype: float16", "paper", "float16", "float32"),
    ],
)
def test_types(keys: str, compat: str, dtype: str, work: str) -> None:
    plan = plan_of(LINEAR + keys, view("a", dtype="BF16"), view("b"), compat=compat)
    assert {(output.dtype, output.work_dtype) for output in plan.outputs} == {(dtype, work)}
    assert plan.config["dtype"] == dtype
    assert "torch_dtype" not in plan.config


def test_the_bases_type_counts_where_there_is_one() -> None:
    plan = plan_of(TIES, view("a"), view("base", dtype="BF16"), view("b"))
    assert {(output.dtype, output.work_dtype) for output in plan.outputs} == {("bfloat16", "bfloat16")}


def test_tensors_that_are_not_floats_are_copied_from_the_base() -> None:
    views = [view(name) for name in ("a", "base", "b")]
    for item in views:
        item.tensors["model.steps"] = SimpleNamespace(shape=(4,), dtype="I64")
    output = by_name(plan_of(TIES, *views))["model.steps"]
    assert (output.copied, output.inputs, output.base) == (True, (InputTensor(1, "model.steps"),), None)
    assert (output.dtype, output.shared, output.per_model) == ("int64", {}, {})


def test_heads_that_are_all_tied_stay_tied() -> None:
    a, b = view("a", "smollm"), view("b", "smollm")
    plan = plan_of(LINEAR, a, b)
    assert "lm_head.weight" not in by_name(plan)
    assert plan.config["tie_word_embeddings"] is True


def test_a_tied_head_gives_its_embedding_where_another_is_stored() -> None:
    tied, own = view("a", "smollm"), view("b", "llama3", tie_word_embeddings=False)
    for views in ((tied, own), (own, tied)):
        plan = plan_of(
            LINEAR.replace(
                "{model: a}, {model: b}", f"{{model: {views[0].name}}}, {{model: {views[1].name}}}"
            ),
            *views,
        )
        names = [item.name for item in by_name(plan)["lm_head.weight"].inputs]
        assert sorted(names) == ["lm_head.weight", "model.embed_tokens.weight"]
        assert plan.config["tie_word_embeddings"] is False


def test_models_saved_without_their_head() -> None:
    whole = view("a", "gpt2")
    bare = FakeView("b", whole.config, {k.removeprefix("transformer."): v for k, v in whole.tensors.items()})
    plan = plan_of(LINEAR, whole, bare)
    assert sorted(by_name(plan)) == sorted(whole.tensors)
    assert by_name(plan)["transformer.h.1.ln_1.weight"].inputs[1] == InputTensor(1, "h.1.ln_1.weight")
    assert by_name(plan)["transformer.wte.weight"].inputs[1] == InputTensor(1, "wte.weight")
    turned = plan_of(LINEAR.replace("{model: a}, {model: b}", "{model: b}, {model: a}"), whole, bare)
    assert sorted(by_name(turned)) == sorted(bare.tensors)


def test_layers_of_different_width_and_experts() -> None:
    narrow = {
        "model__layers__1__mlp__up_proj__weight": (40, 64),
        "model__layers__1__mlp__gate_proj__weight": (40, 64),
    }
    a, b = view("a").reshape(**narrow), view("b").reshape(**narrow)
    for item in (a, b):
        for expert in range(3):
            item.tensors[f"model.layers.0.mlp.experts.{expert}.w1.weight"] = SimpleNamespace(
                shape=(8, 64), dtype="F32"
            )
    outputs = by_name(plan_of(LINEAR, a, b))
    assert outputs["model.layers.1.mlp.up_proj.weight"].shape == (40, 64)
    assert outputs["model.layers.0.mlp.experts.2.w1.weight"].layer == 0
    error = refused(LINEAR, a, view("b"))
    assert isinstance(error, ModelError)


def test_a_vocabulary_sets_the_rows() -> None:
    wide = {"model__embed_tokens__weight": (400, 64), "lm_head__weight": (400, 64)}
    b = view("b").reshape(**wide).with_config(vocab_size=400)
    plan = plan_of(LINEAR, view("a"), b, vocabulary=SimpleNamespace(size=416))
    outputs = by_name(plan)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert (outputs[name].shape, outputs[name].aligned) == ((416, 64), True)
    assert plan.config["vocab_size"] == 416
    assert outputs["model.norm.weight"].shape == (64,)


def t5(name: str, encoder: int = 3, decoder: int = 2) -> FakeView:
    tensors = {"shared.weight": (320, 8), "lm_head.weight": (320, 8)}
    for part, count in (("encoder", encoder), ("decoder", decoder)):
        tensors[f"{part}.final_layer_norm.weight"] = (8,)
        for layer in range(count):
            tensors[f"{part}.block.{layer}.layer.0.SelfAttention.q.weight"] = (8, 8)
    config = {"model_type": "t5", "num_layers": encoder, "num_decoder_layers": decoder, "vocab_size": 320}
    infos = {key: SimpleNamespace(shape=shape, dtype="F32") for key, shape in tensors.items()}
    return FakeView(name, config, infos)


def test_an_encoder_with_a_decoder() -> None:
    text = "merge_method: slerp\nbase_model: a\nmodels: [{model: a}, {model: b}]\nparameters: {t: [0, 1]}\n"
    outputs = by_name(plan_of(text, t5("a"), t5("b")))
    encoder = [outputs[f"encoder.block.{n}.layer.0.SelfAttention.q.weight"].shared["t"] for n in range(3)]
    decoder = [outputs[f"decoder.block.{n}.layer.0.SelfAttention.q.weight"].shared["t"] for n in range(2)]
    assert (encoder, decoder) == ([0, 0.5, 1], [0, 1])
    assert len(outputs) == len(t5("a").tensors)


MODULES = """\
merge_method: passthrough
modules:
  encoder:
    slices: [{sources: [{model: a, layer_range: [0, 1]}]}]
    parameters: {scale: 2}
  decoder:
    models: [{model: b}]
"""


def test_modules() -> None:
    plan = plan_of(MODULES, t5("a"), t5("b"))
    outputs = by_name(plan)
    assert [name for name in outputs if "encoder.block" in name] == [
        "encoder.block.0.layer.0.SelfAttention.q.weight"
    ]
    assert outputs["encoder.final_layer_norm.weight"].per_model == {"scale": (2,)}
    assert outputs["decoder.final_layer_norm.weight"].inputs[0].model == 1
    assert outputs["shared.weight"].inputs[0].model == 0
    assert outputs["lm_head.weight"].inputs[0].model == 1
    assert (plan.config["num_layers"], plan.config["num_decoder_layers"]) == (1, 2)
    assert (
        "no module fits the layers decoder.block" in refused(MODULES.split("  decoder")[0], t5("a")).message
    )
    assert "fits no layers of a" in refused(MODULES.replace("decoder", "vision"), t5("a"), t5("b")).message
    rest = plan_of(MODULES.replace("decoder", "default"), t5("a"), t5("b"))
    assert by_name(rest)["decoder.block.1.layer.0.SelfAttention.q.weight"].inputs[0].model == 1
    sliced = "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, 1]}]}]"
    assert "several stacks of layers (encoder.block, decoder.block)" in refused(sliced, t5("a")).message


def test_notes() -> None:
    text = TIES.replace("{model: base}", "{model: base, parameters: {weight: 1}}").replace(
        "filter: mlp", "filter: mpl"
    )
    b = view("b").with_config(model_type="mistral", rope_theta=5.0)
    for name in ("a", "base"):
        assert "rope_theta" not in view(name).config
    b.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = SimpleNamespace(shape=(8,), dtype="F32")
    notes = plan_of(text, view("a"), view("base"), b).notes
    assert notes == (
        "model.layers.0.self_attn.rotary_emb.inv_freq is in b and not in a;"
        " it follows from the config and is left out",
        "b is a mistral, base is a llama: the shapes fit, and the result gets the latter's type",
        "rope_theta differs: None in base (taken), 5.0 in b",
        "merge.yml:5: base is the base model: weight without effect",
        "merge.yml:6: the filter 'mpl' fits no tensor",
    )


def test_a_quantization_config_is_not_handed_on() -> None:
    plan = plan_of(LINEAR, view("a").with_config(quantization_config={"bits": 4}), view("b"))
    assert "quantization_config" not in plan.config


SLICED = """\
merge_method: linear
slices:
  - sources:
      - {model: a, layer_range: [1, 4]}
parameters: {weight: 1}
"""
WRONG = [
    (SLICED, "merge.yml:4: layer_range is [1, 4], but a has 3 layers (0 to 2)"),
    (
        LINEAR.replace("parameters: {weight: 0.5}", ""),
        "merge.yml:2: linear needs the parameter 'weight' of every model;",
    ),
    (
        LINEAR.replace("0.5", "[{filter: mlp, value: 1}]"),
        "merge.yml:2: linear needs the parameter 'weight' of every model;",
    ),
    (
        "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]",
        "merge.yml:1: slerp needs the parameter 't'; nothing sets it",
    ),
    (
        "merge_method: slerp\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {t: 1}",
        "merge.yml:3: slerp takes exactly 1 model besides the base, not 2",
    ),
    (
        "merge_method: passthrough\nmodels: [{model: a}, {model: b}]",
        "merge.yml:2: passthrough takes exactly 1 model, not 2",
    ),
    (
        "merge_method: model_stock\nbase_model: base\nmodels: [{model: a}]",
        "merge.yml:3: model_stock takes at least 2 models besides the base, not 1",
    ),
    (
        "merge_method: ties\nbase_model: a\nmodels: [{model: a}]\nparameters: {weight: 1}",
        "merge.yml:3: ties takes at least 1 model besides the base, not 0",
    ),
    (
        LINEAR.replace("0.5", "[{filter: mlp, value: 0}, {value: 1}]"),
        "merge.yml:3: weight is [0, 0], but must be weights whose sum",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_configs_that_do_not_fit(text: str, message: str) -> None:
    error = refused(text, view("a"), view("b"), view("base"))
    assert isinstance(error, RecipeError)
    assert error.message.startswith(message), error.message


def test_weights_that_cancel() -> None:
    models = "[{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: -1}}]"
    error = refused(f"merge_method: linear\nmodels: {models}", view("a"), view("b"))
    assert error.message == (
        "merge.yml:2: weight is [1, -1], but must be weights whose sum is not 0, or normalize: false"
        " (for model.embed_tokens.weight)"
    )


def test_models_that_do_not_fit_together() -> None:
    error = refused(LINEAR, view("a"), view("b", intermediate_size=80))
    assert isinstance(error, ModelError)
    assert error.message == "model.layers.0.mlp.down_proj.weight: a has 64 x 96, b has 64 x 80"
    error = refused(LINEAR, view("a"), view("b", num_hidden_layers=2))
    assert error.message == "b has 2 layers and a has 3"
    assert "slices" in str(error.hint)
    error = refused(LINEAR, view("a"), view("b", "gpt2"))
    assert error.message == "b: no layers named model.layers.0, as a has them; it has transformer.h.0"
    error = refused(LINEAR, view("a"), view("b").drop("model.norm.weight"))
    assert error.message == "b: no tensor 'model.norm.weight', which a has"
    error = refused(LINEAR, view("a").drop("model.layers.1.mlp.up_proj.weight"), view("b"))
    assert error.message == "a: no tensor 'model.layers.1.mlp.up_proj.weight', which b has"
    error = refused(LINEAR, view("a").drop("model.embed_tokens.weight", "lm_head.weight"), view("b"))
    assert error.message == "a: no tensor 'lm_head.weight', which b has"
    error = refused(LINEAR, view("a"), view("b").drop("lm_head.weight"))  # its config says that it has one
    assert error.message == "b: no tensor 'lm_head.weight', which a has"


def test_vocabularies_that_do_not_fit() -> None:
    error = refused(LINEAR, view("a"), view("b", vocab_size=400))
    assert error.message == "model.embed_tokens.weight: a has 320 x 64, b has 400 x 64"
    assert "tokenizer: {source: union}" in str(error.hint)


def test_a_base_that_only_gives_its_config_must_fit() -> None:
    text = LINEAR + "base_model: base"
    views = view("a"), view("b")
    error = refused(text, *views, view("base", intermediate_size=80))
    assert error.message == (
        "model.layers.0.mlp.down_proj.weight: a has 64 x 96, and the base model base, whose config the result"
        " gets, has 64 x 80"
    )
    plan_of(text, *views, view("base", vocab_size=400), vocabulary=SimpleNamespace(size=400))


def test_one_model_under_two_names() -> None:
    text = "merge_method: linear\nmodels:\n  - model: a\n  - model: b\nparameters: {weight: 1}"
    views = {"a": view("a"), "b": view("a")}
    with pytest.raises(RecipeError, match=r"merge\.yml:4: b and a are one model under two names"):
        make_plan(parse_configs(text)[0], lambda reference: views[reference.model])
    adapted = text.replace("model: b", "model: b+lora")
    make_plan(parse_configs(adapted)[0], lambda reference: views[reference.model])


def test_a_soup_is_planned_like_an_average() -> None:
    plan = plan_of("merge_method: greedy_soup\nmodels: [{model: a}, {model: b}]", view("a"), view("b"))
    assert (plan.method.name, plan.outputs[0].per_model) == ("greedy_soup", {"weight": (1.0, 1.0)})
