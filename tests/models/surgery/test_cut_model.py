"""Surgery: the cut model equals the masked one, loads with transformers, and leaves the original alone."""

from __future__ import annotations

import pytest
import torch
import transformers

from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.fake_quant import cache_argument
from attar.models.loading.empty import empty_model
from attar.models.loading.load import save_model
from attar.models.surgery.cut_model import head_counts, keep_layers
from tests import tiny_models
from tests.cuts import keep_heads, keep_neurons

HEADS_CAN_GO = ("llama2", "llama3", "smollm", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
HEADS_MUST_STAY = tuple(family for family in tiny_models.FAMILIES if family not in HEADS_CAN_GO)


def silence(model, part, columns):
    """Zero input columns of a projection."""
    module = model.get_submodule(part.name)
    with torch.no_grad():
        (module.weight if part.kind == "conv1d" else module.weight.T)[list(columns)] = 0.0


def masked_heads(model, keep):
    """The model with the output columns of the removed head groups zero."""
    for block, kept in zip(discover(model).blocks, keep, strict=True):
        for index, group in enumerate(block.attention.groups()):
            if index not in kept:
                silence(model, block.attention.o, group.o_columns)
    return model


def masked_neurons(model, keep):
    """The model with the down columns of the removed neurons zero."""
    for block, kept in zip(discover(model).blocks, keep, strict=True):
        silence(model, block.mlp.down, [j for j in range(block.mlp.neurons) if j not in kept])
    return model


def assert_equal_logits(first, second, rows):
    ours, theirs = tiny_models.logits(first, rows), tiny_models.logits(second, rows)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def reloaded(model, folder):
    """The model after a trip through a folder and transformers' own loading."""
    save_model(model, folder)
    auto = (
        transformers.AutoModelForMaskedLM
        if "MaskedLM" in type(model).__name__
        else transformers.AutoModelForCausalLM
    )
    loaded, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return loaded.eval()


def head_choices(model):
    """For each number of KV groups, neighbours that start elsewhere in every layer."""
    total = discover(model).blocks[0].attention.kv_heads
    for count in range(1, total):
        yield [sorted((start + step) % total for step in range(count)) for start in (0, 1, total - 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", HEADS_CAN_GO)
def test_cut_heads_equal_masked_heads(family, tmp_path):
    model = tiny_models.build(family)
    rows = tiny_models.tokens(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for keep in head_choices(model):
        cut = keep_heads(model, keep)
        masked = masked_heads(tiny_models.build(family), keep)
        assert_equal_logits(cut, masked, rows)
        assert_equal_logits(reloaded(cut, tmp_path / str(len(keep[0]))), masked, rows)
        attention, old = discover(cut).blocks[0].attention, discover(model).blocks[0].attention
        assert attention.kv_heads == len(keep[0]) and attention.head_dim == old.head_dim
        assert attention.heads * old.kv_heads == old.heads * len(keep[0])
        kept = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        assert sum(part.out_features for part in (attention.q, attention.k, attention.v)) == kept
        pointers = {tensor.data_ptr() for tensor in model.state_dict().values()}
        assert all(tensor.data_ptr() not in pointers for tensor in cut.state_dict().values())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.few(1)
@pytest.mark.parametrize("family", HEADS_MUST_STAY)
def test_heads_that_the_config_cannot_express(family):
    model = tiny_models.build(family)
    for count in (1, 2, 3):
        with pytest.raises(ModelError, match="heads cannot be removed: no transformers config") as caught:
            keep_heads(model, [list(range(count))] * 3)
        assert caught.value.hint == "use method neurons" and "\n" not in caught.value.message
    assert head_counts(model) == [4]
    everything = keep_heads(model, [[0, 1, 2, 3]] * 3)
    assert_equal_logits(everything, model, tiny_models.tokens(model))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_cut_neurons_equal_masked_neurons(family, tmp_path):
    model = tiny_models.build(family)
    total = discover(model).blocks[0].mlp.neurons
    generator = torch.Generator().manual_seed(1)
    keep = [sorted(torch.randperm(total, generator=generator)[:33].tolist()) for _ in range(3)]
    cut = keep_neurons(model, keep)
    masked = masked_neurons(tiny_models.build(family), keep)
    rows = tiny_models.tokens(model)
    assert_equal_logits(cut, masked, rows)
    assert_equal_logits(reloaded(cut, tmp_path), masked, rows)
    assert type(cut) is type(model)
    assert [block.mlp.neurons for block in discover(cut).blocks] == [33, 33, 33]
    assert sum(p.numel() for p in cut.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_kept_layers_equal_skipped_layers(family, tmp_path):
    model = tiny_models.build(family)
    shorter = keep_layers(model, [0, 2])
    rows = tiny_models.tokens(model)
    skipped = tiny_models.build(family)
    blocks = skipped.get_submodule(discover(skipped).blocks_name)
    if family in ("gemma2", "gemma3"):  # the kind of attention belongs to the layer, not to its place
        kinds = skipped.config.layer_types
        skipped.config.layer_types = [kinds[0], kinds[2]]
        assert shorter.config.layer_types == [kinds[0], kinds[2]]
    del blocks[1]
    skipped.config.num_hidden_layers = 2
    skipped.config.use_cache = False  # its layers still count as before
    assert_equal_logits(shorter, skipped, rows)
    assert_equal_logits(reloaded(shorter, tmp_path), skipped, rows)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiny_models.DECODERS)
def test_smaller_models_generate_with_a_cache(family):
    """The cache indexes layers and heads; a stale index would show here."""
    model = keep_layers(keep_neurons(tiny_models.build(family), [list(range(40))] * 3), [1, 2])
    if family in HEADS_CAN_GO:
        model = keep_heads(model, [[0], [1]])
    rows = tiny_models.tokens(model, batch=1, length=10)
    with torch.no_grad():
        whole = model(input_ids=rows).logits
        first = model(input_ids=rows[:, :6], use_cache=True)
        name = cache_argument(model)
        second = model(input_ids=rows[:, 6:], use_cache=True, **{name: first[name]})
    together = torch.cat([first.logits, second.logits], dim=1)
    torch.testing.assert_close(together, whole, rtol=0, atol=1e-5)


def test_llama_becomes_mistral_only_where_it_must():
    model = tiny_models.build("llama3")
    halved = keep_heads(model, [[0, 3]] * 3)
    assert type(halved).__name__ == halved.config.architectures[0] == "LlamaForCausalLM"
    assert (halved.config.num_attention_heads, halved.config.num_key_value_heads, halved.config.head_dim) == (
        4,
        2,
        8,
    )
    quarter_off = keep_heads(model, [[0, 1, 3]] * 3)
    assert type(quarter_off).__name__ == quarter_off.config.architectures[0] == "MistralForCausalLM"
    assert quarter_off.config.sliding_window is None and quarter_off.config.num_attention_heads == 6
    assert quarter_off.config.rope_parameters == model.config.rope_parameters
    assert not hasattr(quarter_off.config, "mlp_bias")


def test_llama_with_scaled_rope_survives_as_mistral(tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    keep = [[1, 2, 3], [0, 2, 3], [0, 1, 2]]
    cut = keep_heads(tiny_models.build("llama3", rope_parameters=rope), keep)
    masked = masked_heads(tiny_models.build("llama3", rope_parameters=rope), keep)
    rows = tiny_models.tokens(masked, length=60)
    assert type(cut).__name__ == "MistralForCausalLM"
    assert_equal_logits(reloaded(cut, tmp_path), masked, rows)


def test_llama_with_biases_has_no_sibling():
    model = tiny_models.build("llama3", attention_bias=True)
    assert head_counts(model) == [1, 2, 4]
    with pytest.raises(ModelError, match="cannot express num_attention_heads 6") as caught:
        keep_heads(model, [[0, 1, 2]] * 3)
    assert caught.value.hint == "of 4 KV groups it can keep 1, 2, 4"
    masked = masked_heads(tiny_models.build("llama3", attention_bias=True), [[0, 3]] * 3)
    assert_equal_logits(keep_heads(model, [[0, 3]] * 3), masked, tiny_models.tokens(model))


@pytest.mark.parametrize("family", ["Olmo2", "Falcon"])
def test_heads_of_other_families_that_must_stay(family):
    """One norm over all heads; a head width that is a property of the config."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        pad_token_id=0,
        multi_query=False,
    )
    config.architectures = [f"{family}ForCausalLM"]
    with pytest.raises(
        ModelError, match="no transformers config of this family means 2 heads of 8 in a width of 32"
    ):
        keep_heads(empty_model(config), [[1, 2]])


def test_biases_of_q_k_v_are_cut_and_head_norms_stay():
    qwen2 = keep_heads(tiny_models.build("qwen2"), [[1, 3]] * 3)
    attention = qwen2.model.layers[0].self_attn
    assert attention.q_proj.bias.shape == (32,) and attention.v_proj.bias.shape == (16,)
    old = tiny_models.build("qwen3")
    new = keep_heads(old, [[1]] * 3)
    for name in ("q_norm", "k_norm"):
        before, after = (getattr(model.model.layers[0].self_attn, name).weight for model in (old, new))
        assert torch.equal(before, after)


def test_tied_weights_stay_tied_and_settings_travel():
    model = tiny_models.build("smollm").to(torch.bfloat16).train()
    model.generation_config.max_new_tokens = 7
    cut = keep_neurons(model, [list(range(32))] * 3)
    assert cut.lm_head.weight is cut.model.embed_tokens.weight
    assert {parameter.dtype for parameter in cut.parameters()} == {torch.bfloat16}
    assert cut.training and cut.generation_config.max_new_tokens == 7
    untied = keep_neurons(tiny_models.build("llama3"), [list(range(32))] * 3)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_buffers_equal_those_of_a_loaded_model(tmp_path):
    cut = keep_heads(tiny_models.build("gemma3"), [[1]] * 3)
    loaded = reloaded(cut, tmp_path)
    buffers = dict(loaded.named_buffers())
    assert buffers and all(torch.equal(tensor, buffers[name]) for name, tensor in cut.named_buffers())


def test_meta_models_are_cut_for_their_sizes():
    model = tiny_models.build("phi3")
    keep = [[0, 2]] * 3
    real, empty = keep_heads(model, keep), keep_heads(empty_model(model.config), keep)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert {n: p.shape for n, p in empty.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }


@pytest.mark.parametrize(
    ("keep", "sentence"),
    [
        ([[0]], "given for 1 blocks, but the model has 3"),
        ([[0], [0], []], "block 2 must be ascending numbers from 0 to 3"),
        ([[0], [1, 0], [0]], r"they are \[1, 0\]"),
        ([[0], [4], [0]], r"they are \[4\]"),
        ([[0], [-1], [0]], r"they are \[-1\]"),
        ([[0], [1, 1], [0]], r"they are \[1, 1\]"),
        ([[0], [0, 1], [0]], "differ from block to block"),
    ],
)
def test_keep_of_the_wrong_form(keep, sentence):
    with pytest.raises(ModelError, match=sentence):
        keep_heads(tiny_models.build("llama3"), keep)


def test_neurons_that_are_not_there():
    with pytest.raises(ModelError, match="kept neurons of block 1 must be ascending numbers from 0 to 95"):
        keep_neurons(tiny_models.build("llama3"), [[0], [96], [0]])


def test_layers_of_the_wrong_form():
    model = tiny_models.build("llama3")
    for layers in ([], [0, 0], [2, 1], [3]):
        with pytest.raises(ModelError, match="kept layers of block 0 must be"):
            keep_layers(model, layers)
    with pytest.raises(ModelError, match="scaled by the layer's index"):
        keep_layers(tiny_models.build("gpt2", scale_attn_by_inverse_layer_idx=True), [0, 2])


def test_per_layer_lists_follow_the_layers():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny_models.build("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=4)
    model.config.eos_token_id = [0, 1, 2]  # as long as the layers are many, but not theirs
    shorter = keep_layers(model, [1, 2])
    assert shorter.config.layer_types == ["sliding_attention", "full_attention"]
    assert shorter.config.eos_token_id == [0, 1, 2]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "changes", "kept", "expected"),
    [
        (
            "qwen3_moe",
            {"mlp_only_layers": [1], "decoder_sparse_step": 1},
            [1, 2],
            {"mlp_only_layers": [0], "decoder_sparse_step": 1},
        ),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2},
            [1, 2],
            {"mlp_only_layers": [1], "decoder_sparse_step": 1},
        ),
        ("glm4_moe", {"first_k_dense_replace": 1}, [1, 2], {"first_k_dense_replace": 0}),
        ("glm4_moe", {"first_k_dense_replace": 2}, [0, 2], {"first_k_dense_replace": 1}),
        ("llama4", {"interleave_moe_layer_step": 2}, [1, 2], {"moe_layers": [0]}),
    ],
)
def test_mixtures_and_dense_layers_keep_their_kind(family, changes, kept, expected, tmp_path):
    """The config says by number which layers are mixtures: the numbers move with the layers."""
    model = tiny_models.build(family, **changes)
    shorter = keep_layers(model, kept)
    assert {key: getattr(shorter.config, key) for key in expected} == expected
    reloaded(shorter, tmp_path)
    layers = model.model.layers
    rows = tiny_models.tokens(model)
    model.model.layers = type(layers)(layers[number] for number in kept)
    model.config.num_hidden_layers, model.config.use_cache = 2, False
    if hasattr(model.config, "layer_types"):
        model.config.layer_types = shorter.config.layer_types
    assert_equal_logits(shorter, model, rows)
