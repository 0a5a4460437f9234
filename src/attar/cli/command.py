"""Building a command: parameters from a settings class, the options of every verb, output and errors.

Every option arrives as text and is checked by the settings class itself, so that the command line, recipes
and Python have one set of rules and one wording.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any

import typer
import typer.core
import typer.main

from attar.checkpoint.processes import rank
from attar.cli.guard import exit_on_error
from attar.cli.help_text import EXAMPLES, heading_of
from attar.printable import printable
from attar.progress import SILENT, Progress, Terminal
from attar.settings import (
    CommandOrigin,
    SettingField,
    option,
    parse,
    settings_of,
)
from attar.tracking.track import TRACKERS, track

_LINE = "attar.line"
MODEL_HELP = "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
_GENERAL = "Options"


@dataclass(frozen=True)
class Answer:
    """The output of a verb.

    Args:
        data: for ``--json``, or a function that returns it.
        text: for people, or a function that prints it.
        exit_code: of the command; 1 where the answer is no.
    """

    data: dict[str, Any] | Callable[[], dict[str, Any]]
    text: str | Callable[[], None]
    exit_code: int = 0

    def show(self, *, as_json: bool) -> None:
        """Print it on stdout."""
        if as_json:
            with redirect_stdout(sys.stderr):
                data = self.data() if callable(self.data) else self.data
            print(printable(_json_text(data)), flush=True)
        elif callable(self.text):
            self.text()
        else:
            print(printable(self.text), flush=True)


class GroupedCommand(typer.core.TyperCommand):
    """A command whose help lists its options under the headings of their settings. With ``--method NAME`` (or
    another such choice) on the line, options that it does not take are left out of the help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words of the line: help is printed before all of them are parsed."""
        ctx.meta[_LINE] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, each heading in the order of its first option, then the options without a heading."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        words = ctx.meta.get(_LINE, [])
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            heading = getattr(parameter, "rich_help_panel", None) or heading_of(
                self.name or "", parameter.name
            )
            if parameter.param_type_name == "argument":
                heading = "Arguments"
            if record is not None and _belongs(heading or "", words):
                groups.setdefault(heading or _GENERAL, []).append(record)
        for heading, records in sorted(groups.items(), key=lambda group: group[0] == _GENERAL):
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _named_choice(words: Sequence[str], name: str) -> str:
    """The value of an option (``--method``) among the words of a command line; "": there is none."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == name or word.startswith(f"{name}="):
            return word.partition("=")[2] or after
    return ""


def _belongs(heading: str, words: Sequence[str]) -> bool:
    """Whether a group of options applies to the choices on a command line; see ``variants_heading``."""
    if not heading.startswith("With --"):
        return True
    name, _, variants = heading.removeprefix("With ").partition(" ")
    choice = _named_choice(words, name)
    return not choice or choice in variants.replace(" and ", ", ").split(", ")


Act = Callable[[dict[str, Any], Progress], Answer]
"""The work of a verb: from the values of its parameters to its output."""


def build_command(
    name: str,
    help: str,
    example: str,
    parameters: Sequence[inspect.Parameter],
    act: Act,
    *,
    resumes: bool = False,
    cls: type[GroupedCommand] = GroupedCommand,
    variables: str | None = None,
) -> Any:
    """A command for the group.

    Args:
        example: a command line, shown at the end of the help with those of ``help_text.EXAMPLES``.
        resumes: whether the same command continues after an interruption.
        variables: how variables with its options begin, ``ATTAR_SERVE``; None: there are none.
    """

    def callback(**values: Any) -> None:
        quiet, as_json, debug = (values.pop(flag) for flag in ("quiet", "json", "debug"))
        progress: Progress = SILENT if quiet or rank() else Terminal()
        trackers = values.pop("track", None)
        with exit_on_error(debug=debug, resumes=resumes):
            if trackers and not rank():
                progress = track(*trackers, progress=progress)
            # output of libraries must not mix with the data
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                answer = act(values, progress)
            if not rank():
                answer.show(as_json=as_json)
                if answer.exit_code:
                    raise typer.Exit(answer.exit_code)

    callback.__signature__ = inspect.Signature([*parameters, *_common_options()])  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    context = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    context |= {"auto_envvar_prefix": variables}
    examples = (example, *EXAMPLES.get(name, ()))
    epilog = "\n".join(
        ["\b", "Examples:" if examples[1:] else "Example:", *(f"  {example}" for example in examples)]
    )
    app.command(name, cls=cls, help=help, epilog=epilog, context_settings=context)(callback)
    return typer.main.get_command(app)


def argument(name: str, help: str, metavar: str | None = None) -> inspect.Parameter:
    """A required positional argument."""
    info = typer.Argument(..., help=help, metavar=metavar or name.upper(), show_default=False)
    return _parameter(name, str, info)


def optional_argument(name: str, help: str, metavar: str, default: str) -> inspect.Parameter:
    """A positional argument that may be left out."""
    info = typer.Argument(default, help=help, metavar=f"[{metavar}]", show_default=True)
    return _parameter(name, str, info)


def many_argument(name: str, help: str, metavar: str) -> inspect.Parameter:
    """Any number of positional arguments at the end."""
    info = typer.Argument(None, help=help, metavar=metavar, show_default=False)
    return _parameter(name, list[str], info)


def text_option(
    name: str, *spellings: str, help: str, metavar: str = "TEXT", required: bool = False
) -> inspect.Parameter:
    """An option with one value; None where it is not given."""
    default: Any = ... if required else None
    info = typer.Option(default, *spellings, help=help, metavar=metavar, show_default=False)
    return _parameter(name, str, info)


def many_option(
    name: str, *spellings: str, help: str, metavar: str = "TEXT", required: bool = False
) -> inspect.Parameter:
    """An option that may be given several times."""
    default: Any = ... if required else None
    info = typer.Option(
        default, *spellings, help=help + "; may be repeated", metavar=metavar, show_default=False
    )
    return _parameter(name, list[str], info)


def track_option() -> inspect.Parameter:
    """``--track``: :func:`build_command` gives the verb a progress that trackers follow."""
    help = "tell a tracker of settings, steps and results"
    return many_option("track", "--track", help=help, metavar="|".join(TRACKERS))


def flag(name: str, *spellings: str, help: str) -> inspect.Parameter:
    """An option without a value."""
    return _parameter(name, bool, typer.Option(False, *spellings, help=help, show_default=False))


def settings_options(cls: type, without: Sequence[str] = ()) -> list[inspect.Parameter]:
    """One option per field of a settings class, with its help, default and choices; some may be left out."""
    return [_setting_option(setting) for setting in settings_of(cls) if setting.name not in without]


def read_settings(
    cls: type, verb: str, values: dict[str, Any], origins: Mapping[str, str] | None = None
) -> Any:
    """Settings from the options on the command line.

    Args:
        origins: the variable or file of an option that has its value from there, by its name.

    Raises:
        UsageError: names the option.
    """
    names = {setting.name for setting in settings_of(cls)}
    # some versions of typer return an empty list for an absent option that may be repeated
    given = {name: value for name, value in values.items() if name in names and value not in (None, [], ())}
    return parse(cls, given, CommandOrigin(verb, origins=origins or {}))


def _setting_option(setting: SettingField) -> inspect.Parameter:
    spelling = option(setting.name)
    default = _default_text(setting)
    if setting.flag:
        both = f"{spelling}/--no-{spelling[2:]}"
        words = f"{setting.help}  [default: {'yes' if setting.default else 'no'}]"
        info = typer.Option(None, both, help=words, show_default=False, rich_help_panel=setting.title or None)
        return _parameter(setting.name, bool, info)
    choices = [str(choice) for choice in setting.choices]
    metavar = "|".join(choices) or next(
        (_METAVARS[kind] for kind in setting.kinds if kind in _METAVARS), "TEXT"
    )
    info = typer.Option(
        None,
        spelling,
        help=f"{setting.help}{'; may be repeated' if setting.many else ''}{default}",
        metavar=metavar,
        show_default=False,
        autocompletion=_completer(choices) if choices else None,
        rich_help_panel=setting.title or None,
    )
    return _parameter(setting.name, list[str] if setting.many else str, info)


def _default_text(setting: SettingField) -> str:
    """The default in brackets; nothing for an option that is simply not used, unless its help says what
    ``none`` or ``empty`` means."""
    if setting.default is dataclasses.MISSING:
        return "  [required]"
    unused = setting.default in (None, "", (), "none")
    explained = re.search(r"\b(none|empty)\b[:;,.)]|\bnone\b", setting.help)
    return "" if unused and not explained else f"  [default: {setting.default_text}]"


def _completer(choices: list[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _common_options() -> list[inspect.Parameter]:
    """The options of every verb."""
    return [
        flag("json", "--json", help="print the result as JSON on stdout, and nothing else"),
        flag("quiet", "--quiet", "-q", help="no progress"),
        flag("debug", "--debug", help="show the traceback of an error"),
    ]


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def _json_text(data: dict[str, Any]) -> str:
    from attar.checkpoint.card import plain

    return json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False)
