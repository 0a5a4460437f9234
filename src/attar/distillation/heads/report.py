"""What a draft head is worth: how well it predicts the target at each position of a draft.

    a_k      acceptance of draft k where all before it were accepted: 1 - TV(q_k, p_k), for drafts drawn from
    q g_k      how often the likeliest tokens of both are the same: acceptance at temperature 0
    tokens a pass = 1 + mean over chains of sum over k of a_1 ... a_k      the target's own token included

All are measured along text that the target wrote, so that the drafts before k are the text's own tokens. A
head without a distribution of its own has an a_k of what its one token is accepted with.

Letters: n chains, K drafts of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftedChains:
    """Chains at some positions of a text; NaN where the text ends.

    Attributes:
        acceptance: float32 (n, K), a_k.
        agreement: float32 (n, K), 1 where the likeliest tokens are the same, else 0.
        confidence: float32 (n, K), logits of the head's own estimate of a_k; None: it has none.
    """

    acceptance: Tensor
    agreement: Tensor
    confidence: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[DraftedChains]) -> DraftedChains:
        """The chains of several batches."""
        confidences = [part.confidence for part in parts if part.confidence is not None]
        return cls(
            torch.cat([part.acceptance.cpu() for part in parts]),
            torch.cat([part.agreement.cpu() for part in parts]),
            torch.cat([logits.cpu() for logits in confidences]) if confidences else None,
        )

    @property
    def complete(self) -> Tensor:
        """bool (n,), chains without NaN."""
        return ~self.acceptance.isnan().any(1)


def expected_tokens_a_pass(acceptance: Tensor) -> float:
    """1 + mean sum_k prod_(i <= k) a_i of whole chains (n, K); 1 without any."""
    if not len(acceptance):
        return 1.0
    return 1.0 + float(acceptance.double().cumprod(1).sum(1).mean())


def drafting_report(chains: DraftedChains) -> dict[str, Any]:
    """For the card: means at each position, and expected tokens a pass."""
    complete = chains.complete
    return {
        "chains": int(complete.sum()),
        "acceptance": _means(chains.acceptance),
        "agreement": _means(chains.agreement),
        "tokens_a_pass": round(expected_tokens_a_pass(chains.acceptance[complete]), 4),
        "tokens_a_pass_greedy": round(expected_tokens_a_pass(chains.agreement[complete]), 4),
    }


def describe_drafting(numbers: dict[str, Any]) -> str:
    """The report in a line."""
    greedy, sampled = (
        ", ".join(f"{rate:.2f}" for rate in numbers[name]) for name in ("agreement", "acceptance")
    )
    return (
        f"accepted at each position: {greedy} greedy, {sampled} at temperature 1; "
        f"{numbers['tokens_a_pass_greedy']:.2f} and {numbers['tokens_a_pass']:.2f} tokens a pass of a chain"
    )


def _means(values: Tensor) -> list[float]:
    """The mean of each column (n, K) over what is no NaN."""
    return [round(float(column), 4) for column in values.double().nanmean(0).nan_to_num()]
