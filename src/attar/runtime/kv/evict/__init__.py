"""Eviction: which cache entries of a sequence are kept when it may not grow any further.

| name | what a token sees | how |
|---|---|---|
| ``Streaming`` | the first entries and a window | blocks between are freed, nothing is moved |
| ``H2O`` | for each layer and head the entries with most attention so far, and a window | packed as it grows
|
| ``SnapKV`` | for each layer and head what the prompt's end attends to, and all that follows | packed once |
| ``Reread`` | what a second reading of the prompt attends to, and all that follows | once, heads together |

The choice is pure NumPy. After each step the engine calls ``due``; the block manager provides the blocks and
the runner moves the rows. ``kv/compose.py`` lists which features each method works with.
"""

from __future__ import annotations

from attar.runtime.kv.evict.h2o import H2O
from attar.runtime.kv.evict.reread import Reread
from attar.runtime.kv.evict.snapkv import SnapKV
from attar.runtime.kv.evict.streaming import Streaming

Eviction = Streaming | H2O | SnapKV | Reread
EVICTIONS: dict[str, type[Eviction]] = {
    "reread": Reread,
    "streaming": Streaming,
    "h2o": H2O,
    "snapkv": SnapKV,
}

__all__ = ["EVICTIONS", "H2O", "Eviction", "Reread", "SnapKV", "Streaming"]
