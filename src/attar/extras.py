"""The command that installs what an extra needs.

attar is on no index, so ``pip install 'attar[serve]'`` finds nothing, or a stranger's package.
"""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path


def install_command(extra: str) -> str:
    """Of an attar that runs from a checkout: the checkout with the extra; else the extra's packages."""
    checkout = checkout_folder()
    if checkout is None:
        return f"pip install {shlex.join(requirements(extra))}"
    folder = "." if checkout == Path.cwd() else str(checkout)
    return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"


def checkout_folder() -> Path | None:
    """The checkout that this file lies in; None in an installed package."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def requirements(extra: str) -> list[str]:
    """The packages of an extra; the build has put those of an extra inside it into the metadata."""
    pattern = re.compile(rf"([^;]+?)\s*;\s*extra == ['\"]{re.escape(extra)}['\"]")
    return [match[1] for line in metadata.requires("attar") or () if (match := pattern.fullmatch(line))]
