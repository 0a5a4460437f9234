"""Rounding of activations and of keys and values: the numbers, and the hooks that apply them."""

import copy
import math

import pytest
import torch

from attar.errors import CheckpointError, ModelError
from attar.formats.rules import ActivationRule
from attar.models.anatomy.discover import discover
from attar.models.fake_quant import (
    cache_argument,
    on_keys_and_values,
    quantize_activation,
    round_cache,
    round_inputs,
)
from attar.models.loading.load import load_model, save_model
from tests import tiny_models
from tests.quantization.packing import pack, save

TOKEN = ActivationRule("int", 8, "token")
FP8_TOKEN = ActivationRule("float", 8, "token")
GROUP = ActivationRule("float", 8, "group", group_size=16)
STATIC = ActivationRule("int", 8, "tensor", dynamic=False)
ASYMMETRIC = ActivationRule("int", 8, "token", symmetric=False)


def sample(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def fp8(value):
    """Nearest e4m3 value by search over all of them."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[torch.isfinite(every)]
    return every[(every - value).abs().argmin()]


def test_a_token_of_whole_numbers():
    x = sample(2, 3, 8)
    got = quantize_activation(x, TOKEN)
    for row, rounded in zip(x.reshape(-1, 8), got.reshape(-1, 8), strict=True):
        scale = float(row.abs().max()) / 127.5
        codes = [min(127, max(-128, round(float(value) / scale))) for value in row]
        assert torch.allclose(rounded, torch.tensor(codes) * scale, rtol=1e-5, atol=1e-7)


def test_a_token_of_float8():
    x = sample(1, 4, 8, seed=1)
    got = quantize_activation(x, FP8_TOKEN)
    for row, rounded in zip(x[0], got[0], strict=True):
        scale = row.abs().max() / 448
        wanted = torch.stack([fp8(float(value / scale)) * float(scale) for value in row])
        assert torch.allclose(rounded.double(), wanted, rtol=1e-5)


def test_groups_are_tokens_of_their_own():
    x = sample(2, 3, 48)
    apart = torch.cat([quantize_activation(part, FP8_TOKEN) for part in x.split(16, -1)], -1)
    assert torch.equal(quantize_activation(x, GROUP), apart)


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_groups_of_nvfp4():
    """By loops: the scale of a group is an e4m3 number over the global scale."""
    x, above = sample(3, 32, seed=4), torch.tensor([2688 / 5.0])
    got = quantize_activation(x, ActivationRule("float", 4, "tensor_group", group_size=16), above)
    for group, rounded in zip(x.reshape(-1, 16), got.reshape(-1, 16), strict=True):
        scale = float(fp8(float(above * group.abs().max() / 6))) / float(above)
        levels = [min(FP4, key=lambda level: abs(level - abs(float(v)) / scale)) for v in group]
        wanted = torch.tensor(levels) * scale * group.sign()
        assert torch.allclose(rounded, wanted, rtol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_mx_have_powers_of_two(bits):
    x = sample(3, 64, seed=5) * 10
    got = quantize_activation(x, ActivationRule("float", bits, "group", group_size=32, mx=True))
    for group, rounded in zip(x.reshape(-1, 32), got.reshape(-1, 32), strict=True):
        top = float(group.abs().max())
        scale = 2.0 ** (math.floor(math.log2(top / 1.75)) + 1 - (2 if bits == 4 else 8))
        if bits == 4:
            codes = [min(FP4, key=lambda level: abs(level - abs(float(v)) / scale)) for v in group]
            wanted = torch.tensor(codes) * group.sign()
        else:
            wanted = torch.stack([fp8(float(v) / scale) for v in group]).float()
        assert torch.equal(rounded, wanted * scale)


def test_static_scales_saturate():
    x = torch.tensor([[-100.0, -0.26, 0.24, 100.0]])
    got = quantize_activation(x, STATIC, torch.tensor([0.5]))
    assert got.tolist() == [[-64.0, -0.5, 0.0, 63.5]]


def test_zero_points():
    x = sample(1, 2, 64) + 3
    got = quantize_activation(x, ASYMMETRIC)
    step = x.clamp(min=0).amax(-1, keepdim=True) / 255
    assert ((got - x).abs() <= step * 0.51).all()
    assert (got - x).abs().max() < (quantize_activation(x, TOKEN) - x).abs().max()
    shifted = quantize_activation(
        x, ActivationRule("int", 8, "tensor", False, symmetric=False), torch.tensor(0.1), torch.tensor(-128)
    )
    assert torch.allclose(shifted, ((x / 0.1).round().clamp(0, 255)) * 0.1, atol=1e-5)


@pytest.mark.parametrize("rule", [TOKEN, FP8_TOKEN, GROUP, ASYMMETRIC])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_type_zeros_and_input_are_kept(rule, dtype):
    x = sample(2, 3, 32).to(dtype)
    before = x.clone()
    got = quantize_activation(x, rule)
    assert got.shape == x.shape and got.dtype == dtype and torch.equal(x, before)
    zeros = torch.zeros(1, 2, 32, dtype=dtype)
    assert torch.equal(quantize_activation(zeros, rule), zeros)
    assert quantize_activation(x[:0], rule).shape == (0, 3, 32)


def test_inputs_are_rounded_until_the_handle_is_removed():
    linear, x = torch.nn.Linear(8, 4), sample(2, 3, 8)
    plain = linear(x)
    handle = round_inputs(linear, STATIC, torch.tensor([0.5]))
    assert torch.equal(
        linear(x),
        torch.nn.functional.linear(
            quantize_activation(x, STATIC, torch.tensor([0.5])), linear.weight, linear.bias
        ),
    )
    assert "input_scale" not in linear.state_dict()
    handle.remove()
    assert torch.equal(linear(x), plain)
    assert linear.bfloat16().input_scale.dtype == torch.bfloat16


@pytest.mark.few(4)
@pytest.mark.parametrize("family", tiny_models.DECODERS)
def test_keys_and_values_are_seen_as_they_enter_the_cache(family):
    """What is seen is what the cache holds, with a cache or without."""
    model = tiny_models.build(family)
    seen = {}
    for block in discover(model).blocks:
        attention = model.get_submodule(block.attention.name)
        on_keys_and_values(attention, lambda k, v, i=block.index: seen.setdefault(i, (k.clone(), v.clone())))
    rows = tiny_models.tokens(model, length=6)
    with torch.no_grad():
        model(input_ids=rows, use_cache=False)
        first = dict(seen)
        seen.clear()
        cache = model(input_ids=rows, use_cache=True)[cache_argument(model)]
    for index in range(3):
        heads = discover(model).blocks[index].attention.kv_heads
        assert first[index][0].shape[:3] == (2, heads, 6)
        for which in (0, 1):
            held = (cache.layers[index].keys, cache.layers[index].values)[which]
            assert torch.equal(seen[index][which], held) and torch.equal(first[index][which], held)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiny_models.DECODERS)
def test_rounded_keys_change_the_result_and_coarse_ones_more(family):
    """A scale at which nothing is lost leaves the logits alone."""
    rows, wanted, far = None, None, []
    for rule in (None, ActivationRule("int", 16, "token"), TOKEN, ActivationRule("int", 3, "token")):
        model = tiny_models.build(family)
        for block in discover(model).blocks if rule else ():
            round_cache(model.get_submodule(block.attention.name), rule)
        rows = tiny_models.tokens(model)
        got = tiny_models.logits(model, rows)
        wanted = got if wanted is None else wanted
        far.append(float((got - wanted).norm() / wanted.norm()))
    assert far[1] < 1e-3 < far[3] and far[1] < far[2] < far[3]


def test_decoding_step_by_step_gives_the_logits_of_the_whole():
    """A dynamic scale belongs to a token and a head alone, so it does not matter when the token came. (float8
    in float64: with whole numbers the largest magnitude is always a tie, which noise decides.)"""
    model = tiny_models.build("llama3").double()
    for block in discover(model).blocks:
        round_cache(model.get_submodule(block.attention.name), FP8_TOKEN)
    rows = tiny_models.tokens(model, batch=1, length=8)
    whole, cache, steps = tiny_models.logits(model, rows), None, []
    name = cache_argument(model)
    with torch.no_grad():
        for index in range(8):
            out = model(input_ids=rows[:, index : index + 1], use_cache=True, **{name: cache})
            cache = out[name]
            steps.append(out.logits)
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-6)
    assert model.generate(rows, max_new_tokens=3, do_sample=False).shape == (1, 11)


def test_modules_without_a_cache_are_refused():
    with pytest.raises(ModelError, match="Linear takes no cache"):
        on_keys_and_values(torch.nn.Linear(2, 2), lambda k, v: (k, v))


def test_a_packed_checkpoint_is_loaded_with_its_hooks(tmp_path):
    _, result = pack(save(tmp_path / "dense"), tmp_path / "out", scheme="FP8", kv_cache="fp8")
    model = load_model(result)
    linear = model.model.layers[0].mlp.up_proj
    scale = result.load("model.layers.0.mlp.up_proj.input_scale")
    x = sample(1, 2, 128).to(torch.bfloat16)
    rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.bfloat16) * scale
    assert torch.equal(linear(x), torch.nn.functional.linear(rounded, linear.weight))
    assert len(model.lm_head._forward_pre_hooks) == 0
    assert model.model.layers[0].self_attn.k_scale.shape == (1,)
    save_model(model, tmp_path / "saved")
    rows = tiny_models.tokens(model)
    plain = load_model(tmp_path / "saved")
    assert not torch.equal(tiny_models.logits(plain, rows), tiny_models.logits(model, rows))
    assert torch.equal(tiny_models.logits(copy.deepcopy(model), rows), tiny_models.logits(model, rows))
    del result.tensors["model.layers.0.mlp.up_proj.input_scale"]
    with pytest.raises(CheckpointError, match=r"up_proj.input_scale is missing"):
        load_model(result)
