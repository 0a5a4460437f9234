"""The command ``attar``: a group of verbs that are built when they are called for."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from attar.cli.guard import explain, say
from attar.cli.verbs import VERBS
from attar.errors import AttarError, UsageError, did_you_mean, nearest
from attar.recipe.stages import load

# typer brings its own copy of click in newer versions: the base of its errors is found through one that it
# exports
_TyperError: Any = typer.BadParameter.__mro__[2]


class LazyGroup(TyperGroup):
    """Lists the verbs from a table and imports one only when it is used."""

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
        from attar.version import __version__

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
        say(*explain(error))
        return error.exit_code
    except _TyperError as error:
        say(*_wrong_use(error))
        return int(error.exit_code)
    return code if isinstance(code, int) else 0


def _wrong_use(error: Any) -> list[str]:
    """What the parser of the command line did not understand, in one line and a hint."""
    context = getattr(error, "ctx", None)
    hint = f"{getattr(context, 'command_path', 'attar')} --help"
    name = getattr(error, "option_name", None)
    if name and context is not None:  # an unknown option
        known = [spelling for parameter in context.command.get_params(context) for spelling in parameter.opts]
        close = nearest(name, [spelling for spelling in known if spelling.startswith("--")])
        tail = f"; did you mean {close!r}?" if close else ""
        return [f"error: no option {name!r} in {context.command_path}{tail}", f"hint: {hint}"]
    return [f"error: {' '.join(error.format_message().split())}", f"hint: {hint}"]


class _Warnings(logging.Handler):
    """What attar's own code logs as a warning or worse: a line on stderr, as everything that is said."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {self.format(record)}")


def main() -> None:
    """Entry point of the command."""
    logging.getLogger("attar").addHandler(_Warnings(logging.WARNING))
    # libraries that talk on their own would drown attar's progress
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "--debug" not in sys.argv:
        warnings.simplefilter("ignore")
    sys.exit(call(sys.argv[1:]))


if __name__ == "__main__":
    main()
