"""The walk of ``attar prune --method experts``: statistics on calibration text, groups, a streamed cut.

Experts that stay are renumbered, router rows and correction biases are cut with them, the config gets the new
numbers; all other tensors are copied. The result must compute what the original does with the removed experts
out of its routers' reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attar.checkpoint import atomic
from attar.checkpoint.shards import TensorSpec
from attar.errors import ModelError, SettingsError
from attar.models.loading.device import pick_device
from attar.models.loading.load import load_model
from attar.models.mtp_head import ModelWithHead, load_mtp_head
from attar.progress import Progress
from attar.pruning.experts.grouping import SCORES, ExpertGroups, firsts, keep_best, merge_similar
from attar.pruning.experts.mixtures import (
    ExpertTensor,
    MixtureSizes,
    expert_modules,
    expert_tensors,
    router_parameters,
)
from attar.pruning.experts.statistics import ExpertStatistics, collect_statistics
from attar.pruning.task import PruneTask
from attar.walks.stream import WriteStep, stream_steps

OFF = 1e-3
"""Largest difference of logits from the masked model's, over the largest logit, in float32."""


def prune_experts(task: PruneTask) -> None:
    """Remove or merge experts of every layer, or make fewer of them active.

    Raises:
        ModelError: the model is no mixture, or its experts are held in a way that is not understood.
        SettingsError: the numbers do not fit.
    """
    source, options, output = task.source, task.options, task.output
    sizes = MixtureSizes.of(source.config)
    if hashed := next((name for name in source.tensors if name.endswith(".tid2eid")), None):
        raise ModelError(
            f"{source.name}: {hashed} names experts by the ids of tokens; they cannot be removed",
            hint="attar quantize, or prune --method magnitude",
        )
    keep = kept_experts(sizes.experts, options)
    active = options.active or sizes.active
    if active > keep:
        raise SettingsError("active", active, f"1 to {keep}, the experts that stay")
    if keep == sizes.experts and active == sizes.active:
        raise SettingsError("ratio", options.ratio, "large enough to remove an expert, or --active")
    criterion = "reap" if options.criterion == "auto" else options.criterion
    model = load_model(source, dtype=torch.float32, device=pick_device(task.settings.device))
    layers = len(expert_modules(model))
    tensors = expert_tensors(source.tensors, sizes.experts, layers)
    head = expert_tensors(source.mtp, sizes.experts)
    measured = _with_head(model, source, task.progress) if head else model
    modules = expert_modules(measured)
    batches = task.batches()
    groups = [keep_best(torch.zeros(sizes.experts), sizes.experts)] * len(modules)
    if keep < sizes.experts:
        statistics = collect_statistics(
            measured,
            sizes.experts,
            batches,
            norms=criterion in ("reap", "output"),
            means=criterion == "cluster",
            processes=output.processes,
            progress=task.progress,
        )
        groups = [choose(layer, criterion, keep) for layer in statistics]
        output.details["layers"] = rows = _report(list(modules), statistics, groups)
        if unseen := sum(row["unseen_removed"] for row in rows):
            task.progress.log(
                f"{unseen} of the removed experts got no token of this text; another may need them"
            )
    config = sizes.changed(source.config, keep, active)
    atomic.write_json(output.folder / "config.json", config)
    if head and len(groups) == layers:
        groups.append(firsts(groups[-1]))
    tensors |= {name: replace(part, layer=layers) for name, part in head.items()}
    steps = cut_steps(source, tensors, groups)
    stream_steps(
        steps,
        output.folder,
        work=output.shared / "shards",
        processes=output.processes,
        progress=task.progress,
        what="experts",
    )
    output.exit_unless_rank0()
    output.details["kept"] = {
        "unit": "experts",
        "of": sizes.experts,
        "kept": keep,
        "active": active,
        "criterion": criterion,
        "cut": "merged" if criterion == "cluster" else "removed",
    }
    if criterion != "cluster" and active == sizes.active:
        result = load_model(output.folder, dtype=torch.float32)
        _check(model, result, groups[:layers], sizes.experts, batches)


def _with_head(model: Any, source: Any, progress: Progress) -> Any:
    """The model with its multi-token prediction head, whose experts are measured too; the model alone where
    the head is of a form that cannot be run."""
    try:
        return ModelWithHead(model, load_mtp_head(source))
    except ModelError as error:
        progress.log(f"note: {error.message}: its experts stay that the last layer keeps")
        return model


def kept_experts(count: int, options: Any) -> int:
    """Experts of a layer that stay.

    Raises:
        SettingsError: there are not that many.
    """
    if options.experts > count:
        raise SettingsError("experts", options.experts, f"1 to {count}, the experts of a layer")
    return int(options.experts) or max(1, count - round(options.ratio * count))


def choose(statistics: ExpertStatistics, criterion: str, keep: int) -> ExpertGroups:
    """The groups of one layer, by any criterion."""
    if criterion != "cluster":
        return keep_best(SCORES[criterion](statistics), keep)
    assert statistics.outputs is not None, "clusters are made of outputs"
    return merge_similar(statistics.outputs, statistics.frequency, keep)


def cut_steps(
    source: Any, tensors: Mapping[str, ExpertTensor], groups: Sequence[ExpertGroups]
) -> list[WriteStep]:
    """The tensors that are written: every tensor of the source but the tensors of removed experts."""
    steps = []
    for info in source.stored.values():
        part = tensors.get(info.name)
        if part is None:
            spec = TensorSpec(info.name, info.dtype, tuple(info.shape))
            steps.append(WriteStep([spec], lambda name=info.name: {name: source.load(name)}))  # type: ignore[misc]
        elif part.expert is None:
            group = groups[part.layer]
            spec = TensorSpec(info.name, info.dtype, (len(group.members), *info.shape[1:]))
            steps.append(WriteStep([spec], _rows(source, info.name, group)))
        else:
            group = groups[part.layer]
            numbers = [n for n, members in enumerate(group.members) if members[0] == part.expert]
            for number in numbers:  # one, or none for an expert that goes or joins another
                name = f"{part.prefix}.{number}.{part.local_name}"
                members = [f"{part.prefix}.{expert}.{part.local_name}" for expert in group.members[number]]
                spec = TensorSpec(name, info.dtype, tuple(info.shape))
                steps.append(WriteStep([spec], _mean(source, name, members, group.weights[number])))
    return steps


def _rows(source: Any, name: str, group: ExpertGroups) -> Callable[[], dict[str, Tensor]]:
    """A tensor with a row for every expert, cut to the rows of the groups."""

    def make() -> dict[str, Tensor]:
        stored = source.load(name)
        rows = [
            weighted_mean([stored[expert] for expert in members], weights)
            for members, weights in zip(group.members, group.weights, strict=True)
        ]
        return {name: torch.stack(rows)}

    return make


def _mean(
    source: Any, name: str, members: Sequence[str], weights: Sequence[float]
) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: weighted_mean([source.load(member) for member in members], weights)}


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Mean of tensors by weights that sum to 1, computed in float32, in their type; one is itself."""
    if len(tensors) == 1:
        return tensors[0]
    total = sum(weight * tensor.float() for tensor, weight in zip(tensors, weights, strict=True))
    assert isinstance(total, Tensor)
    return total.to(tensors[0].dtype)


class _MaskedLogits(TorchFunctionMode):  # type: ignore[misc]
    """Within it, routers give removed experts a logit of minus infinity."""

    def __init__(self, removed: Mapping[int, list[int]]) -> None:
        super().__init__()
        self.removed = removed  # by the id of the router's weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.linear and id(args[1]) in self.removed:
            return result.index_fill(
                -1, torch.tensor(self.removed[id(args[1])]).to(result.device), -torch.inf
            )
        return result


@contextmanager
def masked_experts(model: Any, groups: Sequence[ExpertGroups], count: int) -> Iterator[None]:
    """The model with the experts that are in no group out of its routers' reach, inside the context."""
    logits: dict[int, list[int]] = {}
    corrections: list[tuple[Tensor, Tensor]] = []
    for name, group in zip(expert_modules(model), groups, strict=True):
        removed = group.removed(count)
        for tensor in router_parameters(model, name, count).values() if removed else ():
            if tensor.dim() == 2:
                logits[id(tensor)] = removed
            else:  # a bias that is added to the logits, or to the scores that choose
                corrections.append((tensor.data, tensor.data.clone()))
                tensor.data[removed] = torch.finfo(tensor.dtype).min
    try:
        with _MaskedLogits(logits):
            yield
    finally:
        for tensor, before in corrections:
            tensor.copy_(before)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _check(
    model: Any, cut: Any, groups: Sequence[ExpertGroups], count: int, batches: Sequence[Tensor]
) -> None:
    """Raise where the cut model is not the masked one, on a row of the calibration text."""
    row = batches[0][:1, :64].to(model.device)
    with masked_experts(model, groups, count):
        wanted = model(input_ids=row, use_cache=False).logits
    logits = cut.to(model.device)(input_ids=row, use_cache=False).logits
    off = float((logits - wanted).abs().max() / wanted.abs().max())
    if not off < OFF:
        raise ModelError(
            f"{type(model).__name__}: the cut model's logits differ from the masked model's by {off:.1e} of"
            " the largest",
            hint="this family does more with its experts than attar knows",
        )


def _report(
    names: Sequence[str], statistics: Sequence[ExpertStatistics], groups: Sequence[ExpertGroups]
) -> list[dict[str, Any]]:
    """Per layer: the groups, the share of choices and gates that removed experts had, and how many of these
    experts no token chose."""
    rows = []
    for name, layer, group in zip(names, statistics, groups, strict=True):
        removed = group.removed(len(layer.frequency))
        rows.append(
            {
                "name": name,
                "experts": [list(members) for members in group.members],
                "frequency_removed": float(layer.frequency[removed].sum() / layer.frequency.sum()),
                "gates_removed": float(layer.gates[removed].sum() / layer.gates.sum()),
                "unseen_removed": int((layer.frequency[removed] == 0).sum()),
            }
        )
    return rows
