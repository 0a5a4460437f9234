"""Settings of what is compared inside the models (``features/``). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attar.distillation.layer_map import is_feature_map
from attar.errors import SettingsError
from attar.options import check_choices, listed
from attar.walks.settings import check_range

FEATURE_NAMES = ("hidden", "patient", "embeddings", "attention", "qkv", "relation", "distance", "angle")
"""Rows of attar.distillation.features.FEATURES."""


def _option(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """What of the teacher's inside the student is trained to agree with, besides its predictions."""

    features: tuple[str, ...] = _option(
        (),
        "hidden features to match, each with its weight after a colon, as hidden:0.5: "
        + listed(FEATURE_NAMES),
    )
    feature_map: str = _option(
        "uniform",
        "layers that are compared: uniform (each student layer with the teacher's at the same relative "
        "depth), last (with the teacher's last ones), top (the last layers alone), learned (weights over all "
        "teacher layers, trained), or pairs student:teacher, counted from 0: 0:2,1:5",
    )
    feature_loss: str = _option(
        "mse",
        "distance of hidden states and embeddings: mse, relative (each token's squared error by its "
        "teacher's square), cosine",
        ("mse", "relative", "cosine"),
    )
    attention_loss: str = _option(
        "mse",
        "distance of attention maps: mse (of the weights), kl, scores (mse of the log weights)",
        ("mse", "kl", "scores"),
    )
    feature_tokens: str = _option(
        "auto",
        "positions that are compared: all, predicted (not those of prompts), first ([CLS] of an encoder); "
        "auto: predicted where next tokens are, else all",
        ("auto", "all", "predicted", "first"),
    )
    relation_heads: int = _option(
        0, "parts that queries, keys and values are cut into for qkv; 0: as many as leave 16 columns"
    )
    relation_tokens: int = _option(
        64, "tokens of a batch, drawn, among which relation, distance and angle are compared"
    )
    map_entropy: float = _option(0.1, "weight of a learned map's entropy: larger, and it comes down to one")
    projection: str = _option(
        "auto",
        "the student's states pass through a matrix that is learned and thrown away: auto (where the widths "
        "differ), always",
        ("auto", "always"),
    )
    prediction_weight: float = _option(
        1.0, "weight of the loss on predictions where features are compared; 0: features alone"
    )
    router_balance: float = _option(
        0.0, "weight of the load-balancing loss of a student that is a mixture, 0.01 say; 1 at balance"
    )
    router_z: float = _option(0.0, "weight of the z-loss of such a student's routers, 0.001 say")

    def __post_init__(self) -> None:
        check_choices(self)
        object.__setattr__(self, "features", tuple(self.features))
        self.weights()
        check_range("prediction_weight", self.prediction_weight, 0.0, 1e6, "0 or more")
        check_range("relation_heads", self.relation_heads, 0, 2**16, "0 (as many as fit) or more")
        check_range("relation_tokens", self.relation_tokens, 3, 512, "between 3 and 512")
        check_range("router_balance", self.router_balance, 0.0, 1e3, "0 or more")
        check_range("router_z", self.router_z, 0.0, 1e3, "0 or more")
        check_range("map_entropy", self.map_entropy, 0.0, 1e6, "0 or more")
        if not self.features and self.prediction_weight != 1.0:
            raise SettingsError("prediction_weight", self.prediction_weight, "1 without features")
        if not is_feature_map(self.feature_map):
            raise SettingsError(
                "feature_map", self.feature_map, "uniform, last, top, learned, or pairs as 0:2,1:5"
            )

    def weights(self) -> dict[str, float]:
        """The features by name, with their weights.

        Raises:
            SettingsError: there is no such feature, it is named twice, or its weight is no positive number.
        """
        weights: dict[str, float] = {}
        for text in self.features:
            name, colon, number = text.partition(":")
            if name not in FEATURE_NAMES:
                raise SettingsError(
                    "features", text, f"one of {', '.join(FEATURE_NAMES)}, as {FEATURE_NAMES[0]}:0.5"
                )
            if name in weights:
                raise SettingsError("features", text, f"{name} once alone")
            weights[name] = _positive(text, number) if colon else 1.0
        return weights


def _positive(text: str, number: str) -> float:
    """The weight after a colon."""
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not 0.0 < weight < 1e6:
        raise SettingsError("features", text, "a name, a colon and a positive weight, as hidden:0.5")
    return weight
