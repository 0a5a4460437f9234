"""The worker with work that takes no model: counts in a file, so that what it does is seen from outside."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from attar.errors import DataError
from attar.mcp import worker


def quantize(model: str, out: str, settings: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Count to ``steps`` from where the file says, ``seconds`` a step."""
    print("a library prints on stdout")
    if settings.get("fail"):
        raise DataError("no text\nin it", hint="give more")
    if settings.get("die"):
        import os

        os.kill(os.getpid(), 9)
    state = Path(f"{out}.state")
    first = int(state.read_text()) if state.exists() else 0
    progress.log(f"from {first}")
    steps = settings.get("steps", 3)
    with progress.task("count", steps, first) as task:
        for step in range(first, steps):
            time.sleep(settings.get("seconds", 0))
            partial = state.with_suffix(".partial")
            partial.write_text(str(step + 1))
            partial.replace(state)
            task.advance(loss=float("nan") if step == 0 else 1 / step)
    return {
        "path": out,
        "bytes": steps,
        "seconds": 0.5,
        "numbers": {"first": float(first)},
        "licence": {},
        "command": "",
    }


worker.TOOLS = {"quantize": quantize}
worker.EVERY_S = 0.0

if __name__ == "__main__":
    worker.main()
