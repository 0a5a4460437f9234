"""Models that exist as names, shapes and a config only: what a plan looks at."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attar.checkpoint.tensors import stored_dtype
from attar.merging.config.documents import parse_configs
from attar.merging.config.schema import MergeConfig
from attar.merging.planning.plan import MergePlan, make_plan
from tests import tiny_models


@dataclass
class FakeView:
    """A model without numbers. ``tied``: heads that are the embedding are not stored."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return Path("/models") / self.name

    def load(self, name: str) -> Any:
        raise AssertionError("a plan reads no weights")

    def drop(self, *names: str) -> FakeView:
        """The same without these tensors."""
        kept = {name: info for name, info in self.tensors.items() if name not in names}
        return FakeView(self.name, self.config, kept)

    def reshape(self, **shapes: tuple[int, ...]) -> FakeView:
        """The same with other shapes; dots of names are double underscores."""
        changed = dict(self.tensors)
        for name, shape in shapes.items():
            name = name.replace("__", ".")
            changed[name] = SimpleNamespace(shape=shape, dtype=changed[name].dtype)
        return FakeView(self.name, self.config, changed)

    def with_config(self, **changes: Any) -> FakeView:
        """The same with other keys in its config."""
        return FakeView(self.name, {**self.config, **changes}, self.tensors)


@functools.cache
def _parts(family: str, changes: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    model = tiny_models.build(family, **dict(changes))
    seen: dict[int, str] = {}
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if seen.setdefault(tensor.data_ptr(), name) == name:  # a tied tensor is stored once
            tensors[name] = SimpleNamespace(shape=tuple(tensor.shape), dtype=stored_dtype(tensor.dtype))
    return model.config.to_dict(), tensors


def view(name: str, family: str = "llama2", dtype: str = "F32", **changes: Any) -> FakeView:
    """A tiny model of a family, its tensors of a type of choice."""
    config, tensors = _parts(family, tuple(sorted(changes.items())))
    infos = {
        key: SimpleNamespace(shape=info.shape, dtype=dtype if info.dtype == "F32" else info.dtype)
        for key, info in tensors.items()
    }
    return FakeView(name, dict(config), infos)


def plan_of(text: str, *views: FakeView, vocabulary: Any = None, compat: str = "mergekit") -> MergePlan:
    """Plan one document over models called by their names."""
    (config,) = parse_configs(text)
    return plan_config(config, *views, vocabulary=vocabulary, compat=compat)


def plan_config(
    config: MergeConfig, *views: FakeView, vocabulary: Any = None, compat: str = "mergekit"
) -> MergePlan:
    """Plan a document that is read already."""
    known = {item.name: item for item in views}
    return make_plan(config, lambda reference: known[reference.model], vocabulary, compat=compat)
