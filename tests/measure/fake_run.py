"""A run folder such as ``attar run`` leaves behind, with made-up numbers of a plausible demo."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
CODE = """(self, name, default=None):
        self.name = name
        self.default = default

    def __repr__(self):
        return"""


def stage(
    name: str,
    verb: str,
    parents: list[str],
    title: str,
    megabytes: float,
    bits: float,
    ppl: float,
    kl: float,
    top1: float,
    sample: str,
    **more: Any,
) -> dict[str, Any]:
    """One entry of ``run.json``."""
    seed = len(name) + int(megabytes * 10)
    measurements = {
        "model": "attar:tiny" if verb == "original" else f"runs/demo/{name}",
        "reference": "attar:tiny",
        "perplexity": ppl,
        "loss": math.log(ppl),
        "tokens": 16352,
        "kl_mean": kl,
        "kl_p99": kl * 9.3,
        "top1_agreement": top1,
        "accuracy": 0.6 * (1 + top1) / 2,
        "quality_kept": (1 + top1) / 2,
        "bytes": int(megabytes * 1e6),
        "parameters": int(megabytes * 8e6 / bits),
        "bits_per_weight": bits,
        "prefill_tokens_per_s": 5210.0 + 37 * seed,
        "prefill_spread": 0.06,
        "decode_tokens_per_s": 163.0 + 2 * seed,
        "decode_spread": 0.11,
        "peak_rss_bytes": 612_000_000,
        "prompt": "def __init__",
        "sample": sample,
        "runner": "compiled",
        "activations": "int8",
        "kv_dtype": "bfloat16",
        "device": "cpu",
        "threads": 2,
        "seconds": 8.1,
    }
    details, settings = more.pop("details", {}), more.pop("settings", {})
    return {
        "name": name,
        "stage": verb,
        "title": title,
        "parents": parents,
        "path": f"0-{name}",
        "key": "0" * 64,
        "settings": settings,
        "seconds": more.pop("seconds", 12.4),
        "peak_rss_bytes": 934_000_000,
        "measurements": measurements,
        "details": details,
    }


def curve(steps: int, start: float, end: float) -> list[dict[str, float]]:
    """A noisy falling loss with a held-out value now and then."""
    noise = random.Random(steps)
    rows = []
    for step in range(1, steps + 1):
        level = end + (start - end) * math.exp(-4 * step / steps)
        row = {"step": step, "loss": level * (1 + 0.12 * noise.gauss(0, 1)), "learning_rate": 1e-3}
        if step % (steps // 5) == 0:
            row["held_out"] = level * 1.05
        rows.append(row)
    return rows


def layers(scale: float, swept: bool) -> list[dict[str, Any]]:
    """Relative errors of 4 blocks: of the outputs, with round-to-nearest's, or of the weights."""
    noise = random.Random(5)
    rows: list[dict[str, Any]] = []
    for block in range(4):
        for number, kind in enumerate(KINDS):
            rtn = (0.006 + 0.001 * number + 0.0012 * block) * (0.8 + 0.4 * noise.random())
            name = f"model.layers.{block}.{kind}"
            errors = {"error": rtn * scale, "rtn_error": rtn} if swept else {"weight_error": rtn / 2}
            rows.append({"name": name, **errors})
    return rows


def fake_run() -> dict[str, Any]:
    """The contents of ``run.json``."""
    four = {"scheme": "W4A16", "group_size": 64, "embedding_bits": 8}
    stages = [
        stage("original", "original", [], "attar:tiny", 14.68, 16.0, 9.31, 0.0, 1.0, CODE, seconds=None),
        stage(
            "distill",
            "distill",
            ["original"],
            "4 of 8 layers, 200 steps, T 2",
            8.39,
            16.0,
            11.9,
            0.238,
            0.781,
            CODE.replace("default", "value"),
            details={"curve": curve(200, 2.4, 0.25)},
            seconds=71.0,
            settings={"layers": 4, "steps": 200, "temperature": 2.0, "alpha": 1.0, "seed": 0},
        ),
        stage(
            "heads",
            "prune",
            ["distill"],
            "25 % of the head groups",
            7.81,
            16.0,
            14.8,
            0.451,
            0.694,
            CODE[:60] + "pass\n",
            settings={"method": "heads", "ratio": 0.25},
        ),
        stage(
            "neurons",
            "prune",
            ["heads"],
            "25 % of the neurons",
            6.42,
            16.0,
            19.6,
            0.702,
            0.618,
            "f(self):\n        return self.f(self)\n" * 3,
            settings={"method": "neurons", "ratio": 0.25},
        ),
        stage(
            "recover",
            "recover",
            ["neurons", "original"],
            "100 steps from the original",
            6.42,
            16.0,
            12.6,
            0.287,
            0.757,
            CODE.replace("name", "key"),
            details={"curve": curve(100, 0.9, 0.3)},
            settings={"steps": 100, "teacher": "original"},
        ),
        stage(
            "rtn",
            "quantize",
            ["recover"],
            "W4A16, group 64, round to nearest",
            1.83,
            4.56,
            13.3,
            0.329,
            0.731,
            CODE.replace("name", "item"),
            details={"layers": layers(1.0, False)},
            settings={**four, "method": "rtn"},
            seconds=0.4,
        ),
        stage(
            "quantize",
            "quantize",
            ["recover"],
            "W4A16, group 64, GPTQ",
            1.83,
            4.56,
            12.8,
            0.301,
            0.749,
            CODE.replace("name", "key"),
            details={"layers": layers(0.55, True)},
            settings={**four, "method": "gptq"},
        ),
    ]
    return {
        "attar": "0.1.0",
        "recipe": {"model": "attar:tiny", "data": "python-stdlib", "seed": 0},
        "machine": {"system": "Linux 6.1 x86_64", "processor": "2 cores", "memory": "24 GB"},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "attar": "0.1.0"},
        "stages": stages,
        "finished": True,
    }


def write_fake_run(folder: Path, run: dict[str, Any] | None = None) -> Path:
    """Write ``run.json`` and ``recipe.yaml``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run or fake_run()))
    (folder / "recipe.yaml").write_text(
        "model: attar:tiny\nstages:\n  - {stage: distill, layers: 4}  # <half>\n"
    )
    return folder
