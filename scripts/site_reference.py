"""The page of ``attar.__all__`` for the site, read from the source: torch is not imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src/attar/__init__.py"
ENGINE = "generate-chat-bench-and-serve-the-engine"
VERBS = {
    "TextSettings": "generate",
    "EngineSettings": ENGINE,
    "RunnerSettings": ENGINE,
    "SpeculationSettings": ENGINE,
}
HEAD = """# API reference

Every public name of `attar`, from its docstring. [Python](api.md) shows how they are used; each setting of a
verb is explained under its verb in [Settings](settings.md).
"""


def public_names() -> list[str]:
    """``attar.__all__``, in its order."""
    for statement in ast.parse(PACKAGE.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(statement.value)]
    raise ValueError(f"{PACKAGE} has no __all__")


def page() -> str:
    """Markdown with a directive of mkdocstrings for each name: verbs, then classes, then errors."""
    names = public_names()
    errors = [name for name in names if name.endswith("Error")]
    classes = [name for name in names if name[0].isupper() and name not in errors]
    verbs = [name for name in names if name not in errors + classes]
    groups = {"Functions": verbs, "Classes": classes, "Errors": errors}
    parts = [HEAD]
    for title, members in groups.items():
        parts += [f"## {title}\n", *(f"::: attar.{name}\n" for name in members)]
    return "\n".join(parts)


def linked(html: str) -> str:
    """The page with docstrings' roles (``:func:`run```) as links to public names and settings of verbs."""
    names = public_names()

    def link(role: re.Match[str]) -> str:
        name = role[1].lstrip("~").rpartition(".")[2]
        code = f"<code>{name}</code>"
        if name in names:
            return f'<a href="#attar.{name}">{code}</a>'
        if name.endswith("Settings"):
            verb = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", VERBS.get(name, name.removesuffix("Settings"))).lower()
            return f'<a href="settings.html#{verb}">{code}</a>'
        return code

    return re.sub(r":(?:func|class|meth|mod|attr|data):<code>(.*?)</code>", link, html)
