"""Progress of long work: description, steps, remaining time, and the latest loss or error.

Long work takes a ``progress`` argument and opens a task on it::

    with progress.task("recover", total=steps) as task:
        for step in range(done, steps):
            ...
            task.advance(loss=loss)

:class:`Silent` shows nothing; :class:`Terminal` draws a bar on a terminal and prints lines elsewhere. Output
goes to stderr: stdout is for data.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from attar.checkpoint.units import seconds_text
from attar.printable import one_line, printable


class ProgressTask(Protocol):
    """Work of a known length."""

    def advance(self, n: int = 1, **numbers: float) -> None:
        """Add ``n`` finished units, with the latest numbers (loss, error, tokens/s)."""


class Progress(Protocol):
    """What long work reports to."""

    def task(self, what: str, total: int, done: int = 0) -> Any:
        """Open a task: a context manager that yields a :class:`ProgressTask`."""

    def log(self, line: str) -> None:
        """Print a line."""


class _SilentTask:
    def advance(self, n: int = 1, **numbers: float) -> None:
        pass


class Silent:
    """Shows nothing."""

    @contextmanager
    def task(self, what: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        """Open a task that is not shown."""
        yield _SilentTask()

    def log(self, line: str) -> None:
        """Drop the line."""


SILENT = Silent()


def shown(progress: Progress | bool | None) -> Progress:
    """Where a verb of Python reports to: what was given; with True a bar, with False nothing; with None a bar
    where somebody looks at it, on a terminal and in a notebook."""
    if progress is None:
        progress = sys.stderr.isatty() or in_notebook()
    if isinstance(progress, bool):
        return Terminal() if progress else SILENT
    return progress


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _numbers(numbers: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _left(seconds: float | None) -> str:
    """The time left in words, as plans have it; nothing before it is known and at the end."""
    return f"about {seconds_text(seconds)} left  " if seconds else ""


class _LineTask:
    """For logs and pipes: a line at the start, every ``every`` seconds, and at the end."""

    def __init__(self, what: str, total: int, done: int, every: float = 15.0) -> None:
        self.what, self.total, self.done, self.every = what, total, done, every
        self.first = done
        self.start = self.last = time.monotonic()
        self.numbers: dict[str, float] = {}

    def advance(self, n: int = 1, **numbers: float) -> None:
        self.done += n
        self.numbers = numbers or self.numbers
        now = time.monotonic()
        if now - self.last >= self.every:
            self.last = now
            remaining_s = (now - self.start) / max(self.done - self.first, 1) * (self.total - self.done)
            self.say(f"{self.done}/{self.total}  {_left(remaining_s)}{_numbers(self.numbers)}")

    def say(self, text: str) -> None:
        print(printable(f"{self.what}: {text.rstrip()}"), file=sys.stderr, flush=True)


class _BarTask:
    def __init__(self, bar: Any, identity: Any) -> None:
        self.bar, self.identity = bar, identity

    def advance(self, n: int = 1, **numbers: float) -> None:
        fields = {"numbers": _numbers(numbers)} if numbers else {}
        self.bar.update(self.identity, advance=n, **fields)


class _NotebookTask:
    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def advance(self, n: int = 1, **numbers: float) -> None:
        self.bar.update(n)
        if numbers:
            self.bar.set_postfix_str(_numbers(numbers))


class Terminal:
    """A rich progress bar on a terminal, tqdm's in a notebook; plain lines elsewhere."""

    @contextmanager
    def task(self, what: str, total: int, done: int = 0) -> Iterator[ProgressTask]:
        """Open a task that is shown."""
        if in_notebook():
            from tqdm.auto import tqdm

            with tqdm(desc=printable(what), total=total, initial=done) as notebook_bar:
                yield _NotebookTask(notebook_bar)
            return
        if not sys.stderr.isatty():
            line = _LineTask(what, total, done)
            yield line
            line.say(f"done in {seconds_text(time.monotonic() - line.start)}  {_numbers(line.numbers)}")
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column
        from rich.text import Text

        class Numbers(ProgressColumn):
            def render(self, task: Any) -> Text:
                return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")

        class TimeLeft(ProgressColumn):
            max_refresh = 0.5

            def render(self, task: Any) -> Text:
                return Text(_left(task.time_remaining).strip())

        columns = (
            TextColumn("{task.description:<22}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(16, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeLeft(table_column=Column(no_wrap=True)),
            Numbers(),  # which alone are cut on a narrow terminal
        )
        with Bar(*columns, console=Console(stderr=True)) as bar:
            yield _BarTask(bar, bar.add_task(one_line(what), total=total, completed=done, numbers=""))

    def log(self, line: str) -> None:
        """Print one line on stderr."""
        print(printable(line), file=sys.stderr, flush=True)
