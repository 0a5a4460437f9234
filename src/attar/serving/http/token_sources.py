"""``attar``: a field of requests and answers that other servers do not have: who proposed each token.

    request        "attar": {"tokens": true}
    each choice    "attar": {"token_ids": [301, 17], "proposers": ["suffix", "target"]}

A proposer is the name of what drafted the token (a draft model or head, ``suffix``, ``lookahead``, ...), and
``target`` where the model itself chose it: without a draft, or against one. The names come from verification.
In a stream the two lists belong to the tokens of the chunk, as those of ``logprobs`` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict


class AttarOptions(BaseModel):
    """``attar`` of a request. ``tokens``: token ids and proposers are in the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tokens: bool | None = None


class TokenSources(BaseModel):
    """``attar`` of a choice; one entry for each token."""

    token_ids: list[int]
    proposers: list[str]


def token_sources(tokens: Sequence[int], proposers: Sequence[str]) -> dict[str, Any]:
    """The field of a choice; empty where it was not asked for."""
    return {"attar": {"token_ids": list(tokens), "proposers": list(proposers)}} if proposers else {}
