"""The kernels of a step and of GPTQ on a device: what `make gpu` runs of them.

    python benchmarks/gpu_kernels.py {operators,speed,gptq} [--device cuda] [--out FILE]

operators   each product on six shapes and five widths beside float64: the largest error, relative to the
            largest output, and whether a row has the same bits twice, and alone
speed       GB/s of weights that are read, at 1, 8 and 64 rows, by attar's kernels, F.linear in bfloat16,
            torch's int8 and FP8 products, and Humming, where it is installed; `times` is F.linear's time
            divided by theirs
gptq        seconds of GPTQ of the matrices of one layer of an 8 B model, times its 32 layers

With --device cpu the shapes are tiny, and the operators' torch bodies run: it shows that the part ends, and
no speed. Weights are taken in turn from more memory than a card's cache holds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from attar.kernels import triton
from attar.kernels.device import products
from attar.kernels.device.planes import join
from attar.quantization.grids import IntGrid
from attar.quantization.hessian import Hessian
from attar.quantization.methods.gptq import gptq
from attar.runtime.kernel_times import KernelShape
from attar.runtime.runner.device.layout import DENSE
from attar.runtime.runner.device.product_times import (
    candidates,
    label,
    median_seconds,
    product_calls,
)

WIDTHS = (2, 3, 4, 6, 8)
SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (576, 1536))
SPEED_WIDTHS, GROUP = (2, 3, 4, 8), 128
LAYER = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
LAYER |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
LAYERS = 32
Row = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="OUT.md gets the table, after every row")
    options = parser.parse_args()
    device = torch.device(options.device)
    if triton.available(device):
        triton.register()
    torch.manual_seed(0)
    lines = [f"Kernels on {name_of(device)}: {options.part}", ""]
    for number, row in enumerate(PARTS[options.part](device)):
        lines += [f"| {' | '.join(row)} |", *(["|" + "---|" * len(row)] if not number else [])]
        print(lines[-1] if number else "\n".join(lines), flush=True)
        if options.out is not None:
            options.out.with_suffix(".md").write_text("\n".join([*lines, ""]))


def name_of(device: torch.device) -> str:
    """The card, or the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def shrunk(shape: tuple[int, int], device: torch.device) -> tuple[int, int]:
    """A shape as it is on a card, a sixteenth of it elsewhere."""
    return shape if device.type == "cuda" else (max(shape[0] // 16, 48), max(shape[1] // 16, GROUP))


def linear(N: int, K: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes (N, K), their words and their scales."""
    codes = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, device=device)
    scales = torch.rand(K // GROUP, N, device=device).add(0.5).mul(2.0**-bits / K**0.5).bfloat16()
    return codes, join(codes, bits), scales


def operators(device: torch.device) -> Iterator[Row]:
    """Errors beside float64."""
    yield "N x K", "bits", "1 row", "8 rows", "64 rows", "same bits"
    for shape in SHAPES:
        N, K = shrunk(shape, device)
        for bits in WIDTHS:
            codes, words, scales = linear(N, K, bits, device)
            meaning = (codes.double() - (1 << bits - 1)) * scales.double().T.repeat_interleave(GROUP, 1)
            x = torch.randn(64, K, device=device).bfloat16()
            expected = x.double() @ meaning.T

            def product(
                rows: Tensor, words: Tensor = words, scales: Tensor = scales, bits: int = bits
            ) -> Tensor:
                return products.packed_product(rows, words, scales, None, None, bits, torch.float32)

            errors, outputs = [], {M: product(x[:M].contiguous()) for M in (1, 8, 64)}
            for M, y in outputs.items():
                errors.append(f"{float((y - expected[:M]).abs().max() / expected.abs().max()):.1e}")
            repeated = torch.equal(product(x), outputs[64])
            alone = all(torch.equal(y, outputs[64][:M]) for M, y in outputs.items())
            yield (
                f"{N} x {K}",
                str(bits),
                *errors,
                "yes" if repeated and alone else f"twice {repeated}, alone {alone}",
            )


def speed(device: torch.device) -> Iterator[Row]:
    """GB/s of weights at 1, 8 and 64 rows, by each kernel that the card has."""
    N, K = shrunk((8192, 8192), device)
    yield f"{N} x {K}", "rows", "us", "GB/s", "times"
    plain = {}
    for bits in (DENSE, *SPEED_WIDTHS):
        nbytes = N * K * bits // 8 + (0 if bits == DENSE else 2 * N * K // GROUP)
        for kernel in speed_kernels(bits, device):
            for M in (1, 8, 64):
                shape = KernelShape(label(bits, kernel), N, K, M)
                try:
                    took = median_seconds(shape, product_calls(kernel, bits, shape, device), device)
                except Exception as error:
                    yield shape.format, str(M), f"failed: {type(error).__name__} {str(error)[:80]}", "", ""
                    continue
                plain.setdefault(M, took)
                numbers = f"{1e6 * took:.1f}", f"{nbytes / took / 1e9:.0f}", f"{plain[M] / took:.2f}"
                yield shape.format, str(M), *numbers


def speed_kernels(bits: int, device: torch.device) -> list[str]:
    """F.linear first, with which the others are compared; without a card the operators' bodies."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    installed = triton.available(device) or device.type == "cpu"
    names = candidates(bits, capability, triton=installed, humming=True)
    return sorted(names, key=lambda name: name != "cublas")


def gptq_layer(device: torch.device) -> Iterator[Row]:
    """Seconds of each matrix; Hessians are made of 8,192 random tokens, and not timed."""
    yield "matrix", "N x K", "seconds", "of a round to nearest's error"
    total, grid = 0.0, IntGrid(4, GROUP)
    for name, shape in LAYER.items():
        N, K = shrunk(shape, device)
        H = Hessian(K)
        H.add(
            torch.randn(8192 if device.type == "cuda" else 512, K, device=device)
            * torch.rand(K, device=device)
        )
        weight, second = torch.randn(N, K, device=device) * 0.02, H.value()
        for _ in range(2 if name == "q" else 1):  # kernels are compiled at the first
            wait(device)
            began = time.perf_counter()
            quantized = gptq(weight, second, grid).quantized
            wait(device)
            took = time.perf_counter() - began
        total += took
        nearest = grid.decode(grid.encode(*tiles(weight, grid)), tiles(weight, grid)[1]).view_as(weight)
        errors = [output_error(w - weight, second) for w in (quantized.dequantize(), nearest)]
        yield name, f"{N} x {K}", f"{took:.2f}", f"{errors[0] / errors[1]:.3f}"
    yield f"{LAYERS} layers", "", f"{LAYERS * total:.0f}", ""


def tiles(weight: Tensor, grid: IntGrid) -> tuple[Tensor, object]:
    """A weight in groups (N, G, c) and their parameters."""
    parameters = grid.choose(weight)
    return weight.unflatten(1, (-1, GROUP)), parameters.map(lambda value: value[..., None])


def output_error(difference: Tensor, H: Tensor) -> float:
    """tr(D H D^T)."""
    return float(((difference.float() @ H) * difference).sum())


def wait(device: torch.device) -> None:
    """For all that was started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PARTS = {"operators": operators, "speed": speed, "gptq": gptq_layer}

if __name__ == "__main__":
    main()
