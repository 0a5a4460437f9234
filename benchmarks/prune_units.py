"""The part of ``benchmarks/prune.py`` about units: structures at equal size, before and after recovery."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from peers.launch import OURS, Method, parse_method
from prune_cells import Bench, markdown, number

import attar
from attar.checkpoint import Checkpoint, open_checkpoint

STRUCTURES = ("neurons", "heads", "hidden", "layers", "mixed")


def units(bench: Bench) -> str:
    """A table for each share of parameters removed: the structures in the order of their recovered KL."""
    args = bench.args
    parts = [
        f"### {bench.checkpoint.name}: {args.samples} x {args.length} calibration tokens, {args.tokens} "
        f"held-out; recovery: {args.steps} steps of 8 x 256 tokens from the original"
    ]
    for share in args.ratios:
        done, impossible = [], []
        for text in args.methods or STRUCTURES:
            method = parse_method(OURS, text)
            most, ratio = amount(bench.checkpoint.config, method.name, share)
            if ratio is None:
                impossible.append(f"{method.label} can remove {most:.0%} at most")
                continue
            key = bench.key("units", method, ratio=share, steps=args.steps)
            row = bench.cell(key, lambda method=method, ratio=ratio: cut_and_recover(bench, method, ratio))
            if row is not None:
                done.append((method, row))
        parts.append(units_table(share, done))
        parts += [f"Not at this size: {'; '.join(impossible)}."] if impossible else []
    return "\n\n".join(parts)


def amount(config: dict[str, Any], structure: str, share: float) -> tuple[float, float | None]:
    """The ``ratio`` of a structure that removes a share of a Llama-shaped model's parameters.

    Returns:
        (the largest share that it can remove, the ratio, None where the share is larger).
    """
    if structure == "mixed":
        return 1.0, share  # its ratio is of parameters
    sizes = parameters(config)
    units = {
        "heads": config["num_key_value_heads"],
        "neurons": config["intermediate_size"],
        "hidden": config["hidden_size"],
        "layers": config["num_hidden_layers"],
    }[structure]
    most = sizes[structure] / sizes["all"] * (1 - 1 / units)
    ratio = share * sizes["all"] / sizes[structure]
    if structure in ("heads", "layers"):  # whole units: the nearest number of them
        ratio = round(ratio * units) / units
    return most, ratio if ratio <= 1 - 1 / units else None


def parameters(config: dict[str, Any]) -> dict[str, int]:
    """Parameters of a Llama-shaped model that each structure holds, and of all of it; norms are left out."""
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    heads = 2 * layers * width * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    neurons = 3 * layers * width * config["intermediate_size"]
    embeddings = (1 if config.get("tie_word_embeddings") else 2) * config["vocab_size"] * width
    whole = heads + neurons + embeddings
    return {"heads": heads, "neurons": neurons, "layers": heads + neurons, "hidden": whole, "all": whole}


def cut_and_recover(bench: Bench, method: Method, ratio: float) -> dict[str, Any]:
    """Prune, measure, recover, measure again."""
    job = bench.job(Method(method.tool, method.name, (*method.changes, ("ratio", ratio))))
    before = bench.prune(method, job)
    pruned = open_checkpoint(job.out)
    recovered = Path(f"{job.out}-recovered")
    attar.recover(
        pruned,
        recovered,
        teacher=bench.checkpoint,
        steps=bench.args.steps,
        batch_size=8,
        sequence_length=256,
        data=bench.args.data,
        seed=bench.args.seed,
        device="cpu",
    )
    after = bench.measure(recovered)
    removed = 1 - elements(pruned) / elements(bench.checkpoint)
    return {**before, "removed": removed, **{f"{name}_after": value for name, value in after.items()}}


def elements(checkpoint: Checkpoint) -> int:
    """Stored parameters."""
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


def units_table(share: float, done: list[tuple[Method, dict[str, Any]]]) -> str:
    """Best first, by the KL after recovery."""
    head = [f"{share:.0%} of parameters", "removed", "perplexity", "KL, nats", "accuracy kept"]
    head += ["recovered: perplexity", "KL, nats", "accuracy kept", "pruning, s"]
    rows, failed = [], []
    for method, row in sorted(done, key=lambda one: one[1].get("kl_after", 0.0)):
        if "failed" in row:
            failed.append([method.label, f"failed: {row['failed']}", *[""] * 7])
            continue
        figures = [
            number(row[f"{name}{when}"], form)
            for when in ("", "_after")
            for name, form in (("perplexity", ".2f"), ("kl", ".4f"), ("kept", ".1%"))
        ]
        rows.append([method.label, number(row["removed"], ".1%"), *figures, number(row["seconds"], ".0f")])
    return markdown(head, rows + failed)
