"""The search for scales and codes of llama.cpp's block formats: ours, llama.cpp's, and our fallback in torch.

    python benchmarks/ggml_search.py [--weights normal heavy attar:tiny|DIR] [--kinds Q4_K ...] [--rounds 3]
        [--efforts 0 1 2 4 8]

Every line is one format on the same weights (at most --size of them), on one thread, without importance
("plain": the error is the squared error) or with one (the error is weighted by it; importances are
exp(normal), one for each input). Rounds are interleaved; the smallest time is printed.

    ns       nanoseconds a weight: scales and codes. llama.cpp's time includes putting codes into bytes, which
             takes us "pack" more
    error    sum v (w - w')^2 / sum v w^2, of what a reader of the file decodes

llama.cpp is called through the library of llama-cpp-python, if its environment stands in $ATTAR_PEERS
(``benchmarks/peers/environments.py llama-cpp`` builds it); without it our two columns are printed alone.
``--efforts`` prints what each effort of the compiled search costs and gains instead.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from peers.environments import folder
from torch import Tensor

from attar.checkpoint import open_checkpoint
from attar.formats.gguf.blocks import pack
from attar.kernels import ggml_search as kernel
from attar.kernels.build import load
from attar.quantization.grids import GGML
from attar.quantization.grids.ggml_search import weights as normalized

Timed = tuple[float, Tensor]  # seconds, decoded weights


class LlamaCpp:
    """The quantizers and dequantizers of libggml-base."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    @classmethod
    def find(cls) -> LlamaCpp | None:
        """The library in the environment ``llama-cpp``, or None."""
        paths = sorted((folder() / "llama-cpp").glob("lib/python*/site-packages/**/libggml-base.*"))
        paths = [path for path in paths if path.suffix in (".so", ".dylib")]
        return cls(paths[0]) if paths else None

    def __call__(self, kind: str, weight: Tensor, importance: Tensor | None) -> Timed:
        """Quantize a weight (N, K)."""
        name = kind.lower().replace("_k", "_K")
        quantize = getattr(self.library, f"quantize_{name}")
        dequantize = getattr(self.library, f"dequantize_row_{name}")
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        quantize.argtypes = [pointer, pointer, whole, whole, pointer]
        dequantize.argtypes = [pointer, pointer, whole]
        layout, (rows, columns) = GGML[kind].layout, weight.shape
        data = torch.empty(weight.numel() // layout.block * layout.size, dtype=torch.uint8)
        decoded = torch.empty_like(weight)
        matrix = None if importance is None else importance.data_ptr()
        started = time.perf_counter()
        quantize(weight.data_ptr(), data.data_ptr(), rows, columns, matrix)
        seconds = time.perf_counter() - started
        dequantize(data.data_ptr(), decoded.data_ptr(), weight.numel())
        return seconds, decoded


def ours(kind: str, weight: Tensor, importance: Tensor | None) -> Timed:
    """The compiled search."""
    os.environ.pop("ATTAR_KERNELS", None)
    started = time.perf_counter()
    parameters = GGML[kind].search(weight, importance)
    return time.perf_counter() - started, parameters.dequantize()


def fallback(kind: str, weight: Tensor, importance: Tensor | None) -> Timed:
    """The search in torch."""
    os.environ["ATTAR_KERNELS"] = "off"
    started = time.perf_counter()
    parameters = GGML[kind].search(weight, importance)
    return time.perf_counter() - started, parameters.dequantize()


def packing(kind: str, weight: Tensor) -> float:
    """Seconds to put codes and scales into the file's bytes."""
    parameters = GGML[kind].search(weight)
    started = time.perf_counter()
    pack(kind, parameters.codes, dict(parameters.parameters.stored))
    return time.perf_counter() - started


def error(decoded: Tensor, weight: Tensor, importance: Tensor | None) -> float:
    """Relative squared error, in float64."""
    v = 1.0 if importance is None else importance.double()
    lost, whole = (decoded.double() - weight).square() * v, weight.double().square() * v
    return float(lost.sum() / whole.sum())


def some_weights(name: str, size: int) -> Tensor:
    """(N, K) float32: normal, normal times exp(normal / 2), or matrices of a checkpoint of one width."""
    generator = torch.Generator().manual_seed(0)
    if name in ("normal", "heavy"):
        weight = torch.randn(size // 1024, 1024, generator=generator) * 0.02
        spread = torch.exp(0.5 * torch.randn(size // 1024, 1024, generator=generator))
        return weight * spread if name == "heavy" else weight
    checkpoint = open_checkpoint(name)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items() if name.endswith("proj.weight")}
    width = max(shape[1] for shape in shapes.values() if shape[1] % 256 == 0)
    names = [name for name, shape in shapes.items() if shape[1] == width]
    return torch.cat([checkpoint.load(name).float() for name in names])[: size // width].contiguous()


def compare(weight: Tensor, kinds: list[str], rounds: int) -> None:
    """Print a table."""
    theirs = LlamaCpp.find()
    ways: dict[str, Callable[[str, Tensor, Tensor | None], Timed]] = {"attar": ours}
    ways |= {"llama.cpp": theirs} if theirs else {}
    ways["torch"] = fallback
    drawn = torch.exp(torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1)))
    names = list(ways)
    print(f"{'':<17}" + "".join(f"{name + ' ns':>14}" for name in names) + f"{'pack ns':>10}", end="")
    print("".join(f"{name + ' error':>18}" for name in names))
    for kind in kinds:
        for title, importance in (("plain", None), ("weighted", drawn)):
            runs = [
                {name: way(kind, weight, importance) for name, way in ways.items()} for _ in range(rounds)
            ]
            nanoseconds = [1e9 * min(run[name][0] for run in runs) / weight.numel() for name in names]
            errors = [error(runs[0][name][1], weight, importance) for name in names]
            os.environ.pop("ATTAR_KERNELS", None)
            packed = 1e9 * min(packing(kind, weight) for _ in range(2)) / weight.numel()
            print(f"{kind:<8}{title:<9}" + "".join(f"{ns:>14.1f}" for ns in nanoseconds), end="")
            print(f"{packed:>10.1f}" + "".join(f"{one:>18.4e}" for one in errors), flush=True)


def curve(weight: Tensor, kinds: list[str], efforts: list[int], rounds: int) -> None:
    """Print what each effort costs, and its error over that of the default."""
    drawn = torch.exp(torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1)))
    print(f"{'effort':<18}" + "".join(f"{effort:>16}" for effort in efforts))
    for kind in kinds:
        for title, importance in (("plain", None), ("weighted", drawn)):
            v = normalized(importance, weight.shape[1], weight.device)
            usual = error(ours(kind, weight, importance)[1], weight, importance)
            cells = []
            for effort in efforts:
                seconds = []
                for _ in range(rounds):
                    started = time.perf_counter()
                    result = kernel.search(kind, GGML[kind].layout, weight, v, codes=True, effort=effort)
                    seconds.append(time.perf_counter() - started)
                assert result is not None
                decoded = GGML[kind].quantize(weight, GGML[kind].parameters(result.stored)).dequantize()
                ratio = error(decoded, weight, importance) / usual
                cells.append(f"{1e9 * min(seconds) / weight.numel():>7.1f} ns {ratio:.3f}")
            print(f"{kind:<9}{title:<9}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", default=["normal", "heavy", "attar:tiny"])
    parser.add_argument("--kinds", nargs="+", default=list(GGML), choices=list(GGML))
    parser.add_argument("--size", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--efforts", nargs="+", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if load("ggml_search") is None:
        print("no compiled kernel: our columns are those of the fallback")
    for name in args.weights:
        weight = some_weights(name, args.size)
        print(f"\n{name}: {weight.shape[0]} x {weight.shape[1]}")
        if args.efforts:
            curve(weight, args.kinds, args.efforts, args.rounds)
        else:
            compare(weight, args.kinds, args.rounds)


if __name__ == "__main__":
    main()
