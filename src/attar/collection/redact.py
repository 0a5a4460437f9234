"""Secrets taken out of text: an endpoint may echo the request's headers in an error, or even in an answer."""

from __future__ import annotations

import base64
import re
from urllib.parse import quote

from attar.printable import one_line

MARK = "[key]"

_HEADER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=*-]{4,}")


class Redactor:
    """Takes a secret out of texts, in the spellings in which it is echoed; and whatever follows ``Bearer``.

    Args:
        secret: the key; "": there is none.
    """

    def __init__(self, secret: str) -> None:
        encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
        spellings = {secret, quote(secret, safe=""), encoded, repr(secret)[1:-1]} - {""}
        self._spellings = sorted(spellings, key=len, reverse=True)

    def answer(self, text: str) -> str:
        """A text without the secret."""
        for spelling in self._spellings:
            text = text.replace(spelling, MARK)
        return text

    def error(self, text: str) -> str:
        """A message in one line, without the secret and without any other credential."""
        text = _HEADER.sub(rf"\1 {MARK}", self.answer(text))
        return one_line(text)[:500]
