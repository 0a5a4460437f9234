"""What becomes of a head after its last step: it is measured on held-out rows, and its confidence
calibrated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from attar.data.examples import Examples
from attar.distillation.heads.calibration import calibrate
from attar.distillation.heads.report import DraftedChains
from attar.distillation.heads.target_pass import TargetPass

TargetRun = Callable[[Examples], TargetPass]
HeadFinish = Callable[[Any, TargetRun, Sequence[Examples], Any], tuple[DraftedChains, dict[str, Any]]]


def finish_by(chains_of: Callable[[Any, TargetPass, Any], DraftedChains]) -> HeadFinish:
    """The finish of a head whose chains on a pass of its target are those of a function."""

    def finish(
        head: Any, target: TargetRun, batches: Sequence[Examples], options: Any
    ) -> tuple[DraftedChains, dict[str, Any]]:
        with torch.no_grad():
            chains = DraftedChains.joined([chains_of(head, target(batch), options) for batch in batches])
        return chains, _calibrate(head, chains)

    return finish


def _calibrate(head: Any, chains: DraftedChains) -> dict[str, Any]:
    """Give a head with a confidence its temperatures, and their bias. What the card says of them."""
    if chains.confidence is None:
        return {}
    complete = chains.complete
    bias, temperatures, details = calibrate(chains.confidence[complete], chains.acceptance[complete])
    with torch.no_grad():
        head.confidence_head.proj.bias += bias
    head.config = replace(head.config, temperatures=temperatures)
    return details
