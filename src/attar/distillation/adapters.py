"""Low-rank adapters on a frozen student: Hu et al. 2021, "LoRA", arXiv 2106.09685, eq. 3, as peft builds
them; over the codes of a quantized student this is Dettmers, Pagnoni, Holtzman, Zettlemoyer 2023, "QLoRA",
arXiv 2305.14314, eq. 5.

    y = x W'^T + c / r * (x A^T) B^T ,   W' = decode(codes) frozen ;  A (r, K), B (N, r) trained ;  c = 2 r

Letters: W (N, K) weight of a Linear of the teacher, W' the student's; r rank; c scaling.

``error`` starts A and B at the r largest singular parts of W - W' instead of B at zero (Li et al. 2023,
"LoftQ", arXiv 2310.08659, algorithm 1 with one alternation): the adapters begin by undoing the rounding.

Differs from QLoRA: the codes are of any format that attar reads, and W' is held dense (recovery on one
machine, not training in little memory).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.atomic import write_config
from attar.errors import MissingExtraError, SettingsError
from attar.models.anatomy.parts import weight_of

CONFIG = "adapter_config.json"
SCALING = 2.0  # c / r


def add_adapters(student: Any, names: Sequence[str], rank: int, teacher: Any | None = None) -> Any:
    """Freeze a model and put adapters on some of its Linears. Returns peft's model, of which only A and B
    are trainable.

    Args:
        student: a transformers model; wrapped, its weights stay.
        names: paths of the Linears.
        rank: r, at least 1.
        teacher: with the original weights, for the start at W - W'; None: B starts at zero.

    Raises:
        MissingExtraError: peft is not installed.
        SettingsError: the teacher has a Linear of another shape, so there is no W - W'.
    """
    try:
        import peft
    except ImportError as problem:
        raise MissingExtraError("peft", "adapters") from problem
    errors = {} if teacher is None else {name: error_of(student, teacher, name) for name in names}
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=int(SCALING * rank),
        lora_dropout=0.0,
        bias="none",
        target_modules=list(names),
        fan_in_fan_out=any(not isinstance(student.get_submodule(name), nn.Linear) for name in names),
    )
    student.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(student, config)
    for name, error in errors.items():
        layer = adapted.base_model.model.get_submodule(name)
        start_at(layer.lora_A["default"].weight, layer.lora_B["default"].weight, error)
    return adapted


def save_adapter(adapted: Any, folder: Path, base: str) -> None:
    """Write the adapters in peft's format: ``adapter_config.json``, ``adapter_model.safetensors``.

    Args:
        base: name or path of the checkpoint that they belong to.
    """
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["target_modules"] = sorted(config["target_modules"])  # peft keeps a set
    write_config(folder / CONFIG, config)


def error_of(student: Any, teacher: Any, name: str) -> Tensor:
    """W - W' (N, K) of a Linear, float32, on the student's device."""
    ours, theirs = (weight_of(model.get_submodule(name)).detach().float() for model in (student, teacher))
    if ours.shape != theirs.shape:
        raise SettingsError(
            "adapter_init", "error", f"zero: {name} is {list(ours.shape)}, the teacher's {list(theirs.shape)}"
        )
    return theirs.to(ours.device) - ours


def start_at(A: Tensor, B: Tensor, error: Tensor) -> None:
    """Set A and B to the best fit of ``error`` (N, K) by c / r * B A. Where the error has a lower rank, the
    rows of A that are left over keep their draw: with both factors zero none would ever get a gradient."""
    U, S, Vh = torch.linalg.svd(error, full_matrices=False)
    rank = min(A.shape[0], int(S.count_nonzero()))
    root = (S[:rank] / SCALING).sqrt()
    with torch.no_grad():
        B.zero_()
        A[:rank].copy_(root[:, None] * Vh[:rank])
        B[:, :rank].copy_(U[:, :rank] * root)
