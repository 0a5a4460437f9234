"""Merge with mergekit, inside its environment.

    python mergekit_run.py '{"runs": [{"config", "out", "seed"}, ...], "options": {}, "started": 0.0}'

``config`` is a YAML file, ``out`` the folder to make, ``seed`` a number or null (which leaves torch's own
seed). ``options`` are fields of mergekit's MergeOptions; without them everything is as its command line has
it. Prints one JSON line a run: seconds in the call, wall (since ``started``), peak_rss_mb of the process so
far, versions; ``error`` instead of the times where mergekit refused or failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from job import peak_mb


def merge(run: dict[str, Any], options: dict[str, Any]) -> None:
    """Do one merge as ``mergekit-yaml`` does it; what it imports is imported already."""
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    source = Path(run["config"]).read_text()
    config = MergeConfiguration.model_validate(yaml.safe_load(source))
    chosen = MergeOptions(random_seed=run.get("seed"), **options)
    run_merge(config, run["out"], options=chosen, config_source=source)


def main() -> None:
    """Do the job."""
    job = json.loads(sys.argv[1] if sys.argv[1] != "-" else sys.stdin.read())
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    answer = os.dup(1)
    os.dup2(2, 1)
    from importlib.metadata import version

    import mergekit.merge  # noqa: F401 (seconds are counted without it, wall with it)

    names = ("mergekit", "torch", "transformers", "safetensors")
    for run in job["runs"]:
        start = time.perf_counter()
        line: dict[str, Any] = {"out": run["out"]}
        try:
            merge(run, job.get("options", {}))
            line["seconds"] = round(time.perf_counter() - start, 3)
            line["wall"] = round(time.time() - job["started"], 3) if job.get("started") else None
        except Exception as error:  # the caller decides what a refusal means
            line["error"] = f"{type(error).__name__}: {error}"
        line |= {"peak_rss_mb": round(peak_mb(), 1), "versions": {name: version(name) for name in names}}
        os.write(answer, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    main()
