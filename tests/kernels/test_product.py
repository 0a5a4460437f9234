"""Packed weights come back as they were, and products are those of torch."""

import ctypes
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from attar.errors import NumericsError, UsageError
from attar.kernels.build import load
from attar.kernels.levels import features
from attar.kernels.memory import Arena
from attar.kernels.packed import BITS, GROUPS, PANEL, pack, pack_bf16, pack_codes, quantize, unpack
from attar.kernels.product import ACTIVATION_BITS, ThreadPool, reference
from attar.kernels.structures import ZEROS, linear_struct, raise_for
from tests.compiler import needs_compiler

SHAPES = [(32, 128), (1, 128), (40, 256), (97, 384)]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 21, 43)
TOPS = {8: 127, 16: 127 * 257}  # the largest code of a row


@pytest.fixture(params=[1, 3], scope="module")
def team(request):
    with ThreadPool(request.param) as actual:
        yield actual


def weight(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def codes_of(rows, columns, group, bits):
    generator = torch.Generator().manual_seed(rows + group)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, columns // group, generator=generator) * 0.02 + 0.001
    zeros = torch.randint(0, 8 << bits, (rows, columns // group), generator=generator) / 8
    return codes, scales.bfloat16(), zeros


def rounded(x, group, bits):
    """Rows as the kernel takes them: integers, a scale for each group; but for ties, which it rounds before
    they are float32."""
    parts = x.unflatten(1, (-1, group))
    peak = parts.abs().amax(2, keepdim=True)
    return ((parts * (TOPS[bits] / peak)).round() * peak / TOPS[bits]).flatten(1)


def assert_half_a_step(computed, x, packed, bits):
    """No input is off by more than half a step of its group."""
    w, group = unpack(packed).double(), packed.group
    step = x.unflatten(1, (-1, group)).abs().amax(2).double() / TOPS[bits]
    sizes = w.unflatten(1, (-1, group)).abs().sum(2)
    expected = torch.nn.functional.linear(x.double(), w, packed.bias.double())
    bound = 0.501 * step @ sizes.T + 1e-6 * (x.double().abs() @ w.abs().T + 1)
    assert ((computed - expected).abs() <= bound).all()


@dataclass
class Case:
    """A product in which nothing is rounded but what the kernel itself rounds: all scales are powers of two.

    codes (T, K / G, G) and scales (T, K / G) of the rows, q (N, K / G, G), s and z (N, K / G) of the weight;
    with zeros stored as products s is three times a power of two, s z whole.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    q: torch.Tensor
    s: torch.Tensor
    z: torch.Tensor | None
    kind: str
    zeros: str

    def product(self, team, bits):
        x = (self.codes * self.scales[..., None]).flatten(1).float()
        packed = pack_codes(self.q.flatten(1).to(torch.uint8), self.s, self.z, kind=self.kind)
        assert packed.zeros == self.zeros
        return team.multiply(x, packed, bits=bits)

    def expected(self):
        """Group after group: sums of integers are exact, what follows is rounded where the kernel does."""
        y = torch.zeros(len(self.codes), len(self.q), dtype=torch.float64)
        for g in range(self.q.shape[1]):
            x, q = self.codes[:, g], self.q[:, g]
            less = x.sum(1, keepdim=True)
            part, t = (x @ q.T).float().double(), self.scales[:, g, None]
            if self.zeros == "middle":
                part = (x @ q.T - (1 << (BITS[self.kind] - 1)) * less).float().double()
            if self.zeros == "points":
                part = (part - self.z[:, g].double() * less).float().double()
            y = (y + part * self.s[:, g].double() * t).float().double()
            if self.zeros == "products":
                y = (y - (self.s * self.z)[:, g].round().double() * (less * t)).float().double()
        return y.float()


def case(kind, bits, group, tokens, zeros, rows=70, columns=256):
    generator = torch.Generator().manual_seed(group + tokens)
    top, largest, groups = TOPS[bits], (1 << BITS[kind]) - 1, columns // group

    def whole(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=generator)

    codes, q = whole(-top, top, tokens, groups, group), whole(0, largest, rows, groups, group)
    codes[..., 3] = top * (2 * whole(0, 1, tokens, groups) - 1)
    codes[0], q[0], q[1] = top, largest, 0  # the largest sums there are
    scales, s = 2.0 ** whole(-9, 9, tokens, groups), 2.0 ** whole(-3, 3, rows, groups)
    z = whole(0, largest, rows, groups).float()
    if zeros == "products":
        z, s = whole(0, 2047, rows, groups) / (3 * s), 3 * s
    return Case(codes, scales.double(), q, s, None if zeros == "middle" else z, kind, zeros)


@pytest.mark.few(16)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("zeroed", [False, True])
def test_codes_come_back_exactly(kind, group, shape, zeroed):
    bits = 4 if kind == "int4" else 8
    codes, scales, zeros = codes_of(*shape, group, bits)
    packed = pack_codes(codes, scales, zeros if zeroed else None, kind=kind)
    middle = zeros if zeroed else torch.full_like(zeros, 1 << (bits - 1))
    parts = codes.unflatten(1, (-1, group)).float() - middle[..., None]
    assert torch.equal(unpack(packed), (parts * scales.float()[..., None]).flatten(1))
    whole = -(-shape[0] // PANEL) * PANEL
    per_group = group * bits // 8 + (4 if zeroed else 2)
    assert packed.nbytes == whole * shape[1] // group * per_group


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_minima_of_float16_come_back_exactly(kind):
    """llama.cpp's w = d q + m: z = -m / d is no float16, s z is; also where it is far beyond the codes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << BITS[kind], (40, 128), generator=generator, dtype=torch.uint8)
    d, m = (torch.rand(2, 40, 4, generator=generator) * 0.01 + 0.001).half().double()
    d[3, 2] = 2.0**-20
    packed = pack_codes(codes, d.float(), (-m / d).float(), kind=kind)
    expected = (codes.unflatten(1, (4, 32)) * d[..., None] + m[..., None]).flatten(1).float()
    assert packed.zeros == "products" and torch.equal(unpack(packed), expected)


def test_bf16_comes_back_exactly():
    w = weight(97, 130)
    assert torch.equal(unpack(pack_bf16(w)), w.bfloat16().float())


@pytest.mark.parametrize("kind, bound", [("int4", 1 / 8), ("int8", 1 / 250)])
def test_quantized_is_nearest(kind, bound):
    w = weight(64, 256)
    error = (unpack(pack(w, kind, group=64)) - w).unflatten(1, (-1, 64)).abs().amax(2)
    assert (error <= w.unflatten(1, (-1, 64)).abs().amax(2) * bound).all()


def test_quantized_zeros_are_zeros():
    w = torch.zeros(32, 64)
    assert torch.equal(unpack(pack(w, "int4")), w)


@pytest.mark.few(36)
@needs_compiler
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("bits", ACTIVATION_BITS)
def test_products_of_codes_bit_by_bit(kind, tokens, zeros, bits, team):
    for group in GROUPS:
        one = case(kind, bits, group, tokens, zeros)
        assert torch.equal(one.product(team, bits), one.expected())


@pytest.mark.few(12)
@needs_compiler
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("bits", ACTIVATION_BITS)
def test_products_of_codes(kind, tokens, zeroed, bits, team):
    for shape in SHAPES:
        for group in GROUPS:
            codes, scales, zeros = codes_of(*shape, group, BITS[kind])
            bias = torch.randn(shape[0])
            packed = pack_codes(codes, scales, zeros if zeroed else None, kind=kind, bias=bias)
            x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(tokens))
            assert_half_a_step(team.multiply(x, packed, bits=bits), x, packed, bits)


@pytest.mark.few(12)
@needs_compiler
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bits", ACTIVATION_BITS)
def test_products_of_bf16(tokens, bits, team):
    for rows, columns in [*SHAPES, (70, 34)]:
        packed = pack_bf16(weight(rows, columns))
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
        kept = x if bits == 16 else x.bfloat16()
        assert_product(team.multiply(x, packed, bits=bits), kept, packed)


def assert_product(computed, x, packed):
    """Within float32's rounding of the sum of what was summed."""
    w, x = unpack(packed).double(), x.double()
    expected = torch.nn.functional.linear(x, w, None if packed.bias is None else packed.bias.double())
    assert computed.dtype == torch.float32
    assert ((computed - expected).abs() <= 1e-6 * (x.abs() @ w.abs().T + 1)).all()


@needs_compiler
@pytest.mark.parametrize("kind", ["int4", "int8", "bf16"])
@pytest.mark.parametrize("bits", ACTIVATION_BITS)
def test_a_row_does_not_depend_on_its_neighbours(kind, bits, team):
    packed = pack(weight(64, 256), kind)
    x = torch.randn(47, 256)
    whole = team.multiply(x, packed, bits=bits)
    assert all(torch.equal(team.multiply(x[i : i + 1], packed, bits=bits)[0], whole[i]) for i in range(47))
    for start, stop in ((0, 3), (3, 9), (9, 25), (25, 46)):
        assert torch.equal(team.multiply(x[start:stop], packed, bits=bits), whole[start:stop])


@needs_compiler
def test_rows_of_zeros_give_zeros(team):
    for kind in ("int4", "int8", "bf16"):
        assert torch.equal(
            team.multiply(torch.zeros(2, 128), pack(weight(32, 128), kind)), torch.zeros(2, 32)
        )


def test_without_a_compiler_torch_does_it(monkeypatch):
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    packed, x = pack(weight(40, 128), "int8"), torch.randn(3, 128)
    with ThreadPool(1) as team:
        assert torch.equal(team.multiply(x, packed), reference(x, packed))


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(UsageError, match="groups of 96"):
        quantize(weight(32, 128), "int4", 96)
    with pytest.raises(UsageError, match="groups of 8 inputs"):
        pack_codes(torch.zeros(32, 128, dtype=torch.uint8), torch.ones(32, 16), kind="int4")
    with pytest.raises(UsageError, match="33 inputs"):
        pack_bf16(weight(32, 33))
    codes = torch.zeros(32, 128, dtype=torch.uint8)
    with pytest.raises(UsageError, match="3 groups do not divide 128"):
        pack_codes(codes, torch.ones(32, 3), kind="int4")
    with pytest.raises(NumericsError, match="zero point"):
        pack_codes(codes, torch.ones(32, 4), torch.full((32, 4), float("inf")), kind="int4")
    with pytest.raises(NumericsError, match="not finite"):
        pack(torch.full((32, 64), float("nan")), "int4")


def test_an_arena_hands_out_lines_of_its_own():
    arena = Arena(1 << 12)
    first, second, third = arena.allocate(100), arena.allocate(5000), arena.allocate(1 << 22)
    assert [len(first), len(second), len(third)] == [100, 5000, 1 << 22]
    assert all(part.data_ptr() % 64 == 0 and not part.any() for part in (first, second, third))
    first.fill_(1)
    second.fill_(2)
    assert first.eq(1).all() and second.eq(2).all() and not third.any()
    packed = pack(weight(64, 256), "int4", arena=arena)
    assert torch.equal(unpack(packed), unpack(pack(weight(64, 256), "int4")))


@needs_compiler
def test_more_threads_than_processors():
    """No worker waits for one without work: it ends soon, and with the same numbers."""
    packed, x = pack(weight(97, 384), "int8"), torch.randn(3, 384)
    with ThreadPool(1) as one, ThreadPool(9) as many:
        expected = one.multiply(x, packed)
        assert all(torch.equal(many.multiply(x, packed), expected) for _ in range(200))


@needs_compiler
@pytest.mark.parametrize("kind", ["int4", "int8", "bf16"])
def test_more_panels_than_are_held(kind, team):
    """Panels and tokens go by in blocks; nothing is left out and the sums are the same."""
    packed, x = pack(weight(480, 2048), kind), torch.randn(87, 2048)
    whole = team.multiply(x, packed)
    assert all(
        torch.equal(team.multiply(x[i : i + 1], packed)[0], whole[i]) for i in (0, 7, 8, 63, 64, 80, 86)
    )


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_thread_without_memory_ends_the_call_and_not_the_process(threads):
    """In one part, in every part, between two phases: all threads come out, and can be used again."""
    with ThreadPool(threads) as team:
        fails = team._library.attar_thread_pool_fails
        for _ in range(50):
            for part in (0, 17, 63, -1):
                assert fails(team._handle, 1 << 62, part, 0) == 1
            assert fails(team._handle, 1 << 62, -1, 1) == 1
            assert fails(team._handle, 8, -1, 0) == 0 == fails(team._handle, 8, -1, 1)
        w, x = weight(40, 128), torch.randn(3, 128)
        assert torch.allclose(team.multiply(x, pack_bf16(w)), x @ w.bfloat16().float().T, atol=1e-4)


@needs_compiler
def test_a_product_that_cannot_be_allocated_is_an_error(team):
    packed = pack_bf16(weight(32, 128))
    code = team._library.attar_multiply(team._handle, ctypes.byref(linear_struct(packed)), 0, 1 << 54, 8, 0)
    assert code == 1
    with pytest.raises(MemoryError, match="a product: there is not enough memory"):
        raise_for(code, "a product")
    with pytest.raises(RuntimeError, match="a product failed"):
        raise_for(2, "a product")
    raise_for(0, "a product")


CHILD = """
import ctypes, random, sys

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

class Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_int32) for name in ("kind", "group", "zeros")),
        ("unit", ctypes.c_float),
        ("sparse", ctypes.c_int32),
    ]

path, small = sys.argv[1], int(sys.argv[2])
room = ctypes.create_string_buffer(4096)
if small:
    assert not ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 4096)), None)
library = ctypes.CDLL(path)
library.attar_thread_pool.restype = ctypes.c_void_p
library.attar_multiply.argtypes = [
    *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
]
random.seed(0)
data = b"".join(bytes.fromhex("003c") * 32 + random.randbytes(32 * 32) for _ in range(2))
held = ctypes.create_string_buffer(data)
linear = Linear(ctypes.addressof(held), None, 32, 64, 8, 32, 0, 1.0)
x = (ctypes.c_float * (20 * 64))(*(random.gauss(0, 1) for _ in range(20 * 64)))
y = (ctypes.c_float * (20 * 32))()
assert library.attar_multiply(library.attar_thread_pool(2), ctypes.byref(linear), x, 20, 16, y) == 0
print(library.attar_tiles(), bytes(y).hex())
"""


@needs_compiler
@pytest.mark.skipif(not {"amx_tile", "amx_int8"} <= features(), reason="a processor without AMX")
def test_tiles_are_taken_and_where_the_system_refuses_them_done_without():
    """Linux permits none where a signal's stack has no room for them; numbers are the same."""

    def child(small):
        command = [sys.executable, "-S", "-c", CHILD, load("decode")._name, str(small)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    (with_tiles, expected), (without, actual) = child(0), child(1)
    assert (with_tiles, without) == ("1", "0") and actual == expected
