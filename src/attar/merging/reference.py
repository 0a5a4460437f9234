"""How a merge names a model: ``path[@revision][+lora[@revision]]``, or the same as a mapping.

org/name                             a hub id, a folder, attar:tiny, or the name of an earlier document
org/name@main                        at a revision
org/name+org/adapter                 with a LoRA adapter added before anything else happens
{model: org/name, lora: org/adapter}
{model: {path: org/name, revision: main}}
"""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.errors import RecipeError, did_you_mean
from attar.yaml import Located, YamlEntry

FORM = "path[@revision][+adapter[@revision]]"


@dataclass(frozen=True)
class ModelReference:
    """One model of a merge. Two references are equal when they name the same model, wherever they stand.

    Attributes:
        model: folder, hub id (with ``@revision``), or name of an earlier document.
        lora: folder or hub id of an adapter that is added to the model, or None.
        where: ``file:line``.
    """

    model: str
    lora: str | None = None
    where: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.model}+{self.lora}" if self.lora else self.model


def parse_reference(located: Located) -> ModelReference:
    """Read a reference in any of its forms.

    Raises:
        RecipeError: it is empty, has two ``+``, two ``@`` in one part, or an unknown key.
    """
    if isinstance(located.value, dict):
        return _mapping(located)
    model, *loras = _text(located).split("+")
    if len(loras) > 1:
        raise RecipeError(
            f"{located.where}: the model {located.value!r} has more than one '+'",
            hint="add one adapter here and the next one in a document of its own",
        )
    lora = _part(loras[0], located) if loras else None
    return ModelReference(_part(model, located), lora, located.where)


def _mapping(located: Located) -> ModelReference:
    """``{model, lora}``, each a text or ``{path, revision}``."""
    entries: dict[str, YamlEntry] = located.value
    for name, entry in entries.items():
        if name == "override_architecture":
            raise RecipeError(
                f"{entry.where}: override_architecture has no use here",
                hint="the tensors are found in the checkpoint; no list of architectures is asked",
            )
        if name not in ("model", "lora"):
            tail = did_you_mean(name, ("model", "lora"))
            raise RecipeError(f"{entry.where}: unknown key {name!r} in a model{tail}")
    if "model" not in entries:
        raise RecipeError(f"{located.where}: a model without the key 'model'")
    lora = entries.get("lora")
    has_lora = lora is not None and lora.value.value is not None
    return ModelReference(
        _path(entries["model"].value), _path(lora.value) if lora and has_lora else None, located.where
    )


def _path(located: Located) -> str:
    """A text, or ``{path, revision}``, as ``path@revision``."""
    if not isinstance(located.value, dict):
        text = _text(located)
        if "+" in text:
            raise RecipeError(f"{located.where}: {text!r}: in a mapping the adapter is the key 'lora'")
        return _part(text, located)
    entries: dict[str, YamlEntry] = located.value
    for name, entry in entries.items():
        if name not in ("path", "revision"):
            tail = did_you_mean(name, ("path", "revision"))
            raise RecipeError(f"{entry.where}: unknown key {name!r} in a model's path{tail}")
    if "path" not in entries:
        raise RecipeError(f"{located.where}: a model's path without the key 'path'")
    path = _text(entries["path"].value)
    revision = entries.get("revision")
    return f"{path}@{_text(revision.value)}" if revision and revision.value.value is not None else path


def _text(located: Located) -> str:
    if isinstance(located.value, str) and located.value:
        return located.value
    raise RecipeError(f"{located.where}: {located.plain()!r} is no model", hint=f"a model is written {FORM}")


def _part(text: str, located: Located) -> str:
    """A path with at most one revision."""
    path, at, revision = text.strip().partition("@")
    if not path or "@" in revision or (at and not revision):
        raise RecipeError(
            f"{located.where}: {located.plain()!r} is no model", hint=f"a model is written {FORM}"
        )
    return text.strip()
