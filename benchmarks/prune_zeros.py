"""Parts of ``benchmarks/prune.py`` about zeros: what each method keeps, what it takes, what zeros bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.launch import OURS, Method, launch, parse_method, write_tokens
from prune_cells import Bench, markdown, number
from quantize import SHAPES, make_model, plan

METHODS = (
    "magnitude",
    "wanda",
    "sparsegpt",
    "alps",
    "wanda,reconstruct=linear",
    "wanda,reconstruct=block",
    "sparsegpt,reconstruct=linear",
)
THEIRS = ("wanda", "sparsegpt")


def methods(bench: Bench, ours: tuple[str, ...] = METHODS) -> list[Method]:
    """attar's methods and the peers', by turns."""
    given = bench.args.methods
    mine = [parse_method(OURS, text) for text in (ours if given is None else given)]
    result = []
    for method in mine:
        result.append(method)
        if method.label in THEIRS:
            result += [Method(peer, method.name) for peer in bench.args.peers]
    if given == []:  # the peers alone
        result = [Method(peer, name) for peer in bench.args.peers for name in THEIRS]
    return result


def zeros(bench: Bench) -> str:
    """A table for each sparsity: the methods in the order of their KL."""
    parts = [heading(bench)]
    for sparsity in bench.args.sparsities:
        done = []
        for method in methods(bench):
            key = bench.key("zeros", method, sparsity=sparsity)
            job = bench.job(method, sparsity=sparsity, dtype="float32")
            row = bench.cell(key, lambda method=method, job=job: bench.prune(method, job))
            if row is not None:
                done.append((method, row))
        if done:
            parts.append(zeros_table(sparsity, done))
    return "\n\n".join(parts)


def heading(bench: Bench) -> str:
    """What was measured on what; the original's perplexity."""
    args = bench.args
    key = {"part": "dense", "model": bench.digest, "tool": OURS, "method": "dense"}
    key |= {"test": args.test or args.data, "tokens": args.tokens, "seed": args.seed}
    dense = bench.cell(key, lambda: bench.measure(bench.checkpoint.path)) or {}
    return (
        f"### {bench.checkpoint.name}: {args.samples} x {args.length} calibration tokens, {args.tokens} "
        f"held-out; perplexity of the original {number(dense.get('perplexity'), '.3f')}"
    )


def zeros_table(sparsity: str, done: list[tuple[Method, dict[str, Any]]]) -> str:
    """Best first; perplexity of ours over the peer's where both have the method."""
    theirs = {method.name: row for method, row in done if method.tool != OURS and "failed" not in row}
    head = [
        sparsity,
        "tool",
        "perplexity",
        "KL, nats",
        "accuracy kept",
        "over the peer's perplexity",
        "call, s",
    ]
    rows, failed = [], []
    for method, row in sorted(done, key=lambda one: one[1].get("kl", 0.0)):
        if "failed" in row:
            failed.append([label(method), method.tool, f"failed: {row['failed']}", "", "", "", ""])
            continue
        peer = theirs.get(method.label) if method.tool == OURS else None
        ratio = row["perplexity"] / peer["perplexity"] if peer else None
        rows.append(
            [
                label(method),
                method.tool,
                number(row["perplexity"], ".2f"),
                number(row["kl"], ".4f"),
                number(row["kept"], ".1%"),
                number(ratio, ".4f"),
                number(row["seconds"], ".0f"),
            ]
        )
    return markdown(head, rows + failed)


def label(method: Method) -> str:
    """A method as a row is called: what was mended, if anything."""
    return method.label.replace(",", ", ").replace(", reconstruct=", ", then ")


def time(bench: Bench) -> str:
    """SparseGPT's time and memory on the model, and on a large shape by its layers. CPU seconds decide: what
    else runs on the machine changes them little."""
    tools = [Method(OURS, "sparsegpt"), *(Method(peer, "sparsegpt") for peer in bench.args.peers)]
    head = ["SparseGPT 50 %", "tool", "call, s", "CPU, s", "peak, MB", "start, MB", "CPU, times attar's"]
    rows, large = [], {}
    for layers in (0, *bench.args.layers):
        name = f"{bench.args.shape}, {layers} layers" if layers else bench.checkpoint.name
        done = timed(bench, tools, layers)
        for method, row in done.items():
            if "failed" in row:
                rows.append([name, method.tool, f"failed: {row['failed']}", "", "", "", ""])
                continue
            base = done.get(tools[0], {}).get("cpu")
            values = [number(row[column], ".0f") for column in ("cpu", "peak_rss_mb", "start_rss_mb")]
            times = number(row["cpu"] / base if base else None, ".2f")
            rows.append([name, method.tool, number(row["seconds"], ".1f"), *values, times])
            if layers:
                large.setdefault(method, {})[layers] = row
    return "\n\n".join([markdown(head, rows), *extrapolated(bench, large)])


def timed(bench: Bench, tools: list[Method], layers: int) -> dict[Method, dict[str, Any]]:
    """Each tool's smallest seconds and largest memory of the rounds, tools by turns.

    Args:
        layers: of the large shape; 0: the model itself.
    """
    done: dict[Method, list[dict[str, Any]]] = {}
    shape = bench.args.shape if layers else ""
    for turn, method in plan(tools, bench.args.rounds):
        key = bench.key("time", method, shape=shape, layers=layers, round=turn)
        row = bench.cell(key, lambda method=method: one_round(bench, method, layers))
        if row is not None:
            done.setdefault(method, []).append(row)
    return {method: best(done[method]) for method in tools if method in done}


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The smallest times and the largest memory; a failure, where there is one."""
    for row in rows:
        if "failed" in row:
            return row
    smallest = {name: min(row[name] for row in rows) for name in ("seconds", "cpu")}
    return smallest | {name: max(row[name] for row in rows) for name in ("peak_rss_mb", "start_rss_mb")}


def one_round(bench: Bench, method: Method, layers: int) -> dict[str, Any]:
    """Prune once; a peer loads the weights in the type in which they are stored."""
    args = bench.args
    source = make_shape(args.shape, layers, args.work) if layers else bench.checkpoint.path
    job = bench.job(method, sparsity="0.5", dtype="auto", save=True)
    if layers:
        tokens = args.work / f"{source.name}-{args.samples}x{args.length}-{args.seed}.safetensors"
        given = {"samples": args.samples, "length": args.length, "seed": args.seed, "data": args.data}
        write_tokens(str(source), tokens, **given)
        job = replace(job, model=str(source), tokens=str(tokens))
    bench.clean()
    return launch(method.tool, job, args.limit, verb="prune")


def make_shape(shape: str, layers: int, work: Path) -> Path:
    """A random model of a shape with fewer layers."""
    name = f"{shape}-{layers}"
    SHAPES[name] = {**SHAPES[shape], "num_hidden_layers": layers}
    return make_model(name, work)


def extrapolated(bench: Bench, large: dict[Method, dict[int, dict[str, Any]]]) -> list[str]:
    """A line for each tool: what the whole of the large shape would take."""
    whole = SHAPES[bench.args.shape]["num_hidden_layers"]
    lines = []
    for method, rows in large.items():
        if len(rows) < 2:
            continue
        seconds, peak = (at_layers(rows, name, whole) for name in ("cpu", "peak_rss_mb"))
        lines.append(
            f"{bench.args.shape}, {whole} layers, extrapolated from {' and '.join(map(str, sorted(rows)))}: "
            f"{method.tool} {seconds:.0f} s of CPU, {peak:.0f} MB"
        )
    return lines


def at_layers(rows: dict[int, dict[str, Any]], name: str, layers: int) -> float:
    """A figure of another number of layers, on the line through the fewest and the most measured."""
    few, many = min(rows), max(rows)
    slope = (rows[many][name] - rows[few][name]) / (many - few)
    return float(rows[many][name] + slope * (layers - many))
