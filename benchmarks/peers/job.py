"""What a runner is asked to do, and what it hands back: shared by every runner, in whichever environment.

A runner is started as ``python X_run.py JOB``, JOB being this dataclass in JSON (``-``: on standard input).
It quantizes a model (``X_prune_run.py`` prunes one) with one tool and leaves in ``out`` a dense checkpoint of
the weights that the tool's file stands for. Where inputs of Linears are quantized too, ``activations.json``
there says how. The last line on standard output is one JSON object: see :func:`finish`. Needs torch and
safetensors, nothing of attar.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ACTIVATIONS = "activations.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One quantization, or pruning, of one model.

    Attributes:
        model: folder of a dense checkpoint.
        tokens: a safetensors file with int64 ``tokens`` (rows, length).
        out: the folder to make.
        method: rtn, gptq, awq, ...; each runner has its own list.
        scheme: INT (weights of ``bits`` bits in groups), W8A8, FP8, FP8_DYNAMIC, NVFP4A16 or NF4.
        bits: of a weight.
        group_size: inputs that share a scale; 0: the whole row.
        symmetric: no zero point.
        act_order: none, static or group: the order of GPTQ's columns.
        sparsity: of a pruning: 0.5, or 2:4.
        iterations: of a learned rounding.
        batch_size: rows in a pass.
        seed: of whatever the tool draws.
        dtype: what the weights are loaded as: float32, bfloat16, or auto for the checkpoint's.
        save: also save the model in the tool's own format, inside the time and the memory that count.
        started: ``time.time()`` when the process was asked for.
        data: where the calibration tokens came from (attar's own runner checks that it reads the same ones).
        options: further settings of attar; no other runner takes any.
    """

    model: str
    tokens: str
    out: str
    method: str
    scheme: str = "INT"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    act_order: str = "static"
    sparsity: str = ""
    iterations: int = 200
    batch_size: int = 8
    seed: int = 0
    dtype: str = "float32"
    save: bool = False
    started: float = 0.0
    data: str = "python-stdlib"
    options: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The job in JSON, as :func:`parse` reads it."""
        return json.dumps(asdict(self))


def parse(text: str) -> Job:
    """A job from its JSON.

    Raises:
        SystemExit: an unknown key, or a missing one.
    """
    given = json.loads(text)
    if unknown := sorted(set(given) - {f.name for f in fields(Job)}):
        raise SystemExit(f"a job has no {', '.join(unknown)}")
    try:
        return Job(**given)
    except TypeError as error:
        raise SystemExit(f"not a whole job: {error}") from None


def read() -> Job:
    """The job of this process. From here on standard output goes to standard error: tools print what they
    like."""
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {Path(sys.argv[0]).name} JOB (JSON, or - for standard input)")
    job = parse(sys.stdin.read() if sys.argv[1] == "-" else sys.argv[1])
    if job.options and not Path(sys.argv[0]).name.startswith("attar_"):
        raise SystemExit(f"{Path(sys.argv[0]).name} takes no {', '.join(job.options)}")
    os.environ["ATTAR_PEERS_STDOUT"] = str(os.dup(1))
    os.dup2(2, 1)
    return job


def peak_mb() -> float:
    """Largest resident set of this process so far, in 10^6 bytes."""
    match = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024 / 1e6


class Watch:
    """Times the tool's own call, and reads the peak of memory before and after it.

    Attributes:
        before: peak in MB when the call began: imports and the loaded model.
        peak: in MB when it ended.
        seconds: in the call; cpu: of all threads of this process in it, which other programs change little.
        wall: seconds from the start of the process to the end of the call.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.before = self.peak = self.seconds = self.cpu = self.wall = 0.0

    def __enter__(self) -> Watch:
        self.before, self._start, self._spent = peak_mb(), time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.cpu = time.process_time() - self._spent
        self.stop()

    def stop(self) -> None:
        """Note wall time and peak memory again, once the tool's own file is written."""
        self.wall, self.peak = time.time() - self.job.started, peak_mb()


def finish(job: Job, watch: Watch, versions: Mapping[str, str]) -> None:
    """Print the one line that the caller reads."""
    line = {
        "seconds": round(watch.seconds, 3),
        "cpu": round(watch.cpu, 3),
        "wall": round(watch.wall, 3),
        "peak_rss_mb": round(watch.peak, 1),
        "start_rss_mb": round(watch.before, 1),
        "out": job.out,
        "versions": dict(versions),
    }
    os.write(int(os.environ["ATTAR_PEERS_STDOUT"]), (json.dumps(line) + "\n").encode())


def load_tokens(job: Job) -> Any:
    """The calibration rows, int64 (rows, length)."""
    from safetensors.torch import load_file

    return load_file(job.tokens)["tokens"]


def block_linears(model: Any) -> dict[str, Any]:
    """The Linears of a model's blocks by name: all but the head."""
    import torch

    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


def write_dense(job: Job, state: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> None:
    """Write ``out``: the model's own tensors by name, with the tool's values; config and tokenizer.

    Args:
        state: tensors under the names of the original; one that is not there keeps its original value.
        activations: by name of a Linear, how its input is quantized (see ``quality.py``).
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    source, out = Path(job.model), Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                tensors[name] = (
                    state[name].detach().contiguous() if name in state else stored.get_tensor(name)
                )
                if list(tensors[name].shape) != stored.get_slice(name).get_shape():
                    raise SystemExit(f"{name} came back as {list(tensors[name].shape)}")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in source.glob("*"):
        companion = file.suffix in (".json", ".txt", ".model") and not file.name.endswith(".index.json")
        if companion and file.name not in ("config.json", "attar.json"):
            shutil.copy(file, out / file.name)
    if activations:
        (out / ACTIVATIONS).write_text(json.dumps(activations, indent=1) + "\n")
