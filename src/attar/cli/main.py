"""The command ``attar``: a group of verbs, each built when it is called."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import MutableMapping
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from attar.cli.guard import error_lines, print_lines
from attar.cli.launch import end_with_launcher, launched
from attar.cli.vllm_names import ELSEWHERE
from attar.errors import AttarError, UsageError, did_you_mean, nearest
from attar.old_names import old_name
from attar.recipe.stages import STAGES, load
from attar.settings import option

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("Run the main job on the embedded model.", "attar.cli.run:build_demo"),
    "run": ("Run a recipe; goes on where it was stopped.", "attar.cli.run:build_run"),
    "sweep": ("Run a recipe with several values of its settings.", "attar.cli.sweep:build_sweep"),
    "status": ("Show what is done of a run or a sweep.", "attar.cli.sweep:build_status"),
    "collect": ("Ask a teacher, and keep its answers to learn from.", "attar.cli.collect:build_collect"),
    **{
        verb: (
            stage.summary,
            "attar.cli.export:build_export"
            if verb == "export"
            else f"attar.cli.stage:build_{verb if verb in ('merge', 'prune') else 'stage'}",
        )
        for verb, stage in STAGES.items()
    },
    "extract": ("Write the difference of two models as a LoRA adapter.", "attar.cli.stage:build_extract"),
    "evaluate": ("Measure quality, size, speed and memory.", "attar.cli.evaluate:build_evaluate"),
    "verify": ("Check a finished model against its original.", "attar.cli.verify:build_verify"),
    "upload": ("Upload a checkpoint to an object store or the hub.", "attar.cli.upload:build_upload"),
    "generate": ("Continue a prompt.", "attar.cli.generate:build_generate"),
    "chat": ("Talk with a model.", "attar.cli.chat:build_chat"),
    "plan": ("Find the recipe that meets a budget.", "attar.cli.plan:build_plan"),
    "bench": ("Measure how fast a model answers.", "attar.cli.bench:build_bench"),
    "serve": ("Serve a model over HTTP, as OpenAI's API does.", "attar.cli.serve:build_serve"),
    "mcp": ("Offer attar to an agent as tools.", "attar.cli.mcp:build_mcp"),
    "inspect": ("Show what a checkpoint is and where it comes from.", "attar.cli.inspect:build_inspect"),
    "list": ("List the results below a folder.", "attar.cli.list_results:build_list"),
    "plan-kv": ("Show what a KV cache takes, and what fits a budget.", "attar.cli.plan_kv:build_plan_kv"),
    "report": ("Build the report of a run again.", "attar.cli.run:build_report"),
}
"""Verb to its summary and to the function that builds its command; printing the table imports none."""

# newer versions of typer contain a copy of click: the base of its errors is found through an exported one
_TyperError: Any = typer.BadParameter.__mro__[2]


class LazyGroup(TyperGroup):
    """Lists the verbs from the table, and imports one when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs, in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Build a verb's command."""
        return load(VERBS[cmd_name][1])(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb, or name the nearest."""
        if args[0] not in VERBS and not args[0].startswith("-"):
            message = f"no verb {args[0]!r}{did_you_mean(args[0], list(VERBS))}"
            raise UsageError(message, hint="attar --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print the table without building any command."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, summary) for name, (summary, _) in VERBS.items()])


app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, no_args_is_help=False, invoke_without_command=True)


def _version(value: bool) -> None:
    if value:
        from attar import __version__

        print(f"attar {__version__}")
        raise typer.Exit


@app.callback(
    help="Make an open-weight language model small and fast, and prove that it is still good.",
    epilog="\b\nExample:\n  attar demo\n\nattar VERB --help shows a verb's options.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
def _root(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", help="Show the version.", callback=_version, is_eager=True
    ),
) -> None:
    if ctx.invoked_subcommand is None and not ctx.resilient_parsing:
        print(ctx.get_help())
        raise typer.Exit(2)


def call(argv: list[str]) -> int:
    """Run a command line; returns its exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(argv, prog_name="attar", standalone_mode=False)
    except AttarError as error:
        print_lines(*error_lines(error))
        return error.exit_code
    except _TyperError as error:
        print_lines(*_usage_error_lines(error))
        return int(error.exit_code)
    return code if isinstance(code, int) else 0


def _usage_error_lines(error: Any) -> list[str]:
    """An error of the command line's parser, in one line and a hint."""
    context = getattr(error, "ctx", None)
    hint = f"{getattr(context, 'command_path', 'attar')} --help"
    name = getattr(error, "option_name", None)
    if name and context is not None:  # an unknown option
        verb, given = context.info_name or "", name.lstrip("-").removeprefix("no-").replace("-", "_")
        if old := old_name(verb, given, option):
            return [f"error: {old}", f"hint: {hint}"]
        if verb == "serve" and given in ELSEWHERE:
            return [
                f"error: no option {name!r} in {context.command_path}: {ELSEWHERE[given]}",
                f"hint: {hint}",
            ]
        known = [spelling for parameter in context.command.get_params(context) for spelling in parameter.opts]
        close = nearest(name, [spelling for spelling in known if spelling.startswith("--")])
        suggestion = f"; did you mean {close!r}?" if close else ""
        return [f"error: no option {name!r} in {context.command_path}{suggestion}", f"hint: {hint}"]
    return [f"error: {' '.join(error.format_message().split())}", f"hint: {hint}"]


class _StderrHandler(logging.Handler):
    """Prints attar's own warnings and errors on stderr, a line each, and what takes a while."""

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        print_lines(f"{level}{self.format(record)}")


def wait_briefly(environment: MutableMapping[str, str]) -> None:
    """Have OpenMP's threads spin for microseconds before they sleep, unless the user decides.

    By default they spin for milliseconds, each on a processor that the others need: beside other work a
    training falls to a tenth, and on an idle machine nothing is gained (docs/recipes.md). It must be said
    before torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = "2000"


def main() -> None:
    """Entry point of the command."""
    logging.getLogger("attar").addHandler(_StderrHandler(logging.INFO))
    if not {"--quiet", "-q"} & set(sys.argv):
        logging.getLogger("attar.kernels.build").setLevel(logging.INFO)  # compiling takes a minute
    # messages of libraries would bury attar's progress
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    wait_briefly(os.environ)
    if "--debug" not in sys.argv:
        warnings.simplefilter("ignore")
    if launched():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher gets it, and sends SIGTERM
        end_with_launcher()
    sys.exit(call(sys.argv[1:]))


if __name__ == "__main__":
    main()
