"""Recipes: a model, data, and a list of stages, read from YAML into dataclasses; errors name file and line.

    model: attar:tiny              # a folder, a hub id, attar:tiny
    data: notes.txt                # default of every stage; absent: auto, the text that fits the model
    seed: 0                        # default of every stage
    evaluate: {tokens: 16384}      # or false
    stages:
      - {stage: prune, method: heads, ratio: 0.25}
      - {stage: recover, steps: 100}
      - {stage: quantize, name: rtn, method: rtn, from: recover}
    predicted: {kl: 0.04, bytes: 3500000}   # by attar plan; a run writes measured: beside it

Keys of every stage: ``stage`` (the verb), ``name`` (default: the verb, made unique with -2, -3), ``from``
(the stage whose checkpoint it takes; default: the previous one that makes a model, no draft head). A recovery
also has ``teacher`` (default: the model before the prunings). All other keys are the stage's settings.

A merge has no ``from``; its ``config`` (in place, or a file) names the models, also by stage:

      - stage: merge
        config:
          merge_method: ties
          base_model: original
          models:
            - {model: code, parameters: {weight: 0.5, density: 0.4}}     # the stage named code
            - {model: org/other, parameters: {weight: 0.5}}              # any other model
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attar.data.settings import SOURCES
from attar.errors import RecipeError, did_you_mean
from attar.recipe.overrides import override
from attar.recipe.plan_history import NUMBERS, is_prediction
from attar.recipe.stages import EVALUATE_SETTINGS, STAGES, StageSpec, load
from attar.settings import RecipeOrigin, parse, plain, settings_of
from attar.yaml import Located, YamlEntry, parse_yaml, read_yaml

ORIGINAL = "original"
"""Name of the model that the recipe starts from."""

_TOP = ("model", "data", "seed", "evaluate", "stages", "predicted", "measured")
_COMMON = ("stage", "name", "from")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")


@dataclass(frozen=True)
class StageEntry:
    """One stage of a recipe. Checkpoints are named by their stage, or "original".

    Args:
        number: counted from 1.
        teacher: the checkpoint that it learns from, or None.
        where: ``file:line``.
        merged: the checkpoints of a merge; ``source`` is the first of them.
    """

    number: int
    stage: str
    name: str
    source: str
    teacher: str | None
    settings: Any
    where: str
    merged: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Name of its folder in the run: ``02-prune``."""
        return f"{self.number:02d}-{self.name}"

    @property
    def makes_model(self) -> bool:
        """Whether its checkpoint is a model, and no draft head for one."""
        return bool(getattr(self.settings, "makes_model", True))

    @property
    def parents(self) -> tuple[str, ...]:
        """The checkpoints that it reads: source and teacher, or those of a merge."""
        if STAGES[self.stage].merges:
            return self.merged
        return (self.source,) if self.teacher is None else (self.source, self.teacher)


@dataclass(frozen=True)
class Recipe:
    """A model, data and stages.

    Args:
        path: its file, or a name for errors.
        evaluate: EvaluateSettings, or None for no measurements.
        predicted: of a plan, the numbers of :mod:`attar.recipe.plan_history`; empty: it is none.
        measured: the same of its last model, once it ran.
    """

    path: str
    model: str
    data: str
    seed: int
    evaluate: Any | None
    stages: tuple[StageEntry, ...]
    predicted: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)

    def entry(self, name: str) -> StageEntry:
        """The stage with a name."""
        return next(entry for entry in self.stages if entry.name == name)

    def to_dict(self) -> dict[str, Any]:
        """The recipe with all defaults; reading it gives the same recipe."""
        stages = []
        for entry in self.stages:
            common = {"stage": entry.stage, "name": entry.name}
            if not STAGES[entry.stage].merges:
                common["from"] = entry.source
            teacher = {} if entry.teacher is None else {"teacher": entry.teacher}
            stages.append(common | teacher | plain(entry.settings))
        evaluate = False if self.evaluate is None else plain(self.evaluate)
        return {
            "model": self.model,
            "data": self.data,
            "seed": self.seed,
            "evaluate": evaluate,
            "stages": stages,
            **self._outcome(),
        }

    def written(self) -> str:
        """The recipe as YAML with what differs from the defaults; reading it gives the same recipe."""
        content: dict[str, Any] = {"model": self.model}
        content |= {"data": self.data} if self.data != "auto" else {}
        content |= {"seed": self.seed} if self.seed else {}
        evaluate = False if self.evaluate is None else self._differing(self.evaluate)
        content |= {"evaluate": evaluate} if evaluate != {} else {}
        content["stages"] = [self._written_stage(number) for number in range(len(self.stages))]
        return _dump(content | self._outcome())

    def _outcome(self) -> dict[str, Any]:
        """What is predicted and measured, where there is something."""
        outcome = {"predicted": dict(self.predicted), "measured": dict(self.measured)}
        return {name: numbers for name, numbers in outcome.items() if numbers}

    def _written_stage(self, number: int) -> dict[str, Any]:
        entry, done = self.stages[number], list(self.stages[:number])
        shown = {"stage": entry.stage} | ({"name": entry.name} if entry.name != entry.stage else {})
        if not STAGES[entry.stage].merges and entry.source != _default_source(done):
            shown["from"] = entry.source
        if entry.teacher not in (None, _unpruned(entry.source, done)):
            shown["teacher"] = str(entry.teacher)
        return shown | self._differing(entry.settings)

    def _differing(self, settings: Any) -> dict[str, Any]:
        """Settings that are not their defaults; those of the recipe are the defaults of every stage."""
        common, changed = {"data": self.data, "seed": self.seed}, plain(settings, defaults=False)
        return {
            name: value
            for name, value in plain(settings).items()
            if (value != common[name] if name in common else name in changed)
        }

    def to_yaml(self) -> str:
        """:meth:`to_dict` as YAML."""
        return _dump(self.to_dict())


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file.

    Args:
        overrides: ``key=value`` changes, e.g. ``stages.2.ratio=0.3`` or ``stages.recover.steps=50``. Stages
            are counted from 0; their names work as well.

    Raises:
        RecipeError: names file, line and key.
    """
    return _recipe(read_yaml(Path(path)), str(path), overrides)


def parse_recipe(text: str, name: str = "recipe", overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a string; errors name ``name`` as its file."""
    return _recipe(parse_yaml(text, name), name, overrides)


def _recipe(root: Located, path: str, overrides: Iterable[str]) -> Recipe:
    if not isinstance(root.value, dict):
        raise RecipeError(f"{root.where}: a recipe is a mapping with the keys {', '.join(_TOP)}")
    for text in overrides:
        root = override(root, text, stage_names)
    top: Mapping[str, YamlEntry] = root.value
    for name, entry in top.items():
        if name not in _TOP:
            raise RecipeError(f"{entry.where}: unknown key {name!r} in the recipe{did_you_mean(name, _TOP)}")
    model = _typed(top, "model", str, "text: a folder, a hub id or attar:tiny")
    if not model:
        raise RecipeError(f"{root.where}: the key 'model' is missing", hint="model: attar:tiny")
    data = _typed(top, "data", str, f"text: {SOURCES}", "auto")
    seed = _typed(top, "seed", int, "a whole number, 0 or more", 0)
    if seed < 0:
        raise RecipeError(f"{top['seed'].where}: seed is {seed}, but must be a whole number, 0 or more")
    defaults = {name: top[name] for name in ("data", "seed") if name in top}
    return Recipe(
        path,
        model,
        data,
        seed,
        _evaluate(top.get("evaluate"), defaults, root),
        _stages(root, defaults, path),
        *(_numbers(top, name) for name in ("predicted", "measured")),
    )


def _typed(mapping: Mapping[str, YamlEntry], name: str, kind: type, allowed: str, default: Any = None) -> Any:
    """A scalar of a type, or the default of an absent key."""
    if name not in mapping:
        return default
    value = mapping[name].value.plain()
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RecipeError(f"{mapping[name].where}: {name} is {value!r}, but must be {allowed}")
    return value


def _numbers(top: Mapping[str, YamlEntry], name: str) -> dict[str, float]:
    """What a plan predicts, or a run measured; empty without the key."""
    value = top[name].value.plain() if name in top else {}
    if not is_prediction(value):
        allowed = f"a mapping with numbers of {', '.join(NUMBERS)}"
        raise RecipeError(f"{top[name].where}: {name} is {value!r}, but must be {allowed}")
    return dict(value)


def _evaluate(entry: YamlEntry | None, defaults: Mapping[str, YamlEntry], root: Located) -> Any | None:
    """EvaluateSettings, or None for ``evaluate: false``."""
    value = True if entry is None else entry.value.value
    if value is False:
        return None
    where = entry.where if entry else root.where
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: evaluate is {value!r}, but must be false or a mapping of settings")
    return _settings(load(EVALUATE_SETTINGS), value, defaults, "evaluate", where, ())


def _settings(
    cls: type,
    given: Mapping[str, YamlEntry],
    defaults: Mapping[str, YamlEntry],
    what: str,
    where: str,
    extra: tuple[str, ...],
    verb: str = "",
) -> Any:
    """Settings of a stage: its own keys, and the recipe's data and seed if it has such settings."""
    known = {setting.name for setting in settings_of(cls)}
    merged = {name: entry for name, entry in defaults.items() if name in known} | {
        name: entry for name, entry in given.items() if name not in extra
    }
    locations = {name: entry.where for name, entry in merged.items()}
    values = {name: entry.value.plain() for name, entry in merged.items()}
    return parse(cls, values, RecipeOrigin(what, where, locations, extra, verb))


def _stages(root: Located, defaults: Mapping[str, YamlEntry], path: str) -> tuple[StageEntry, ...]:
    entry = root.value.get("stages")
    if entry is None:
        raise RecipeError(f"{root.where}: the key 'stages' is missing", hint="stages: [{stage: quantize}]")
    items = entry.value.value
    if not isinstance(items, list) or not items:
        raise RecipeError(f"{entry.where}: stages must be a list with at least one stage")
    done: list[StageEntry] = []
    for item, name in zip(items, stage_names(entry.value), strict=True):
        done.append(_stage(item, name, done, defaults, path))
    return tuple(done)


def stage_names(stages: Located) -> list[str]:
    """The name of each stage: its ``name``, or the verb made unique with -2, -3.

    Raises:
        RecipeError: an item is not a stage, a verb is unknown, a name is used twice or cannot name a folder.
    """
    mappings = [item.value for item in stages.value if isinstance(item.value, dict)]
    used = [ORIGINAL, *(mapping["name"].value.plain() for mapping in mappings if "name" in mapping)]
    names: list[str] = []
    for item in stages.value:
        verb = _verb(item)
        if "name" not in item.value:
            candidates = [verb.verb, *(f"{verb.verb}-{n}" for n in range(2, len(stages.value) + 2))]
            names.append(next(name for name in candidates if name not in used))
            used.append(names[-1])
            continue
        entry = item.value["name"]
        name = entry.value.plain()
        if not isinstance(name, str) or not _NAME.match(name) or name == ORIGINAL:
            allowed = "letters, digits, - and _ (and not 'original')"
            raise RecipeError(f"{entry.where}: name is {name!r}, but must be {allowed}")
        if name in names:
            raise RecipeError(f"{entry.where}: two stages are named {name!r}")
        names.append(name)
    return names


def _verb(item: Located) -> StageSpec:
    if not isinstance(item.value, dict):
        raise RecipeError(f"{item.where}: a stage is a mapping such as {{stage: prune, ratio: 0.25}}")
    if "stage" not in item.value:
        known = ", ".join(STAGES)
        raise RecipeError(f"{item.where}: the key 'stage' is missing (one of {known})")
    entry = item.value["stage"]
    verb = entry.value.plain()
    if verb == "evaluate":
        hint = "evaluate is a key of the recipe: every stage's checkpoint is evaluated"
        raise RecipeError(f"{entry.where}: 'evaluate' is not a stage", hint=hint)
    if not isinstance(verb, str) or verb not in STAGES:
        raise RecipeError(f"{entry.where}: unknown stage {verb!r}{did_you_mean(str(verb), list(STAGES))}")
    return STAGES[verb]


def _stage(
    item: Located, name: str, done: list[StageEntry], defaults: Mapping[str, YamlEntry], path: str
) -> StageEntry:
    verb = _verb(item)
    keys: Mapping[str, YamlEntry] = item.value
    if verb.merges:
        return _merge(item, name, done, defaults, path)
    common = (*_COMMON, "teacher") if verb.teacher else _COMMON
    source = _reference(keys, "from", done, _default_source(done))
    teacher = _reference(keys, "teacher", done, _unpruned(source, done)) if verb.teacher else None
    what = f"stage {name!r}"
    settings = _settings(verb.settings_class(), keys, defaults, what, item.where, common, verb.verb)
    return StageEntry(len(done) + 1, verb.verb, name, source, teacher, settings, item.where)


def _merge(
    item: Located, name: str, done: list[StageEntry], defaults: Mapping[str, YamlEntry], path: str
) -> StageEntry:
    """A merge, which takes the models of its configuration."""
    keys: dict[str, YamlEntry] = dict(item.value)
    what = f"stage {name!r}"
    if "from" in keys:
        raise RecipeError(f"{keys['from'].where}: {what} has no 'from'", hint="its config names its models")
    if "config" not in keys:
        raise RecipeError(
            f"{item.where}: {what} needs the key 'config'", hint="mergekit's YAML, or a file of it"
        )
    read = read_merge(keys["config"], path, [ORIGINAL, *(entry.name for entry in done)])
    keys["config"] = read.config
    verb = STAGES[_verb(item).verb]
    settings = _settings(verb.settings_class(), keys, defaults, what, item.where, ("stage", "name"))
    source = read.stages[0] if read.stages else ORIGINAL
    return StageEntry(len(done) + 1, verb.verb, name, source, None, settings, item.where, read.stages)


def _reference(keys: Mapping[str, YamlEntry], key: str, done: list[StageEntry], default: str) -> str:
    """The name of an earlier stage."""
    if key not in keys:
        return default
    value = keys[key].value.plain()
    known = [ORIGINAL, *(entry.name for entry in done)]
    if value not in known:
        tail = did_you_mean(str(value), known)
        raise RecipeError(f"{keys[key].where}: {key} names {value!r}, which is no earlier stage{tail}")
    if any(entry.name == value and not entry.makes_model for entry in done):
        raise RecipeError(
            f"{keys[key].where}: {key} names {value!r}, a draft head", hint="name the stage of its model"
        )
    assert isinstance(value, str)
    return value


def _default_source(done: Sequence[StageEntry]) -> str:
    """The last stage that made a model; the original without any."""
    return next((entry.name for entry in reversed(done) if entry.makes_model), ORIGINAL)


def _unpruned(source: str, done: Sequence[StageEntry]) -> str:
    """The model before the prunings that made ``source``; the original without any."""
    by_name = {entry.name: entry for entry in done}
    name = source
    while name in by_name and by_name[name].stage == "prune":
        name = by_name[name].source
    return name if name != source else ORIGINAL


@dataclass(frozen=True)
class MergeEntry:
    """A merge's configuration as text, and the earlier stages that it names, "original" included."""

    config: YamlEntry
    stages: tuple[str, ...]


def read_merge(entry: YamlEntry, recipe: str, known: Sequence[str]) -> MergeEntry:
    """Read the configuration of a merge.

    Args:
        entry: the key ``config``: a mapping, a text, or a path relative to the file ``recipe``.

    Raises:
        RecipeError: the configuration is wrong; names file and line.
    """
    value = entry.value
    if isinstance(value.value, dict):
        documents: Any = load("attar.merging.config.documents:parse_located")(value)
        text = _dump(value.plain())
    elif not isinstance(value.value, str):
        raise RecipeError(f"{value.where}: config is neither a mapping nor a path nor a text")
    else:
        sibling = str(Path(recipe).parent / value.value)
        path = sibling if os.path.isfile(sibling) else value.value  # noqa: PTH113 (Path's raises at long names)
        documents, text = load("attar.merging.config.documents:read_configs")(path, value.where)
    names = [reference.model for document in documents for reference in document.models()]
    stages = tuple(dict.fromkeys(name for name in names if name in known))
    return MergeEntry(YamlEntry(entry.where, Located(text, value.where)), stages)


def _dump(content: Any) -> str:
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000))
