"""Types of fields with their bounds, and the errors of services."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from attar.errors import AttarError

VERSION = 2  # of the protocol
MOST_AHEAD = 64  # tokens of an offer
MOST_TOKENS = 1 << 20  # of a request
MOST_MESSAGES, MOST_BYTES = 4096, 16 << 20  # of a frame

STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=0, lt=2**53)]
WireToken = Annotated[int, Field(ge=0, lt=2**31)]
WireTokens = Annotated[tuple[WireToken, ...], Field(max_length=MOST_TOKENS)]
ShortText = Annotated[str, Field(max_length=256)]
Penalty = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class ProtocolError(AttarError):
    """Another service sends what the protocol does not allow."""


class UnavailableError(AttarError):
    """Another service cannot be reached now."""
