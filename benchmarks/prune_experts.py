"""What experts cost: a mixture with fewer of them, and with fewer active, by each criterion.

    python benchmarks/prune_experts.py [--model attar:tiny-moe|DIR] [--keep 6 4] [--active 1]

Perplexity and KL to the original in nats a token on held-out text, next-token accuracy kept, and size.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import attar
from attar.checkpoint import open_checkpoint

CRITERIA = ("reap", "frequency", "gates", "cluster")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="attar:tiny-moe")
    parser.add_argument("--criteria", nargs="+", choices=CRITERIA, default=list(CRITERIA))
    parser.add_argument("--keep", nargs="+", type=int, default=[6, 4], help="experts of a layer")
    parser.add_argument("--active", nargs="*", type=int, default=[1], help="experts of a token, none removed")
    parser.add_argument("--samples", type=int, default=64, help="calibration rows of 256 tokens")
    parser.add_argument("--tokens", type=int, default=16_384, help="held-out")
    options = parser.parse_args()
    cases = [
        ({"experts": keep, "criterion": name}, name) for keep in options.keep for name in options.criteria
    ]
    cases += [({"ratio": 0.0, "active": active}, f"{active} active") for active in options.active]
    print(
        "| experts | criterion | MB | perplexity | KL, nats | accuracy kept |\n|---:|---|---:|---:|---:|---:|"
    )
    measure(options, options.model, "original", "")
    for settings, name in cases:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "pruned"
            pruned = attar.prune(options.model, out, method="experts", samples=options.samples, **settings)
            kept = pruned.card.details["kept"]["kept"]
            measure(options, pruned.path, str(kept), name)


def measure(options: argparse.Namespace, model: str | Path, experts: str, name: str) -> None:
    """Print a row."""
    result = attar.evaluate(
        model, reference=options.model, tokens=options.tokens, runner="transformers", speed=False
    )
    size = open_checkpoint(model).nbytes / 1e6
    kept = "–" if result.quality_kept is None else f"{100 * result.quality_kept:.1f} %"
    print(
        f"| {experts} | {name} | {size:.1f} | {result.perplexity:.3f} | {result.kl_mean:.4f} | {kept} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
