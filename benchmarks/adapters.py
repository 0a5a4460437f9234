"""Recovery of a quantized model by low-rank adapters over frozen codes, on held-out text.

    python benchmarks/adapters.py [--model attar:tiny] [--bits 2 3] [--starts zero error] [--rank 16]

A row for each number of bits and each start of the adapters: KL to the original in nats a token and
perplexity, of the rounded model (groups of 64) and after ``attar recover --adapter-rank``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import attar


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--starts", nargs="+", default=["zero", "error"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    print(f"{'bits':>4}  {'model':<28}{'KL':>9}{'perplexity':>12}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for bits in arguments.bits:
            measure_bits(bits, Path(folder), arguments)


def measure_bits(bits: int, folder: Path, arguments: argparse.Namespace) -> None:
    """The rows of one number of bits."""
    model, rounded = arguments.model, folder / f"w{bits}"
    began = time.perf_counter()
    attar.quantize(model, rounded, scheme=f"W{bits}A16", group_size=64, check_tokens=0)
    row(bits, "rounded", rounded, began, arguments)
    for init in arguments.starts:
        began, out = time.perf_counter(), folder / f"w{bits}-{init}"
        attar.recover(
            rounded,
            out,
            teacher=model,
            adapter_rank=arguments.rank,
            adapter_init=init,
            steps=arguments.steps,
            sequence_length=arguments.length,
        )
        row(bits, f"rank {arguments.rank}, start at {init}", out, began, arguments)


def row(bits: int, name: str, path: Path, began: float, arguments: argparse.Namespace) -> None:
    """Measure a model and print its row."""
    seconds = time.perf_counter() - began
    measured = attar.evaluate(path, reference=arguments.model, tokens=arguments.tokens, speed=False)
    print(
        f"{bits:>4}  {name:<28}{measured.kl_mean:>9.4f}{measured.perplexity:>12.3f}{seconds:>9.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
