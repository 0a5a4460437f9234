"""Which type products are computed in: what the processor has, what oneDNN and torch are set to use, and
what a run began with."""

import os
import subprocess
import sys

import pytest
import torch

from attar.models.loading import device
from attar.models.loading.device import has_bfloat16, resolve

CPU = torch.device("cpu")
PROGRAM = """
import torch
from attar.models.loading.device import has_bfloat16
print(has_bfloat16(torch.device('cpu')))
"""


@pytest.fixture
def native(monkeypatch):
    """A processor with AVX-512 BF16, whatever this one is."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(device, "_onednn_has_bfloat16", lambda: True)
    return monkeypatch


def test_bfloat16_where_processor_and_libraries_have_it(native):
    assert has_bfloat16(CPU) and has_bfloat16(torch.device("cuda"))
    native.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert not has_bfloat16(CPU) and has_bfloat16(torch.device("cuda"))


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_limit_of_onednn_is_obeyed(native, name):
    for limit, wanted in [("AVX2", 0), ("avx512_core_vnni", 0), ("AVX512_CORE_BF16", 1), ("ALL", 1)]:
        native.setenv(name, limit)
        assert has_bfloat16(CPU) == bool(wanted)


def test_a_limit_of_torch_is_obeyed(native):
    native.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not has_bfloat16(CPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        {"ATEN_CPU_CAPABILITY": "avx2"},
    ],
)
def test_imitated_processors_have_none(limits):
    """In a process that starts with the limits, as torch and oneDNN read them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | limits, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


def test_what_is_asked_for_is_done(native):
    assert [resolve(asked, CPU) for asked in ("auto", "bf16", "fp32")] == ["bf16", "bf16", "fp32"]
    native.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert [resolve(asked, CPU) for asked in ("auto", "bf16", "fp32")] == ["fp32", "bf16", "fp32"]


@pytest.mark.parametrize("began", ["bf16", "fp32"])
def test_a_run_keeps_what_it_began_with(native, tmp_path, began):
    native.setattr(device, "has_bfloat16", lambda device: began == "bf16")
    assert resolve("auto", CPU, tmp_path / "work") == began
    native.setattr(device, "has_bfloat16", lambda device: began != "bf16")
    assert resolve("auto", CPU, tmp_path / "work") == began
    assert resolve("auto", CPU, tmp_path / "other") != began
    assert resolve("fp32", CPU, tmp_path / "work") == "fp32"
