"""QLoRA: Dettmers, Pagnoni, Holtzman, Zettlemoyer 2023, "QLoRA: Efficient Finetuning of Quantized LLMs",
arXiv 2305.14314, eq. 5, on the adapters of Hu et al. 2021, "LoRA", arXiv 2106.09685, as peft builds them.

    y = x W'^T + c / r * (x A^T) B^T ,      W' = decode(codes)  frozen ;  A (r, K), B (N, r) trained

Letters: W (N, K) weight of a Linear, W' the weight its codes stand for; r rank; c the adapters' scaling.

Differs from the paper: any grid takes the place of NF4, and the base is held dense, with exactly the values
of its codes (this is recovery on one machine, not training in little memory). ``init="error"`` starts A and B
at the r largest singular parts of W - W' instead of at zero (Li et al. 2023, "LoftQ", arXiv 2310.08659, one
alternation of algorithm 1), so that the adapters begin by undoing what the rounding did.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.errors import MissingExtraError, ModelError, SettingsError
from attar.progress import SILENT, Progress
from attar.quantization.grids import Grid, QuantizedTensor
from attar.quantization.methods.rtn import rtn
from attar.walks.objectives import next_token
from attar.walks.settings import TrainSettings
from attar.walks.train import Loss, TrainHistory, train

INITS = ("zero", "error")


@dataclass(frozen=True)
class Adapted:
    """What adapter training leaves.

    Attributes:
        model: with ``merge`` the dense model, W' plus the adapters; else peft's model, adapters beside the
            base.
        weights: the base's codes by module name.
        history: of the run.
    """

    model: Any
    weights: dict[str, QuantizedTensor]
    history: TrainHistory


def learn_adapters(
    model: Any,
    grids: Mapping[str, Grid],
    rows: Tensor,
    settings: TrainSettings,
    *,
    rank: int = 16,
    scaling: float = 32.0,
    init: str = "zero",
    merge: bool = True,
    loss: Loss = next_token,
    start: Mapping[str, QuantizedTensor] | None = None,
    work: Path | None = None,
    held_out: Callable[[nn.Module], float] | None = None,
    progress: Progress = SILENT,
) -> Adapted:
    """Quantize the Linears of a model and train adapters beside them.

    Args:
        model: a transformers model, causal, float32, with its original weights (also when a run is resumed);
            changed in place.
        grids: the number format of each Linear that gets adapters, by module name.
        rows: int64 (R, S) training rows.
        settings: of the train walk.
        rank: r.
        scaling: c.
        init: "zero": B starts at 0; "error": A and B start at the best rank-r fit of W - W'.
        merge: add the adapters to the weights at the end; the result is dense and no longer on the grid.
        loss: see attar.walks.train; :func:`attar.walks.objectives.agreement` distils from the original model.
        start: codes of the base, of GPTQ say; else nearest codes.
        work: folder of resumable states.
        held_out: as in the train walk.

    Raises:
        MissingExtraError: peft is not installed.
        SettingsError: the rank is not positive, or ``init`` is neither.
        ModelError: a name is no Linear of the model.
        NumericsError: training diverged.
    """
    if rank < 1:
        raise SettingsError("rank", rank, "at least 1")
    if init not in INITS:
        raise SettingsError("init", init, " or ".join(INITS))
    peft = _peft()
    model.requires_grad_(False)
    originals = {name: _rows(model, name).detach().clone() for name in grids} if init == "error" else {}
    weights = {
        name: (start or {}).get(name) or rtn(_rows(model, name).detach(), grid)
        for name, grid in grids.items()
    }
    with torch.no_grad():
        for name, made in weights.items():
            _rows(model, name).copy_(made.dequantize())
    torch.manual_seed(settings.seed)
    adapted = _wrap(peft, model, list(grids), rank, scaling)
    for name, weight in originals.items():
        _fit(adapted, name, weight - weights[name].dequantize().to(weight.device), scaling / rank)
    history = train(
        adapted, loss, rows, settings, work=work, held_out=held_out, progress=progress, what="adapters"
    )
    return Adapted(adapted.merge_and_unload() if merge else adapted, weights, history)


def save_adapters(adapted: Adapted, folder: Path) -> None:
    """Write the adapters that were not merged, in peft's format: ``adapter_config.json`` and
    ``adapter_model.safetensors``. The base is written apart.

    Raises:
        ModelError: they were merged.
    """
    if not hasattr(adapted.model, "peft_config"):
        raise ModelError("the adapters were merged into the model", hint="train them with merge off")
    adapted.model.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("peft", "adapters") from error
    return peft


def _wrap(peft: Any, model: Any, names: list[str], rank: int, scaling: float) -> Any:
    """The model with adapters beside the named modules, only they trainable."""
    transposed = any(not isinstance(model.get_submodule(name), nn.Linear) for name in names)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=scaling,
        lora_dropout=0.0,
        bias="none",
        target_modules=names,
        fan_in_fan_out=transposed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


def _fit(adapted: Any, name: str, error: Tensor, factor: float) -> None:
    """Start A and B of a module at the best fit of ``error`` (N, K): factor * B A."""
    layer = adapted.base_model.model.get_submodule(name)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    U, S, Vh = torch.linalg.svd(error.float(), full_matrices=False)
    rank = min(A.shape[0], len(S))
    root = (S[:rank] / factor).sqrt()
    with torch.no_grad():
        A.zero_()
        B.zero_()
        A[:rank].copy_(root[:, None] * Vh[:rank])
        B[:, :rank].copy_(U[:, :rank] * root)


def _rows(model: Any, name: str) -> Tensor:
    """The weight of a Linear or a Conv1D as (N, K), a view of it."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = nn.Identity()
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        raise ModelError(f"{name} is not a Linear of the model", hint="names are those of the module tree")
    return weight if isinstance(module, nn.Linear) else weight.T
