"""A merge's YAML of one document or several, read from a file, a text or a recipe and sorted by use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attar.errors import RecipeError
from attar.merging.config.parse import parse_document
from attar.merging.config.schema import MergeConfig
from attar.merging.mixture.config import MixtureConfig, is_mixture, parse_mixture
from attar.merging.settings import INLINE, yaml_text
from attar.yaml import Located, parse_documents

MergeDocument = MergeConfig | MixtureConfig
"""A merge, or a mixture of experts made of dense models."""


def read_configs(config: str, name: str = INLINE) -> tuple[tuple[MergeDocument, ...], str]:
    """The documents of the setting ``config``, and their text.

    Args:
        config: a path, or a YAML text (it has a line break or a colon followed by a space).
        name: name of a text in errors.

    Raises:
        RecipeError: there is no such file, or the configuration is wrong; names file and line.
        SettingsError: the setting is empty.
    """
    text, where = yaml_text(config, name)
    return parse_configs(text, where), text


def parse_configs(text: str, name: str = "merge.yml") -> tuple[MergeDocument, ...]:
    """The documents of a YAML text: each after the documents whose results it uses, the unnamed document
    last.

    Raises:
        RecipeError: one line with file and line.
    """
    documents = parse_documents(text, name)
    if not documents:
        raise RecipeError(f"{name}: is empty; a merge needs at least merge_method and models")
    return sorted_by_use([_parse(document) for document in documents])


def parse_located(located: Located) -> tuple[MergeDocument, ...]:
    """The one document that is part of another file, such as a recipe."""
    return (_parse(located),)


def _parse(located: Located) -> MergeDocument:
    return parse_mixture(located) if is_mixture(located) else parse_document(located)


def sorted_by_use(configs: Sequence[MergeDocument]) -> tuple[MergeDocument, ...]:
    """Documents sorted so that each comes after the documents whose results it uses; otherwise the order
    stays. The document without a name, which is the final result, comes last.

    Raises:
        RecipeError: two documents have one name, two have none, or they use each other in a circle.
    """
    named = _by_name(configs)
    waiting_documents = sorted(configs, key=lambda config: config.name is None)
    done: list[MergeDocument] = []
    while waiting_documents:
        waiting = {config.name for config in waiting_documents}
        ready = [
            config
            for config in waiting_documents
            if not any(used.model in waiting for used in config.models())
        ]
        if not ready:
            circle = _circle(waiting_documents, named)
            raise RecipeError(
                f"{waiting_documents[0].where}: the documents need each other in a circle: {circle}"
            )
        done.append(ready[0])
        waiting_documents.remove(ready[0])
    return tuple(done)


def _by_name(configs: Sequence[MergeDocument]) -> dict[str | None, MergeDocument]:
    """Documents by name; at most one has none."""
    named: dict[str | None, MergeDocument] = {}
    for config in configs:
        if config.name in named:
            what = "without a name" if config.name is None else f"named {config.name!r}"
            raise RecipeError(
                f"{config.where}: a second document {what} (the first at {named[config.name].where})",
                hint="every document but the final one needs a name" if config.name is None else None,
            )
        named[config.name] = config
    return named


def _circle(configs: Sequence[MergeDocument], named: Mapping[str | None, MergeDocument]) -> str:
    """Names along a circle; each document of ``configs`` uses another of them."""
    waiting = {config.name for config in configs}
    path: list[str] = []
    config = configs[0]
    while True:
        name = next(used.model for used in config.models() if used.model in waiting)
        if name in path:
            return " -> ".join([*path[path.index(name) :], name])
        path.append(name)
        config = named[name]
