"""Numbers and tables as text: bytes, counts and durations with units, sizes read from text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attar.errors import SettingsError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_text(count: float) -> str:
    """``15_900_000`` -> ``15.9 MB``. Decimal units: 1 kB = 1,000 bytes."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """``7_900_000`` -> ``7.90 M``. Thousand K, million M, billion B, trillion T."""
    return _scaled(count, ("", "K", "M", "B", "T")).strip()


def byte_count(name: str, text: str) -> int:
    """Bytes of a size such as ``4.5GB`` or ``900MiB``; 0 for an empty text.

    Raises:
        SettingsError: no such size.
    """
    if not text:
        return 0
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise SettingsError(name, text, "a size such as 4.5GB or 900MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


COUNTS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def size_limit(name: str, text: str) -> tuple[str, int]:
    """What a size limits, and the limit: ``60M`` is ("parameters", 60,000,000) as models are called by them,
    ``120MB`` ("bytes", 120,000,000); ("", 0) for an empty text.

    Raises:
        SettingsError: no such size.
    """
    if not text.strip():
        return "", 0
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else "?"
    if match and unit in COUNTS and float(match[1]) > 0:
        return "parameters", int(float(match[1]) * COUNTS[unit])
    if match and unit in UNITS and len(unit) > 1 and float(match[1]) > 0:
        return "bytes", int(float(match[1]) * UNITS[unit])
    raise SettingsError(name, text, "parameters as 60M or 1.5B, or bytes as 120MB or 1GiB")


def _scaled(count: float, units: tuple[str, ...]) -> str:
    value, index = float(count), 0
    while abs(value) >= 999.5 and index + 1 < len(units):
        value, index = value / 1000, index + 1
    if index == 0:
        return f"{count:.0f} {units[0]}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[index]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with aligned columns: the first ``left`` columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def seconds_text(seconds: float) -> str:
    """``75`` -> ``1 min 15 s``; two figures are enough for a duration."""
    rounded = round(seconds)
    if rounded < 1:
        return "under 1 s"
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    if rounded < 3600:
        return f"{round(rounded / 60)} min"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def range_text(least: float, most: float) -> str:
    """``(40, 160)`` -> ``40-160 s``; one duration where both ends read the same."""
    if seconds_text(least) == seconds_text(most):
        return seconds_text(most)
    unit, name = (1, "s") if most < 200 else (60, "min") if most < 12_000 else (3600, "h")
    digits = 0 if least >= unit else 1
    return f"{least / unit:.{digits}f}-{most / unit:.0f} {name}"


def number(value: float | None, form: str) -> str:
    """A number in a format, or a dash where it was not measured."""
    return "-" if value is None else format(value, form)
