"""Settings of what is compared inside the models (``features/``). Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from attar.distillation.layer_map import is_feature_map
from attar.errors import SettingsError
from attar.options import listed, setting

FEATURE_NAMES = (
    "hidden",
    "hidden-relative",
    "hidden-cosine",
    "patient",
    "embeddings",
    "attention",
    "attention-kl",
    "attention-scores",
    "qkv",
    "relation",
    "distance",
    "angle",
)
"""Rows of attar.distillation.features.FEATURES."""


ROUTER_LOSSES = ("balance", "z")
"""Fields of attar.distillation.router_loss.RouterLoss."""


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """What of the teacher's inside the student is trained to agree with, besides its predictions."""

    feature_map: ClassVar[str] = "uniform"
    features: tuple[str, ...] = setting(
        (),
        "hidden features to match, each with its weight after a colon, as hidden:0.5: "
        + listed(FEATURE_NAMES),
    )
    router_loss: tuple[str, ...] = setting(
        (),
        "losses of the routers of a student that is a mixture, each with its weight after a colon: balance "
        "(load balancing; 1 at balance), z (of their logits), as balance:0.01",
    )

    def __post_init__(self) -> None:
        for name in ("features", "router_loss"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self.weights()
        self.router_weights()

    def weights(self) -> dict[str, float]:
        """The features by name, with their weights.

        Raises:
            SettingsError: there is no such feature, it is named twice, or its weight is no positive number.
        """
        return _weights("features", self.features, FEATURE_NAMES)

    def router_weights(self) -> dict[str, float]:
        """The losses of routers by name, with their weights.

        Raises:
            SettingsError: as :meth:`weights`.
        """
        return _weights("router_loss", self.router_loss, ROUTER_LOSSES)


@dataclass(frozen=True, kw_only=True)
class StudentFeatureSettings(FeatureSettings):
    """The same for a student whose layers are not the teacher's."""

    feature_map: str = setting(  # type: ignore[misc]
        "uniform",
        "layers that are compared: uniform (each student layer with the teacher's at the same relative "
        "depth), last (with the teacher's last ones), top (the last layers alone), learned (weights over all "
        "teacher layers, trained), or pairs student:teacher, counted from 0: 0:2,1:5",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_feature_map(self.feature_map):
            raise SettingsError(
                "feature_map", self.feature_map, "uniform, last, top, learned, or pairs as 0:2,1:5"
            )


def _weights(option: str, texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Names with their weights, of texts NAME or NAME:WEIGHT."""
    weights: dict[str, float] = {}
    for text in texts:
        name, colon, number = text.partition(":")
        if name not in names:
            raise SettingsError(option, text, f"one of {', '.join(names)}, as {names[0]}:0.5")
        if name in weights:
            raise SettingsError(option, text, f"{name} once alone")
        weights[name] = _positive(option, text, number) if colon else 1.0
    return weights


def _positive(option: str, text: str, number: str) -> float:
    """The weight after a colon."""
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not 0.0 < weight < 1e6:
        raise SettingsError(option, text, "a name, a colon and a positive weight, as hidden:0.5")
    return weight
