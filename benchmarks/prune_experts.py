"""What experts cost: a mixture with fewer of them, and with fewer active, by each criterion, before and after
a short recovery from the original.

    python benchmarks/prune_experts.py [--model attar:tiny-moe|DIR] [--keep 6 4] [--active 1] [--steps 0]
        [--rows 4] [--random 1]

Perplexity and KL to the original in nats a token on held-out text, next-token accuracy kept, and size. Rows
``random`` are the control: experts drawn without a look at them. Recovery: ``--steps`` of ``--rows`` x 256
tokens, the same for all.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import attar
from attar.checkpoint import open_checkpoint
from attar.pruning.experts.grouping import SCORES
from attar.pruning.experts.mixtures import MixtureSizes

CRITERIA = ("reap", "output", "frequency", "gates", "cluster")
HEAD = "| experts | criterion | MB | perplexity | KL, nats | accuracy kept |"


def main() -> None:
    """Print the table."""
    options = parse()
    cases: list[tuple[dict[str, Any], str]] = []
    for keep in options.keep:
        cases += [({"experts": keep, "criterion": name}, name) for name in options.criteria]
        cases += [({"experts": keep, "criterion": "random"}, f"random {n}") for n in range(options.random)]
    cases += [({"ratio": 0.0, "active": active}, f"{active} active") for active in options.active]
    recovered = " recovered: KL | accuracy kept |" if options.steps else ""
    print(HEAD + recovered)
    print("|---:|---|---:|---:|---:|---:|" + ("---:|---:|" if options.steps else ""))
    first = cells(options, options.model)
    count = MixtureSizes.of(open_checkpoint(options.model).config).experts
    print(f"| {count} | original | {first} |", flush=True)
    for settings, name in cases:
        with tempfile.TemporaryDirectory() as folder:
            pruned = prune(options, Path(folder) / "pruned", settings, name)
            row = f"| {pruned.card.details['kept']['kept']} | {name} | {cells(options, pruned.path)} |"
            if options.steps:
                result = attar.recover(
                    pruned.path,
                    Path(folder) / "recovered",
                    teacher=options.model,
                    steps=options.steps,
                    batch_size=options.rows,
                    sequence_length=256,
                )
                row += f" {' | '.join(cells(options, result.path).split(' | ')[2:])} |"
            print(row, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="attar:tiny-moe")
    parser.add_argument("--criteria", nargs="*", choices=CRITERIA, default=list(CRITERIA))
    parser.add_argument("--keep", nargs="*", type=int, default=[6, 4], help="experts of a layer")
    parser.add_argument("--active", nargs="*", type=int, default=[1], help="experts of a token, none removed")
    parser.add_argument("--random", type=int, default=1, help="draws of the control")
    parser.add_argument("--samples", type=int, default=64, help="calibration rows of 256 tokens")
    parser.add_argument("--tokens", type=int, default=16_384, help="held-out")
    parser.add_argument("--steps", type=int, default=0, help="of the recovery; 0: none")
    parser.add_argument("--rows", type=int, default=4, help="of a step of the recovery")
    return parser.parse_args()


def prune(options: argparse.Namespace, out: Path, settings: dict[str, Any], name: str) -> Any:
    """A pruned checkpoint; for the control the scores of one criterion are drawn."""
    if settings.get("criterion") != "random":
        return attar.prune(options.model, out, method="experts", samples=options.samples, **settings)
    generator = torch.Generator().manual_seed(int(name.split()[1]))
    drawn = {"frequency": lambda of: torch.rand(of.frequency.shape, generator=generator)}
    with patch.dict(SCORES, drawn):
        return attar.prune(
            options.model, out, method="experts", samples=2, **{**settings, "criterion": "frequency"}
        )


def cells(options: argparse.Namespace, model: str | Path) -> str:
    """MB, perplexity, KL and accuracy kept."""
    result = attar.evaluate(
        model, reference=options.model, tokens=options.tokens, runner="transformers", speed=False
    )
    size = open_checkpoint(model).nbytes / 1e6
    kept = "–" if result.quality_kept is None else f"{100 * result.quality_kept:.1f} %"
    return f"{size:.1f} | {result.perplexity:.3f} | {result.kl_mean:.4f} | {kept}"


if __name__ == "__main__":
    main()
