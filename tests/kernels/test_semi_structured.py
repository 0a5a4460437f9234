"""2:4 weights: what is packed comes back, and products are those of the dense form."""

import itertools

import pytest
import torch

from attar.kernels import semi_structured
from attar.kernels.packed import GROUPS, PANEL, pack, pack_bf16, pack_codes, unpack
from attar.kernels.product import ACTIVATION_BITS, ThreadPool, reference
from tests.compiler import needs_compiler
from tests.kernels.test_product import TOKENS, assert_product

SHAPES = [(32, 128), (1, 128), (40, 256), (97, 384)]
BITS = {"int4": 4, "int8": 8, "bf16": 16}
PATTERNS = [pattern for pattern in itertools.product((0, 1), repeat=4) if sum(pattern) <= 2]


@pytest.fixture(params=[1, 3], scope="module")
def team(request):
    with ThreadPool(request.param) as actual:
        yield actual


def always(kind):
    return True


def never(kind):
    return False


def patterns(rows, columns, seed=0):
    """bool (rows, columns): every set of at most two of four."""
    table = torch.tensor(PATTERNS, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    return table[torch.randint(0, len(table), (rows, columns // 4), generator=generator)].flatten(1)


def weight(rows, columns, seed=0):
    """2:4, no kept value zero."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05
    return torch.where(patterns(rows, columns, seed), values + 0.2 * values.sign(), 0.0)


def coded(rows, columns, group, kind, seed=0):
    """Codes, scales and whole zero points of a 2:4 weight; int8's q - z fit a signed byte."""
    generator = torch.Generator().manual_seed(seed)
    top = 16 if kind == "int4" else 128
    codes = torch.randint(0, top, (rows, columns), generator=generator)
    zeros = torch.randint(0, top, (rows, columns // group), generator=generator)
    codes = torch.where(patterns(rows, columns, seed), codes, zeros.repeat_interleave(group, 1))
    scales = torch.rand(rows, columns // group, generator=generator) * 0.02 + 0.001
    return codes.to(torch.uint8), scales, zeros.float()


def forms(rows, columns, group, kind, zeroed):
    """The 2:4 form of a weight with a bias, and its dense form."""
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(rows))
    if zeroed:
        codes, scales, zeros = coded(rows, columns, group, kind)
        return [pack_codes(codes, scales, zeros, kind=kind, bias=bias, pays=p) for p in (always, None)]
    w = weight(rows, columns)
    return [pack(w, kind, group=group, bias=bias, pays=p) for p in (always, None)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_codes_come_back_exactly(kind, zeroed, shape):
    for group in GROUPS:
        sparse, dense = forms(*shape, group, kind, zeroed)
        assert (sparse.form, dense.form) == ("2:4", "dense")
        assert sparse.zeros == dense.zeros == ("points" if zeroed else "middle")
        assert torch.equal(unpack(sparse), unpack(dense))


def test_bf16_comes_back_exactly():
    for rows, columns in [(97, 384), (1, 16), (33, 48)]:
        packed = pack_bf16(weight(rows, columns), pays=always)
        assert packed.form == "2:4" and torch.equal(unpack(packed), weight(rows, columns).bfloat16().float())


@pytest.mark.parametrize(("kind", "bits"), [("int4", 3), ("int8", 5), ("bf16", 9)])
def test_bytes(kind, bits):
    """A value and two bits for two of four inputs: 3 bits a weight instead of 4, 5 of 8, 9 of 16."""
    packed = pack(weight(70, 256), kind, group=64, pays=always)
    scales = 0 if kind == "bf16" else 256 // 64 * 2
    assert packed.nbytes == 3 * PANEL * (256 * bits // 8 + scales)


def test_every_pattern_is_found_and_no_other():
    for pattern in itertools.product((False, True), repeat=4):
        rows = torch.zeros(5, 32, dtype=torch.bool)
        rows[3, 16:20] = torch.tensor(pattern)
        assert semi_structured.holds(rows) == (sum(pattern) <= 2)
    below = torch.zeros(semi_structured.SAMPLE + 2, 16, dtype=torch.bool)
    below[-1, 12:15] = True
    assert not semi_structured.holds(below)
    assert not semi_structured.holds(torch.zeros(4, 24, dtype=torch.bool))  # 16 does not divide 24
    shifted = torch.zeros(1, 16, dtype=torch.bool)
    shifted[0, 2:6] = True  # two of each aligned four
    assert semi_structured.holds(shifted)


@pytest.mark.parametrize("kind", ["int4", "int8", "bf16"])
def test_what_is_not_sparse_is_packed_dense(kind):
    w = weight(70, 256)
    w[69, 252:255] = 1.0
    assert pack(w, kind, pays=always).form == "dense"
    assert pack(weight(70, 256), kind, pays=never).form == "2:4 as dense"
    assert pack(weight(70, 256), kind).form == "dense"
    assert pack(weight(70, 256), kind, pays=never).label == f"{kind} (2:4, run dense: no faster here)"
    assert pack(weight(70, 256), kind, pays=always).label == f"{kind} 2:4"


def test_zero_points_that_no_code_has():
    """A zero point between codes makes no code zero; q - z beyond a signed byte is stored dense."""
    codes, scales, zeros = coded(40, 128, 32, "int4")
    assert pack_codes(codes, scales, zeros + 0.5, kind="int4", pays=always).form == "dense"
    codes, scales, zeros = coded(40, 128, 32, "int8")
    codes[0, :2], zeros[0, 0] = 255, 0
    codes[0, 2:32] = 0
    assert pack_codes(codes, scales, zeros, kind="int8", pays=always).form == "dense"


@pytest.mark.few(12)
@needs_compiler
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bits", ACTIVATION_BITS)
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_products_of_codes_are_those_of_the_dense_form(kind, zeroed, bits, tokens, team):
    """Bit by bit: sums of integers are the same, and so is everything after them."""
    for shape, group in itertools.product(SHAPES[2:], GROUPS):
        sparse, dense = forms(*shape, group, kind, zeroed)
        x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(tokens))
        computed = team.multiply(x, sparse, bits=bits)
        assert computed.any() and torch.equal(computed, team.multiply(x, dense, bits=bits))


@needs_compiler
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_the_largest_sums(kind, team):
    """Every kept value and every activation at its end, of either sign."""
    for low, high in itertools.product((0, 15 if kind == "int4" else 255), repeat=2):
        middle = 8 if kind == "int4" else 128
        codes = torch.full((40, 128), middle, dtype=torch.uint8)
        codes[:, ::4], codes[:, 3::4] = low, high
        for sign in (1.0, -1.0):
            x = torch.full((3, 128), sign)
            x[1, ::2] *= -1
            packed = [pack_codes(codes, torch.ones(40, 1), kind=kind, pays=p) for p in (always, None)]
            results = [team.multiply(x, one, bits=bits) for one in packed for bits in ACTIVATION_BITS]
            assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
            torch.testing.assert_close(results[1], reference(x, packed[1]), rtol=1e-4, atol=1e-2)


@pytest.mark.few(12)
@needs_compiler
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bits", ACTIVATION_BITS)
def test_products_of_bf16(tokens, bits, team):
    """With float32 activations bit by bit those of the dense form, which adds zeros; with rounded ones
    within the rounding of sums, as bfloat16 has instructions of its own."""
    for rows, columns in [*SHAPES, (70, 48)]:
        sparse, dense = (pack_bf16(weight(rows, columns), pays=p) for p in (always, None))
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
        computed = team.multiply(x, sparse, bits=bits)
        assert_product(computed, x if bits == 16 else x.bfloat16(), sparse)
        if bits == 16:
            assert torch.equal(computed, team.multiply(x, dense, bits=bits))


@needs_compiler
@pytest.mark.parametrize("kind", ["int4", "int8", "bf16"])
@pytest.mark.parametrize("bits", ACTIVATION_BITS)
def test_a_row_does_not_depend_on_its_neighbours(kind, bits, team):
    packed = pack(weight(64, 256), kind, pays=always)
    x = torch.randn(47, 256)
    whole = team.multiply(x, packed, bits=bits)
    assert all(torch.equal(team.multiply(x[i : i + 1], packed, bits=bits)[0], whole[i]) for i in range(47))
    for start, stop in ((0, 3), (3, 9), (9, 25), (25, 46)):
        assert torch.equal(team.multiply(x[start:stop], packed, bits=bits), whole[start:stop])


def test_without_a_compiler_torch_does_it(monkeypatch):
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    packed, x = pack(weight(40, 128), "int8", pays=always), torch.randn(3, 128)
    with ThreadPool(1) as team:
        assert torch.equal(team.multiply(x, packed), reference(x, packed))
