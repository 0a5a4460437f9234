"""Processor levels that wheels carry compiled libraries for: for machines without a compiler.

A level is a set of instructions common to many machines (``-march=native`` is of one). Better levels come
first.

    x86-64     v3: AVX2 (Haswell 2013, Zen 2017) · v4: AVX-512 (Skylake server 2017, Zen 4 2022); with VNNI
               since Cascade Lake 2019, with bfloat16 since Cooper Lake 2020, with AMX since Sapphire Rapids
               2023; AVX2 with VNNI: Alder Lake 2021
    aarch64    armv8: all · dotprod: Cortex-A76, Neoverse N1, Apple M1 · i8mm and bf16: Neoverse V1 and N2,
               Apple M2
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """A level of instructions.

    Attributes:
        name: part of the library's file name.
        machine: as ``platform.machine()`` has it.
        features: that ``/proc/cpuinfo`` must list.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: tuple[str, ...]


_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI, _BF16 = "-mavx512vnni", "-mavx512bf16"
_AMX = ("-mamx-tile", "-mamx-int8")

LEVELS = (
    Level(
        "v4-vnni-bf16-amx",
        "x86_64",
        ("-march=x86-64-v4", _VNNI, _BF16, *_AMX),
        (*_V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8"),
    ),
    Level("v4-vnni-bf16", "x86_64", ("-march=x86-64-v4", _VNNI, _BF16), (*_V4, "avx512_vnni", "avx512_bf16")),
    Level("v4-vnni", "x86_64", ("-march=x86-64-v4", _VNNI), (*_V4, "avx512_vnni")),
    Level("v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), (*_V3, "avx_vnni")),
    Level("v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("i8mm-bf16", "aarch64", ("-march=armv8.2-a+dotprod+i8mm+bf16",), ("asimddp", "i8mm", "bf16")),
    Level("dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), ("asimddp",)),
    Level("armv8", "aarch64", ("-march=armv8-a",), ("asimd",)),
)


def levels() -> tuple[Level, ...]:
    """The levels that this processor runs, the best first."""
    machine, available = platform.machine(), features()
    return tuple(x for x in LEVELS if x.machine == machine and available.issuperset(x.features))


def features() -> frozenset[str]:
    """Features of this processor; empty where the system does not list them (not Linux)."""
    try:
        lines = CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(flags[0].split()) if flags else frozenset()
