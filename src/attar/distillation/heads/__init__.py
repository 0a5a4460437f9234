"""Draft heads that are trained: one file each, with ``make`` and ``loss``.

``make`` gives a head before its first step: of the target, the target's own head, the options of its kind,
and the tokens int64 (v,) that it can propose (None: all). ``loss`` is a mean over the predictions of a batch:
of the head, a pass of the target over the batch, and the options. ``finish`` (finish.py) measures a trained
head on held-out rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from attar.distillation.heads import block_loss as block
from attar.distillation.heads import eagle3_loss as eagle3
from attar.distillation.heads import eagle_loss as eagle
from attar.distillation.heads import medusa_loss as medusa
from attar.distillation.heads import unrolled_chains
from attar.distillation.heads.finish import HeadFinish, finish_by
from attar.distillation.heads.target_pass import TargetPass
from attar.models.head import Head

HeadMaker = Callable[[Any, Head, Any, Tensor | None], Any]
HeadObjective = Callable[[Any, TargetPass, Any], Tensor]


class HeadFunctions(NamedTuple):
    """How a kind of head is made, trained and measured."""

    make: HeadMaker
    loss: HeadObjective
    finish: HeadFinish


_UNROLLED, _BLOCKS = finish_by(unrolled_chains.chains), finish_by(block.chains)
HEADS: dict[str, HeadFunctions] = {
    "medusa": HeadFunctions(medusa.make, medusa.loss, medusa.finish),
    "eagle": HeadFunctions(eagle.make, eagle.loss, _UNROLLED),
    "eagle3": HeadFunctions(eagle3.make, eagle3.loss, _UNROLLED),
    "dflash": HeadFunctions(block.make, block.loss, _BLOCKS),
    "dspark": HeadFunctions(block.make, block.loss, _BLOCKS),
}
