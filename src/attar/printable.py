"""Text that others wrote (endpoints, models, files, peers), as a terminal may have it.

A terminal obeys control characters: they clear it, set its title, or fill the clipboard. What changes the
direction of text, or cannot be seen, makes a line look like another one. Each such character is shown as its
escape (``\\u001b``), as JSON has it, so that JSON stays what it says.
"""

from __future__ import annotations

import logging
import re
import sys

_BAD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """The text with escapes for all that a terminal obeys or hides; line breaks and tabs stay."""
    return _BAD.sub(_escape, text)


def one_line(text: str) -> str:
    """The same in one line."""
    return printable(" ".join(text.split()))


def for_stdout(text: str) -> str:
    """Text that a model wrote, for stdout: printable on a terminal; elsewhere it is data, as it is."""
    return printable(text) if sys.stdout.isatty() else text


class PrintableFormatter(logging.Formatter):
    """Lines of a log."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, and a traceback where there is one."""
        return printable(super().format(record))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
