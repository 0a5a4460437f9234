"""Quantize a GGUF file with llama.cpp, inside the environment of llama-cpp-python.

    python llamacpp_run.py '{"source", "target", "type", "threads", "imatrix", "started"}'

Prints one JSON line: seconds in the call, wall, peak_rss_mb.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from job import peak_mb


def importance(file: str) -> Any:
    """An importance matrix as the library takes it: name and mean squared inputs of each weight, the last
    name null."""
    import numpy as np
    from gguf import GGUFReader
    from llama_cpp.llama_cpp import llama_model_imatrix_data as entry

    tensors = {tensor.name: tensor.data for tensor in GGUFReader(file).tensors}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    array = (entry * (len(names) + 1))()
    array.kept = []  # what the pointers point to
    for index, name in enumerate(names):
        mean = tensors[f"{name}.in_sum2"].ravel() / max(float(tensors[f"{name}.counts"].ravel()[0]), 1.0)
        values = np.ascontiguousarray(mean, dtype=np.float32)
        array.kept.append(values)
        pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        array[index] = entry(name.encode(), pointer, values.size)
    return array


def main() -> None:
    """Do the job."""
    job = json.loads(sys.argv[1])
    answer = os.dup(1)
    os.dup2(2, 1)
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = job["threads"]
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{job['type']}")
    kept = importance(job["imatrix"]) if job["imatrix"] else None
    if kept is not None:
        params.imatrix = kept
    start = time.perf_counter()
    code = llama_cpp.llama_model_quantize(
        job["source"].encode(), job["target"].encode(), ctypes.byref(params)
    )
    seconds = time.perf_counter() - start
    if code:
        raise SystemExit(f"llama_model_quantize: {code}")
    line = {"seconds": round(seconds, 3), "wall": round(time.time() - job["started"], 3)}
    os.write(answer, (json.dumps({**line, "peak_rss_mb": peak_mb()}) + "\n").encode())


if __name__ == "__main__":
    main()
