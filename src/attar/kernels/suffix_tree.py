"""The compiled suffix tree: ``runtime/speculate/suffix_tree.py`` has the same in Python."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

from attar.kernels.build import load, warn_slower, why_missing

SHORT = 64  # new tokens that fit in the buffer
MOST = 256  # drafts that fit in the buffer


def available() -> bool:
    """Whether there is a compiled tree; warns once if not."""
    if _library() is None:
        warn_slower(f"suffix trees run in Python, slower than compiled: {why_missing('suffix_tree')}")
        return False
    return True


class CompiledSuffixTree:
    """See :class:`attar.runtime.speculate.suffix_tree.SuffixTree`."""

    def __init__(self, depth: int, factor: float, least: float, ends: Sequence[int]) -> None:
        self._library = _library()
        assert self._library is not None, "call available() first"
        self.depth = depth
        stops = array("i", ends)
        self._tree: int | None = self._library.attar_suffix_tree(
            depth, factor, least, stops.buffer_info()[0], len(stops)
        )
        if not self._tree:
            raise MemoryError("a suffix tree")
        self._in, self._out = (ctypes.c_int32 * SHORT)(), (ctypes.c_int32 * (3 * MOST))()
        self._in_at, self._out_at = ctypes.addressof(self._in), ctypes.addressof(self._out)
        self._draft = self._library.attar_suffix_draft

    def __del__(self) -> None:
        if getattr(self, "_tree", None):
            self._library.attar_suffix_free(self._tree)

    def __len__(self) -> int:
        """Nodes."""
        return int(self._library.attar_suffix_size(self._tree))

    def begin(self) -> int:
        """A new text; its number."""
        return _checked(self._library.attar_suffix_begin(self._tree))

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text."""
        buffer = array("i", tokens)
        address, count = buffer.buffer_info()
        _checked(self._library.attar_suffix_extend(self._tree, text, address, count))

    def count(self, string: Sequence[int]) -> int:
        """How often a string of at most ``depth`` tokens occurs."""
        address, length = (buffer := array("i", string)).buffer_info()
        assert 0 < len(buffer) <= self.depth
        return int(self._library.attar_suffix_count(self._tree, address, length))

    def remove(self, text: int) -> None:
        """Remove a text with all its occurrences."""
        _checked(self._library.attar_suffix_remove(self._tree, text))

    def draft(
        self, text: int, tokens: Sequence[int], others: CompiledSuffixTree | None, most: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Append tokens to a text, and draft after them: tokens, parents and kinds."""
        count, most = len(tokens), min(most, MOST)
        if count <= SHORT:
            for index, token in enumerate(tokens):  # faster than a slice
                self._in[index] = token
            address = self._in_at
        else:
            buffer = array("i", tokens)
            address = buffer.buffer_info()[0]
        below = None if others is None else others._tree
        n = self._draft(self._tree, text, address, count, below, most, self._out_at)
        if not n:
            return [], [], []
        out, n = self._out, _checked(n)
        return out[:n], out[most : most + n], out[2 * most : 2 * most + n]


def _checked(result: int) -> int:
    assert result != -2, "a text that the suffix tree does not have"
    if result < 0:
        raise MemoryError("a suffix tree")
    return result


@cache
def _typed(loaded: Any) -> Any:
    """The library with the types of its functions."""
    library = ctypes.PyDLL(loaded._name, handle=loaded._handle)
    pointer, long, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    for name, arguments in {
        "free": [pointer],
        "size": [pointer],
        "begin": [pointer],
        "count": [pointer, pointer, long],
        "extend": [pointer, long, pointer, long],
        "remove": [pointer, long],
        "draft": [pointer, long, pointer, long, pointer, long, pointer],
    }.items():
        function = getattr(library, f"attar_suffix_{name}")
        function.argtypes, function.restype = arguments, None if name == "free" else long
    library.attar_suffix_tree.argtypes = [ctypes.c_int32, number, number, pointer, long]
    library.attar_suffix_tree.restype = pointer
    return library


def _library() -> Any:
    """It keeps the interpreter's lock: releasing it takes longer than a look-up."""
    library = load("suffix_tree")
    return None if library is None else _typed(library)
