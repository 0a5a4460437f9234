"""What the router and the experts of each layer do on calibration text.

    frequency_e = tokens that chose e                       gates_e = sum of g_e(x) over them
    saliency_e  = mean over them of g_e(x) |f_e(x)|         REAP: Lasby et al. 2025, arXiv 2510.13999, eq. 9
    mean_e      = mean over all tokens of f_e(x)            HC-SMoE: Chen et al. 2024, arXiv 2410.08589, eq. 4

Letters: x (H,) what enters the experts, f_e(x) (H,) the output of expert e, g_e(x) its gate as the family
computes it (normalized over the chosen experts where it does so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.progress import SILENT, Progress
from attar.pruning.experts.mixtures import expert_modules
from attar.walks.distributed import own_batches


@dataclass
class ExpertStatistics:
    """Of one layer; all float64.

    Attributes:
        frequency, gates, saliency: (E,).
        outputs: (E, H) the mean output on all tokens; None where it was not asked for.
    """

    frequency: Tensor
    gates: Tensor
    saliency: Tensor
    outputs: Tensor | None = None


@torch.no_grad()  # type: ignore[untyped-decorator]
def collect_statistics(
    model: Any,
    experts: int,
    batches: Sequence[Tensor],
    *,
    norms: bool = True,
    means: bool = False,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> list[ExpertStatistics]:
    """Run the model over batches of token ids (B, S); the statistics of each layer with experts.

    Args:
        experts: E.
        norms: measure the experts' outputs, else ``saliency`` is 0.
        means: run every expert on every token too.
        processes: each runs a part of the batches; all get the statistics of all.
    """
    modules = expert_modules(model)
    layers = [_Recorder(module, experts, norms, means) for module in modules.values()]
    hooks = [
        module.register_forward_pre_hook(layer, with_kwargs=True)
        for module, layer in zip(modules.values(), layers, strict=True)
    ]
    try:
        assigned = own_batches(batches, processes)
        with progress.task("experts", total=len(assigned)) as task:
            for batch in assigned:
                model(input_ids=batch.to(model.device), use_cache=False)
                task.advance()
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        layer.reduce(processes.total)
    return [layer.statistics() for layer in layers]


class _Recorder:
    """A hook before a layer's experts that adds up their statistics."""

    def __init__(self, module: nn.Module, experts: int, norms: bool, means: bool) -> None:
        self.module, self.norms = module, norms
        self.frequency = torch.zeros(experts, dtype=torch.float64)
        self.gates, self.activation = self.frequency.clone(), self.frequency.clone()
        self.outputs: Tensor | None = None
        self.means, self.tokens = means, 0

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, chosen, gates = (*args, *kwargs.values())[:3]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        self.tokens += len(hidden)
        for expert in range(len(self.frequency)):
            rows, slots = torch.where(chosen == expert)
            weights = gates[rows, slots].double().cpu()
            self.frequency[expert] += len(rows)
            self.gates[expert] += weights.sum()
            if self.norms and len(rows):
                lengths = self._output(expert, hidden[rows]).norm(dim=-1).double().cpu()
                self.activation[expert] += (weights * lengths).sum()
            if self.means:
                total = self._output(expert, hidden).double().sum(0).cpu()
                if self.outputs is None:
                    self.outputs = torch.zeros(len(self.frequency), len(total), dtype=torch.float64)
                self.outputs[expert] += total

    def _output(self, expert: int, x: Tensor) -> Tensor:
        """f_e(x), (T, H): the layer's experts with all tokens sent to e, without hooks."""
        forward: Callable[..., Tensor] = self.module.forward
        index = torch.full((len(x), 1), expert, device=x.device)
        return forward(x, index, torch.ones(len(x), 1, dtype=x.dtype, device=x.device))

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add the sums of several processes: ``total`` of a tensor is its sum over them."""
        for sums in (self.frequency, self.gates, self.activation):
            total(sums)
        if self.outputs is not None:
            total(self.outputs)
        self.tokens = int(total(torch.tensor(self.tokens)))

    def statistics(self) -> ExpertStatistics:
        saliency = self.activation / self.frequency.clamp(min=1)
        outputs = None if self.outputs is None else self.outputs / max(self.tokens, 1)
        return ExpertStatistics(self.frequency, self.gates, saliency, outputs)
