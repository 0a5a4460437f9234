"""A line of JSON for each request in each service, on the server's log: the same ``trace`` in all of them.

coordinator   the access log of the server: "request" is the trace, or its beginning
target        trace, tokens, seconds
draft         trace, offers, tokens at the end
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

LOGGER = "attar.server"


def log_request(role: str, trace: str, **numbers: float) -> None:
    """A request has ended at a service."""
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "role": role, "trace": trace}
    logging.getLogger(LOGGER).info(json.dumps(line | numbers))
