"""Every level of processor gives what x86-64-v3 gives: of this family run here, of the other by qemu.

All sums of integers are exact and every other operation rounds once, so results are equal bit for bit, of
products, whole steps and searches alike. But bfloat16 has instructions of its own where a processor has them:
x86's flush subnormal numbers and round each product's sum, ARM's round to odd.
"""

import functools
import platform
import shutil

import pytest
import torch

from attar.kernels import build
from attar.kernels.levels import LEVELS, levels
from attar.kernels.product import ThreadPool
from attar.quantization.grids import GGML
from tests.compiler import needs_compiler
from tests.kernels import cases, replay

BASE = "v3"
CROSS, QEMU, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # a library takes half a minute to compile
    needs_compiler,
    pytest.mark.skipif(BASE not in [each.name for each in levels()], reason="not a processor with AVX2"),
]

PRODUCTS = {
    "int4": lambda: cases.products("int4"),
    "int8": lambda: cases.products("int8"),
    "int4, 16 bits": lambda: cases.products("int4", bits=16),
    "int8, 16 bits": lambda: cases.products("int8", bits=16),
    "bf16, 16 bits": lambda: cases.products("bf16", bits=16),
    "bf16": lambda: cases.products("bf16"),
    "int4 2:4": lambda: cases.products("int4", sparse=True),
    "int8 2:4": lambda: cases.products("int8", sparse=True),
    "int4 2:4, 16 bits": lambda: cases.products("int4", bits=16, sparse=True),
    "int8 2:4, 16 bits": lambda: cases.products("int8", bits=16, sparse=True),
    "bf16 2:4, 16 bits": lambda: cases.products("bf16", bits=16, sparse=True),
    "bf16 2:4": lambda: cases.products("bf16", sparse=True),
}
STEPS = {
    "float32": lambda: cases.steps("llama3", kv_dtype="float32", bits=16),
    "caps and windows": lambda: cases.steps("gemma2", kv_dtype="float32", weights="int8", bits=8),
    "codes": lambda: cases.steps("gemma2", kv_dtype="int8", weights="int8", bits=8),
    "int4": lambda: cases.steps("llama3", kv_dtype="bfloat16", weights="int4", bits=8),
    "norms of heads": lambda: cases.steps("qwen3", kv_dtype="bfloat16", bits=8),
    "experts": lambda: cases.steps("qwen2_moe", kv_dtype="float32", weights="int4", group=16, bits=8),
    "sigmoid scores": lambda: cases.steps("glm4_moe", kv_dtype="float32", weights="int8", group=16, bits=16),
    "sinks": lambda: cases.steps("gpt_oss", kv_dtype="float32", weights="int8", bits=8),
    "latents": lambda: cases.steps("deepseek_v3", kv_dtype="float32", bits=16),
    "latents in codes": lambda: cases.steps(
        "deepseek_v2", kv_dtype="float16", weights="int4", group=16, bits=8
    ),
    "four-bit keys": lambda: cases.steps("gemma2", kv_dtype="int4", weights="int4", bits=16),
    "16 bits": lambda: cases.steps("llama3", kv_dtype="float16", weights="int4", bits=16),
}
HALVES = {
    **dict.fromkeys(("bf16", "int4", "latents", "latents in codes"), 1e-6),
    "norms of heads": 1e-2,
}  # of the largest: 2^-8 where a rounding flips


@pytest.fixture(scope="module")
def built_libraries(tmp_path_factory):
    """Libraries and drivers, each compiled once."""
    room = tmp_path_factory.mktemp("made")

    @functools.cache
    def compiled(compiler, source, *flags):
        path = room / f"{source.stem}-{len(list(room.iterdir()))}.so"
        return replay.compiled(compiler, flags, source, path, "-ldl")

    return compiled


def results(recording, name, level, built_libraries, room):
    """Of a level's library."""
    cross = level.machine != platform.machine()
    compiler = CROSS if cross else build._compiler()
    library = built_libraries(compiler, build.SOURCES / f"{name}.cpp", *build.FLAGS, *level.flags)
    before = (QEMU, "-L", LIBRARIES, "-cpu", "max") if cross else ()
    return recording.run(library, built_libraries(compiler, replay.SOURCE, "-O1"), room, *before)


def base(recording, name, built_libraries, room):
    (level,) = (each for each in LEVELS if each.name == BASE)
    return results(recording, name, level, built_libraries, room)


@pytest.fixture(params=[each for each in LEVELS if each.name != BASE], ids=lambda each: each.name)
def level(request):
    if request.param.machine == platform.machine():
        if request.param not in levels():
            pytest.skip("this processor does not run it")
    else:
        for tool in (CROSS, QEMU):
            if not shutil.which(tool):
                pytest.skip(f"no {tool} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    return request.param


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products(kind, level, built_libraries, tmp_path):
    recording = PRODUCTS[kind]()
    actual = results(recording, "decode", level, built_libraries, tmp_path)
    same(actual, base(recording, "decode", built_libraries, tmp_path), kind, level)


@pytest.mark.parametrize("kind", STEPS)
def test_steps(kind, level, built_libraries, tmp_path):
    """Norms, rotary positions, attention over all kinds of cache, activations, soft caps."""
    recording = STEPS[kind]()
    actual = results(recording, "decode", level, built_libraries, tmp_path)
    same(actual, base(recording, "decode", built_libraries, tmp_path), kind, level)


@pytest.mark.parametrize("kind", GGML)
def test_searches(kind, level, built_libraries, tmp_path):
    recording = cases.searches(kind)
    actual = results(recording, "ggml_search", level, built_libraries, tmp_path)
    same(actual, base(recording, "ggml_search", built_libraries, tmp_path))


def same(computed, expected, kind="", level=None):
    assert all(each.any() for each in expected)
    if level and "bf16" in level.name and kind in HALVES:
        for ours, theirs in zip(computed, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=HALVES[kind] * float(theirs.abs().max()))
    else:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(computed, expected, strict=True))


def test_what_is_replayed_is_what_python_calls(built_libraries, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTAR_KERNELS_TARGET", "x86-64-v3")
    packed, recording = next(cases.packed_weights("int4")), cases.products("int4")
    with ThreadPool(2) as team:
        ours = team.multiply(cases.normal(1, 256, seed=1), packed, bits=8)
    assert torch.equal(ours, base(recording, "decode", built_libraries, tmp_path)[0])
