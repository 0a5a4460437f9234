"""Blocks and scales against ggml itself: the C library that llama-cpp-python brings.

``$ATTAR_PEERS/llama-cpp`` is an environment with it; without it, this one is asked.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from attar.deployment.gguf_codes import GGUFBlocks, grid_of
from attar.errors import NumericsError
from attar.formats.gguf.blocks import LAYOUTS, check_blocks, dequantize, pack, unpack
from attar.formats.gguf.types import TYPES, UNREAD, row_bytes
from attar.quantization.grids import GGML
from attar.quantization.methods.rtn import rtn

pytestmark = pytest.mark.peers
KINDS = list(LAYOUTS)
N, K = 32, 1024


def library():
    """libggml-base of the llama-cpp-python found, or None."""
    folder = os.environ.get("ATTAR_PEERS")
    python = f"{folder}/llama-cpp/bin/python" if folder else None
    if python is None:
        actual = importlib.util.find_spec("llama_cpp")
        origin = actual.origin if actual else None
    else:
        code = "import importlib.util; print(importlib.util.find_spec('llama_cpp').origin)"
        origin = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    name = {"darwin": "libggml-base.dylib", "win32": "ggml-base.dll"}.get(sys.platform, "libggml-base.so")
    return Path(origin).parent / "lib" / name if origin else None


@pytest.fixture(scope="module")
def ggml():
    path = library()
    if path is None or not path.exists():
        pytest.skip("no llama-cpp-python: set ATTAR_PEERS")
    loaded = ctypes.CDLL(str(path))
    loaded.ggml_type_size.restype = ctypes.c_size_t
    loaded.ggml_blck_size.restype = ctypes.c_int64
    loaded.ggml_type_name.restype = ctypes.c_char_p
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    loaded.ggml_validate_row_data.restype = ctypes.c_bool
    return loaded


def address(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def read(ggml, kind, data):
    """Weights that ggml reads."""
    columns = data.shape[1] // TYPES[kind].size * TYPES[kind].block
    out = torch.empty(len(data), columns)
    function = getattr(ggml, f"dequantize_row_{kind.lower().replace('_k', '_K')}")
    function(address(data), address(out), ctypes.c_int64(out.numel()))
    return out


def write(ggml, kind, weight, importance=None):
    """Bytes that ggml's quantizer makes."""
    data = torch.empty((len(weight), row_bytes(kind, weight.shape[1])), dtype=torch.uint8)
    rows, columns = map(ctypes.c_int64, weight.shape)
    pointer = ctypes.c_void_p(0) if importance is None else address(importance)
    result = ggml.ggml_quantize_chunk(
        TYPES[kind].id, address(weight), address(data), ctypes.c_int64(0), rows, columns, pointer
    )
    assert result == data.numel()
    return data


def valid(ggml, kind, data):
    return ggml.ggml_validate_row_data(TYPES[kind].id, address(data), ctypes.c_size_t(data.numel()))


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(N, K, generator=generator) * 0.03
    return values * torch.exp(0.5 * torch.randn(N, K, generator=generator))


@pytest.fixture(scope="module")
def importance():
    return torch.exp(1.5 * torch.randn(K, generator=torch.Generator().manual_seed(1)))


def same_bits(a, b):
    return np.array_equal(a.numpy().view(np.int32), b.numpy().view(np.int32))


def test_numbers_blocks_and_bytes_of_types(ggml):
    for kind in TYPES.values():
        assert ggml.ggml_type_name(kind.id).decode().upper() == kind.name
        assert ggml.ggml_blck_size(kind.id) == kind.block and ggml.ggml_type_size(kind.id) == kind.size
    for number, name in UNREAD.items():
        message = ggml.ggml_type_name(number).decode().upper()  # retired types say so
        assert message in (name, "DEPRECATED") or message.startswith(f"TYPE_{name} REMOVED")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_any_bytes(ggml, kind):
    """Every byte is random; float16 numbers are finite."""
    data = torch.randint(
        0, 256, (N, row_bytes(kind, K)), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    blocks = data.view(-1, TYPES[kind].size)
    for at in LAYOUTS[kind].halves.values():
        blocks[:, at + 1] &= 0xBB
    assert same_bits(dequantize(kind, data, K), read(ggml, kind, data))


@pytest.mark.parametrize("kind", KINDS)
def test_our_bytes_are_read_as_our_grid_decodes_them(ggml, kind, weight, importance):
    grid = grid_of(kind)
    quantized = rtn(weight, grid, grid.choose(weight, importance=importance))
    made = GGUFBlocks(quantized)
    data = pack(kind, made.codes, made.stored)
    assert valid(ggml, kind, data)
    if made.whole_scale is None:
        assert torch.equal(read(ggml, kind, data), quantized.dequantize())
    else:
        scaled = read(ggml, kind, data) * made.whole_scale
        assert torch.allclose(scaled, quantized.dequantize(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_their_bytes_come_back_bit_for_bit(ggml, kind, weight):
    data = write(ggml, kind, weight)
    codes, stored = unpack(kind, data, K)
    assert torch.equal(pack(kind, codes, stored), data)
    assert same_bits(dequantize(kind, data, K), read(ggml, kind, data))
    check_blocks(kind, data, "weight")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", list(GGML))
def test_our_scales_err_less_than_theirs(ggml, kind, weight, importance, weighted):
    v = importance if weighted else torch.ones(K)
    theirs = read(ggml, kind, write(ggml, kind, weight, importance if weighted else None))
    ours = rtn(weight, GGML[kind], GGML[kind].choose(weight, importance=v)).dequantize()
    errors = [((values - weight).square() * v).sum().item() for values in (ours, theirs)]
    print(
        f"{kind} {'with' if weighted else 'without'} importance: {errors[0] / errors[1]:.3f} of ggml's error"
    )
    assert errors[0] < errors[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_blocks_are_refused(ggml, kind, weight, capfd):
    data = write(ggml, kind, weight)
    positions = list(LAYOUTS[kind].halves.values())
    wrong = [(at, value) for at in positions for value in (b"\x00\x7c", b"\x01\xfc")] or [(0, b"\xff")]
    for at, value in wrong:
        broken = data.clone()
        broken.view(-1, TYPES[kind].size)[5, at : at + len(value)] = torch.tensor(
            list(value), dtype=torch.uint8
        )
        assert not valid(ggml, kind, broken)
        with pytest.raises(NumericsError):
            check_blocks(kind, broken, "weight")
    capfd.readouterr()
