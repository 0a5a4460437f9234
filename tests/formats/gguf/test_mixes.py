"""The mixes against tables written out by hand; tests/peers/test_llama_cpp_mixes.py has llama.cpp itself."""

import pytest

from attar.errors import SettingsError
from attar.formats.gguf.quant_types import DEFAULTS, bits, fitting, mix, quantizable, use_more_bits
from attar.formats.gguf.types import FILE_TYPES, TYPES


def shapes(layers=3, K=256, F=512, *, tied=False, fused=False):
    """Tensors of a llama-like model, in the order of a file."""
    actual = {"token_embd.weight": (300, K)}
    for layer in range(layers):
        leaves = {"attn_norm": (K,), "ffn_down": (K, F), "ffn_gate": (F, K), "ffn_up": (F, K)}
        names = ["attn_qkv"] if fused else ["attn_k", "attn_q", "attn_v"]
        leaves |= {**dict.fromkeys(names, (K, K)), "attn_output": (K, K)}
        actual.update({f"blk.{layer}.{leaf}.weight": shape for leaf, shape in leaves.items()})
    actual["output_norm.weight"] = (K,)
    return actual if tied else {**actual, "output.weight": (300, K)}


def types(name, layers=3, *, heads=8, kv_heads=8, architecture="llama", **options):
    given = options.pop("shapes", None) or shapes(layers, **options.pop("sizes", {}))
    return mix(
        name, given, layers=layers, heads=heads, kv_heads=kv_heads, architecture=architecture, **options
    )


def column(types_by_name, leaf):
    """Types of one role, layer by layer, without their Q and _K."""
    kinds = [kind for name, kind in types_by_name.kinds.items() if name.endswith(f".{leaf}.weight")]
    return " ".join(kind.removeprefix("Q").removesuffix("_K") for kind in kinds)


def test_q4_k_m_of_sixteen_layers():
    actual_types = types("Q4_K_M", 16)
    for leaf in ("attn_v", "ffn_down"):  # the first 2, the last 2, of the others every third: 4, 7, 10, 13
        assert column(actual_types, leaf) == "6 6 4 4 6 4 4 6 4 4 6 4 4 6 6 6"
    for leaf in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert column(actual_types, leaf) == " ".join("4" * 16)
    assert actual_types.kinds["token_embd.weight"] == "Q4_K" and actual_types.kinds["output.weight"] == "Q6_K"
    assert actual_types.kinds["output_norm.weight"] == actual_types.kinds["blk.0.attn_norm.weight"] == "F32"
    assert (
        actual_types.file_type == 15
        and actual_types.notes == ()
        and list(actual_types.kinds) == list(shapes(16))
    )


@pytest.mark.parametrize(
    ("name", "leaf", "wanted"),
    [
        ("Q2_K", "ffn_down", " ".join("3" * 16)),
        ("Q2_K", "attn_v", " ".join("3" * 16)),
        ("Q2_K", "attn_output", " ".join("3" * 16)),
        ("Q2_K", "attn_q", " ".join("2" * 16)),
        ("Q3_K_S", "attn_v", " ".join("3" * 16)),
        ("Q3_K_M", "attn_v", "5 5 " + " ".join("4" * 14)),
        ("Q3_K_M", "ffn_down", "5 " + " ".join("4" * 15)),
        ("Q3_K_M", "attn_output", " ".join("4" * 16)),
        ("Q3_K_L", "ffn_down", " ".join("5" * 16)),
        ("Q4_K_S", "attn_v", "5 5 5 5 " + " ".join("4" * 12)),
        ("Q4_K_S", "ffn_down", "5 5 " + " ".join("4" * 14)),
        ("Q5_K_S", "attn_v", " ".join("5" * 16)),
        ("Q5_K_M", "ffn_down", "6 6 5 5 6 5 5 6 5 5 6 5 5 6 6 6"),
        ("Q6_K", "ffn_down", " ".join("6" * 16)),
        ("IQ4_XS", "ffn_down", "5 5 " + " ".join(["IQ4_XS"] * 14)),
    ],
)
def test_one_role_of_a_mix(name, leaf, wanted):
    assert column(types(name, 16), leaf) == wanted


def test_what_else_changes_a_type():
    assert column(types("Q2_K", kv_heads=2), "attn_v") == "4 4 4"
    assert column(types("IQ4_NL", kv_heads=2), "attn_v") == "5 5 5"
    assert column(types("Q3_K_S", 80, kv_heads=1), "attn_v") == " ".join("5" * 80)  # one of 70 billion
    assert column(types("Q3_K_S", 80), "attn_v") == " ".join("3" * 80)
    assert column(types("IQ4_XS", 16, imatrix=True), "ffn_down") == " ".join(["IQ4_XS"] * 16)
    assert column(types("Q4_0", 16, imatrix=True), "ffn_down") == "4_1 4_1 " + " ".join(["4_0"] * 14)
    assert column(types("Q4_0", 16), "ffn_down") == " ".join(["4_0"] * 16)
    assert column(types("Q4_K_M", architecture="falcon"), "ffn_down") == "4 4 5"
    assert column(types("Q4_K_M", sizes={"fused": True}), "attn_qkv") == "4 4 6"
    assert types("Q4_K_M", sizes={"tied": True}).kinds["token_embd.weight"] == "Q6_K"
    assert types("Q8_0", sizes={"tied": True}).kinds["token_embd.weight"] == "Q8_0"


def test_experts():
    given = {
        "blk.0.ffn_gate_inp.weight": (8, 256),
        "blk.0.ffn_up_exps.weight": (8, 64, 256),
        "blk.0.attn_k.weight": (64, 256),
        "blk.0.attn_output.weight": (64, 256),
        "output.weight": (64, 256),
    }
    actual = types("Q4_K_M", 1, shapes=given, experts=8).kinds
    assert list(actual.values()) == ["F32", "Q4_K", "Q8_0", "Q5_K", "Q6_K"]
    actual = types("MXFP4_MOE", 1, shapes=given, experts=8).kinds
    assert list(actual.values()) == ["F32", "MXFP4", "Q8_0", "Q8_0", "Q8_0"]


def test_fp4_of_a_model_without_experts():
    dense = types("MXFP4_MOE")
    assert dense.kinds["blk.0.attn_q.weight"] == "Q8_0" and "for experts" in dense.notes[0]
    for kind in ("MXFP4", "NVFP4"):
        ours = types(kind).kinds
        assert ours["blk.0.attn_q.weight"] == ours["blk.2.ffn_down.weight"] == kind
        assert ours["token_embd.weight"] == ours["output.weight"] == "Q8_0"


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_numbers(name):
    actual_types = types(name, sizes={"K": 80})
    assert actual_types.kinds["blk.0.attn_q.weight"] == actual_types.kinds["output.weight"] == name
    assert actual_types.kinds["blk.0.attn_norm.weight"] == "F32" and actual_types.notes == ()


def test_inputs_that_blocks_do_not_divide():
    actual_types = types("Q4_K_M", 3, sizes={"K": 96, "F": 80})
    assert (
        actual_types.kinds["blk.0.attn_q.weight"] == "Q5_0" and actual_types.kinds["output.weight"] == "Q8_0"
    )
    assert actual_types.kinds["blk.0.ffn_down.weight"] == "F16"
    assert actual_types.notes == (
        "output.weight and 1 more have 96 inputs, no multiple of 256: Q8_0 instead of Q6_K",
        "token_embd.weight and 17 more have 96 inputs, no multiple of 256: Q5_0 instead of Q4_K",
        "blk.0.ffn_down.weight and 1 more have 80 inputs, no multiple of 32: F16 instead of Q4_K",
        "blk.2.ffn_down.weight has 80 inputs, no multiple of 32: F16 instead of Q6_K",
    )


def test_a_type_that_does_not_fit_gives_way():
    given = [("Q2_K", "Q4_0"), ("Q3_K", "Q4_0"), ("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0")]
    for kind, smaller in [*given, ("IQ4_XS", "IQ4_NL"), ("NVFP4", "IQ4_NL")]:
        assert (fitting(kind, 512), fitting(kind, 96), fitting(kind, 80)) == (kind, smaller, "F16")
    assert (fitting("Q4_0", 96), fitting("Q4_0", 80), fitting("BF16", 80)) == ("Q4_0", "F16", "BF16")


@pytest.mark.few(30)
@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("sizes", [{}, {"K": 96, "F": 80}, {"tied": True}, {"fused": True}])
def test_every_mix_gives_every_tensor_a_type_that_divides_it(name, sizes):
    given = shapes(9, **sizes)
    actual_types = types(name, 9, shapes=given, imatrix=True)
    assert list(actual_types.kinds) == list(given)
    assert actual_types.file_type == FILE_TYPES.get(name, FILE_TYPES["MXFP4_MOE"])
    assert all(given[one][-1] % TYPES[kind].block == 0 for one, kind in actual_types.kinds.items())
    backwards = dict(reversed(given.items()))
    assert types(name, 9, shapes=backwards, imatrix=True).kinds == actual_types.kinds  # whatever their order


def test_what_is_never_quantized():
    for name in (
        "blk.0.ffn_gate_inp.weight",
        "position_embd.weight",
        "blk.0.attn_q_norm.weight",
        "blk.0.x.bias",
    ):
        assert not quantizable(name, (8, 256)), name
    assert not quantizable("blk.0.attn_q.weight", (256,))
    assert not quantizable("blk.0.attn_q.weight", (1, 256))  # one row is a vector to llama.cpp
    assert quantizable("blk.0.attn_q.weight", (2, 256)) and quantizable(
        "blk.0.ffn_up_exps.weight", (1, 2, 256)
    )


def test_types_of_their_own():
    own = ["blk\\.0\\.attn_v=q8_0", "attn_(k|v)=Q5_K", "output.weight=BF16"]
    actual_types = types("Q4_K_M", 16, overrides=own)
    assert column(actual_types, "attn_v") == "8_0 " + " ".join("5" * 15)
    assert column(actual_types, "attn_k") == " ".join("5" * 16)
    assert actual_types.kinds["output.weight"] == "BF16"
    assert types("F16", overrides=["ffn_down=Q8_0"]).kinds["blk.1.ffn_down.weight"] == "Q8_0"
    counted = types("Q4_K_M", 16, overrides=["blk\\.[01]\\.attn_v=Q8_0"])  # the others are counted from 0 on
    assert column(counted, "attn_v") == "8_0 8_0 6 6 4 4 6 4 4 6 4 4 6 4 4 6"
    narrow = types("Q4_K_M", overrides=["attn_q=Q3_K"], sizes={"K": 96})
    assert narrow.kinds["blk.0.attn_q.weight"] == "Q4_0"


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Q4_KM", {}, r"type is 'Q4_KM', but must be one of .*did you mean Q4_K_M"),
        ("Q2_K_S", {}, "another without an importance matrix"),
        ("Q4_K_M", {"overrides": ["attn_q=Q7_K"]}, "PATTERN=TYPE with one of .*Q4_K"),
        ("Q4_K_M", {"overrides": ["attn_q=I32"]}, "PATTERN=TYPE"),
        ("Q4_K_M", {"overrides": ["attn_norm=F16"]}, "a pattern that some matrix"),
    ],
)
def test_what_is_refused(name, options, why):
    with pytest.raises(SettingsError, match=why):
        types(name, **options)


def test_other_names():
    assert types("q4_k").kinds == types("Q4_K_M").kinds


def test_bits_and_bytes():
    kinds = {"a": "Q4_K", "b": "F32", "c": "Q6_K"}
    given = {"a": (3, 512), "b": (7,), "c": (2, 5, 256)}
    weights, stored = 3 * 512 + 7 + 2560, 3 * 2 * 144 + 7 * 4 + 10 * 210
    assert bits(kinds, given) == (stored * 8 / weights, stored)


def test_more_bits_for_every_third_between_the_ends():
    assert [i for i in range(32) if use_more_bits(i, 32)] == [
        0,
        1,
        2,
        3,
        6,
        9,
        12,
        15,
        18,
        21,
        24,
        27,
        28,
        29,
        30,
        31,
    ]
    assert [i for i in range(5) if use_more_bits(i, 5)] == [2, 4]
