"""The verb ``quantize``: a dense checkpoint in, a packed compressed-tensors checkpoint out.

RTN needs no data and streams over the tensors. GPTQ sweeps over the blocks, its codes wait in the work
folder, and the same stream then writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import produce
from attar.checkpoint.shards import Slot
from attar.checkpoint.tensors import stored_dtype
from attar.data.calibration import calibration_batches
from attar.data.packing import row_length
from attar.errors import NumericsError
from attar.formats import compressed_tensors
from attar.formats.compressed_tensors import Integers
from attar.models.device import pick_device
from attar.models.load import load_tokenizer
from attar.progress import SILENT, Progress
from attar.quantization.gptq import gptq
from attar.quantization.grids import IntGrid, Parameters, Quantized
from attar.quantization.hessian import Hessian, output_error
from attar.quantization.rtn import rtn
from attar.quantization.scheme import Plan, Site, plan
from attar.quantization.settings import VERSION, QuantizeSettings
from attar.walks.stream import stream
from attar.walks.sweep import Solution, Swept, sweep

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def quantize(
    model: str | Path | Checkpoint,
    out: Path,
    settings: QuantizeSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Quantize the Linears of a model's blocks.

    Args:
        model: a dense checkpoint.
        out: the folder to make.
        settings: what to quantize, how far and how.
        force: replace an existing ``out``.
        key: identity of this work, when a recipe knows it.

    Returns:
        the packed checkpoint; its card lists every layer with its error.

    Raises:
        AttarError: see errors.py; nothing is left behind.
    """
    checkpoint = open_checkpoint(model)
    chosen = plan(checkpoint, settings)
    parents = [(checkpoint, "weights")]
    with produce(
        out,
        stage="quantize",
        version=VERSION,
        settings=asdict(settings),
        seed=settings.seed,
        parents=parents,
        force=force,
        key=key,
    ) as output:
        if settings.method == "gptq":
            swept = _sweep(checkpoint, chosen, settings, output.work / "blocks", progress)
            codes: _Swept | _Nearest = _Swept(chosen, swept)
        else:
            codes = _Nearest(chosen, output.work / "errors.jsonl")
        write(checkpoint, chosen, codes, output.folder, output.work / "shards", progress)
        copy_companions(checkpoint.path, output.folder)
        output.details["layers"] = codes.reports()
    return open_checkpoint(out)


def write(
    checkpoint: Checkpoint,
    chosen: Plan,
    codes: Callable[[str, Callable[[], Tensor]], Quantized],
    folder: Path,
    work: Path,
    progress: Progress = SILENT,
) -> None:
    """Write the packed checkpoint: its config and its tensors.

    Args:
        chosen: what happens to each tensor.
        codes: ``codes(stored name, load)`` gives the quantized weight of a site.
    """
    config = {**checkpoint.config, "quantization_config": chosen.config}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def layout(info: Any) -> Sequence[Slot]:
        base = info.name.removesuffix(".weight")
        if info.name in chosen.sites:
            site = chosen.sites[info.name]
            made = compressed_tensors.encoded_layout(
                site.shape, site.grid.groups(site.shape[1]), site.grid.bits, stored_dtype(site.grid.storage)
            )
            return [Slot(f"{base}.{leaf}", dtype, shape) for leaf, (dtype, shape) in made.items()]
        if info.name == chosen.embedding:
            scale = [
                Slot(f"{name}.weight_scale", info.dtype, (info.shape[0], 1)) for name in _scaled(chosen, base)
            ]
            return [Slot(info.name, "I8", info.shape), *scale]
        return [Slot(info.name, info.dtype, info.shape)]

    def transform(name: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        base = name.removesuffix(".weight")
        if name in chosen.sites:
            made = codes(name, load)
            whole = Integers(made.codes, made.parameters.scale, made.parameters.zero, made.grid.bits)
            return {
                f"{base}.{leaf}": value
                for leaf, value in compressed_tensors.encode(whole, made.grid.storage).items()
            }
        if name == chosen.embedding:
            weight = load()
            made = rtn(weight, IntGrid(8, 0, storage=weight.dtype))
            scale = made.parameters.scale.to(weight.dtype)
            return {name: made.codes, **{f"{owner}.weight_scale": scale for owner in _scaled(chosen, base)}}
        return {name: load()}

    stream(checkpoint, layout, transform, folder, work=work, progress=progress, what="pack")


def _scaled(chosen: Plan, embedding: str) -> list[str]:
    """Modules that store a scale for the int8 embedding: itself, and a head tied to it."""
    return [embedding, chosen.tied_head] if chosen.tied_head else [embedding]


def _sweep(
    checkpoint: Checkpoint, chosen: Plan, settings: QuantizeSettings, work: Path, progress: Progress
) -> Swept:
    batches = calibration_batches(
        load_tokenizer(checkpoint),
        settings.data,
        samples=settings.samples,
        sequence_length=row_length(settings.sequence_length, checkpoint.config),
        batch_size=settings.batch_size,
        seed=settings.seed,
    )
    solver = GPTQSolver(
        {site.module: site for site in chosen.sites.values()}, settings.damp, settings.act_order
    )
    return sweep(
        checkpoint,
        batches,
        solver,
        work=work,
        select=solver.sites.__contains__,
        device=pick_device(settings.device),
        progress=progress,
        what="gptq",
    )


@dataclass(frozen=True)
class GPTQSolver:
    """GPTQ as the sweep walk calls it.

    Attributes:
        sites: by module name.
        damp: lambda, as a fraction of the Hessian's mean diagonal.
        act_order: columns of large activations first.
    """

    sites: dict[str, Site]
    damp: float
    act_order: bool

    def accumulator(self, inputs: int) -> Hessian:
        """An empty Hessian (K, K)."""
        return Hessian(inputs)

    def solve(self, name: str, weight: Tensor, seen: Hessian) -> Solution:
        """Round one weight (N, K)."""
        grid, H = self.sites[name].grid, seen.value()
        result = gptq(weight, H, grid, damp=self.damp, act_order=self.act_order)
        dense = result.quantized.dequantize()
        report = {
            "error": output_error(weight, dense, H),
            "rtn_error": output_error(weight, rtn(weight, grid).dequantize(), H),
            "damp": result.damp,
            "dead": result.dead,
        }
        tensors = {"codes": result.quantized.codes.cpu(), "scale": result.quantized.parameters.scale.cpu()}
        return Solution(dense, tensors, report)

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The weight (N, K) that stored codes stand for."""
        return Quantized(self.sites[name].grid, tensors["codes"], Parameters(tensors["scale"])).dequantize()


class _Swept:
    """Codes that a sweep left on disk; one block's are held at a time, because tensors are asked for in file
    order."""

    def __init__(self, chosen: Plan, swept: Swept) -> None:
        self.chosen, self.swept = chosen, swept
        self.held: tuple[int, dict[str, dict[str, Tensor]]] = (-1, {})

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> Quantized:
        site = self.chosen.sites[stored]
        number = self.swept.block_of[site.module]
        if self.held[0] != number:
            self.held = (number, self.swept.tensors(number))
        tensors = self.held[1][site.module]
        return Quantized(site.grid, tensors["codes"], Parameters(tensors["scale"]))

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, in the order of the blocks."""
        return list(self.swept.reports)


class _Nearest:
    """Codes rounded to nearest as the tensors stream by; notes each layer's relative weight error in a file
    that survives a kill."""

    def __init__(self, chosen: Plan, errors: Path) -> None:
        self.chosen, self.errors = chosen, errors

    def __call__(self, stored: str, load: Callable[[], Tensor]) -> Quantized:
        site = self.chosen.sites[stored]
        weight = load().T.contiguous() if site.transposed else load()
        if not torch.isfinite(weight).all():
            raise NumericsError(f"{stored} holds NaN or infinity", hint="the checkpoint is damaged")
        made = rtn(weight, site.grid)
        whole = weight.double().square().sum().clamp(min=1e-30)
        lost = float((weight.double() - made.dequantize().double()).square().sum() / whole)
        with self.errors.open("a") as file:
            file.write(json.dumps({"name": site.module, "weight_error": lost}) + "\n")
        return made

    def reports(self) -> list[dict[str, Any]]:
        """One row a layer, in the order of the file."""
        rows = [json.loads(line) for line in self.errors.read_text().splitlines() if line.endswith("}")]
        return list({row["name"]: row for row in rows}.values())
