"""mergekit's YAML: what is read, and one line with the place for everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.errors import RecipeError, SettingsError
from attar.merging.config.documents import parse_configs, parse_located, read_configs
from attar.merging.config.schema import (
    FilteredValue,
    ModelReference,
    ModelToken,
    ParameterSetting,
    TokenChoice,
)
from attar.merging.planning.parameters import method_of
from attar.yaml import parse_yaml

PAIR = "models: [{model: a}, {model: b}]\n"


def one(text: str):
    (config,) = parse_configs(text)
    return config


def refused(text: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        parse_configs(text)
    assert "\n" not in caught.value.message
    return caught.value


def test_everything_of_a_merge_of_models() -> None:
    config = one(
        """\
name: both
merge_method: ties
base_model: org/base@v1
models:
  - model: org/one+org/lora@r2
    parameters:
      weight: 0.5
      density: [1, 0.7, 0.1]
  - model: {model: {path: org/two, revision: main}, lora: null}
    parameters:
      weight:
        - filter: mlp
          value: [0, 0.5]
        - value: 1
parameters:
  normalize: false
  int8_mask: true
dtype: torch.float32
out_dtype: bfloat16
tokenizer_source: union
chat_template: auto
"""
    )
    assert (config.name, config.method, config.dtype, config.out_dtype) == (
        "both", "ties", "float32", "bfloat16",
    )  # fmt: skip
    assert config.base == ModelReference("org/base@v1")
    (part,) = config.modules[0].slices
    first, second = part.sources
    assert (first.model.model, first.model.lora, str(first.model)) == (
        "org/one", "org/lora@r2", "org/one+org/lora@r2",
    )  # fmt: skip
    assert first.layers is None
    assert first.parameters["density"] == ParameterSetting((1, 0.7, 0.1))
    assert str(second.model) == "org/two@main"
    assert second.parameters["weight"].value == (FilteredValue("mlp", (0, 0.5)), FilteredValue(None, 1))
    assert second.parameters["weight"].where == "merge.yml:11"
    assert config.parameters["normalize"] == ParameterSetting(False)
    assert config.tokenizer is not None
    assert config.tokenizer.source == "union"
    assert config.chat_template == "auto"
    assert [str(model) for model in config.models()] == ["org/one+org/lora@r2", "org/two@main", "org/base@v1"]


def test_slices_and_modules() -> None:
    config = one(
        """\
merge_method: passthrough
modules:
  encoder:
    slices:
      - sources:
          - {model: a, layer_range: [0, 2], parameters: {scale: 0.5}}
        parameters: {scale: 2}
      - sources: [{model: b, layer_range: [1, 3]}]
        base_model: c
    parameters: {scale: 1}
  decoder:
    models: [{model: a}]
"""
    )
    encoder, decoder = config.modules
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert [model.sources[0].layers for model in encoder.slices] == [(0, 2), (1, 3)]
    assert encoder.slices[0].parameters["scale"] == ParameterSetting(2)
    assert encoder.slices[1].base == ModelReference("c")
    assert decoder.slices[0].sources[0].layers is None
    assert [str(model) for model in config.models()] == ["a", "b", "c"]


def test_tokenizer_with_tokens() -> None:
    config = one(
        """\
merge_method: linear
models: [{model: a, parameters: {weight: 1}}]
tokenizer:
  source: model:org/chat
  tokens:
    <|im_start|>: {source: org/chat}
    <|end|>: {source: org/other, force: true}
    <|old|>:
      source: {kind: model_token, model: a, token_id: 7}
    <|new|>:
      source: {kind: zero}
    <|mean|>:
  pad_to_multiple_of: 64
"""
    )
    choice = config.tokenizer
    assert choice is not None
    assert choice.source == ModelReference("org/chat")
    assert choice.pad_to_multiple_of == 64
    assert dict(choice.tokens) == {
        "<|im_start|>": TokenChoice(ModelReference("org/chat")),
        "<|end|>": TokenChoice(ModelReference("org/other"), True),
        "<|old|>": TokenChoice(ModelToken(ModelReference("a"), None, 7)),
        "<|new|>": TokenChoice("zero"),
        "<|mean|>": TokenChoice(None),
    }
    assert [str(model) for model in config.models()] == ["a", "org/chat", "org/other"]


def test_without_source_the_tokenizer_is_the_union() -> None:
    choice = one(f"merge_method: karcher\n{PAIR}tokenizer: {{pad_to_multiple_of: 8}}").tokenizer
    assert choice is not None
    assert choice.source == "union"


ANCHORS = """\
const_tag: &MODEL org/one
const_tag: &FACTOR 0.5
MODELS:
  - &two {model: org/two, revision: main}
scale-filter-env: &scaled
  parameters:
    scale:
      - {filter: o_proj, value: *FACTOR}
      - value: !!float 1
slices:
  - sources:
      - model: *MODEL
        layer_range: ["0", 4]
  - sources:
      - model: *MODEL
        layer_range: [2, 6]
        <<: *scaled
  - sources:
      - <<: [*scaled, *two]
        layer_range: [6, 8]
        parameters: {scale: "0.25"}
merge_method: passthrough
"""


def test_keys_at_the_top_may_carry_anchors_and_merge_keys_bring_entries() -> None:
    first, second, third = (part.sources[0] for part in one(ANCHORS).slices())
    assert [str(source.model) for source in (first, second, third)] == ["org/one", "org/one", "org/two@main"]
    assert [source.layers for source in (first, second, third)] == [(0, 4), (2, 6), (6, 8)]
    assert second.parameters["scale"].value == (FilteredValue("o_proj", 0.5), FilteredValue(None, 1.0))
    assert third.parameters["scale"] == ParameterSetting(0.25)
    mixture = "x: &a org/a\nbase_model: *a\ngate_mode: random\nexperts: [{source_model: *a}]\n"
    (parsed,) = parse_configs(mixture + "experts_per_token: 1\n")
    assert str(parsed.models()[0]) == "org/a"


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    text = f"models:\n  - {{model: '{tmp_path}', revision: main}}\n  - {{model: org/b, revision: v1}}\n"
    models = [str(model) for model in one(f"merge_method: karcher\n{text}").models()]
    assert models == [str(tmp_path), "org/b@v1"]


def test_of_a_model_that_is_given_twice_the_last_one_counts() -> None:
    text = "models:\n  - {model: a, parameters: {weight: 1}}\n  - {model: b, parameters: {weight: 2}}\n"
    (part,) = one(f"merge_method: linear\n{text}  - {{model: a, parameters: {{weight: 3}}}}").slices()
    weights = [(str(source.model), source.parameters["weight"].value) for source in part.sources]
    assert weights == [("a", 3), ("b", 2)]
    assert [source.where for source in part.again] == ["merge.yml:3"]


def test_empty_keys_count_as_missing() -> None:
    config = one(f"merge_method: karcher\n{PAIR}parameters:\ndtype:\nbase_model:\n")
    assert (dict(config.parameters), config.dtype, config.base) == ({}, None, None)


def test_greedy_soup_is_a_method_with_optional_weights() -> None:
    config = one(f"merge_method: greedy_soup\n{PAIR}")
    assert config.method == "greedy_soup"
    assert (
        "unknown parameter 'tt' of greedy_soup"
        in refused(f"merge_method: greedy_soup\n{PAIR}parameters: {{tt: 1}}").message
    )


def test_documents_come_after_those_they_name() -> None:
    text = f"""\
merge_method: linear
models:
  - {{model: second, parameters: {{weight: 1}}}}
  - {{model: x, parameters: {{weight: 1}}}}
---
name: second
merge_method: slerp
base_model: first
models: [{{model: y}}]
parameters: {{t: 0.5}}
---
name: first
merge_method: karcher
{PAIR}"""
    assert [config.name for config in parse_configs(text)] == ["first", "second", None]


def test_the_document_without_a_name_is_the_last() -> None:
    text = f"merge_method: karcher\n{PAIR}---\nname: z\nmerge_method: karcher\n{PAIR}"
    text += f"---\nname: y\nmerge_method: karcher\n{PAIR}"
    assert [config.name for config in parse_configs(text)] == ["z", "y", None]


def test_a_file_and_a_part_of_another(tmp_path: Path) -> None:
    (tmp_path / "m.yml").write_text(f"merge_method: karcher\n{PAIR}")
    assert read_configs(str(tmp_path / "m.yml"))[0][0].where == f"{tmp_path / 'm.yml'}:1"
    inner = parse_yaml(f"config:\n  merge_method: karcher\n  {PAIR}", "r.yaml").value["config"].value
    assert parse_located(inner)[0].where == "r.yaml:2"


LINEAR = "merge_method: linear\n"
SLICE = "merge_method: passthrough\nslices:\n"
WRONG = [
    ("", "merge.yml: is empty"),
    ("- 1", "merge.yml:1: a merge must be a mapping"),
    ("models: []", "merge.yml:1: a merge needs the key 'merge_method'"),
    ("merge_method: tise\n" + PAIR, "merge.yml:1: unknown merge_method 'tise'; did you mean 'ties'?"),
    (
        f"{LINEAR}{PAIR}base_modle: a",
        "merge.yml:3: unknown key 'base_modle' in a merge; did you mean 'base_model'?",
    ),
    (f"{LINEAR}{PAIR}random_seed: 1", "merge.yml:3: unknown key 'random_seed' in a merge"),
    (LINEAR, "merge.yml:1: a merge needs one of the keys models, slices, modules"),
    (f"{LINEAR}{PAIR}slices: []", "merge.yml:3: 'slices' next to 'models'; a merge has one of"),
    (f"{LINEAR}models: []", "merge.yml:2: models must be a list with at least one item"),
    (f"{LINEAR}models: [{{modle: a}}]", "merge.yml:2: unknown key 'modle' in a model; did you mean 'model'?"),
    (
        f"{LINEAR}models:\n  - model: a\n    layer_range: [0, 1]",
        "merge.yml:4: unknown key 'layer_range' in a model",
    ),
    (f"{LINEAR}models:\n  - model: a\n    weight: 1", "merge.yml:4: unknown key 'weight' in a model"),
    (f"{LINEAR}models: [{{model: 3}}]", "merge.yml:2: 3 is no model"),
    (f"{LINEAR}models: [{{model: a+b+c}}]", "merge.yml:2: the model 'a+b+c' has more than one '+'"),
    (f"{LINEAR}models: [{{model: a@b@c}}]", "merge.yml:2: 'a@b@c' is no model"),
    (f"{LINEAR}models: [{{model: a+}}]", "merge.yml:2: 'a+' is no model"),
    (f"{LINEAR}models: [{{model: {{lora: b}}}}]", "merge.yml:2: a model needs the key 'model'"),
    (f"{LINEAR}models: [{{model: {{model: a, lroa: b}}}}]", "merge.yml:2: unknown key 'lroa' in a model"),
    (
        f"{LINEAR}models: [{{model: {{model: a, override_architecture: x}}}}]",
        "merge.yml:2: unknown key 'override_architecture'",
    ),
    (
        f"{LINEAR}models:\n  - model: a@x\n    revision: y",
        "merge.yml:4: revision is 'y', but the model is at 'x'",
    ),
    (f"{LINEAR}models:\n  - model: a\n    revision: 3", "merge.yml:4: revision is 3, but must be a text"),
    (f"{LINEAR}{PAIR}base_modle: &base a", "merge.yml:3: unknown key 'base_modle' in a merge"),
    (f"{LINEAR}{PAIR}models: &a [{{model: c}}]", "merge.yml:3: key 'models' is given twice"),
    ("x: &a 1\nx: 2\n" + LINEAR + PAIR, "merge.yml:2: key 'x' is given twice (first at merge.yml:1)"),
    (f"{LINEAR}{PAIR}<<: 3", "merge.yml:3: << takes mappings alone"),
    (f"{LINEAR}{PAIR}parameters: {{weight: !!float x}}", "merge.yml:3: 'x' is no float"),
    (f"{LINEAR}{PAIR}parameters: {{weight: !half 1}}", "merge.yml:3: the tag '!half' is not allowed"),
    (f"{LINEAR}{PAIR}dtype: int64", "merge.yml:3: dtype is 'int64', but must be bfloat16, float16, float32"),
    (f"{LINEAR}{PAIR}out_dtype: bf16", "merge.yml:3: out_dtype is 'bf16', but must be"),
    (f"{LINEAR}{PAIR}chat_template: 3", "merge.yml:3: chat_template is 3, but must be a text"),
    (f"{LINEAR}{PAIR}parameters: 3", "merge.yml:3: parameters must be a mapping"),
    (
        f"{LINEAR}{PAIR}parameters:\n  wieght: 1",
        "merge.yml:4: unknown parameter 'wieght' of linear; did you mean 'weight'?",
    ),
    (f"{LINEAR}{PAIR}parameters: {{weight: heavy}}", "merge.yml:3: weight is 'heavy', but must be"),
    (f"{LINEAR}{PAIR}parameters: {{weight: true}}", "merge.yml:3: weight is True, but must be"),
    (
        f"{LINEAR}{PAIR}parameters: {{weight: .nan}}",
        "merge.yml:3: weight is nan, but must be a finite number",
    ),
    (f"{LINEAR}{PAIR}parameters: {{weight: }}", "merge.yml:3: weight has no value"),
    (f"{LINEAR}{PAIR}parameters: {{weight: []}}", "merge.yml:3: weight is an empty list"),
    (
        f"{LINEAR}{PAIR}parameters: {{weight: [1, [2]]}}",
        "merge.yml:3: weight holds [2] where one value belongs",
    ),
    (f"{LINEAR}{PAIR}parameters: {{weight: {{filter: mlp, value: 1}}}}", "merge.yml:3: weight is a mapping"),
    (
        f"{LINEAR}{PAIR}parameters: {{weight: [{{value: 1}}, 2]}}",
        "merge.yml:3: weight mixes numbers with filters",
    ),
    (
        f"{LINEAR}{PAIR}parameters: {{weight: [{{filter: mlp}}]}}",
        "merge.yml:3: a filter of weight needs the key 'value'",
    ),
    (
        f"{LINEAR}{PAIR}parameters: {{weight: [{{pattern: mlp, value: 1}}]}}",
        "merge.yml:3: unknown key 'pattern' in a filter",
    ),
    (f"{LINEAR}{PAIR}parameters: {{normalize: 2}}", "merge.yml:3: normalize is 2, but must be true or false"),
    (
        f"{LINEAR}models: [{{model: a, parameters: {{normalize: true}}}}]",
        "merge.yml:2: normalize is one for all models",
    ),
    ("merge_method: ties\n" + PAIR, "merge.yml:1: ties needs a base_model"),
    (
        f"merge_method: ties\nbase_model: c\n{PAIR}parameters: {{density: 0}}",
        "merge.yml:4: density is 0, but must be",
    ),
    (
        f"merge_method: ties\nbase_model: c\n{PAIR}parameters: {{density: [1, 1.5]}}",
        "merge.yml:4: density is 1.5, but must",
    ),
    (f"{SLICE}  - sources: [{{model: a}}]", "merge.yml:3: a source needs the key 'layer_range'"),
    (
        f"{SLICE}  - sources: [{{model: a, layer_range: [2, 2]}}]",
        "merge.yml:3: layer_range is [2, 2], but must be",
    ),
    (f"{SLICE}  - sources: [{{model: a, layer_range: 2}}]", "merge.yml:3: layer_range is 2, but must be"),
    (
        f"{SLICE}  - residual_weight: 1\n    sources: []",
        "merge.yml:3: unknown key 'residual_weight' in a slice",
    ),
    (
        f"{SLICE}  - sources:\n"
        "    - {model: a, layer_range: [0, 2]}\n    - {model: b, layer_range: [0, 3]}",
        "merge.yml:5: 3 layers of b, but 2 layers of a; the sources of a slice have the same number",
    ),
    ("merge_method: passthrough\nmodules: []", "merge.yml:2: modules must be a mapping"),
    (
        "merge_method: passthrough\nmodules:\n  enc:\n    slice: []",
        "merge.yml:4: unknown key 'slice' in module 'enc'",
    ),
    (
        f"{LINEAR}{PAIR}tokenizer_source: base\ntokenizer: {{}}",
        "merge.yml:3: tokenizer and tokenizer_source say the same",
    ),
    (f"{LINEAR}{PAIR}tokenizer: union", "merge.yml:3: tokenizer must be a mapping"),
    (
        f"{LINEAR}{PAIR}tokenizer: {{pad_to_multiple_of: 0}}",
        "merge.yml:3: pad_to_multiple_of is 0, but must be a whole",
    ),
    (
        f"{LINEAR}{PAIR}tokenizer: {{tokens: {{x: {{force: true}}}}}}",
        "merge.yml:3: token 'x' is forced, but has no source",
    ),
    (
        f"{LINEAR}{PAIR}tokenizer: {{tokens: {{x: {{source: {{kind: nil}}}}}}}}",
        "merge.yml:3: kind is 'nil', but must be zero or",
    ),
    (
        f"{LINEAR}{PAIR}tokenizer: {{tokens: {{x: {{source: {{kind: model_token, model: a}}}}}}}}",
        "merge.yml:3: a model_token needs either 'token' or 'token_id'",
    ),
    (
        f"{LINEAR}{PAIR}---\n{LINEAR}{PAIR}",
        "merge.yml:4: a second document without a name (the first at merge.yml:1)",
    ),
    (f"name: n\n{LINEAR}{PAIR}---\nname: n\n{LINEAR}{PAIR}", "merge.yml:5: a second document named 'n'"),
    (
        "name: n\nmerge_method: karcher\nmodels: [{model: m}]\n"
        "---\nname: m\nmerge_method: karcher\nmodels: [{model: n}]",
        "merge.yml:1: the documents need each other in a circle: m -> n -> m",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_wrong(text: str, message: str) -> None:
    assert refused(text).message.startswith(message), refused(text).message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (f"{LINEAR}{PAIR}random_seed: 1", "the seed is a setting of the command: --seed"),
        (
            f"{SLICE}  - residual_weight: 1\n    sources: []",
            "the reference reads residual_weight and never uses it",
        ),
        (f"{LINEAR}models:\n  - model: a\n    layer_range: [0, 1]", "models are merged whole"),
        (
            f"{LINEAR}models: [{{model: a, parameters: {{normalize: true}}}}]",
            "move it to the parameters of the slice",
        ),
    ],
)
def test_hints(text: str, hint: str) -> None:
    assert str(refused(text).hint).startswith(hint)


def test_weights_of_a_soup_have_a_sum() -> None:
    soup = method_of("greedy_soup")
    with pytest.raises(SettingsError, match="weight is"):
        soup.check({}, {"weight": [0.0, 0.0]})
    soup.check({}, {"weight": [1.0, 0.0]})


def test_a_flag_may_be_0_or_1_as_in_the_wild() -> None:
    assert one(f"{LINEAR}{PAIR}parameters: {{normalize: 1.0}}").parameters["normalize"] == ParameterSetting(
        1.0
    )
