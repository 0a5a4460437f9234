"""Limits of the targets: degrees of tensor parallelism by hand, refusals of kernels with the layer."""

import pytest

from attar.formats.limits import limits
from attar.formats.rules import WeightRule
from tests.formats.integer_weights import rule


def llama(hidden=4096, neurons=11008, heads=32, kv_heads=32, layers=2):
    """Shapes of a Llama's Linears."""
    width, shapes = hidden // heads, {}
    for layer in range(layers):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        shapes[f"{attention}.q_proj"] = (hidden, hidden)
        shapes[f"{attention}.k_proj"] = shapes[f"{attention}.v_proj"] = (kv_heads * width, hidden)
        shapes[f"{attention}.o_proj"] = (hidden, hidden)
        shapes[f"{mlp}.gate_proj"] = shapes[f"{mlp}.up_proj"] = (neurons, hidden)
        shapes[f"{mlp}.down_proj"] = (hidden, neurons)
    return shapes


W4 = rule(4, 128)
SHAPES = llama()


@pytest.mark.parametrize(
    ("shapes", "made", "heads", "degree", "layer"),
    [
        # 11008 / 128 = 86 groups: two devices share them, four do not
        (llama(), W4, (32, 32), "up to 2 devices; on 4", "layers.0.mlp.down_proj keeps 2752 inputs"),
        (llama(), rule(4, 32), (32, 32), "up to 8 devices; on 16", "down_proj keeps 688 inputs"),
        (llama(), rule(4, 0), (32, 32), "up to 16 devices", ""),
        (llama(neurons=14336, kv_heads=8), W4, (32, 8), "up to 16 devices", ""),  # 8 heads, repeated
        (llama(neurons=14336, kv_heads=8), W4, (32, 3), "up to 1 device;", "k_proj has 3 heads of keys"),
        (llama(896, 4864, 14, 2), rule(4, 64), (14, 2), "up to 2 devices; on 4", "q_proj has 14 heads"),
        (llama(896, 4864, 14, 2), W4, (14, 2), "up to 1 device; on 2", "o_proj keeps 448 inputs"),
        (llama(neurons=11010), rule(4, 0), (32, 32), "not even one", "gate_proj keeps 11010 outputs"),
        (llama(neurons=11000), W4, (32, 32), "not even one device", "down_proj keeps 11000 inputs"),
        (llama(), rule(4, 128, ordered=True), (32, 32), "up to 16 devices", ""),
    ],
)
def test_tensor_parallel_degrees(shapes, made, heads, degree, layer):
    first = limits("gptq", shapes, made, heads=heads[0], kv_heads=heads[1])[0]
    assert first.startswith("tensor parallel: ") and degree in first and layer in first


def test_words_of_packed_codes_are_not_cut():
    """2 x 24 outputs of 4 bits: 96 bits a device; of 3 bits and of AWQ on 4 devices no whole words."""
    shapes = {"a.fc1": (48, 128)}
    assert "up to 2 devices; on 4, a.fc1 keeps 12 outputs" in limits("gptq", shapes, rule(4, 32))[0]
    assert "up to 2 devices; on 4, a.fc1 keeps 12 outputs" in limits("awq", shapes, rule(4, 32))[0]
    assert "not even one device" in limits("gptq", shapes, rule(3, 32))[0]
    assert "up to 16" in limits("compressed-tensors", shapes, rule(4, 32))[0]
    assert "on 4" in limits("compressed-tensors", shapes, rule(4, 32, symmetric=False))[0]
    down = {"a.fc2": (128, 48)}
    assert "up to 2 devices" in limits("compressed-tensors", down, rule(4, 0))[0]
    assert "up to 16" in limits("awq", down, rule(4, 0))[0]


def test_heads_of_keys_are_repeated_whole():
    """One head of 24 outputs, 3 words of 4-bit codes: 16 devices cannot cut it, and need not."""
    assert "up to 16" in limits("gptq", {"a.k_proj": (24, 128)}, rule(4, 32), heads=16, kv_heads=1)[0]
    assert "up to 1 device;" in limits("gptq", {"a.k_proj": (24, 128)}, rule(4, 32), heads=16)[0]


def test_blocks_are_not_cut():
    blocks = WeightRule("float", 8, "block", block=(128, 128))
    first = limits("compressed-tensors", SHAPES, blocks, heads=32)[0]
    assert "up to 2 devices; on 4, model.layers.0.mlp.gate_proj keeps 2752 outputs" in first
    assert "(and 5 more)" in first


def test_a_well_shaped_model_has_no_other_limits():
    shapes = llama(neurons=14336, kv_heads=8)
    for format, result in (("gptq", W4), ("awq", rule(4, 128, symmetric=False)), ("compressed-tensors", W4)):
        assert len(limits(format, shapes, result, heads=32, kv_heads=8)) == 1


def one(format, made, shapes=None, **said):
    """The sentences after the first."""
    return " | ".join(limits(format, shapes or SHAPES, made, **said)[1:])


@pytest.mark.parametrize(
    ("format", "made", "sentence"),
    [
        (
            "gptq",
            rule(3, 128),
            "vLLM loads GPTQ of 4 or 8 bits, symmetric; model.layers.0.self_attn.q_proj has 3",
        ),
        ("gptq", rule(2, 128), "has 2 bits, symmetric (and 13 more)"),
        ("gptq", rule(4, 128, symmetric=False), "has 4 bits, asymmetric"),
        ("gptq", rule(4, 128, symmetric=False), "gptq_v2"),
        ("gptq", rule(4, 16), "Marlin has groups of 32, 64, 128 or the whole row"),
        ("gptq", rule(4, 16), "no groups of 16, as model.layers.0.self_attn.q_proj has (and 13 more)"),
        ("gptq", rule(4, 8), "1024 or the whole row; model.layers.0.self_attn.q_proj has groups of 8"),
        ("awq", rule(4, 256), "16, 32, 64, 128 or the whole row"),
        ("awq", rule(4, 16, symmetric=False), "Marlin has groups"),
        ("gptq", rule(4, 128, ordered=True), "refuse model.layers.0.self_attn.o_proj (and 3 more)"),
        ("compressed-tensors", rule(5, 128), "vLLM loads packed codes of 4 or 8 bits"),
        ("compressed-tensors", rule(8, 128, symmetric=False), "zero points with 4"),
    ],
)
def test_kernels_that_refuse_name_the_layer(format, made, sentence):
    assert sentence in one(format, made)


def test_shapes_that_kernels_do_not_take():
    odd = {"a.fc1": (96, 256), "a.fc2": (256, 96)}
    message = one("gptq", rule(4, 32), odd)
    assert "64 outputs and 128 inputs; a.fc1 has 96 outputs and 256 inputs (and 1 more)" in message
    assert "pads it" in message and "ExLlama" not in message
    assert "vLLM refuses it" in one("gptq", rule(4, 32, ordered=True), odd)
    ragged = {"a.fc1": (100, 256)}
    assert "ExLlama wants multiples of 32; a.fc1 has 100 outputs" in one("gptq", rule(4, 32), ragged)
    assert "3-bit kernels unpack 32 codes at once; a.fc1" in one("gptq", rule(3, 32), ragged)


def test_sets_that_vllm_fuses():
    rules = dict.fromkeys(SHAPES, W4)
    rules["model.layers.1.mlp.up_proj"] = rule(8, 128)
    message = one("gptq", rules)
    assert (
        "one Linear of gate_proj, up_proj" in message and "the codes of model.layers.1.mlp differ" in message
    )
    assert "transformers knows one rule for all Linears, and model.layers.1.mlp.up_proj differs" in message
    del rules["model.layers.0.self_attn.k_proj"]
    assert "(and 1 more)" in one("awq", rules, {name: SHAPES[name] for name in rules})


def test_heads_and_formats_without_limits():
    shapes = {**SHAPES, "lm_head": (32000, 4096)}
    for format in ("gptq", "awq"):
        assert "transformers takes lm_head to be dense and leaves it random" in one(format, W4, shapes)
    assert "lm_head" not in one("compressed-tensors", W4, shapes)
    assert limits("gguf", SHAPES, W4) == [] == limits("gptq", {}, W4)
    assert "does not split" in limits("bitsandbytes", SHAPES, rule(8, 0))[0]


def test_rounded_inputs_have_other_kernels():
    odd = {"a.fc1": (96, 256)}
    assert "Marlin" in one("compressed-tensors", rule(8, 0), odd)
    assert not one("compressed-tensors", rule(8, 0), odd, activations=True)
