"""Merge with attar in a process of its own: the counterpart of mergekit_run.py.

    python attar_merge_run.py '{"runs": [{"config", "out", "seed"}, ...], "settings": {}, "started": 0.0}'

Prints one JSON line a run: seconds in the call, wall (since ``started``), peak_rss_mb; ``error`` instead of
the times where the merge was refused.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from job import peak_mb


def main() -> None:
    """Do the job."""
    job = json.loads(sys.argv[1] if sys.argv[1] != "-" else sys.stdin.read())
    import attar

    for run in job["runs"]:
        start = time.perf_counter()
        line: dict[str, Any] = {"out": run["out"]}
        seed = {} if run.get("seed") is None else {"seed": run["seed"]}
        try:
            attar.merge(run["config"], run["out"], force=True, **seed, **job.get("settings", {}))
            line["seconds"] = round(time.perf_counter() - start, 3)
            line["wall"] = round(time.time() - job["started"], 3) if job.get("started") else None
        except attar.AttarError as error:
            line["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps({**line, "peak_rss_mb": round(peak_mb(), 1)}), flush=True)


if __name__ == "__main__":
    main()
