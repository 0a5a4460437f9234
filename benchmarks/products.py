"""Microseconds of a product of a packed weight and a few tokens, one thread: the shortest of many runs.

python benchmarks/products.py [--size 1024] [--tokens 1 2 3 4 5 6 7 8]
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from attar.kernels.packed import PackedWeight, pack
from attar.kernels.product import ThreadPool

RUNS = 60


def microseconds(pool: ThreadPool, x: Tensor, packed: PackedWeight) -> float:
    """The shortest run."""
    best = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter()
        pool.multiply(x, packed)
        best = min(best, time.perf_counter() - began)
    return 1e6 * best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the weight")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6, 7, 8, 12])
    args = parser.parse_args()
    torch.manual_seed(0)
    weight = torch.randn(args.size, args.size)
    packed = {"bf16": pack(weight, "bf16")}
    packed |= {
        f"{kind}, groups of {group}": pack(weight, kind, group=group)
        for kind in ("int8", "int4")
        for group in (32, 128)
    }
    print(f"| tokens | {' | '.join(map(str, args.tokens))} |\n|---{'|---' * len(args.tokens)}|")
    with ThreadPool(1) as pool:
        for kind, one in packed.items():
            times = [microseconds(pool, torch.randn(count, args.size), one) for count in args.tokens]
            print(f"| {kind} | {' | '.join(f'{each:.0f}' for each in times)} |", flush=True)


if __name__ == "__main__":
    main()
