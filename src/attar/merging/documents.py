"""Several documents in one file: each after those whose results it uses."""

from __future__ import annotations

from collections.abc import Sequence

from attar.errors import RecipeError
from attar.merging.config.schema import MergeConfig


def in_order(configs: Sequence[MergeConfig]) -> tuple[MergeConfig, ...]:
    """Sort documents so that each comes after those it names; else they keep their order. The one without a
    name, which is the final result, comes last.

    Raises:
        RecipeError: two documents have one name, two have none, or they name each other in a circle.
    """
    named = _by_name(configs)
    needs = {
        id(config): [str(each.model) for each in config.models() if each.model in named] for config in configs
    }
    rest = sorted(configs, key=lambda config: config.name is None)
    done: list[MergeConfig] = []
    names: list[str | None] = []
    while rest:
        ready = [config for config in rest if all(need in names for need in needs[id(config)])]
        if not ready:
            circle = _circle(rest, named)
            raise RecipeError(f"{rest[0].where}: the documents need each other in a circle: {circle}")
        done.append(ready[0])
        names.append(ready[0].name)
        rest = [config for config in rest if config is not ready[0]]
    return tuple(done)


def _by_name(configs: Sequence[MergeConfig]) -> dict[str, MergeConfig]:
    """Documents by name; one at most has none."""
    named: dict[str, MergeConfig] = {}
    final: MergeConfig | None = None
    for config in configs:
        if config.name is None:
            if final is not None:
                raise RecipeError(
                    f"{config.where}: a second document without a name (the first at {final.where})",
                    hint="every document but the final one needs a name",
                )
            final = config
        elif config.name in named:
            raise RecipeError(
                f"{config.where}: a second document named {config.name!r}"
                f" (the first at {named[config.name].where})"
            )
        else:
            named[config.name] = config
    return named


def _circle(rest: Sequence[MergeConfig], named: dict[str, MergeConfig]) -> str:
    """Names along a circle. Each of ``rest`` needs another of them, so following them must come back."""
    waiting = [config.name for config in rest]
    path: list[str] = []
    config = rest[0]
    while True:
        name = next(each.model for each in config.models() if each.model in waiting)
        if name in path:
            return " -> ".join([*path[path.index(name) :], name])
        path.append(name)
        config = named[name]
