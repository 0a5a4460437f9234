"""Seconds of a step of decoding: the products of every group by this machine's table, and all else of a step.

step(choice) = sum over products of their times in the choice's formats + overhead
overhead     = step of the model rounded to int4, measured, less its products
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint.hashing import computed_folder
from attar.errors import CheckpointError, SettingsError
from attar.models.anatomy.discover import discover
from attar.models.loading.empty import empty_model
from attar.models.loading.fit import admit
from attar.models.loading.single_experts import single_experts
from attar.planner.costs import (
    CARD_FORMATS,
    EMBEDDING,
    HEAD,
    STEP_FORMATS,
    GroupProduct,
    StepTimes,
    group_seconds,
    kernel_formats,
    kernel_shapes,
    layer_groups,
)
from attar.planner.settings import PlanSettings
from attar.progress import SILENT, Progress
from attar.recipe.machine import machine
from attar.runtime.kernel_times import KernelTimes, read_times, times_of

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

CONTEXT = 128  # tokens before the step that is timed, as attar evaluate has it


def kernel_table(
    products: Sequence[GroupProduct],
    batch: Sequence[int],
    layers: int,
    progress: Progress = SILENT,
) -> KernelTimes:
    """This machine's times of a model's products, measured where the user's cache lacks them.

    Raises:
        CheckpointError: there are no compiled kernels.
    """
    path = computed_folder() / "kernels.yaml"
    shapes = [shape for tokens in batch for shape in kernel_shapes(products, tokens)]
    return times_of(shapes, path, str(machine()["cpu"]), layers=layers, progress=progress)


def model_kernels(model: Any, batches: Sequence[int], progress: Progress) -> KernelTimes:
    """This machine's times of the products of a model, and of no other, with the overhead of its step.

    Args:
        batches: rows of the products.

    Raises:
        AttarError: see :func:`products_of` and :func:`kernel_table`.
    """
    checkpoint = admit(model, progress)
    fused = products_of(checkpoint, layer_groups(checkpoint))
    shapes = [product for products in fused.values() for product in products]
    table = kernel_table(shapes, batches, len(fused) // 4, progress)
    return _of_model(table, checkpoint, fused, batches, "cpu", progress)


def device_kernels(model: Any, batches: Sequence[int], device: str, progress: Progress) -> KernelTimes:
    """A card's times of the products of a model by each kernel, measured where its table lacks them, with the
    overhead of its step.

    Raises:
        AttarError: see :func:`products_of`; torch sees no such card.
    """
    from attar.models.loading.device import pick_device
    from attar.runtime.runner.device import product_times
    from attar.runtime.runner.device.runner import has_triton, register_kernels

    chosen = pick_device(device)
    if chosen.type != "cuda":
        raise SettingsError("device", device, "a card: cuda or cuda:0")
    checkpoint = admit(model, progress)
    fused = products_of(checkpoint, layer_groups(checkpoint))
    register_kernels(chosen)
    every = [product for products in fused.values() for product in products]
    table = product_times.device_times(
        [product[:2] for product in every],
        sorted({product.shape("", batch).tokens for product in every for batch in batches}),
        product_times.table_path(),
        chosen,
        card=product_times.card_name(chosen),
        kernels=product_times.kernels_of(chosen, triton=has_triton(chosen)),
        progress=progress,
    )
    return _of_model(table, checkpoint, fused, batches, str(chosen), progress)


def _of_model(
    table: KernelTimes,
    checkpoint: Checkpoint,
    fused: Mapping[str, Sequence[GroupProduct]],
    batches: Sequence[int],
    device: str,
    progress: Progress,
) -> KernelTimes:
    """The entries of a model, with the overhead of its steps where the table has what a step multiplies."""
    every = [product for members in fused.values() for product in members]
    wanted = {product.shape("", batch)[1:] for product in every for batch in batches}
    table = replace(table, seconds={shape: s for shape, s in table.seconds.items() if shape[1:] in wanted})
    overhead = {
        batch: _overhead(table, checkpoint, fused, batch, device, progress)
        for batch in batches
        if not table.missing(kernel_shapes(every, batch, kernel_formats(table)))
    }
    return replace(table, overhead=overhead)


def products_of(checkpoint: Checkpoint, groups: Mapping[str, Sequence[str]]) -> dict[str, list[GroupProduct]]:
    """The products of each group, fused as the step has them, and of the head.

    Raises:
        CheckpointError: the compiled step does not run the model.
    """
    from attar.runtime.runner.choice import RunnerSettings, why_not_compiled

    if why := why_not_compiled(checkpoint, RunnerSettings()):
        raise CheckpointError(f"the compiled step does not run this model: {why}", hint="leave --speed out")
    tensors = single_experts(checkpoint).tensors
    shapes = {name.removesuffix(".weight"): info.shape for name, info in tensors.items()}
    anatomy = discover(empty_model(checkpoint.config, unstacked=True))
    mixtures = [block.mixture for block in anatomy.blocks if block.mixture is not None]
    routed = {  # of each mixture's first expert: gate and up are one product, down another
        part.name: (name, mixture.count, mixture.active)
        for mixture in mixtures
        for name, part in vars(mixture.experts[0]).items()
        if name in ("gate", "up", "down") and part is not None
    }
    others = frozenset(module for mixture in mixtures for module in mixture.linears) - routed.keys()
    fused = {}
    for group, modules in groups.items():
        rows: dict[tuple[int, bool, int, int], int] = {}  # by inputs, and by what of a mixture it is
        for module in (module for module in modules if module not in others):
            part, experts, active = routed.get(module, ("", 0, 0))
            key = int(shapes[module][1]), part == "down", experts, active
            rows[key] = rows.get(key, 0) + int(shapes[module][0])
        fused[group] = [
            GroupProduct(count, columns, experts, active)
            for (columns, _, experts, active), count in rows.items()
        ]
    vocabulary, width = shapes[anatomy.embedding if anatomy.tied else str(anatomy.head)]
    fused[EMBEDDING if anatomy.tied else HEAD] = [GroupProduct(int(vocabulary), int(width))]
    return fused


def step_times(
    checkpoint: Checkpoint, groups: Mapping[str, Sequence[str]], settings: PlanSettings, progress: Progress
) -> StepTimes:
    """Times of this machine, or of the one whose table ``hardware`` is.

    Raises:
        CheckpointError: there are no compiled kernels, or the compiled step does not run the model.
        SettingsError: the table lacks a product; names what makes it.
    """
    fused = products_of(checkpoint, groups)
    products, batch = [product for members in fused.values() for product in members], settings.batch
    if settings.hardware == "this":
        table = kernel_table(products, [batch], len(groups) // 4, progress)
        overhead = _overhead(table, checkpoint, fused, batch, "cpu", progress)
        return StepTimes(group_seconds(table, fused, batch), overhead)
    from attar.runtime.runner.device.product_times import FORMATS

    table = read_times(Path(settings.hardware), (*STEP_FORMATS.values(), *FORMATS))
    formats = kernel_formats(table)
    if missing := table.missing(kernel_shapes(products, batch, formats)):
        device = " --device cuda" if formats is CARD_FORMATS else ""
        raise CheckpointError(
            f"{settings.hardware} has no time of {missing[0].format} {missing[0].rows} x "
            f"{missing[0].columns} with {batch} tokens",
            hint=f"attar bench MODEL --kernels{device} --batch {batch} on that machine",
        )
    if batch not in table.overhead:
        progress.log(f"{settings.hardware} has no overhead of a step: only its products count")
    return StepTimes(group_seconds(table, fused, batch), table.overhead.get(batch, 0.0))


def _overhead(
    table: KernelTimes,
    checkpoint: Checkpoint,
    fused: Mapping[str, Sequence[GroupProduct]],
    batch: int,
    device: str,
    progress: Progress,
) -> float:
    """Seconds of a step outside its products, at least next to nothing."""
    coded = StepTimes(group_seconds(table, fused, batch)).seconds(dict.fromkeys(fused, "W4A16"))
    return max(_step(checkpoint, batch, device, progress) - coded, 1e-9)


def _step(checkpoint: Any, batch: int, device: str, progress: Progress) -> float:
    """Seconds of a step of the model rounded to int4 while it is loaded, the fastest of three tries."""
    import random

    from attar.runtime.bench import measure
    from attar.runtime.llm import LLM

    with progress.task("time a step", total=3) as task:
        llm = LLM(checkpoint, weights="int4", device=device)
        context = min(CONTEXT, (llm.engine.runner.context or 2 * CONTEXT) // 2)
        tries = []
        for _ in range(3):
            tries.append(batch / measure(llm, batch, context, 33, random.Random(0)).decode_tokens_per_s)
            task.advance()
    return min(tries)
