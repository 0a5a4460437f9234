"""llama.cpp's formats: what a reader computes from the stored numbers, and the error against the reference's
way to choose them."""

from itertools import pairwise

import pytest
import torch

from attar.errors import SettingsError
from attar.quantization.grids import GGML, GGMLGrid
from attar.quantization.grids import ggml as module
from attar.quantization.methods.rtn import rtn

# bytes of a block, weights of a block, weights of a tile: ggml-common.h
BLOCKS = {
    "Q4_0": (18, 32, 32),
    "Q4_1": (20, 32, 32),
    "Q5_0": (22, 32, 32),
    "Q5_1": (24, 32, 32),
    "Q8_0": (34, 32, 32),
    "Q2_K": (84, 256, 16),
    "Q3_K": (110, 256, 16),
    "Q4_K": (144, 256, 32),
    "Q5_K": (176, 256, 32),
    "Q6_K": (210, 256, 16),
    "IQ4_NL": (18, 32, 32),
    "IQ4_XS": (136, 256, 32),
}
CODES = {
    "Q2_K": (0, 15), "Q3_K": (0, 63), "Q4_K": (0, 63), "Q5_K": (0, 63), "Q6_K": (-128, 127),
    "IQ4_XS": (0, 63),
}  # fmt: skip
KINDS = list(BLOCKS)
UNEVEN = ("IQ4_NL", "IQ4_XS")
LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(12, 512, generator=generator) * 0.02
    return values * torch.exp(0.5 * torch.randn(12, 512, generator=generator))


def read(kind, stored, codes, row, column):
    """One weight as a reader computes it, from the numbers in the file."""
    size, tile = BLOCKS[kind][1:]
    q = int(codes[row, column])
    d = float(stored["d"][row, column // size])
    if kind in ("Q4_0", "Q5_0"):
        return d * (q - (8 if kind == "Q4_0" else 16))
    if kind == "Q8_0":
        return d * q
    if kind in ("Q4_1", "Q5_1"):
        return d * q + float(stored["m"][row, column // size])
    if kind == "IQ4_NL":
        return d * LEVELS[q]
    c = int(stored["scale_codes"][row, column // tile])
    if kind == "Q3_K":
        return d * (c - 32) * (q - 4)
    if kind == "Q6_K":
        return d * c * (q - 32)
    if kind == "IQ4_XS":
        return d * (c - 32) * LEVELS[q]
    return d * c * q - float(stored["dmin"][row, column // size]) * int(
        stored["minimum_codes"][row, column // tile]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_of_the_stored_numbers_gets_the_same_weights(kind, weight):
    quantized = rtn(weight, GGML[kind])
    stored, decoded = quantized.parameters.stored, quantized.dequantize()
    assert stored["d"].dtype == torch.float16 and stored["d"].shape == (12, 512 // BLOCKS[kind][1])
    for row in (0, 5, 11):
        for column in range(0, 512, 7):
            expected = read(kind, stored, quantized.codes, row, column)
            assert decoded[row, column].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_their_scales_fit_their_bits(kind, weight):
    quantized = rtn(weight, GGML[kind])
    bits = int(kind.removeprefix("I")[1])
    low, high = (-127, 127) if kind == "Q8_0" else (0, 2**bits - 1)
    assert quantized.codes.min() >= low and quantized.codes.max() <= high
    assert quantized.codes.dtype == (torch.int8 if kind == "Q8_0" else torch.uint8)
    for name in ("scale_codes", "minimum_codes"):
        if name in quantized.parameters.stored:
            codes = quantized.parameters.stored[name]
            assert codes.shape == (12, 512 // BLOCKS[kind][2])
            assert codes.dtype == (torch.int8 if kind == "Q6_K" else torch.uint8)
            assert codes.min() >= CODES[kind][0] and codes.max() <= CODES[kind][1]
    assert (quantized.parameters.scale != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bits_per_weight_are_the_bytes_of_a_block(kind):
    size, block, tile = BLOCKS[kind]
    assert GGML[kind].bits_per_weight((4, 512)) == size * 8 / block
    assert GGML[kind].group_size == tile


def test_known_bits():
    assert {kind: GGML[kind].bits_per_weight((1, 256)) for kind in KINDS} == {
        "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5,
        "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625,
        "IQ4_NL": 4.5, "IQ4_XS": 4.25,
    }  # fmt: skip


def simple(kind, x):
    """The reference's direct formula for blocks of 32 (float64)."""
    if kind in ("Q4_1", "Q5_1"):
        top = 15 if kind == "Q4_1" else 31
        d, m = float(((x.max() - x.min()) / top).half()), float(x.min().half())
        return ((x - m) / d + 0.5).floor().clamp(0, top) * d + m
    if kind == "Q8_0":
        d = float((x.abs().max() / 127).half())
        return (x / d).round() * d
    middle = 8 if kind == "Q4_0" else 16
    d = float((x[x.abs().argmax()] / -middle).half())
    return ((x / d + middle + 0.5).floor().clamp(0, 2 * middle - 1) - middle) * d


def with_minimum(x, v, top, first, count, absolute):
    """The reference's search for a scale and a minimum of one tile (float64)."""
    low, high = min(x.min(), 0.0), x.max()
    if high == low:
        return 0.0, -float(low)
    best, actual = torch.inf, None
    for trial in [None, *range(count + 1)]:
        reach = top if trial is None else top + first + 0.1 * trial
        q = ((x - low) * reach / (high - low)).round().clamp(0, top)
        s, b = (high - low) / top, low
        if trial is not None:
            rows = torch.stack([q, torch.ones_like(q)], 1) * v.sqrt()[:, None]
            s, b = torch.linalg.lstsq(rows, (x * v.sqrt())[:, None]).solution[:, 0]
            if b > 0:
                s, b = (v * q * x).sum() / (v * q * q).sum(), 0.0
        miss = s * q + b - x
        error = (v * (miss.abs() if absolute else miss**2)).sum()
        if error < best:
            best, actual = error, (float(s), -float(b))
    return actual


def around_zero(x, v, middle):
    """The reference's search for a scale of codes -middle to middle - 1 (float64)."""
    peak = x[x.abs().argmax()]
    best, actual = 0.0, 0.0
    for trial in range(-9, 10):
        q = (-(middle + 0.1 * trial) * x / peak).round().clamp(-middle, middle - 1)
        qx, qq = (v * q * x).sum(), (v * q * q).sum()
        if qq > 0 and qx * qx / qq > best:
            best, actual = qx * qx / qq, float(qx / qq)
    return actual


def over_levels(x, v):
    """The reference's search for a scale of the uneven levels (float64)."""
    peak, best, actual = x[x.abs().argmax()], 0.0, 0.0
    for trial in range(-7, 8):
        T = nearest_level(x * (LEVELS[0] + trial) / peak)
        qx, qq = (v * T * x).sum(), (v * T * T).sum()
        if qq > 0 and qx * qx / qq > best:
            best, actual = qx * qx / qq, float(qx / qq)
    return actual


def nearest_level(x):
    """By all distances."""
    T = torch.tensor(LEVELS, dtype=x.dtype)
    return T[(x[..., None] - T).abs().argmin(-1)]


def uneven(kind, x):
    """A block decoded after the reference's quantization to uneven levels (float64)."""
    tiles = x.reshape(-1, 32)
    scales = torch.tensor([over_levels(one, one**2) for one in tiles], dtype=torch.float64)
    if kind == "IQ4_NL":
        s = scales.half().double()
    else:
        peak = scales[scales.abs().argmax()]
        s = float((peak / -32).half()) * (scales * -32 / peak).round().clamp(-32, 31)
    s = torch.where(s == 0, 1e-12, s)[:, None]
    return (nearest_level(tiles / s) * s).reshape(-1)


def reference(kind, x):
    """A block of 256 decoded after the reference's quantization (float64)."""
    size = BLOCKS[kind][2]
    tiles = x.reshape(-1, size)
    if kind in ("Q3_K", "Q6_K"):
        middle, last = (4, -32) if kind == "Q3_K" else (32, -128)
        scales = torch.tensor([around_zero(one, one**2, middle) for one in tiles], dtype=torch.float64)
        peak = scales[scales.abs().argmax()]
        d = float((peak / last).half())
        c = (scales * last / peak).round().clamp(last, -last - 1)
        s, m, low, high = d * c, 0 * c, -middle, middle - 1
    else:
        how = {"Q2_K": (3, -0.5, 15, True), "Q4_K": (15, -1.0, 20, False), "Q5_K": (31, -0.5, 15, False)}
        results = []
        for one in tiles:
            v = one.abs() + (0 if kind == "Q2_K" else one.square().mean().sqrt())
            results.append(with_minimum(one, v, *how[kind]))
        scales, mins = torch.tensor(results, dtype=torch.float64).T
        most = CODES[kind][1]
        d, dmin = float((scales.max() / most).half()), float((mins.max() / most).half())
        s = d * (scales * most / scales.max()).round()
        m = dmin * (mins * most / mins.max()).round()
        low, high = 0, how[kind][0]
    q = ((tiles + m[:, None]) / torch.where(s == 0, 1.0, s)[:, None]).round().clamp(low, high)
    return (q * s[:, None] - m[:, None]).reshape(-1)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_squared_error_is_below_the_references(kind, weight):
    weight = weight[:4]
    ours = rtn(weight, GGML[kind]).dequantize()
    block = BLOCKS[kind][1]
    method = uneven if kind in UNEVEN else reference if block == 256 else simple
    theirs = torch.stack([method(kind, x) for x in weight.double().reshape(-1, block)]).reshape(4, 512)
    lost = (ours.double() - weight).square().sum() / (theirs - weight).square().sum()
    assert lost < (0.97 if kind == "Q4_K" else 0.95)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", UNEVEN)
@pytest.mark.parametrize("sign", [1, -1])
def test_uneven_levels_are_searched_for_the_scale_of_least_error(kind, sign, weight):
    """By brute force: 800 places for the largest weight of a tile, both signs."""
    values = (sign * weight[:4, :256] * 3).double()  # the levels are uneven: the two signs differ
    tiles = values.reshape(-1, 32)
    peak = tiles.gather(1, tiles.abs().argmax(1, True))
    best = torch.full((len(tiles),), torch.inf, dtype=torch.float64)
    for end in [*torch.linspace(80, 200, 400).tolist(), *torch.linspace(-80, -200, 400).tolist()]:
        T = nearest_level(tiles * end / peak)
        s = (T * tiles).sum(1, True) / (T * T).sum(1, True)
        best = best.minimum((nearest_level(tiles / s) * s - tiles).square().sum(1))
    quantized = rtn(values.float(), GGML[kind])
    lost = (quantized.dequantize().double() - values).square().sum() / best.sum()
    assert lost < (1.002 if kind == "IQ4_NL" else 1.04)
    assert (quantized.parameters.scale > 0).any() and (quantized.parameters.scale < 0).any()


@pytest.mark.parametrize("kind", UNEVEN)
def test_half_way_between_uneven_levels_is_the_upper_one(kind):
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(LEVELS)])
    below, above = (torch.nextafter(middles, middles + side) for side in (-1, 1))
    codes = torch.arange(15.0)
    assert torch.equal(GGML[kind].nearest(below), codes)
    assert torch.equal(GGML[kind].nearest(middles), codes + 1)
    assert torch.equal(GGML[kind].nearest(above), codes + 1)
    assert 0 <= GGML[kind].nearest(torch.tensor(float("nan"))) <= 15


@pytest.mark.parametrize("kind", KINDS)
def test_importance_moves_the_error_to_inputs_that_matter_less(kind, weight):
    importance = torch.exp(1.5 * torch.randn(512, generator=torch.Generator().manual_seed(2)))
    plain, weighted = (
        rtn(weight, GGML[kind], GGML[kind].choose(weight, importance=v)) for v in (None, importance)
    )
    errors = [((result.dequantize() - weight).square() * importance).sum() for result in (plain, weighted)]
    assert errors[1] < errors[0]
    assert (weighted.dequantize() - weight).square().sum() > (plain.dequantize() - weight).square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_know_of_each_other(kind, weight, monkeypatch):
    whole = GGML[kind].choose(weight)
    monkeypatch.setattr(module, "CHUNK", 1)
    single = GGML[kind].choose(weight)
    assert torch.allclose(single.scale, whole.scale, rtol=1e-3)
    assert single.stored.keys() == whole.stored.keys()
    assert all(single.stored[name].dtype == value.dtype for name, value in whole.stored.items())


@pytest.mark.parametrize("kind", KINDS)
def test_hard_blocks(kind):
    weight = torch.zeros(6, 256)
    weight[1] = 0.25
    weight[2] = -0.25
    weight[3, 17] = 3.0
    weight[4] = 1e-30
    weight[5] = torch.linspace(-1, 1, 256) * 4e4
    quantized = rtn(weight, GGML[kind])
    decoded = quantized.dequantize()
    assert torch.isfinite(decoded).all() and (quantized.parameters.scale != 0).all()
    assert (decoded[0].abs() <= (2.0**-24 if kind in UNEVEN else 0)).all()  # no level is 0
    assert torch.allclose(decoded[1:3], weight[1:3], rtol=0.05)
    assert decoded[3, 17].item() == pytest.approx(3.0, rel=0.05)
    assert (decoded[4].abs() < 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_shrink_clips_the_range_of_each_tile(kind, weight):
    tile = BLOCKS[kind][2]
    shrink = torch.full((12, 512 // tile), 1.0)
    shrink[:, 0] = 0.5
    quantized = rtn(weight, GGML[kind], GGML[kind].choose(weight, shrink))
    clipped = weight.clone()
    low, high = weight[:, :tile].amin(1, True).clamp(max=0), weight[:, :tile].amax(1, True).clamp(min=0)
    clipped[:, :tile] = weight[:, :tile].minimum(high / 2).maximum(low / 2)
    expected = GGML[kind].choose(clipped)
    assert torch.equal(quantized.parameters.scale, expected.scale)


def test_a_block_must_divide_the_inputs():
    with pytest.raises(SettingsError, match="300 is not a multiple of 256"):
        GGML["Q4_K"].choose(torch.zeros(2, 300))
    with pytest.raises(SettingsError, match="Q4_0 or Q4_1"):
        GGMLGrid("Q9_K")
