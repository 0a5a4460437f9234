"""The kernels are found where triton is, and take the operators' places."""

import inspect
import subprocess
import sys

import pytest
import torch

from attar.kernels import triton as kernels


def test_kernels_are_for_cuda_and_for_the_interpreter(monkeypatch):
    monkeypatch.setattr(kernels, "_installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels.available(torch.device("cuda")) and not kernels.available(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.available(torch.device("cpu"))
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    assert not kernels.available(torch.device("cuda"))


def test_importing_the_package_does_not_import_triton():
    code = "import sys, torch; from attar.kernels import triton; triton.available(torch.device('cuda'))"
    code += "; print('triton.language' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_operator_gets_a_kernel_of_its_arguments():
    pytest.importorskip("triton")
    from attar.kernels.device import attention, elementwise, products
    from attar.kernels.triton import experts, fused, gemm, paged, route

    kernels.register()
    owners = dict.fromkeys(("packed_product", "dense_product"), gemm)
    owners |= dict.fromkeys(("experts_product", "experts_dense"), experts)
    owners |= dict.fromkeys(("rope_write", "add_norm", "gated"), fused) | {
        "paged_attention": paged,
        "route": route,
    }
    names = {
        name
        for part in (attention, elementwise, products)
        for name in vars(part)
        if f"_{name}_shape" in vars(part)
    }
    assert names == set(owners)
    for name, module in owners.items():
        operation = next(
            getattr(part, name) for part in (attention, elementwise, products) if hasattr(part, name)
        )
        assert [a.name for a in operation._schema.arguments] == list(
            inspect.signature(getattr(module, name)).parameters
        )
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"attar::{name}", "CUDA")
