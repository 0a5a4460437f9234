"""Times of a card's products by kernel, which ``attar bench MODEL --kernels --device cuda`` measures.

    triton      attar's kernels: a row's bits do not depend on how many rows are multiplied
    cublas      torch's product of dense weights
    humming     packed weights, where github.com/inclusionAI/humming is installed
    int_mm      torch's product of int8 rows and int8 weights, a scale for each row and output
    scaled_mm   the same of e4m3

The runner multiplies by the first two. Of dense weights it takes the faster one by this table where
ATTAR_PRODUCTS=fastest gives up that texts do not depend on their batch; else always triton. The others are
measured for comparison: int_mm and scaled_mm round what they read, and humming has a layout of its own.

Never run on a GPU. Letters: M rows, N outputs, K inputs, G inputs of a scale.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.checkpoint.hashing import computed_folder
from attar.errors import SettingsError
from attar.kernels.device.products import dense_product, packed_product
from attar.kernels.kv_codes import encode
from attar.progress import SILENT, Progress
from attar.runtime.kernel_times import KernelShape, KernelTimes, read_times
from attar.runtime.runner.device.layout import DENSE
from attar.runtime.runner.device.linears import FIRST, Capability

logger = logging.getLogger(__name__)

WIDTHS = (DENSE, 2, 3, 4, 5, 6, 8)
GROUP = 128
CACHE = 256 << 20  # bytes of weights that are multiplied in turn: more than a card's cache holds
ROUNDS = 20
SINCE = {"triton": FIRST, "cublas": (0, 0), "humming": (7, 5), "int_mm": (7, 5), "scaled_mm": (8, 9)}
Calls = list[Callable[[], Tensor]]
Timer = Callable[[KernelShape, Calls, torch.device], float]


def candidates(bits: int, capability: Capability, *, triton: bool, humming: bool) -> list[str]:
    """The kernels that multiply by a weight of so many bits on a card.

    Args:
        bits: of a code; DENSE: none.
        triton, humming: whether they are installed.
    """
    names = ["triton"] if triton else []
    if bits == DENSE:
        names += ["cublas"]
    else:
        names += ["humming"] if humming else []
        names += ["int_mm", "scaled_mm"] if bits == 8 else []
    return [name for name in names if capability >= SINCE[name]]


def label(bits: int, kernel: str) -> str:
    """As descriptions have it."""
    weight = "bfloat16" if bits == DENSE else "fp8" if kernel == "scaled_mm" else f"int{bits}"
    return f"{weight} by {kernel}"


FORMATS = [label(bits, name) for bits in WIDTHS for name in SINCE]
"""Of every entry that a table may have."""


def device_times(
    shapes: Iterable[tuple[int, int]],
    tokens: Sequence[int],
    path: Path,
    device: torch.device,
    *,
    card: str,
    kernels: Callable[[int], list[str]],
    timer: Timer | None = None,
    progress: Progress = SILENT,
) -> KernelTimes:
    """The table of a card with these shapes: what its file lacks is measured, and the file replaced after
    each. A kernel that fails is left out, with a line.

    Args:
        shapes: (N, K).
        tokens: M.
        path: of the file, which need not exist; one of another card is made anew.
        card: its name, with its capability.
        kernels: of a weight, by its bits.
        timer: seconds of a call.
    """
    table, known = KernelTimes(card, 0), _read(path)
    table = known if known is not None and known.machine == card else table
    wanted = [
        (bits, name, KernelShape(label(bits, name), N, K, M))
        for N, K in dict.fromkeys(shapes)
        for bits in WIDTHS
        for name in kernels(bits)
        for M in tokens
    ]
    missing = [product for product in wanted if product[2] not in table.seconds]
    with progress.task("kernels", total=len(missing)) as task:
        for bits, name, shape in missing:
            try:
                calls = product_calls(name, bits, shape, device)
                table.seconds[shape] = (timer or median_seconds)(shape, calls, device)
            except Exception as error:
                logger.warning("%s, %d rows: %s: %s", shape.format, shape.tokens, type(error).__name__, error)
            else:
                table.write(path)
            task.advance()
    return table


def dense_kernel(times: KernelTimes | None, rows: int, columns: int) -> str:
    """What multiplies by a dense weight (N, K), one kernel for any number of rows: cublas where the table has
    both, and cublas' times, each divided by triton's for as many rows, are shorter in the mean; else the
    operator's ("")."""
    ours, theirs = (label(DENSE, name) for name in ("triton", "cublas"))
    seconds = {} if times is None else times.seconds
    ratios = [
        theirs_s / ours_s
        for shape, theirs_s in seconds.items()
        if (shape.format, shape.rows, shape.columns) == (theirs, rows, columns)
        and (ours_s := seconds.get(shape._replace(format=ours))) is not None
    ]
    return "cublas" if ratios and statistics.geometric_mean(ratios) < 1 else ""


@functools.cache
def fastest(device: torch.device) -> KernelTimes | None:
    """The table of a device, where ATTAR_PRODUCTS=fastest asks for it and there is one."""
    if device.type != "cuda" or os.environ.get("ATTAR_PRODUCTS", "exact") != "fastest":
        return None
    table = _read(table_path())
    return table if table is not None and table.machine == card_name(device) else None


def table_path() -> Path:
    """The file of the table."""
    return computed_folder() / "products.yaml"


def card_name(device: torch.device) -> str:
    """A card and its capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"


def kernels_of(device: torch.device, *, triton: bool) -> Callable[[int], list[str]]:
    """:func:`candidates` of a card, by bits."""
    capability, humming = torch.cuda.get_device_capability(device), importlib.util.find_spec("humming")
    return functools.partial(candidates, capability=capability, triton=triton, humming=humming is not None)


def product_calls(kernel: str, bits: int, shape: KernelShape, device: torch.device) -> Calls:
    """Products of random weights with M rows, in turn more than a card's cache holds.

    Raises:
        Exception: whatever the kernel raises that does not run here.
    """
    nbytes = shape.rows * shape.columns * bits // 8
    copies = 1 + CACHE // nbytes if device.type == "cuda" else 1
    x = torch.randn(shape.tokens, shape.columns, device=device).bfloat16()
    calls = [_product(kernel, bits, x, shape.rows) for _ in range(copies)]
    calls[0]()
    return calls


def median_seconds(shape: KernelShape, calls: Calls, device: torch.device) -> float:
    """Of a call, the calls in turn; with a card's own clock."""
    times: list[float] = []
    for number in range(max(ROUNDS, len(calls))):
        call = calls[number % len(calls)]
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _product(kernel: str, bits: int, x: Tensor, N: int) -> Callable[[], Tensor]:
    """A product of x (M, K) with a random weight of N outputs."""
    K, device = x.shape[1], x.device
    if kernel in ("cublas", "triton") and bits == DENSE:
        weight = torch.randn(N, K, device=device).bfloat16()
        if kernel == "cublas":
            return lambda: F.linear(x, weight)
        return lambda: dense_product(x, weight, None, torch.bfloat16)
    if kernel == "triton":
        words = torch.randint(-(2**31), 2**31, (K * bits // 32, N), device=device).int()
        scales = torch.full((K // group_of(K), N), K**-0.5 / 2 ** (bits - 1), device=device).half()
        return lambda: packed_product(x, words, scales, None, None, bits, torch.bfloat16)
    if kernel == "humming":
        return _humming(x, N, bits)
    codes, scales = encode(
        torch.randn(N, K, device=device), torch.int8 if kernel == "int_mm" else torch.float8_e4m3fn
    )
    return lambda: rounded_product(x, codes, scales)


def rounded_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x (M, K), its rows rounded to the codes' type, times codes (N, K), int8 or e4m3, with scales float32
    (N, 1): bfloat16 (M, N)."""
    rows, of_rows = encode(x, codes.dtype)
    if codes.dtype == torch.int8:
        padded = F.pad(rows, (0, 0, 0, max(17 - len(rows), 0)))  # it takes more than 16 rows
        return (torch._int_mm(padded, codes.t())[: len(rows)] * of_rows * scales.t()).bfloat16()
    return torch._scaled_mm(rows, codes.t(), of_rows, scales.t(), out_dtype=torch.bfloat16)


def _humming(x: Tensor, N: int, bits: int) -> Callable[[], Tensor]:
    from humming.layer import HummingLayer  # type: ignore[import-not-found, unused-ignore]

    K = x.shape[1]
    config = {"dtype": f"uint{bits}", "group_size": group_of(K)}
    layer: Any = HummingLayer(shape_n=N, shape_k=K, weight_config=config, torch_dtype=torch.bfloat16)
    layer = layer.to(x.device)
    layer.load_from_unquantized(torch.randn(N, K, device=x.device).bfloat16())
    layer.transform()
    return lambda: layer(x)


def group_of(K: int) -> int:
    """Inputs of a scale that are timed."""
    return next(size for size in (GROUP, 64, 32) if K % size == 0)


def _read(path: Path) -> KernelTimes | None:
    """The table of a file; None where there is none, or a damaged one."""
    try:
        return read_times(path, FORMATS)
    except SettingsError:
        return None
