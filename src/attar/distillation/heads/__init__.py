"""Draft heads in training: one file each, with ``make`` and ``loss``.

A head is made of its target, the target's own head, the options of its kind, and the tokens of its rows. A
loss takes the head, a pass of its target over a batch, and the options; it is a mean over the predictions of
the batch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attar.distillation.heads import eagle, eagle3, medusa
from attar.distillation.heads.target_pass import TargetPass
from attar.models.head import Head

HeadObjective = Callable[[Any, TargetPass, Any], Tensor]

HEAD_LOSSES: dict[str, HeadObjective] = {
    "medusa": medusa.loss,
    "eagle": eagle.loss,
    "eagle3": eagle3.loss,
}

HEAD_MAKERS: dict[str, Callable[[Any, Head, Any, Tensor], Any]] = {
    "medusa": medusa.make,
    "eagle": eagle.make,
    "eagle3": eagle3.make,
}
