"""Losses of draft heads: one file each. A loss takes the head, a pass of its target over a batch, and the
options of its kind; it is a mean over the predictions of the batch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attar.distillation.heads import block, medusa
from attar.distillation.heads.target_pass import TargetPass

HeadObjective = Callable[[Any, TargetPass, Any], Tensor]

HEAD_LOSSES: dict[str, HeadObjective] = {
    "medusa": medusa.loss,
    "dflash": block.loss,
    "dspark": block.loss,
}
