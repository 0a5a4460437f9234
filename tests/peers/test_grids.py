"""Number formats against the libraries that read them: compressed-tensors (FP8, NVFP4, MXFP4), bitsandbytes
(NF4) and gguf (llama.cpp's blocks of 32)."""

import numpy as np
import pytest
import torch

from attar.quantization.grids import GGML, Float8Grid, MXFP4Grid, NF4Grid, NVFP4Grid
from attar.quantization.methods.rtn import rtn

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 384, generator=generator) * 0.04
    return values * torch.exp(0.5 * torch.randn(64, 1, generator=generator))


def theirs(weight, name, tops, global_scale=None):
    """Scales, quantized values and decoded weight of compressed-tensors' preset weights."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = preset_name_to_scheme(name, ["Linear"]).weights
    scale, zero = calculate_qparams(-tops, tops, arguments, global_scale=global_scale)
    quantized = quantize(weight, scale, zero, arguments, global_scale=global_scale)
    return scale, quantized, dequantize(quantized, scale, None, arguments, global_scale=global_scale)


@pytest.mark.parametrize("preset, group, rows", [
    ("FP8", 0, 0), ("FP8_DYNAMIC", 0, 1), ("FP8_BLOCK", 128, 128),
])  # fmt: skip
def test_float8_scales_codes_and_values(weight, preset, group, rows):
    grid = Float8Grid("e4m3fn", group, rows)
    result = rtn(weight, grid)
    tops = grid.tile(weight).abs().amax((1, 3))
    scale, quantized, decoded = theirs(weight, preset, tops)
    assert torch.equal(result.parameters.scale, scale)
    assert torch.equal(result.codes.float(), quantized)
    assert torch.equal(result.dequantize(), decoded)


@pytest.mark.parametrize("preset, group, rows", [("FP8", 0, 0), ("FP8_DYNAMIC", 0, 1)])
def test_float8_in_bf16_decodes_as_theirs(weight, preset, group, rows):
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    quantized = rtn(weight.bfloat16(), Float8Grid("e4m3fn", group, rows, torch.bfloat16))
    tops = (
        weight.bfloat16().abs().amax(1, keepdim=True) if rows else weight.bfloat16().abs().max()[None, None]
    )
    scale, _, _ = theirs(weight.bfloat16(), preset, tops)
    assert scale.dtype == torch.bfloat16 and torch.equal(quantized.parameters.scale, scale.float())
    arguments = preset_name_to_scheme(preset, ["Linear"]).weights
    assert torch.equal(quantized.dequantize(), dequantize(quantized.codes, scale, None, arguments).float())


def packed_fp4(codes):
    """Two codes to a byte, the even column low."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def test_nvfp4_scales_codes_and_values(weight):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import generate_gparam

    grid = NVFP4Grid(torch.bfloat16)
    result = rtn(weight, grid, grid.choose(weight, 1.0))
    tops = weight.reshape(64, 24, 16).abs().amax(-1)
    whole = generate_gparam(weight.min(), weight.max())
    scale, quantized, _ = theirs(weight, "NVFP4A16", tops, whole)
    stored = result.parameters.stored
    assert torch.equal(stored["global_scale"], whole)
    assert torch.equal(stored["local_scale"].float(), scale.float())
    assert torch.equal(result.grid.level(result.codes), quantized)

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    compressed = NVFP4PackedCompressor.compress(state, scheme)
    assert torch.equal(compressed["weight_packed"], packed_fp4(result.codes))
    assert torch.equal(compressed["weight_scale"].float(), stored["local_scale"].float())
    read = NVFP4PackedCompressor.decompress(compressed, scheme)["weight"]
    assert read.dtype == torch.bfloat16 and torch.equal(read.float(), result.dequantize())


def test_mxfp4_scales_codes_and_values(weight):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    result = rtn(weight, MXFP4Grid(torch.bfloat16))
    tops = weight.reshape(64, 12, 32).abs().amax(-1)
    scale, quantized, _ = theirs(weight, "MXFP4A16", tops)
    assert torch.equal(result.parameters.scale, scale)
    assert torch.equal(result.grid.level(result.codes), quantized)

    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    compressed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert torch.equal(compressed["weight_packed"], packed_fp4(result.codes))
    assert torch.equal(compressed["weight_scale"], result.parameters.stored["exponent"])
    read = MXFP4PackedCompressor.decompress(compressed, scheme)["weight"]
    assert torch.equal(read.float(), result.dequantize())


def test_mxfp4_exponents_of_many_magnitudes():
    pytest.importorskip("compressed_tensors")
    powers = torch.exp2(torch.linspace(-40, 40, 4001))
    exact = torch.exp2(torch.arange(-40.0, 40.0))
    tops = torch.cat([powers, exact, exact * 1.75, (exact * 1.75).nextafter(torch.zeros(1))])
    weight = torch.zeros(len(tops), 32)
    weight[:, 3] = tops
    scale, _, _ = theirs(weight, "MXFP4A16", tops[:, None])
    assert torch.equal(MXFP4Grid().choose(weight).scale, scale)


def test_fp4_ties_are_decided_as_theirs():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.cat([halves, halves.nextafter(torch.zeros(1)), halves.nextafter(torch.full((1,), 9.0))])
    values = torch.cat([values, -values])
    grid = NVFP4Grid()
    assert torch.equal(grid.level(grid.nearest(values)), cast_to_fp4(values.clone()))


def packed_nf4(codes):
    """Two codes to a byte of the flattened weight, the first one high."""
    flat = codes.reshape(-1)
    return (flat[::2] << 4 | flat[1::2])[:, None]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_bytes_scales_and_values(weight, group, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    quantized = rtn(weight.to(dtype), NF4Grid(group, storage=dtype))
    data, state = functional.quantize_4bit(weight.to(dtype), blocksize=group, quant_type="nf4")
    assert torch.equal(quantized.grid.level(torch.arange(16)), state.code)
    assert torch.equal(quantized.parameters.scale.reshape(-1), state.absmax)
    assert torch.equal(packed_nf4(quantized.codes), data)
    read = functional.dequantize_4bit(data, state)
    assert torch.equal(read.float(), quantized.dequantize())


def test_nf4_levels_decide_as_theirs(weight):
    """Values at and next to every threshold."""
    functional = pytest.importorskip("bitsandbytes.functional")
    levels = NF4Grid().level(torch.arange(16))
    middles = (levels[1:] + levels[:-1]) / 2
    edges = [middles, middles.nextafter(torch.ones(1)), middles.nextafter(-torch.ones(1)), levels]
    values = torch.cat([*edges, torch.ones(64)])[:64].reshape(1, 64)
    values[0, 63] = 1.0
    data, _ = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    assert torch.equal(packed_nf4(rtn(values, NF4Grid(64)).codes), data)


def test_nf4_double_quantization(weight):
    functional = pytest.importorskip("bitsandbytes.functional")
    quantized = rtn(weight, NF4Grid(64, double=True))
    _, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    stored = quantized.parameters.stored
    assert torch.equal(stored["nested_map"], state.state2.code)
    assert torch.equal(stored["nested_absmax"], state.state2.absmax)
    assert torch.equal(stored["nested_offset"][0], state.offset)
    assert torch.equal(stored["absmax_codes"].reshape(-1), state.absmax)
    read = functional.dequantize_4bit(packed_nf4(quantized.codes), state)  # our codes under their scales
    assert torch.equal(read, quantized.dequantize())


def block_bytes(kind, made):
    """Blocks of 32 as ggml lays them out: d, (m,) (fifth bits,) low nibbles of element j and j + 16."""
    stored = made.parameters.stored
    q = made.codes.reshape(-1, 32)
    parts = [stored["d"].reshape(-1, 1).view(torch.uint8)]
    if kind == "Q8_0":
        return torch.cat([*parts, q.view(torch.uint8)], 1)
    if "m" in stored:
        parts.append(stored["m"].reshape(-1, 1).view(torch.uint8))
    if kind.startswith("Q5"):
        bits = ((q >> 4).reshape(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
        parts.append(bits)
    low = q & 15
    return torch.cat([*parts, low[:, :16] | low[:, 16:] << 4], 1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_ggml_blocks_of_32_decode_as_theirs(weight, kind):
    gguf = pytest.importorskip("gguf")
    quantized = rtn(weight, GGML[kind])
    data = block_bytes(kind, quantized).reshape(64, -1).numpy()
    assert data.size * 8 / weight.numel() == GGML[kind].bits_per_weight((64, 384))
    read = gguf.quants.dequantize(data, getattr(gguf.GGMLQuantizationType, kind))
    assert np.array_equal(read, quantized.dequantize().numpy())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_ggml_blocks_of_32_err_less_than_theirs(weight, kind):
    gguf = pytest.importorskip("gguf")
    wanted = getattr(gguf.GGMLQuantizationType, kind)
    read = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), wanted), wanted)
    ours = (rtn(weight, GGML[kind]).dequantize() - weight).square().sum()
    assert ours < (torch.from_numpy(read) - weight).square().sum()


def q4_k_bytes(made):
    """d, dmin, twelve bytes of 6-bit scales and minimums; of 64 weights the first 32 low, the others high."""
    stored = {name: value.reshape(-1, value.shape[1] // 2) for name, value in made.parameters.stored.items()}
    s, m = stored["scale_codes"], stored["minimum_codes"]
    scales = [
        s[:, :4] | s[:, 4:] >> 4 << 6,
        m[:, :4] | m[:, 4:] >> 4 << 6,
        s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
    ]
    q = made.codes.reshape(-1, 4, 2, 32)
    halves = [stored[name].reshape(-1, 1).view(torch.uint8) for name in ("d", "dmin")]
    return torch.cat([*halves, *scales, (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)], 1)


def q6_k_bytes(made):
    """Low nibbles, two high bits, signed scales, d; halves of 128 as four runs of 32."""
    stored = made.parameters.stored
    x = made.codes.reshape(-1, 2, 4, 32)
    low, high = x & 15, x >> 4
    ql = torch.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2).reshape(-1, 128)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    scales = stored["scale_codes"].reshape(-1, 16).view(torch.uint8)
    return torch.cat([ql, qh.reshape(-1, 64), scales, stored["d"].reshape(-1, 1).view(torch.uint8)], 1)


@pytest.mark.parametrize("kind, pack", [("Q4_K", q4_k_bytes), ("Q6_K", q6_k_bytes)])
def test_ggml_super_blocks_decode_as_theirs(kind, pack):
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(6)) * 0.03
    quantized = rtn(weight, GGML[kind])
    data = pack(quantized).reshape(16, -1).numpy()
    read = gguf.quants.dequantize(data, getattr(gguf.GGMLQuantizationType, kind))
    assert np.array_equal(read, quantized.dequantize().numpy())
