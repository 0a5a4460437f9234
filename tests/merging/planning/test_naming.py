"""Stacks of layers in tensor names: every family, experts, encoders with decoders, and what is no stack."""

from __future__ import annotations

import pytest

from attar.errors import ModelError
from attar.merging.planning.naming import (
    ModelStack,
    comes_first,
    find_stacks,
    has_token_rows,
    is_buffer,
    kind_of,
    layer_name,
    position_of,
    token_embedding,
)
from tests import tiny_models
from tests.merging.views import view

PREFIXES = {
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
    "bert": "bert.encoder.layer",
    "roberta": "roberta.encoder.layer",
    "distilbert": "distilbert.transformer.layer",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_has_one_stack_of_three(family: str) -> None:
    model = view("m", family)
    stacks = find_stacks(model.tensors, model.config, "m")
    assert stacks == (ModelStack(PREFIXES.get(family, "model.layers"), 3),)
    inside = [name for name in model.tensors if position_of(name, stacks)]
    assert len(inside) % 3 == 0
    for name in inside:
        position = position_of(name, stacks)
        assert position is not None
        assert layer_name(position.stack.prefix, position.layer, position.local_name) == name


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_has_its_token_rows(family: str) -> None:
    model = view("m", family)
    embedding = token_embedding(model.tensors, model.config)
    assert embedding is not None
    assert embedding.split(".")[-2] in ("embed_tokens", "wte", "embed_in", "word_embeddings")
    stacks = find_stacks(model.tensors, model.config, "m")
    outside = [name for name in model.tensors if position_of(name, stacks) is None]
    rows = [
        name for name in outside if has_token_rows(name, model.tensors[name].shape, tiny_models.VOCABULARY)
    ]
    sized = [name for name in outside if model.tensors[name].shape[0] == tiny_models.VOCABULARY]
    assert rows == sized
    assert comes_first(embedding)
    assert not any(comes_first(name) for name in rows if name != embedding)


def names(prefix: str, count: int, *rest: str) -> list[str]:
    return [f"{prefix}.{layer}.{item}" for layer in range(count) for item in rest]


def test_experts_are_inside_a_layer() -> None:
    actual = names("model.layers", 2, *names("mlp.experts", 4, "w1.weight"), "norm.weight")
    assert find_stacks(actual, {"num_hidden_layers": 2}, "m") == (ModelStack("model.layers", 2),)
    position = position_of("model.layers.1.mlp.experts.3.w1.weight", [ModelStack("model.layers", 2)])
    assert position is not None
    assert (position.layer, position.local_name) == (1, "mlp.experts.3.w1.weight")


def test_an_encoder_and_a_decoder() -> None:
    results = [*names("encoder.block", 3, "layer.0.SelfAttention.q.weight"), "shared.weight"]
    results += names("decoder.block", 2, "layer.0.SelfAttention.q.weight", "layer.1.EncDecAttention.q.weight")
    config = {"num_layers": 3, "num_decoder_layers": 2}
    assert find_stacks(results, config, "m") == (
        ModelStack("encoder.block", 3),
        ModelStack("decoder.block", 2),
    )


def test_the_language_model_comes_first() -> None:
    results = [
        *names("visual.blocks", 4, "attn.qkv.weight"),
        *names("language_model.layers", 2, "w"),
        "visual.merger.mlp.0.weight",
    ]
    results += ["visual.merger.mlp.2.weight"]
    config = {"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 4}}
    assert find_stacks(results, config, "m") == (
        ModelStack("language_model.layers", 2),
        ModelStack("visual.blocks", 4),
    )


def test_a_number_at_the_beginning() -> None:
    assert find_stacks(names("layers", 2, "w"), {}, "m") == (ModelStack("layers", 2),)
    assert layer_name("", 3, "w") == "3.w"


@pytest.mark.parametrize(
    ("layer_names", "config", "message"),
    [
        (
            names("model.layers", 2, "w"),
            {"num_hidden_layers": 3},
            "config.json says 3 layers, but the tensors' names have 2 in",
        ),
        (
            ["model.layers.0.w", "model.layers.2.w"],
            {"n_layer": 2},
            r"says 2 layers, .* have \[0, 2\] in model.layers",
        ),
        (["w"], {}, "m: no layers found"),
    ],
)
def test_what_does_not_fit_the_config(layer_names: list[str], config: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_stacks(layer_names, config, "m")


def test_kinds() -> None:
    kinds = {
        "shared.weight": "embedding",
        "lm_head.weight": "head",
        "model.norm.weight": "other",
        "x.wte.weight": "embedding",
    }
    assert {name: kind_of(name, False) for name in kinds} == kinds
    assert kind_of("lm_head.weight", True) == "layer"
    assert not comes_first("embed_out.weight")
    assert is_buffer("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert is_buffer("transformer.h.0.attn.bias")
    assert not is_buffer("transformer.h.0.attn.c_attn.bias")


def test_positions_and_dense_layers_of_heads_are_no_token_rows() -> None:
    for name in (
        "wpe.weight",
        "bert.embeddings.position_embeddings.weight",
        "cls.predictions.transform.dense.weight",
    ):
        assert not has_token_rows(name, (8, 4), 8)
    assert has_token_rows("cls.predictions.bias", (8,), 8)
    assert not has_token_rows("lm_head.weight", (9, 4), 8)
