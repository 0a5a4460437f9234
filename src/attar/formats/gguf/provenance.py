"""Where a model comes from, as metadata of a GGUF file, and back: keys that a file keeps when it leaves its
card.

    general.license                    the tag of its licence; ``other`` where several apply
    general.license.name               the tags of all of them, with commas
    general.base_model.count           models that its weights come from; of each, from 0:
    general.base_model.N.name, .organization, .repo_url

Source: llama.cpp ``gguf-py/gguf/metadata.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.formats.gguf.values import MetadataValue

HUB = "https://huggingface.co/"
BASE = "general.base_model"


def provenance_metadata(licences: Sequence[str], bases: Sequence[str]) -> dict[str, MetadataValue]:
    """The keys of licences and origins.

    Args:
        licences: tags as in the front matter of a README.
        bases: hub ids, ``organization/name``.
    """
    keys: dict[str, MetadataValue] = {}
    if licences:
        keys["general.license"] = licences[0] if len(licences) == 1 else "other"
    if len(licences) > 1:
        keys["general.license.name"] = ", ".join(licences)
    if bases:
        keys[f"{BASE}.count"] = len(bases)
    for number, base in enumerate(bases):
        organization, _, name = base.partition("/")
        keys[f"{BASE}.{number}.name"] = name
        keys[f"{BASE}.{number}.organization"] = organization
        keys[f"{BASE}.{number}.repo_url"] = f"{HUB}{base}"
    return keys


def provenance_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``license`` and ``base_model`` for a config.json, as a README has them: a text, or several in a list.
    Values of another type than a text are left out."""
    count = metadata.get(f"{BASE}.count", 0)
    numbers = range(count if type(count) is int and 0 <= count < len(metadata) else 0)
    named = metadata.get("general.license.name", "")
    licences = [metadata.get("general.license"), *(named.split(", ") if isinstance(named, str) else ())]
    bases = [metadata.get(f"{BASE}.{number}.repo_url") for number in numbers]
    fields = {
        "license": [text for text in licences if isinstance(text, str) and text],
        "base_model": [text.removeprefix(HUB) for text in bases if isinstance(text, str)],
    }
    return {name: texts[0] if len(texts) == 1 else texts for name, texts in fields.items() if texts}
