"""Numbers for people: bytes and counts with three figures and a unit, and sizes that people write."""

from __future__ import annotations

import re

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
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in UNITS:
        raise SettingsError(name, text, "a size such as 4.5GB or 900MiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _scaled(count: float, units: tuple[str, ...]) -> str:
    value, index = float(count), 0
    while abs(value) >= 999.5 and index + 1 < len(units):
        value, index = value / 1000, index + 1
    if index == 0:
        return f"{count:.0f} {units[0]}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[index]}"
