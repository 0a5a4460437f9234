"""Round trips of draft heads through every published layout, and what readers of those layouts look for."""

import json

import pytest
import torch

from attar.checkpoint.draft_head import published_head, published_layout
from attar.errors import AttarError, CheckpointError, ModelError
from attar.formats.draft_heads.content import HeadContent, HeadTarget
from attar.formats.draft_heads.table import HEAD_LAYOUTS
from tests.formats.draft_heads.stored_heads import TARGET, H, L, V, block, eagle, eagle3, medusa, table

torch.manual_seed(0)
CASES = {
    "medusa": [medusa(), medusa(layers=2), medusa(shared=True, tree=((0,), (0, 1), (1,)))],
    "speculators": [
        block("dspark", rank=4, confidence=True),
        block("dspark", rank=4, markov="gated", draft_vocabulary=9),
        block("dspark", rank=4, markov="rnn"),
        block("dspark", rank=0, depth=1, bias=True),
        block("dflash"),
        block("dflash", draft_vocabulary=11, mask=table()[17].clone()),
        block("dflash", rank=4, confidence=True),
        eagle3(),
        eagle3(draft_vocabulary=0, layers=(0, 2), norm_before_fc=True, norm_output=True),
        eagle3(fc_norm=True, norm_before_residual=True, norms=True, bias=True),
        eagle3(depth=3, norms=True, bias=True),
    ],
    "eagle": [
        eagle(),
        eagle(bias=False),
        eagle(depth=2),
        eagle3(),
        eagle3(draft_vocabulary=0, fc_norm=True, bias=True),
    ],
}
CASES["deepspec"] = CASES["speculators"][:7]
ALL = [(name, head) for name, heads in CASES.items() for head in heads]


def stored(name, head):
    """Config as it is in a file, and tensors."""
    config, tensors = HEAD_LAYOUTS[name].encode(head)
    return json.loads(json.dumps(config)), tensors


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(("name", "head"), ALL)
def test_a_head_comes_back_as_it_was(name, head):
    config, tensors = stored(name, head)
    again = HEAD_LAYOUTS[name].decode(config, tensors, HeadTarget("", embedding=table))
    assert again.values == head.values
    assert again.target == TARGET
    assert same(again.tensors, head.tensors)


@pytest.mark.parametrize(("name", "head"), ALL)
def test_a_folder_comes_back_as_it_was(name, head):
    config, tensors = stored(name, head)
    again = HEAD_LAYOUTS[name].decode(config, tensors, HeadTarget("", embedding=table))
    second, copies = stored(name, again)
    assert second == config
    assert same(copies, tensors)


@pytest.mark.parametrize(("name", "head"), ALL)
def test_only_what_a_layout_has_no_words_for_is_ours(name, head):
    config, _ = stored(name, head)
    unspoken = {
        "medusa": {"shared", "tree"},
        "speculators": {"branches"},
        "deepspec": set(),
        "eagle": {"branches", "drafts"},
    }
    ours = config.get("attar", {})
    assert set(ours.get("head", {})) <= unspoken[name]
    known = {"medusa": {"architectures", "layers", "context"}, "speculators": {"layers"}}
    assert set(ours.get("target", {})) <= known.get(name, {"name", "architectures"})


@pytest.mark.parametrize(("name", "head"), ALL)
def test_a_layout_is_recognised(name, head):
    config, tensors = stored(name, head)
    config.pop("attar", None)
    assert published_layout(config, tensors) == name


@pytest.mark.parametrize(("name", "head"), ALL)
def test_a_config_alone_describes_the_head(name, head):
    config, _ = stored(name, head)
    assert published_layout(config) == name
    described = published_head(config, name)
    for key in ("kind", "hidden", "vocabulary", "draft_vocabulary"):
        assert described[key] == head.values[key]
    assert described["drafts"] == head.values["drafts"] and described["target"] == "org/target"
    assert described["layers"] in (head.values["layers"], None if head.values["layers"] == [L] else ())


def test_models_are_no_draft_heads():
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
    assert published_layout({"architectures": ["LlamaForCausalLM"]}, names) == ""
    assert published_layout({"architectures": ["Qwen3ForCausalLM"], "medusa_num_heads": 2}, names) == ""


def test_the_layout_of_eagle_has_eagle3_of_one_layer():
    with pytest.raises(ModelError, match="of one layer") as raised:
        stored("eagle", eagle3(depth=2))
    assert "speculators" in raised.value.hint


def test_layers_are_numbered_as_each_reader_numbers_them():
    drafter, head = block("dspark", rank=4), eagle3(layers=(1, 2, 4))
    assert drafter.values["layers"] == [1, 3, 5]  # after these blocks
    assert stored("speculators", drafter)[0]["aux_hidden_state_layer_ids"] == [2, 4, 6]  # entering
    assert stored("deepspec", drafter)[0]["target_layer_ids"] == [1, 3, 5]  # after
    assert stored("speculators", head)[0]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    config = stored("eagle", head)[0]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]  # vLLM, llama.cpp: entering
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]  # SGLang: after


def test_layers_that_a_config_leaves_out_are_the_usual_ones():
    config, tensors = stored("eagle", eagle3(layers=(1, 2, 5)))
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "num_target_layers"):
        del config[key]
    read = HEAD_LAYOUTS["eagle"].decode(config, tensors, HeadTarget("", layers=32))
    assert read.values["layers"] == [1, 15, 28]  # entering blocks 2, 16 and 29
    with pytest.raises(ModelError, match="how many layers"):
        HEAD_LAYOUTS["eagle"].decode(config, tensors, HeadTarget(""))


@pytest.mark.parametrize("name", ["speculators", "deepspec"])
@pytest.mark.parametrize(("kind", "size", "anchor"), [("dspark", 3, True), ("dflash", 4, False)])
def test_three_drafts_are_a_block_of_three_or_four(name, kind, size, anchor):
    for rank in (0, 4):
        config, _ = stored(name, block(kind, rank=rank))
        assert (config["block_size"], config["sample_from_anchor"]) == (size, anchor)
    assert stored("speculators", block(kind))[0]["speculators_config"]["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 3}
    ]


def test_an_anchor_that_is_not_stated_follows_the_kind():
    for name, kind in (("speculators", "dspark"), ("deepspec", "dspark"), ("deepspec", "dflash")):
        head = block(kind, rank=4 if kind == "dspark" else 0)
        config, tensors = stored(name, head)
        del config["sample_from_anchor"]
        if "dflash_config" in config:
            del config["dflash_config"]["sample_from_anchor"]
        assert HEAD_LAYOUTS[name].decode(config, tensors, TARGET).values == head.values


def test_a_learned_mask_is_a_row_of_a_table():
    head = block("dspark", draft_vocabulary=9)
    config, tensors = stored("speculators", head)
    token, drafted = config["mask_token_id"], (head.tensors["d2t"] + torch.arange(9)).tolist()
    assert token not in drafted and all(other in drafted for other in range(token + 1, V))
    assert torch.equal(tensors["embed_tokens.weight"][token], head.tensors["mask_embedding"])
    others = torch.arange(V) != token
    assert torch.equal(tensors["embed_tokens.weight"][others], table()[others])


def test_a_mask_of_the_target_needs_no_table():
    config, tensors = stored("deepspec", block("dflash", mask=table()[17].clone()))
    assert config["mask_token_id"] == 17 and "embed_tokens.weight" not in tensors


def test_a_reduced_vocabulary_is_offsets_and_a_mask():
    for name in ("speculators", "eagle"):
        head = eagle3(draft_vocabulary=16)
        config, tensors = stored(name, head)
        chosen = tensors["d2t"] + torch.arange(16)
        assert tensors["d2t"].dtype == torch.int64 and config["draft_vocab_size"] == 16
        assert (
            tensors["t2d"].dtype == torch.bool
            and tensors["t2d"].nonzero().flatten().tolist() == chosen.tolist()
        )
        assert tensors["lm_head.weight"].shape == (16, H)


def test_offsets_that_leave_nothing_out_are_dropped():
    head = eagle3(draft_vocabulary=0)
    config, tensors = stored("eagle", head)
    tensors |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    read = HEAD_LAYOUTS["eagle"].decode(config, tensors, TARGET)
    assert read.values == head.values and same(read.tensors, head.tensors)


def test_medusa_reads_the_tensors_not_the_config():
    config, tensors = stored("medusa", medusa())
    read = HEAD_LAYOUTS["medusa"].decode({**config, "medusa_num_heads": 2}, tensors, TARGET)
    assert read.values["drafts"] == 3 and read.values["layers"] == [L]


class Residual(torch.nn.Module):
    """A layer of Medusa's heads, by its tensors."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(H, H)


@pytest.mark.parametrize(("layers", "shared"), [(1, False), (2, False), (1, True)])
def test_medusa_loads_the_tensors_into_its_sequences(layers, shared):
    _, tensors = stored("medusa", medusa(layers, shared))
    out = [torch.nn.Linear(H, V, bias=False) for _ in range(3)]
    heads = [torch.nn.Sequential(*(Residual() for _ in range(layers)), linear) for linear in out]
    torch.nn.ModuleList(heads).load_state_dict(tensors)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("name", "head"), [("speculators", block("dspark")), ("deepspec", block("dspark")), ("eagle", eagle3())]
)
def test_scaled_positions_are_stated_and_read(name, head):
    """By both keys; without the new one, as older configs are, by the old one."""
    scaled = HeadContent(
        {**head.values, "shape": {**head.values["shape"], "rope_scaling": YARN}}, head.tensors, TARGET
    )
    config, tensors = stored(name, scaled)
    inner = config.get("transformer_layer_config", config)
    assert inner["rope_scaling"] == YARN and "shape" not in config.get("attar", {}).get("head", {})
    assert inner["rope_parameters"] == {**YARN, "rope_theta": 50000.0}
    assert HEAD_LAYOUTS[name].decode(config, tensors, TARGET).values == scaled.values
    del inner["rope_parameters"]
    assert HEAD_LAYOUTS[name].decode(config, tensors, TARGET).values == scaled.values


def test_the_class_of_eagle_follows_its_bias():
    assert stored("eagle", eagle(bias=True))[0]["architectures"] == ["LlamaForCausalLMEagle"]
    assert "bias" not in stored("eagle", eagle(bias=True))[0]  # readers take it for attention's
    assert stored("eagle", eagle(bias=False))[0]["architectures"] == ["LlamaForCausalLM"]
    assert stored("eagle", eagle(bias=False))[0]["bias"] is False


LAYERS = {  # a Qwen3 or Llama config as transformers 4 writes it
    "attention_bias": False,
    "head_dim": 4,
    "hidden_act": "silu",
    "hidden_size": H,
    "intermediate_size": 20,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "sliding_window": None,
    "vocab_size": V,
}


def read(config, head, layout, names=lambda name: name, **more):
    """A folder of others: a config in their words, with our tensors under their names."""
    tensors = {names(name): x for name, x in head.tensors.items() if name != "mask_embedding"} | more
    assert published_layout(config, tensors) == layout
    return HEAD_LAYOUTS[layout].decode(config, tensors, HeadTarget("", layers=L, embedding=table))


def test_specforge_nests_what_deepspec_has_at_the_top():
    head = block("dspark", rank=4, confidence=True, mask=table()[17].clone())
    inner = {"attention_mode": "gqa", "mask_token_id": 17, "target_layer_ids": [1, 3, 5]}
    inner |= {"projector_type": "dspark", "markov_rank": 4, "markov_head_type": "vanilla"}
    inner |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    qwen3 = {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", **LAYERS, "num_hidden_layers": 2}
    layers = {"layer_types": ["full_attention"] * 2, "num_target_layers": L, "block_size": 3}
    got = read({**qwen3, **layers, "dflash_config": inner}, head, "deepspec")
    assert got.values == head.values and same(got.tensors, head.tensors)
    flat = {**qwen3, **layers, **inner, "architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    table_and_head = {
        "embed_tokens.weight": table(),
        "lm_head.weight": table(),
    }  # DeepSpec stores the target's
    got = read(flat, head, "deepspec", **table_and_head)
    assert got.values == head.values and same(got.tensors, head.tensors)


def test_dflash_of_its_authors():
    head = block("dflash", mask=table()[17].clone())
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **LAYERS, "num_hidden_layers": 2}
    config |= {"block_size": 4, "dflash_config": {"mask_token_id": 17, "target_layer_ids": [1, 3, 5]}}
    got = read(config, head, "deepspec")
    assert got.values == head.values and same(got.tensors, head.tensors)


def test_eagle_as_its_authors_publish_it():
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LAYERS, "num_hidden_layers": 1}
    third = eagle3(layers=(1, 2, 2))  # entering blocks 2, 6 // 2 and 6 - 3
    midlayer = lambda name: name.replace("layers.0.", "midlayer.")  # noqa: E731
    mask = torch.zeros(V, dtype=torch.bool)
    got = read({**llama, "draft_vocab_size": 16}, third, "eagle", midlayer, t2d=mask)
    assert got.values == {**third.values, "drafts": 5} and same(got.tensors, third.tensors)
    first = eagle()
    got = read(llama, first, "eagle", **{"embed_tokens.weight": table()})
    assert got.values == {**first.values, "drafts": 5, "branches": 1}
    assert same(got.tensors, first.tensors)


def without(tensors, name):
    return {key: x for key, x in tensors.items() if key != name}


def reduced(tensors):
    return {**tensors, "lm_head.weight": tensors["lm_head.weight"][:5]}


@pytest.mark.parametrize(
    ("name", "head", "config", "change", "error"),
    [
        ("medusa", medusa(), {}, lambda t: without(t, "0.1.weight"), "head 0"),
        ("medusa", medusa(), {}, lambda t: {**t, "other": t["0.1.weight"]}, "'other'"),
        ("speculators", block("dspark"), {"speculators_model_type": "mtp"}, dict, "'mtp'"),
        (
            "speculators",
            block("dspark"),
            {"transformer_layer_config": None},
            dict,
            "transformer_layer_config",
        ),
        ("speculators", block("dspark"), {"mask_token_id": None}, dict, "mask_token_id"),
        ("speculators", block("dspark"), {"mask_token_id": V}, dict, "mask_token_id is 40"),
        ("speculators", block("dspark"), {"aux_hidden_state_layer_ids": None}, dict, "aux_hidden_state"),
        ("speculators", block("dspark", rank=4), {"markov_head_type": "x"}, dict, "markov_head_type"),
        ("speculators", block("dspark"), {}, lambda t: without(t, "fc.weight"), "fc.weight"),
        ("speculators", block("dspark", draft_vocabulary=9), {}, lambda t: without(t, "d2t"), "d2t"),
        (
            "speculators",
            block("dspark", draft_vocabulary=9),
            {},
            lambda t: without(t, "lm_head.weight"),
            "d2t",
        ),
        ("deepspec", block("dspark", rank=4), {"hidden_act": "gelu"}, dict, "hidden_act"),
        ("deepspec", block("dspark"), {"layer_types": ["sliding_attention"]}, dict, "layer_types"),
        (
            "deepspec",
            block("dspark"),
            {"rope_parameters": {"rope_type": "yarn"}},
            dict,
            "yarn with factor None",
        ),
        ("deepspec", block("dspark"), {"rope_parameters": {"rope_type": "dynamic"}}, dict, "dynamic"),
        ("eagle", eagle3(), {"rope_parameters": 4}, dict, "rope_parameters is 4"),
        ("deepspec", block("dspark"), {"num_attention_heads": None}, dict, "num_attention_heads"),
        ("eagle", eagle3(), {"num_hidden_layers": 2}, dict, "is 2, the tensors have 1"),
        ("eagle", eagle(depth=2), {}, lambda t: t | {"layers.3.a": t["fc.bias"]}, "is 2, the tensors have 4"),
        ("eagle", eagle3(), {}, reduced, "rows"),
        ("eagle", eagle3(), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, dict, "fc.weight"),
        ("eagle", eagle3(), {"target_hidden_size": 99}, dict, "99"),
        (
            "eagle",
            eagle(),
            {},
            lambda t: {**t, "layers.0.input_layernorm.weight": t["fc.bias"]},
            "input_layer",
        ),
    ],
)
def test_half_or_foreign_folders_are_refused_in_one_line(name, head, config, change, error):
    stated, tensors = stored(name, head)
    with pytest.raises((CheckpointError, ModelError), match=error) as raised:
        HEAD_LAYOUTS[name].decode({**stated, **config}, change(tensors), TARGET)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("name", "head", "error"),
    [
        (
            "medusa",
            HeadContent({**medusa().values, "draft_vocabulary": 8}, medusa().tensors, TARGET),
            "reduced",
        ),
        ("eagle", eagle3(norms=True), "norms"),
        ("speculators", eagle3(layers=(1, 2, L)), "final norm"),
        ("deepspec", block("dflash"), "embedding"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(name, head, error):
    if error == "embedding":
        head = HeadContent(head.values, head.tensors, HeadTarget("org/target", layers=L))
    with pytest.raises(AttarError, match=error):
        HEAD_LAYOUTS[name].encode(head)
