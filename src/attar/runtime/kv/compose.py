"""Which features of the KV cache work together: a table with the reason for each pair that does not.

Every pair outside :data:`REFUSED` works: ``tests/runtime/kv/test_matrix.py`` runs them all. The others are
refused when the model is loaded, or when a request asks for them, under the name of the setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from attar.errors import SettingsError

STORES = ("dense", "int8", "fp8", "int4", "mixed", "kivi")  # mixed: int4 and int8, layer by layer
EVICTIONS = ("reread", "streaming", "h2o", "snapkv")
SCHEDULING = (
    *("prefix_reuse", "fork", "chunked_prefill", "preemption", "speculation", "tree"),
    "hidden_states",
)
MODELS = ("sliding_window", "learned_positions", "latents", "states")
RUNNERS = ("modules", "compiled")
FEATURES = (*STORES, *EVICTIONS, *SCHEDULING, *MODELS, *RUNNERS)

_GROUPS = "KIVI's constants are shared by 32 tokens, so single tokens of a block cannot be taken out"
_POSITIONS = "a sliding window counts positions, and packed entries are no longer in the order of positions"
_SCORES = "H2O's scores are sums over every query"
_LAYERS = "Reread moves entries between layers, and layers of this model are kept in different bits"
_QUERIES = "every token's query attends again, and tokens from the prefix cache are not run"
_DRAFTS = f"{_SCORES}, and what rejected drafts added cannot be removed"
_STATES = (
    "a draft head reads the hidden states of every token, and eviction keeps the states of some, head by head"
)
_LATENTS = "MLA's latents are keys and values in one, and KIVI rounds keys by channel and values by token"
_COMPILED = (
    "the compiled step keeps keys and values in floats, int8 or int4, without eviction; modules run it"
)

_CHAIN = "a state follows one chain of tokens, and the branches of a tree are run at once"

FeatureRequests = Mapping[str, tuple[str, object] | None]
"""Features, each with the setting that asks for it and its value; None: a property of the model."""

REFUSED: dict[tuple[str, str], str] = {
    ("kivi", "h2o"): _GROUPS,
    ("kivi", "snapkv"): _GROUPS,
    ("kivi", "reread"): _GROUPS,
    ("kivi", "latents"): _LATENTS,
    ("mixed", "reread"): _LAYERS,
    ("reread", "prefix_reuse"): _QUERIES,
    ("reread", "sliding_window"): _POSITIONS,
    (
        "reread",
        "learned_positions",
    ): "queries attend again at later positions by rotating them, which learned positions do not allow",
    ("h2o", "prefix_reuse"): f"{_SCORES}, and tokens from the prefix cache are not run",
    ("h2o", "speculation"): _DRAFTS,
    ("h2o", "tree"): _DRAFTS,
    (
        "streaming",
        "sliding_window",
    ): "the model has its own window, and its layers do not agree on sinks",
    ("h2o", "sliding_window"): _POSITIONS,
    ("snapkv", "sliding_window"): _POSITIONS,
    (
        "streaming",
        "learned_positions",
    ): "positions are reassigned by rotating queries, which learned positions do not allow",
    **{(feature, "hidden_states"): _STATES for feature in EVICTIONS},
    **{(feature, "compiled"): _COMPILED for feature in ("fp8", "kivi", *EVICTIONS)},
    ("learned_positions", "compiled"): "the compiled step rotates queries and keys; modules run such models",
    ("states", "tree"): _CHAIN,
    ("states", "compiled"): "the compiled step has no states of this kind",
    ("modules", "compiled"): "one runner owns the pool",
    **dict.fromkeys(combinations(EVICTIONS, 2), "one method of eviction at a time"),
    **dict.fromkeys(combinations(STORES, 2), "a pool has one format"),
}


def reason(first: str, second: str) -> str | None:
    """Why two features do not work together; None where they do."""
    for feature in (first, second):
        assert feature in FEATURES, f"{feature!r} is no feature of the table"
    return REFUSED.get((first, second)) or REFUSED.get((second, first))


def check_together(features: FeatureRequests) -> None:
    """Refuse the first pair that does not work together.

    Args:
        features: in order of precedence: the later setting of a pair is the one to change.

    Raises:
        SettingsError: names both settings with their values, and the reason.
    """
    names = list(features)
    for index, earlier in enumerate(names):
        for later in names[index + 1 :]:
            why = reason(earlier, later)
            if why is not None:
                first, second = (earlier, later) if features[later] else (later, earlier)
                raise _refusal(features, first, second, why)


def store_feature(kv_dtype: str) -> str:
    """The row of a ``kv_dtype``."""
    if kv_dtype.startswith("kivi"):
        return "kivi"
    return kv_dtype if kv_dtype in STORES else "dense"


def evicting(eviction: object) -> dict[str, tuple[str, object]]:
    """The row of an eviction, with its setting; empty for None."""
    name = type(eviction).__name__.lower()
    return {} if eviction is None else {name: ("eviction", name)}


def _refusal(features: FeatureRequests, first: str, second: str, why: str) -> SettingsError:
    """The second's setting must change."""
    kept, wrong = features[first], features[second]
    assert wrong is not None, f"a model has {first} and {second}, which do not work together: {why}"
    other = f"{kept[0]}={kept[1]!r}" if kept else f"the model's own {first.replace('_', ' ')}"
    return SettingsError(*wrong, f"something else with {other}: {why}")
