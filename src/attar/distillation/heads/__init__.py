"""Draft heads that are trained: one file each, with ``make``, ``loss`` and ``finish``.

``make`` gives a head before its first step: of the target, the target's own head, the options of its kind,
and the tokens int64 (v,) that it can propose (None: all). ``loss`` is a mean over the predictions of a batch:
of the head, a pass of the target over the batch, and the options. ``finish`` measures a trained head on
held-out rows, and settles what depends on that: of the head, what runs the target over a batch, the batches,
and the options; it gives the chains, and what the card says besides.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.heads import block, eagle, eagle3, medusa
from attar.distillation.heads.report import DraftedChains
from attar.distillation.heads.target_pass import TargetPass
from attar.models.head import Head

HeadMaker = Callable[[Any, Head, Any, Tensor | None], Any]
HeadObjective = Callable[[Any, TargetPass, Any], Tensor]
HeadFinisher = Callable[
    [Any, Callable[[Examples], TargetPass], Sequence[Examples], Any], tuple[DraftedChains, dict[str, Any]]
]

HEAD_MAKERS: dict[str, HeadMaker] = {
    "medusa": medusa.make,
    "eagle": eagle.make,
    "eagle3": eagle3.make,
    "dflash": block.make,
    "dspark": block.make,
}
HEAD_LOSSES: dict[str, HeadObjective] = {
    "medusa": medusa.loss,
    "eagle": eagle.loss,
    "eagle3": eagle3.loss,
    "dflash": block.loss,
    "dspark": block.loss,
}
HEAD_FINISHERS: dict[str, HeadFinisher] = {"dflash": block.finish, "dspark": block.finish}
