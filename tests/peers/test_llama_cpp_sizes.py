"""Sizes of a plan for llama.cpp against llama.cpp's dry run, which prints what its quantizer would write.

The quantizer runs in the environment ``$ATTAR_PEERS/llama-cpp`` (benchmarks/peers/environments.py builds it).
"""

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

import attar
from attar.checkpoint import open_checkpoint
from attar.deployment.gguf_type_search import data_bytes
from attar.formats.gguf.types import TYPES
from attar.planner.gguf_costs import gguf_costs

pytestmark = pytest.mark.peers
PYTHON = Path(os.environ.get("ATTAR_PEERS", "")) / "llama-cpp" / "bin" / "python"
if "ATTAR_PEERS" not in os.environ or not PYTHON.exists():
    pytest.skip("no $ATTAR_PEERS/llama-cpp", allow_module_level=True)

DRY_RUN = textwrap.dedent(
    """
    import ctypes, json, sys
    import llama_cpp as l

    lines = []
    keep = l.llama_log_callback(lambda level, text, data: lines.append(text.decode(errors="replace")))
    l.llama_log_set(keep, ctypes.c_void_p(0))
    job = json.load(sys.stdin)
    params = l.llama_model_quantize_default_params()
    params.nthread, params.dry_run = 1, True
    own = (l.llama_model_tensor_override * (len(job["types"]) + 1))()
    for entry, (name, kind) in zip(own, job["types"].items()):
        entry.pattern, entry.type = name.encode(), kind
    params.tt_overrides = ctypes.cast(own, type(params.tt_overrides))
    assert l.llama_model_quantize(job["source"].encode(), b"nowhere.gguf", ctypes.byref(params)) == 0
    print(json.dumps("".join(lines)))
    """
)


def test_llama_cpp_would_write_these_types_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "dense.gguf"
    attar.export("attar:tiny", file, type="F16", progress=False)
    costs = gguf_costs(open_checkpoint("attar:tiny"), "rtn")
    kinds = {group: list(options) for group, options in costs.table.items()}
    choice = {group: names[(3 * n) % len(names)] for n, (group, names) in enumerate(kinds.items())}
    types = costs.layout.spread(choice)
    own = {f"^{re.escape(name)}$": TYPES[types[name]].id for name in costs.matrices}
    job = json.dumps({"source": str(file), "types": own})
    ended = subprocess.run([PYTHON, "-c", DRY_RUN], input=job, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    log = json.loads(ended.stdout.splitlines()[-1])
    written = dict(re.findall(r"\] +(\S+) +- \[.*?MiB -> +[\d.]+ MiB \((\w+)\)", log))
    assert {name: kind.upper() for name, kind in written.items()} == {
        name: types[name] for name in costs.matrices if types[name] != "F16"
    }
    (size,) = re.findall(r"quant size += +([\d.]+) MiB", log)
    assert float(size) == pytest.approx(
        data_bytes(types, costs.layout.shapes, padding=False) / 2**20, abs=0.0051
    )
