"""Sources compile for every level of this family; compiled for lesser processors, products and a whole step
are what this one's are."""

import itertools
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from attar.kernels import build
from attar.kernels.build import load
from attar.kernels.levels import LEVELS
from attar.kernels.packed import pack, pack_codes
from attar.kernels.product import ThreadPool, reference
from attar.runtime.runner.compiled import compiled
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.cases import mostly_slow
from tests.kernels.test_product import case, rounded

SOURCES = sorted(path.stem for path in build.SOURCES.glob("*.cpp"))
TARGETS = ("x86-64", "x86-64-v3", "x86-64-v4")
FEATURES = {
    "x86-64": (),
    "x86-64-v3": ("avx2", "fma", "f16c"),
    "x86-64-v4": ("avx512bw", "avx512dq", "avx512vl"),
}


@pytest.mark.skipif(not any(map(build.shutil.which, build.COMPILERS)), reason="no C++ compiler")
@pytest.mark.parametrize("name", mostly_slow(SOURCES, ["decode"]))
def test_every_level_compiles(name):
    flags = [level.flags for level in LEVELS if level.machine == platform.machine()]
    for each in [build.NATIVE[:1], *flags]:
        command = [build._compiler(), *build.FLAGS[:1], "-fsyntax-only", "-Wno-psabi", *each]
        ended = subprocess.run([*command, build.SOURCES / f"{name}.cpp"], capture_output=True, text=True)
        assert not ended.returncode, (each, ended.stderr)


@pytest.fixture(params=TARGETS)
def target(request, monkeypatch):
    """Libraries are those of another target."""
    if platform.machine() != "x86_64":
        pytest.skip("not of this family")
    try:
        messages = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        messages = []
    if any(feature not in messages for feature in FEATURES[request.param]):
        pytest.skip("this processor does not run it")
    monkeypatch.setenv("ATTAR_KERNELS_TARGET", request.param)
    if load("decode") is None:
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a library takes minutes to compile beside other work
def test_products_and_a_step(target):
    torch.manual_seed(0)
    w, x = torch.randn(70, 256) * 0.05, torch.randn(11, 256)
    with ThreadPool(2) as team:
        for kind, bits in itertools.product(("int4", "int8"), (8, 16)):
            packed = pack(w, kind, group=64)
            torch.testing.assert_close(
                team.multiply(x, packed, bits=bits),
                reference(rounded(x, 64, bits), packed),
                rtol=1e-4,
                atol=1e-4,
            )
            codes = torch.randint(0, 16 if kind == "int4" else 256, (70, 256), dtype=torch.uint8)
            scales, zeros = torch.rand(70, 16) * 0.01, torch.rand(70, 16) * 15
            packed = pack_codes(codes, scales, zeros, kind=kind)
            torch.testing.assert_close(
                team.multiply(x, packed, bits=bits),
                reference(rounded(x, 16, bits), packed),
                rtol=1e-4,
                atol=1e-4,
            )
            one = case(kind, bits, 32, tokens=11, zeros="middle")
            assert torch.equal(one.product(team, bits), one.expected())
        order = torch.rand(70, 64, 4, generator=torch.Generator().manual_seed(1)).argsort(2).argsort(2)
        sparse = w * (order.flatten(1) < 2)
        for kind, bits in itertools.product(("int4", "int8", "bf16"), (8, 16)):
            forms = [pack(sparse, kind, group=64, pays=pays) for pays in (lambda kind: True, None)]
            computed, dense = (team.multiply(x, packed, bits=bits) for packed in forms)
            assert forms[0].form == "2:4" and torch.equal(computed, dense), (kind, bits)
        packed = pack(w, "bf16")
        expected = reference(x.bfloat16(), packed)
        torch.testing.assert_close(team.multiply(x, packed, bits=8), expected, rtol=1e-4, atol=1e-4)
    same_steps()


def same_steps():
    """Every kind of keys and values against transformers."""
    model = tiny_models.build("llama3")
    ids = torch.randint(2, tiny_models.VOCABULARY, (40,)).tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
        expected = model(torch.tensor([ids])).logits[0].float()
    settings = {"blocks": 4, "threads": 2}
    for more, atol in (
        ({"kv_dtype": "float32", "bits": 16}, 2e-4),
        ({"bits": 8}, 0.05),
        ({"kv_dtype": "int8", "bits": 8}, 0.1),
        ({"kv_dtype": "int4", "bits": 16}, 1.0),
    ):
        runner = compiled(model.config, model.state_dict(), **settings, **more)
        rows = [runner.run(StepInput(ids[:33], (TokenSpan(0, 0, 33, (2, 0, 1), 33),)))]
        rows.append(runner.run(StepInput(ids[33:], (TokenSpan(0, 33, 40, (2, 0, 1), 7),))))
        torch.testing.assert_close(torch.cat(rows), expected, rtol=0, atol=atol)
        runner.close()
