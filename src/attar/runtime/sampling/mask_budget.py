"""The time that the masks of grammars may take of a step, divided among the running requests.

    share = max(STEP_S, last pass) / payers
    balance = min(balance + share, share)          once a step; a payer may compute a mask while it is >= 0

A mask that costs more than is left makes a debt, which the next steps pay: over many steps no payer exceeds
its share. A payer is a tenant, or a request that has none.
"""

from __future__ import annotations

from collections.abc import Iterable

STEP_S = 0.01
SLOW_S = 0.0005  # a mask that takes longer: its completion has no drafts, each of which needs several


class MaskBudget:
    """What each payer has left, in seconds of the processor."""

    def __init__(self) -> None:
        self._balances: dict[str, float] = {}

    def begin(self, payers: Iterable[str], pass_s: float) -> None:
        """A step begins.

        Args:
            payers: of all sequences that run.
            pass_s: seconds of the last pass through the model, of the processor too.
        """
        named = dict.fromkeys(payers)
        share = max(STEP_S, pass_s) / max(len(named), 1)
        self._balances = {name: min(self._balances.get(name, 0.0) + share, share) for name in named}

    def open(self, payer: str) -> bool:
        """Whether a payer may compute one more mask."""
        return self._balances.get(payer, 0.0) >= 0

    def charge(self, payer: str, seconds: float) -> None:
        """A payer has computed masks."""
        self._balances[payer] = self._balances.get(payer, 0.0) - seconds
