"""The kinds of draft heads."""

from __future__ import annotations

from attar.models.draft_heads.block_module import BlockDrafter, DFlashConfig, DSparkConfig
from attar.models.draft_heads.config import HeadConfig
from attar.models.draft_heads.eagle3_module import Eagle3Config, Eagle3Head
from attar.models.draft_heads.eagle_module import EagleConfig, EagleHead
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads

DRAFT_HEADS: dict[str, tuple[type[HeadConfig], type]] = {
    "medusa": (MedusaConfig, MedusaHeads),
    "eagle": (EagleConfig, EagleHead),
    "eagle3": (Eagle3Config, Eagle3Head),
    "dflash": (DFlashConfig, BlockDrafter),
    "dspark": (DSparkConfig, BlockDrafter),
}
"""The config and the module of each kind."""
