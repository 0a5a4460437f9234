"""Times of this machine's compiled products, by format, shape and number of tokens: what speed is predicted
from, since fewer bits can be slower than more.

    seconds of y = x W^T        W (N, K) in bf16, int8 or int4 (kernels/packed.py); x (T, K)

Inputs x are rounded as the step rounds them. A step is one call with many products: what a call costs, that
of a product of next to nothing, is taken off.

A table is a YAML file in the user's cache, which grows by the shapes that were asked for; on another machine
``attar bench MODEL --kernels`` prints those of one model, with the overhead of its step, and the file can be
given in place of this machine's:

    machine: AMD EPYC 9B14
    threads: 2
    bits: 16
    overhead:
    - {tokens: 1, seconds: 0.00011}
    kernels:
    - {format: int4, rows: 768, columns: 256, tokens: 1, seconds: 4.1e-06}
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

from attar.checkpoint.atomic import write_bytes
from attar.errors import AttarError, CheckpointError, SettingsError
from attar.kernels.packed import GROUPS, Kind
from attar.progress import SILENT, Progress
from attar.yaml import read_yaml

TRY_S = 0.08  # seconds of measuring a product, about
LEAST = 5  # repetitions of a product, at least
COPIES_BYTES = 1 << 30  # of a weight that is multiplied in turn, at most


class KernelShape(NamedTuple):
    """A product: format of the weight, N, K and T."""

    format: str
    rows: int
    columns: int
    tokens: int


@dataclass
class KernelTimes:
    """Seconds of products on a machine.

    Attributes:
        machine: the processor's name.
        threads: of the products.
        seconds: by shape.
        bits: of the products' inputs, 8 or 16 (:func:`attar.kernels.product.default_activation_bits`).
        overhead: of a model's table: seconds of a step outside its products, by number of tokens.
    """

    machine: str
    threads: int
    seconds: dict[KernelShape, float] = field(default_factory=dict)
    bits: int = 16
    overhead: dict[int, float] = field(default_factory=dict)

    def missing(self, shapes: Iterable[KernelShape]) -> list[KernelShape]:
        """The shapes that the table does not have, each once."""
        return [shape for shape in dict.fromkeys(shapes) if shape not in self.seconds]

    def to_dict(self) -> dict[str, Any]:
        """The content of its file."""
        rows = [{**shape._asdict(), "seconds": seconds} for shape, seconds in sorted(self.seconds.items())]
        head = {"machine": self.machine, "threads": self.threads, "bits": self.bits}
        overhead = [{"tokens": tokens, "seconds": seconds} for tokens, seconds in self.overhead.items()]
        return {**head, **({"overhead": overhead} if overhead else {}), "kernels": rows}

    def to_yaml(self) -> str:
        """The text of its file."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=1000))

    def write(self, path: Path) -> None:
        """Replace its file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, self.to_yaml().encode())


def read_times(path: Path, formats: Sequence[str] = get_args(Kind)) -> KernelTimes:
    """The table of a file.

    Args:
        formats: that it may have.

    Raises:
        SettingsError: it is none; names the entry and what it must be.
    """
    try:
        content = read_yaml(path).plain()
    except AttarError as error:
        raise SettingsError("hardware", str(path), f"a table of attar bench --kernels ({error})") from error
    times = content.get("kernels") if isinstance(content, Mapping) else None
    bits = content.get("bits", 16) if isinstance(content, Mapping) else None
    if not isinstance(times, list) or not isinstance(content.get("threads"), int) or bits not in (8, 16):
        raise SettingsError("hardware", str(path), "a file with machine, threads, bits (8 or 16) and kernels")
    table = KernelTimes(str(content.get("machine", "")), content["threads"], bits=bits)
    steps = content.get("overhead", [])
    for step in steps if isinstance(steps, list) else [steps]:
        known = isinstance(step, Mapping) and set(step) == {"tokens", "seconds"}
        if not known or not _is_size(step["tokens"]) or not _is_time(step["seconds"]):
            raise SettingsError("hardware", str(path), "a file whose overhead has tokens and seconds")
        table.overhead[step["tokens"]] = float(step["seconds"])
    for number, entry in enumerate(times):
        shape = _shape(path, number, entry, formats)
        table.seconds[shape] = float(entry["seconds"])
    return table


def _shape(path: Path, number: int, entry: Any, formats: Sequence[str]) -> KernelShape:
    """The shape of an entry, checked."""
    allowed = f"kernels[{number}] with format, rows, columns, tokens and positive seconds"
    if not isinstance(entry, Mapping) or set(entry) != {*KernelShape._fields, "seconds"}:
        raise SettingsError("hardware", str(path), allowed)
    shape = KernelShape(*(entry[name] for name in KernelShape._fields))
    if shape.format not in formats or not all(map(_is_size, shape[1:])) or not _is_time(entry["seconds"]):
        raise SettingsError("hardware", str(path), allowed)
    return shape


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def times_of(
    shapes: Iterable[KernelShape],
    path: Path,
    machine: str,
    *,
    layers: int = 32,
    progress: Progress = SILENT,
) -> KernelTimes:
    """This machine's table, with these shapes: what its file lacks is measured, and the file replaced.

    Args:
        path: of the file, which need not exist; one that is damaged or of another machine is made anew.
        machine: the processor's name.
        layers: copies of a weight that are multiplied in turn, as a model does: the next layer's weight is
            in the caches only where the whole model is.

    Raises:
        CheckpointError: there are no compiled kernels.
    """
    from attar.kernels.build import why_missing
    from attar.kernels.product import ThreadPool, default_activation_bits, default_threads

    if why := why_missing("decode"):
        raise CheckpointError(f"no compiled kernels to time: {why}", hint="leave --speed out")
    table = KernelTimes(machine, default_threads(), bits=default_activation_bits())
    try:
        known = read_times(path)
        if (known.machine, known.threads, known.bits) == (machine, table.threads, table.bits):
            table = known
    except SettingsError:
        pass
    missing = table.missing(shapes)
    with ThreadPool() as pool, progress.task("kernels", total=len(missing)) as task:
        call = _measure(pool, KernelShape("bf16", 16, 32, 1), 1, table.bits) if missing else 0.0
        for shape in missing:
            seconds = _measure(pool, shape, layers, table.bits)
            table.seconds[shape] = max(seconds - call, seconds / 10)
            task.advance()
    if missing:
        table.write(path)
    return table


def _measure(pool: Any, shape: KernelShape, layers: int, bits: int) -> float:
    """The time of a call of a product, the fastest try: other work only adds to it."""
    import torch

    from attar.kernels.memory import huge_pages
    from attar.kernels.packed import PackedWeight, packed_bytes

    kind: Any = shape.format
    group = 0 if kind == "bf16" else max(size for size in GROUPS if shape.columns % size == 0)
    nbytes = packed_bytes(shape.rows, shape.columns, kind, group, "dense")
    copies = max(min(COPIES_BYTES // nbytes, layers), 1)
    weights = [
        PackedWeight(huge_pages(nbytes)[:nbytes].fill_(0), shape.rows, shape.columns, kind, group)
        for _ in range(copies)
    ]
    x = torch.zeros(shape.tokens, shape.columns)
    tries: list[float] = []
    began = time.perf_counter()
    while len(tries) < LEAST or time.perf_counter() - began < TRY_S:
        start = time.perf_counter()
        for weight in weights:
            pool.multiply(x, weight, bits=bits)
        tries.append((time.perf_counter() - start) / copies)
    return min(tries)
