"""The forms of mergekit's documented examples: each is read, planned and run over tiny models.

The texts are the tests' own; structure, methods and parameters are those of mergekit's README,
docs/merge_methods.md, docs/multimerge.md, examples/ and recipes/, with the models replaced.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import attar
from attar.merging.config.documents import parse_configs
from tests import tiny_models
from tests.merging.views import FakeView, plan_config, view

EXAMPLES = {
    "linear": """\
models:
  - {model: a, parameters: {weight: 1.0}}
  - {model: b, parameters: {weight: 0.3}}
  - {model: c, parameters: {weight: 0.5}}
merge_method: linear
dtype: float16
""",
    "gradient slerp": """\
slices:
  - sources:
      - {model: a, layer_range: [0, 3]}
      - {model: b, layer_range: [0, 3]}
merge_method: slerp
base_model: a
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # for the rest
dtype: float16
""",
    "ties": """\
models:
  - model: a
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: b
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: c
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: base
parameters:
  normalize: true
  int8_mask: true
dtype: float16
""",
    "ties without normalization": """\
models:
  - {model: a, parameters: {density: 0.5, weight: 0.5}}
  - {model: b, parameters: {density: 0.5, weight: 0.5}}
merge_method: ties
base_model: base
parameters: {normalize: false, int8_mask: true}
dtype: float16
""",
    "ties of revisions with a template": """\
models:
  - {model: a@v00.02-step-000003660, parameters: {weight: 0.5, density: 0.2}}
  - {model: b@v01.02-step-000002600, parameters: {weight: 0.5, density: 0.2}}
merge_method: ties
parameters: {lambda: 1.0}
base_model: base
dtype: bfloat16
chat_template: "auto"
""",
    "layers of two models": """\
slices:
  - sources:
    - model: a
      layer_range: [0, 2]
  - sources:
    - model: b
      layer_range: [1, 3]
merge_method: passthrough
dtype: float16
""",
    "fewer layers": """\
slices:
  - sources:
    - {model: a, layer_range: [0, 2]}
merge_method: passthrough
dtype: float16
""",
    "fusion": """\
models: [{model: a}, {model: b}]
merge_method: arcee_fusion
base_model: a
dtype: bfloat16
""",
    "nuslerp": """\
models:
  - {model: a, parameters: {weight: 0.5}}
  - {model: b, parameters: {weight: 0.5}}
merge_method: nuslerp
parameters: {nuslerp_flatten: false, nuslerp_row_wise: true}
tokenizer: {source: "union"}
dtype: bfloat16
""",
    "nuslerp of task vectors": """\
models:
  - {model: a, parameters: {weight: 0.2}}
  - {model: b, parameters: {weight: 0.8}}
base_model: base
merge_method: nuslerp
""",
    "multislerp": """\
models:
  - {model: a, parameters: {weight: 1}}
  - {model: b, parameters: {weight: 1}}
  - {model: c, parameters: {weight: 1}}
merge_method: multislerp
parameters: {normalize_weights: false, eps: 1e-8}
""",
    "karcher": """\
models: [{model: a}, {model: b}, {model: c}]
merge_method: karcher
parameters: {max_iter: 10, tol: 1e-5}
""",
    "task arithmetic": """\
models:
  - {model: a, parameters: {weight: 0.4}}
  - {model: b, parameters: {weight: -0.2}}
merge_method: task_arithmetic
base_model: base
parameters: {lambda: 0.8}
""",
    "dare": """\
models:
  - model: base
    # no parameters for the base
  - {model: a, parameters: {weight: 0.4, density: 0.53}}
  - {model: b, parameters: {weight: 0.3, density: 0.53}}
merge_method: dare_ties
base_model: base
parameters: {int8_mask: true}
dtype: bfloat16
tokenizer_source: base
""",
    "dare without signs": """\
models:
  - {model: a, parameters: {weight: 0.4, density: 0.5}}
  - {model: b, parameters: {weight: 0.3, density: 0.5}}
merge_method: dare_linear
base_model: base
parameters: {rescale: false, lambda: 1.1}
""",
    "della": """\
models:
  - {model: a, parameters: {weight: 0.4, density: 0.5, epsilon: 0.1}}
  - {model: b, parameters: {weight: 0.3, density: 0.5}}
merge_method: della
base_model: base
parameters: {lambda: 1.0}
""",
    "della without signs": """\
models: [{model: a, parameters: {weight: 0.4, density: 0.7, epsilon: 0.2}}]
merge_method: della_linear
base_model: base
""",
    "breadcrumbs": """\
models: [{model: a}, {model: b}]
merge_method: breadcrumbs
base_model: base
parameters: {weight: 1.0, density: 0.9, gamma: 0.01, lambda: 0.5}
""",
    "breadcrumbs with signs": """\
models: [{model: a}, {model: b}]
merge_method: breadcrumbs_ties
base_model: base
parameters: {weight: 1.0, density: 0.9, gamma: 0.01}
""",
    "sce": """\
models: [{model: a}, {model: b}]
merge_method: sce
base_model: base
parameters: {select_topk: 0.1}
""",
    "model stock": """\
models: [{model: a}, {model: b}, {model: c}]
merge_method: model_stock
base_model: base
parameters: {filter_wise: false}
""",
    "nearswap": """\
models: [{model: a}, {model: b}]
merge_method: nearswap
base_model: a
parameters: {t: 0.0001}
""",
    "ram": """\
models: [{model: a}, {model: b}]
merge_method: ram
base_model: base
""",
    "a scaled layer": """\
slices:
  - sources:
      - model: a
        layer_range: [0, 3]
        parameters:
          scale:
            - filter: down_proj
              value: 0.5
            - value: 1.0
merge_method: passthrough
""",
    "a layer without effect": """\
slices:
  - sources: [{model: a, layer_range: [0, 2]}]
  - sources:
      - model: a
        layer_range: [1, 2]
        parameters:
          scale: [{filter: o_proj, value: 0.0}, {filter: down_proj, value: 0.0}, {value: 1.0}]
  - sources: [{model: a, layer_range: [2, 3]}]
merge_method: passthrough
""",
    "tokens of two prompt formats": """\
models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]
merge_method: linear
tokenizer:
  source: union
  tokens:
    <|im_start|>:
      source: a
    <|start_header_id|>:
      source: "b"
      force: true
    <|renamed|>:
      source:
        kind: "model_token"
        model: "b"
        token: "<|original|>"
    <|unused|>:
      source:
        kind: "zero"
  pad_to_multiple_of: null
chat_template: "llama3"
""",
    "several documents": """\
name: first-merge
merge_method: linear
models:
  - model: a
  - model: b
parameters:
  weight: 0.5
---
name: second-merge
merge_method: slerp
base_model: first-merge  # the result of the document above
models:
  - model: c
parameters:
  t: 0.5
---
merge_method: dare_ties
base_model: a
models:
  - {model: second-merge, parameters: {density: 0.6, weight: 0.5}}
  - {model: b, parameters: {density: 0.8, weight: 0.5}}
""",
    "several documents, all with names": """\
name: gradient
merge_method: task_arithmetic
base_model: base
models: [{model: a, parameters: {weight: 1}}]
---
name: last
merge_method: linear
models: [{model: gradient, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]
""",
}


def views(*further: str) -> list[FakeView]:
    names = ("a", "b", "c", "base", "a@v00.02-step-000003660", "b@v01.02-step-000002600", *further)
    return [view(name, "llama3") for name in names]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_planned(name: str) -> None:
    configs = parse_configs(EXAMPLES[name])
    known = views(*(config.name for config in configs if config.name))
    for config in configs:
        vocabulary = SimpleNamespace(size=352) if config.tokenizer else None
        plan = plan_config(config, *known, vocabulary=vocabulary)
        layers = {output.layer for output in plan.outputs if output.layer is not None}
        assert layers == set(range(plan.config["num_hidden_layers"]))
        assert len(plan.outputs) == 9 * len(layers) + 3
        for output in plan.outputs:
            assert all(len(values) == len(output.inputs) for values in output.per_model.values())
            assert output.dtype == (config.dtype or "float32")
        assert plan.config["vocab_size"] == (352 if config.tokenizer else 320)


ADDED = {
    "tokens of two prompt formats": {
        "a": ["<|im_start|>", "<|im_end|>"],
        "b": ["<|start_header_id|>", "<|original|>"],
    }
}
"""Tokens that the models of an example have in addition to those of all tiny models."""


def speaking(folder: Path, words: list[str], target: Path) -> Path:
    """A copy of a model with further tokens and rows for them."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tiny_models.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, family: dict[str, Path], tmp_path: Path) -> None:
    """What comes out is a model that transformers loads whole, and that gives numbers."""
    positions = {"base": family["base"], "a": family["one"], "b": family["two"], "c": family["three"]}
    positions |= {"a@v00.02-step-000003660": family["one"], "b@v01.02-step-000002600": family["two"]}
    for model, words in ADDED.get(name, {}).items():
        positions[model] = speaking(positions[model], words, tmp_path / model)
    merged = attar.merge(EXAMPLES[name], tmp_path / "out", models=positions, tokens=0)
    model, report = AutoModelForCausalLM.from_pretrained(merged.path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.isfinite(model.float()(torch.tensor([[5, 6, 7]])).logits).all()


def test_documents_are_in_order() -> None:
    assert [config.name for config in parse_configs(EXAMPLES["several documents"])] == [
        "first-merge",
        "second-merge",
        None,
    ]
