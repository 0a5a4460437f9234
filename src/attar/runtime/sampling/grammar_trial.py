"""Compiling a grammar in a process with bounds, to find out whether it may be compiled in this one.

llguidance's own limits (``LIMITS``) do not count all of its work: the complement of an expression in an
intersection took 20 s, twenty ``multipleOf`` minutes, and a thread that does it cannot be stopped.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.limited_process import CostError, LimitedProcess

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SECONDS, MEMORY = 5.0, 2 << 30  # of the processor, with the vocabulary's trie after a start; bytes


class GrammarTrial:
    """Trials of one tokenizer; threads may share it.

    Args:
        tokenizer: tokenizer.json, as llguidance reads it.
        end: its end token, the last one.
        limits: of llguidance.
    """

    def __init__(self, tokenizer: str, end: int, limits: dict[str, Any]) -> None:
        self._file = tempfile.NamedTemporaryFile(suffix=".json")  # noqa: SIM115 (it lives as long as this)
        self._file.write(tokenizer.encode())
        self._file.flush()
        self._request = {"tokenizer": self._file.name, "end": end, "limits": limits}
        self._process = LimitedProcess(f"{__name__}:attempt", SECONDS, MEMORY)

    def fails(self, grammar: str) -> str | None:
        """Why a grammar may not be compiled here; None: it may, and says itself what else is wrong."""
        try:
            self._process(self._request | {"grammar": grammar})
        except CostError as error:
            return f"to compile {error}"
        return None


def attempt(request: dict[str, Any]) -> None:
    """Compile a grammar and its first mask in this process."""
    from llguidance import LLMatcher, LLParserLimits

    trie = _trie(request["tokenizer"], request["end"])
    matcher = LLMatcher(trie, request["grammar"], log_level=0, limits=LLParserLimits(**request["limits"]))
    if not matcher.is_error():
        matcher.compute_bitmask()


@lru_cache(maxsize=1)
def _trie(file: str, end: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(Path(file).read_text(encoding="utf-8"), n_vocab=end + 1, eos_token=end)
