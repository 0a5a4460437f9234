"""Settings of the student: what it starts from, and its size. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from attar.checkpoint.units import size_limit
from attar.distillation.layer_map import LAYER_MAPS, is_map
from attar.errors import SettingsError
from attar.options import check_choices, setting
from attar.walks.settings import check_range


@dataclass(frozen=True, kw_only=True)
class StudentSettings:
    """What the student starts from."""

    student: str = setting(
        "",
        "a model that is there already, to be trained with its own weights; empty: one made of the teacher",
    )
    init: str = setting(
        "copy",
        "weights that the student starts with: copy (the teacher's, or its own), random (the same shape)",
        ("copy", "random"),
    )
    layers: int = setting(0, "layers of the student; 0: as keep_layers or layer_map has")
    keep_layers: float = setting(
        0.0,
        "fraction of the teacher's layers that the student has, where layers is 0; 0: half of them, or all "
        "where heads, neurons or hidden are fewer",
    )
    layer_map: str = setting(
        "uniform",
        "teacher layers the student starts from: uniform (evenly spread), ends (first and last), last, "
        "influence (those that turn the residual stream most), kl (those that the teacher misses most, each "
        "alone), run (all but the run of layers that it misses least), or their numbers: 0,3,6",
    )
    heads: int = setting(0, "attention heads of a layer that stay, whole KV heads of them; 0: all")
    neurons: int = setting(0, "neurons of a layer's MLP that stay; 0: all")
    hidden: int = setting(0, "channels of the residual stream that stay; 0: all")
    size: str = setting(
        "",
        "most parameters (60M, 1.5B) or bytes (120MB) of the student: fewer layers, down to half of them, "
        "then fewer heads, neurons and channels",
    )
    width: int = setting(
        0, "width of a student that starts afresh, heads and MLP in proportion; 0: the teacher's"
    )
    moe_to_dense: str = setting(
        "",
        "of a mixture of experts, a student without: an MLP made of each layer's experts, active (the most "
        "used ones side by side, as many as work on a token), mean, used (the most used one), shared",
        ("", "active", "mean", "used", "shared"),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("layers", self.layers, 0, 10_000, "0 (half of the teacher's) or more")
        check_range("keep_layers", self.keep_layers, 0.0, 1.0, "between 0 and 1")
        for name in ("heads", "neurons", "hidden", "width"):
            check_range(name, getattr(self, name), 0, 2**24, "0 (the teacher's) or more")
        size_limit("size", self.size)
        if not is_map(self.layer_map):
            raise SettingsError("layer_map", self.layer_map, f"{', '.join(LAYER_MAPS)}, or numbers as 0,3,6")
        if self.student:
            self._check_alone("student", "init")
        if self.width:
            self._check_alone("width", "init", "layers", "keep_layers", "layer_map")
        if self.moe_to_dense:
            self._check_alone("moe_to_dense")
        if self.size:
            self._check_alone("size", "init", "layer_map")

    def _check_alone(self, name: str, *allowed: str) -> None:
        """Raise where an option is set that ``name`` decides."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in (name, *allowed) and value != option.default:
                raise SettingsError(option.name, value, f"left out with {name} {getattr(self, name)}")

    @property
    def is_narrower(self) -> bool:
        """Whether some of the teacher's units within a layer are left out."""
        return bool(self.heads or self.neurons or self.hidden)
