"""How many tokens the KV cache of a device holds: what the weights leave, or what was asked for."""

from __future__ import annotations

from attar.checkpoint.units import bytes_text
from attar.errors import MemoryNeededError

SHARE = 0.9  # of the memory that is free after loading; the other part is of the steps


def planned_tokens(
    name: str, token_bytes: int, free: int, *, most: int | None, wanted: int | None = None
) -> int:
    """Tokens of the pool.

    Args:
        name: of the model, for the error.
        free: bytes of the device, weights loaded.
        most: tokens that can be of use; None: no limit.
        wanted: tokens that were asked for; None: as many as fit.

    Raises:
        MemoryNeededError: what was asked for, or one token, does not fit; names both amounts.
    """
    room = int(free * SHARE) // token_bytes
    needed = wanted or 1
    if needed > room:
        size = bytes_text(needed * token_bytes)
        raise MemoryNeededError(
            f"{name}: a KV cache of {needed:,} tokens needs {size} of the device's memory, and "
            f"{bytes_text(int(free * SHARE))} are left by the weights",
            hint="choose a smaller --kv-tokens, or --kv-dtype int8",
        )
    return wanted or min(room, most or room)
