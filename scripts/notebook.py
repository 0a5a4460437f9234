"""A tutorial's page as a Jupyter notebook: the same text, the same commands in the same order.

python scripts/notebook.py docs/tutorials/serve-4-bit.md > serve-4-bit.ipynb
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```\n?", re.M | re.S)
COMMENT = re.compile(r"^<!-- .*? -->\n", re.M)
SERVER = re.compile(r"^(attar serve .*) &$", re.M)


def of_page(page: str) -> str:
    """The notebook's JSON (nbformat 4.5).

    A server's output goes to a file, since a cell ends when its shell's output does, and so does the number
    of its process, since each cell has a shell of its own.
    """
    cells: list[dict[str, Any]] = []
    end = 0
    for block in BLOCK.finditer(page):
        cells += _text(page[end : block.start()])
        code = block[2]
        if block[1] == "sh":
            code = SERVER.sub(r"\1 > server.log 2>&1 & echo $! > server.pid", code)
            code = "%%bash\nset -e\n" + code.replace("kill %1", "kill $(cat server.pid)")
        cells.append(
            {"cell_type": "code", "execution_count": None, "outputs": [], "source": code.rstrip("\n")}
        )
        end = block.end()
    cells += _text(page[end:])
    for number, cell in enumerate(cells):
        cell |= {"id": f"cell-{number}", "metadata": {}}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1) + "\n"


def _text(markdown: str) -> list[dict[str, Any]]:
    text = COMMENT.sub("", markdown).strip("\n")
    return [{"cell_type": "markdown", "source": text}] if text else []


if __name__ == "__main__":
    print(of_page(Path(sys.argv[1]).read_text()), end="")
