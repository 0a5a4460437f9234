"""Students of a mixture: dense ones, and mixtures with and without a loss that balances their routers.

    python benchmarks/mixture_students.py [--model attar:tiny-moe|DIR] [--parts dense routers] [--steps 40]
        [--rows 4] [--balances 0 0.01 0.1] [--tokens 16384]

    dense      a student without experts, made each way and trained for one step and for ``--steps``:
               parameters, perplexity, KL to the mixture in nats a token, next-token accuracy kept
    routers    the mixture with 6 of its experts (REAP), recovered with each weight of the load-balancing
               loss: the same, and the share of choices that the most and the least used expert of a layer
               have, mean over layers; 1 / 6 each where they are used alike

Steps are of ``--rows`` x 256 tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import attar
from attar.checkpoint import open_checkpoint
from attar.data.packing import pack
from attar.distillation.students.dense import expert_use
from attar.models.anatomy.discover import discover
from attar.models.loading.load import load_model, load_tokenizer


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="attar:tiny-moe")
    parser.add_argument("--parts", nargs="+", choices=("dense", "routers"), default=["dense", "routers"])
    parser.add_argument("--ways", nargs="+", default=["active", "mean", "used"])
    parser.add_argument("--balances", nargs="+", type=float, default=[0.0, 0.01, 0.1])
    parser.add_argument("--keep", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16_384)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if "dense" in options.parts:
            dense(options, Path(folder))
        if "routers" in options.parts:
            routers(options, Path(folder))


def training(options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """What all trainings have."""
    return {"steps": steps, "batch_size": options.rows, "sequence_length": 256}


def dense(options: argparse.Namespace, folder: Path) -> None:
    """A row for each way and number of steps."""
    print("| student | steps | parameters, M | perplexity | KL, nats | accuracy kept |")
    print("|---|---:|---:|---:|---:|---:|")
    print(f"| the mixture | | {cells(options, options.model)} |", flush=True)
    for way in options.ways:
        for steps in (1, options.steps):
            out = folder / f"{way}-{steps}"
            student = attar.distill(options.model, out, moe_to_dense=way, **training(options, steps))
            print(f"| {way} | {steps} | {cells(options, student.path)} |", flush=True)


def routers(options: argparse.Namespace, folder: Path) -> None:
    """A row for each weight of the loss."""
    pruned = attar.prune(
        options.model, folder / "pruned", method="experts", experts=options.keep, samples=options.samples
    )
    print(
        "| router-loss balance | parameters, M | perplexity | KL, nats | accuracy kept | most, least used |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    print(f"| not recovered | {cells(options, pruned.path)} | {shares(pruned.path)} |", flush=True)
    for balance in options.balances:
        settings = {
            **training(options, options.steps),
            "router_loss": [f"balance:{balance}"] if balance else [],
        }
        out = attar.recover(pruned.path, folder / f"balance-{balance}", teacher=options.model, **settings)
        print(f"| {balance:g} | {cells(options, out.path)} | {shares(out.path)} |", flush=True)


def cells(options: argparse.Namespace, model: str | Path) -> str:
    """Parameters, perplexity, KL and accuracy kept."""
    result = attar.evaluate(
        model, reference=options.model, tokens=options.tokens, runner="transformers", speed=False
    )
    checkpoint = open_checkpoint(model)
    count = sum(torch.Size(info.shape).numel() for info in checkpoint.tensors.values()) / 1e6
    kept = "–" if result.quality_kept is None else f"{100 * result.quality_kept:.1f} %"
    return f"{count:.2f} | {result.perplexity:.3f} | {result.kl_mean:.4f} | {kept}"


def shares(model: str | Path) -> str:
    """Of the choices in a layer, those of its most and of its least used expert; held-out text."""
    checkpoint = open_checkpoint(model)
    loaded = load_model(checkpoint, dtype=torch.float32)
    mixtures = [block.mixture for block in discover(loaded).blocks if block.mixture is not None]
    rows = pack(load_tokenizer(checkpoint), "python-stdlib", "evaluation", length=256, rows=32, seed=0).rows
    parts = [use.chosen / use.chosen.sum() for use in expert_use(loaded, mixtures, rows.split(8))]
    most, least = (torch.stack([ends(part) for part in parts]).mean() for ends in (torch.max, torch.min))
    return f"{100 * most:.0f} %, {100 * least:.0f} %"


if __name__ == "__main__":
    main()
