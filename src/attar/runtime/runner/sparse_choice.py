"""Whether 2:4 weights are multiplied in their own form (kernels/semi_structured.py), which is measured.

The form reads fewer bytes, and picks its inputs by shuffles. On processors where these are slow the dense
form is faster. Results do not depend on the choice, bfloat16 with 8-bit activations aside.
"""

from __future__ import annotations

import functools
import time

import torch

from attar.kernels.memory import huge_pages
from attar.kernels.packed import Form, Kind, PackedWeight, Pays, packed_bytes
from attar.kernels.product import ThreadPool
from attar.kernels.structures import library

ROWS, COLUMNS, GROUP = 4096, 4096, 32  # more than second caches hold
ROUNDS = 5


def sparse_pays(bits: int, threads: int) -> Pays:
    """For each kind, whether one row of activations is multiplied faster in the 2:4 form.

    Args:
        bits: of activations, 8 or 16.
    """
    return functools.partial(_pays, bits=bits, threads=threads)


@functools.cache
def _pays(kind: Kind, *, bits: int, threads: int) -> bool:
    if library() is None:
        return False
    forms: tuple[Form, ...] = ("dense", "2:4")
    weights = {form: _weight(kind, form) for form in forms}
    x, seconds = torch.zeros(1, COLUMNS), dict.fromkeys(forms, float("inf"))
    with ThreadPool(threads) as pool:
        for number in range(ROUNDS):
            for form in forms[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                pool.multiply(x, weights[form], bits=bits)
                seconds[form] = min(seconds[form], time.perf_counter() - began)
    return seconds["2:4"] < seconds["dense"]


def _weight(kind: Kind, form: Form) -> PackedWeight:
    """A weight of zeros: time does not depend on its numbers."""
    group = 0 if kind == "bf16" else GROUP
    nbytes = packed_bytes(ROWS, COLUMNS, kind, group, form)
    data = huge_pages(nbytes)[:nbytes].fill_(0)  # pages are in memory
    return PackedWeight(data, ROWS, COLUMNS, kind, group, form=form)
