"""Export with attar in a process of its own: the counterpart of llamacpp_run.py.

    python attar_export_run.py '{"model", "target", "settings", "started"}'

Prints one JSON line: seconds in the call (verification included), wall, peak_rss_mb.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from job import peak_mb


def main() -> None:
    """Do the job."""
    job = json.loads(sys.argv[1])
    import attar

    start = time.perf_counter()
    attar.export(job["model"], job["target"], format="gguf", force=True, **job["settings"])
    line = {"seconds": round(time.perf_counter() - start, 3), "wall": round(time.time() - job["started"], 3)}
    print(json.dumps({**line, "peak_rss_mb": peak_mb()}))


if __name__ == "__main__":
    main()
