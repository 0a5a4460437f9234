"""``attar serve --limits FILE``: bounds and times of a server, in YAML.

    max_queue: 64          # completions that may wait
    request_s: 120         # seconds that a request may take
    sequences: 16          # that run at the same time

The keys are the fields of :class:`LimitSettings`, :class:`LoraLimitSettings` and :class:`SchedulingSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from attar.errors import RecipeError
from attar.runtime.settings import SchedulingSettings
from attar.serving.http.settings import LimitSettings, LoraLimitSettings
from attar.settings import RecipeOrigin, parse
from attar.yaml import YamlEntry, read_yaml


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds and times of a server, in a file of YAML; what it leaves out keeps its default.

    Attributes:
        server: of connections, requests and callers.
        loras: of adapters.
        scheduling: of the engine.
        given: names of the options that the file has; the others keep their values.
    """

    server: LimitSettings = field(default_factory=LimitSettings)
    loras: LoraLimitSettings = field(default_factory=LoraLimitSettings)
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    given: frozenset[str] = field(default=frozenset(), init=False)

    def of(self, part: Any) -> dict[str, Any]:
        """The given options of one part, by name."""
        return {item.name: getattr(part, item.name) for item in fields(part) if item.name in self.given}


def read_limits(path: str | Path) -> ServerLimits:
    """Read a file of limits.

    Raises:
        RecipeError: the file cannot be read, or has an unknown key or a wrong value; names file and line.
    """
    root = read_yaml(Path(path))
    if not isinstance(root.value, dict):
        raise RecipeError(f"{root.where}: limits are a mapping", hint="max_queue: 64")
    keys: Mapping[str, YamlEntry] = root.value
    locations = {name: entry.where for name, entry in keys.items()}
    values = {name: entry.value.plain() for name, entry in keys.items()}
    limits = parse(ServerLimits, values, RecipeOrigin("the limits", root.where, locations))
    object.__setattr__(limits, "given", frozenset(keys))
    return limits
