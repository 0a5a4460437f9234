"""Which features of the KV cache work together: a table, and the sentence for each pair that does not.

Everything that is not in :data:`REFUSED` works and is in the matrix of ``tests/runtime/kv/test_compose.py``.
"""

from __future__ import annotations

from attar.errors import SettingsError

STORES = ("dense", "int8", "fp8", "kivi")
EVICTIONS = ("streaming", "h2o", "snapkv")
SCHEDULING = ("prefix_reuse", "fork", "chunked_prefill", "preemption", "speculation")
MODELS = ("sliding_window", "learned_positions")
FEATURES = (*STORES, *EVICTIONS, *SCHEDULING, *MODELS)

_GROUPS = "KIVI's constants are shared by 32 tokens, so single tokens of a block cannot be taken out"
_POSITIONS = "a sliding window counts positions, and packed places no longer stand in their positions' order"
_SCORES = "H2O's scores are sums over every query"

REFUSED: dict[tuple[str, str], str] = {
    ("kivi", "h2o"): _GROUPS,
    ("kivi", "snapkv"): _GROUPS,
    ("h2o", "prefix_reuse"): f"{_SCORES}, and tokens that are found in the prefix tree are not run",
    ("h2o", "fork"): f"{_SCORES} of one sequence; a fork would have none",
    ("h2o", "speculation"): f"{_SCORES}, and what rejected drafts added cannot be taken back",
    (
        "streaming",
        "sliding_window",
    ): "the model has a window of its own, and its layers do not agree on sinks",
    ("h2o", "sliding_window"): _POSITIONS,
    ("snapkv", "sliding_window"): _POSITIONS,
    (
        "streaming",
        "learned_positions",
    ): "positions are reassigned by turning queries, which learned positions are not",
    ("streaming", "h2o"): "one method of eviction at a time",
    ("streaming", "snapkv"): "one method of eviction at a time",
    ("h2o", "snapkv"): "one method of eviction at a time",
    **{
        (one, two): "a pool has one format" for place, one in enumerate(STORES) for two in STORES[place + 1 :]
    },
}


def reason(one: str, two: str) -> str | None:
    """Why two features do not work together; None where they do."""
    for feature in (one, two):
        assert feature in FEATURES, f"{feature!r} is no feature of the table"
    return REFUSED.get((one, two)) or REFUSED.get((two, one))


def check_together(*features: str) -> None:
    """Refuse the first pair that does not work together.

    Raises:
        SettingsError: names both, with the sentence.
    """
    for place, one in enumerate(features):
        for two in features[place + 1 :]:
            why = reason(one, two)
            if why is not None:
                raise SettingsError(one, "on", f"off together with {two}: {why}")


def store_feature(kv_dtype: str) -> str:
    """The row of a ``kv_dtype``."""
    if kv_dtype.startswith("kivi"):
        return "kivi"
    return kv_dtype if kv_dtype in STORES else "dense"
