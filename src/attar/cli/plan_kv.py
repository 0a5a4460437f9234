"""``attar plan-kv MODEL``: bytes of the KV cache, before anything is loaded."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attar.cli.command import Answer, argument, build_command, many_option, text_option
from attar.errors import SettingsError
from attar.printable import printable
from attar.progress import Progress

if TYPE_CHECKING:
    from attar.runtime.kv.memory import KVPlan


def build_plan_kv(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("model", "a folder, a config.json, a .gguf file, a hub id or attar:tiny"),
        many_option("context", "--context", help="tokens  [default: 1024, 4096, the model's own]"),
        many_option("batch", "--batch", help="sequences at a time  [default: 1, 8]"),
        many_option("kv_dtype", "--kv-dtype", "--dtype", help="formats of keys and values  [default: all]"),
        text_option("budget", "--budget", help="memory, such as 2GiB: what fits", metavar="SIZE"),
        text_option("draft", "--draft", help="a draft head, whose hidden states count", metavar="HEAD"),
        text_option("block_size", "--block-size", help="tokens of a block  [default: 32]"),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        from attar.checkpoint.geometry import geometry
        from attar.checkpoint.units import byte_count
        from attar.runtime.kv.memory import config_path, plan_kv, read_config, with_formats
        from attar.runtime.runner.kept_shapes import kept_shapes

        config = read_config(values["model"])
        context = geometry(config, "bfloat16").context
        usual = [size for size in (1024, 4096) if context is None or size < context] + (
            [context] if context else []
        )
        layers, state_bytes = kept_shapes(config)
        plan = plan_kv(
            with_formats(layers, config_path(values["model"])),
            contexts=_numbers("context", values["context"]) or usual,
            batches=_numbers("batch", values["batch"]) or [1, 8],
            kv_dtypes=values["kv_dtype"] or (),
            budget=byte_count("budget", values["budget"] or "") or None,
            state_bytes=state_bytes,
            hidden_bytes=_hidden_bytes(values["draft"]),
            block_size=(_numbers("block-size", [values["block_size"] or "32"]))[0],
        )
        return Answer(asdict(plan), lambda: _print(plan))

    help = (
        "Show how many bytes keys and values take, by context, batch and format, and what fits a budget. "
        "Reads the model's config, and which layers attar-kv.json keeps in 8 bits."
    )
    return build_command(
        verb, help, "attar plan-kv attar:tiny --context 2048 --budget 64MiB", parameters, act
    )


def _numbers(name: str, texts: list[str] | None) -> list[int]:
    for text in texts or []:
        if not text.isdecimal():
            raise SettingsError(name, text, "a whole number, at least 1")
    return [int(text) for text in texts or []]


def _hidden_bytes(head: str | None) -> int:
    """Bytes a token of the hidden states that a draft head reads; 0 for another model that drafts."""
    from attar.checkpoint import open_checkpoint
    from attar.checkpoint.draft_head import draft_head_of

    checkpoint = None if head is None else open_checkpoint(head)
    config = None if checkpoint is None else draft_head_of(checkpoint.config, checkpoint.tensors)
    return 0 if config is None else 2 * len(config["layers"] or ()) * (config["hidden"] or 0)


def _print(plan: KVPlan) -> None:
    from attar.runtime.kv.memory import plan_table

    head, rows = plan_table(plan)
    states = f", with {plan.hidden_bytes:,} of hidden states" if plan.hidden_bytes else ""
    print(printable(f"{plan.model}{states}"))
    if plan.state_bytes:
        print(f"{plan.state_bytes:,} bytes of states a sequence in float32, twice: before and after a step")
    if sys.stdout.isatty():
        _rich(head, rows)
    else:
        from attar.checkpoint.units import table

        print(table(head, rows))
    if any(cell.fits is False for cell in plan.cells):
        print("! more than the budget")


def _rich(head: list[str], rows: list[list[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=SIMPLE_HEAD)
    for column, name in enumerate(head):
        grid.add_column(name, justify="right" if column else "left")
    for row in rows:
        grid.add_row(*(f"[red]{cell}[/red]" if cell.endswith("!") else cell for cell in row))
    Console().print(grid)
