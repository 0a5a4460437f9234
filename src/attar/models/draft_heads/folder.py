"""A draft head on disk: ``config.json`` with its config, and ``model.safetensors`` with its tensors.

This layout is our own, because no published one carries every head: speculators has no Medusa and no EAGLE-1,
DeepSpec block drafters alone, EAGLE's and Medusa's no block drafter; several need the target to be read, and
a learned mask costs them a copy of its embedding. Here a kind is its config as it is and the state of its
modules, whatever the kind. ``formats/draft_heads/`` translates, both ways, without loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.atomic import save_tensors, write_config
from attar.checkpoint.open import Checkpoint
from attar.errors import CheckpointError
from attar.formats.draft_heads.content import HeadTarget
from attar.models.draft_heads.block_module import BlockDrafter, DFlashConfig, DSparkConfig
from attar.models.draft_heads.config import HeadConfig
from attar.models.draft_heads.content import head_content
from attar.models.draft_heads.eagle3_module import Eagle3Config, Eagle3Head
from attar.models.draft_heads.eagle_module import EagleConfig, EagleHead
from attar.models.draft_heads.kind import ARCHITECTURE, MODEL_TYPE
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads

DRAFT_HEADS: dict[str, tuple[type[HeadConfig], type]] = {
    "medusa": (MedusaConfig, MedusaHeads),
    "eagle": (EagleConfig, EagleHead),
    "eagle3": (Eagle3Config, Eagle3Head),
    "dflash": (DFlashConfig, BlockDrafter),
    "dspark": (DSparkConfig, BlockDrafter),
}
"""The config and the module of each kind of heads."""


def save_draft_head(head: Any, folder: Path, *, target: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head.

    Args:
        target: the name of the model that it was trained for.
        dtype: of its weights.
    """
    config: HeadConfig = head.config
    described = {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "target": target}
    write_config(folder / "config.json", {**described, "head": config.to_dict()})
    tensors = {name: value.detach().to("cpu").contiguous() for name, value in head.state_dict().items()}
    stored = {name: _as(value, dtype) for name, value in tensors.items()}
    save_tensors(folder / "model.safetensors", stored, metadata={"format": "pt"})


def load_draft_head(checkpoint: Checkpoint, target: HeadTarget | None = None) -> Any:
    """The head, from our folder or a published layout: float32, in evaluation mode, on the CPU.

    Args:
        target: what is known of its target, which published layouts do not repeat.

    Raises:
        CheckpointError: its kind is unknown, or its tensors do not fit its config.
        ModelError: it has a part that attar's heads do not have.
    """
    content = head_content(checkpoint, target)
    file, kind = str(checkpoint.path / "config.json"), content.values.get("kind")
    if kind not in DRAFT_HEADS:
        raise CheckpointError(f"{file}: head.kind is {kind!r}", hint=f"one of {', '.join(DRAFT_HEADS)}")
    config_class, module = DRAFT_HEADS[kind]
    head = module(config_class.from_dict(content.values, file))
    tensors = {name: _as(tensor, torch.float32) for name, tensor in content.tensors.items()}
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.path}: {str(error).splitlines()[-1].strip()}") from error
    return head.eval().requires_grad_(False)


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in a type; whole numbers (d2t) stay what they are."""
    return value.to(dtype) if value.is_floating_point() else value
