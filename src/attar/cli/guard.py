"""From an exception to one or two lines on stderr and an exit code.

0 success, 1 failure, 2 wrong usage, 130 interrupted (143 by SIGTERM, in a training).
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from attar.cli.launch import launched, report
from attar.errors import AttarError, SettingsError
from attar.printable import printable
from attar.settings import option


@contextmanager
def exit_on_error(*, debug: bool, resumes: bool) -> Iterator[None]:
    """Turn an exception of the block into a message and an exit.

    Args:
        resumes: the same command continues after an interruption.
    """
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError:  # the reader of stdout has exited, as in `attar inspect MODEL | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        if not launched():  # the launcher says it
            print_lines(f"stopped; to go on: {_command_line()}" if resumes else "stopped")
        raise typer.Exit(getattr(error, "exit_code", 130)) from None
    except Exception as error:
        if debug:
            print_lines(traceback.format_exc().rstrip())
        code = error.exit_code if isinstance(error, AttarError) else 1
        if launched():
            report(error_lines(error), code)
        else:
            print_lines(*error_lines(error))
        raise typer.Exit(code) from None


def print_lines(*lines: str) -> None:
    """Write lines to stderr, printable: their words may come from files and peers."""
    print(printable("\n".join(lines)), file=sys.stderr, flush=True)


def error_lines(error: Exception) -> list[str]:
    """An exception in one line, and a hint where there is one."""
    if isinstance(error, SettingsError) and error.field.isidentifier():
        hint = error.hint
        error = SettingsError(option(error.field), error.value, error.allowed)
        error.hint = hint
    if isinstance(error, AttarError):
        return _lines(error.message, error.hint)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return _lines(f"out of memory: {error}", "a smaller --batch-size or --sequence-length needs less")
    if isinstance(error, OSError) and error.strerror:
        return _lines(f"{error.filename or 'the system'}: {error.strerror}", None)
    where = traceback.extract_tb(error.__traceback__)[-1:]
    location = f" ({where[0].filename.rpartition('/')[2]}:{where[0].lineno})" if where else ""
    message = f"this is a bug of attar: {type(error).__name__}: {error}{location}"
    return _lines(message, "run it again with --debug and report what it prints")


def _lines(message: str, hint: str | None) -> list[str]:
    line = f"error: {' '.join(message.split())}"
    return [line, f"hint: {' '.join(hint.split())}"] if hint else [line]


def _command_line() -> str:
    """This command, without the option that would start over."""
    return shlex.join(["attar", *(word for word in sys.argv[1:] if word != "--fresh")])
