"""Quantize with attar, in a process of its own. See job.py for what comes in and what goes out.

The job's ``options`` become settings of ``attar quantize``. attar reads its calibration tokens itself: the
runner checks that they are those of the token file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import job as jobs


def settings_of(job: jobs.Job, rows: int, length: int) -> dict[str, Any]:
    """Settings of ``attar.quantize`` for a job whose token file holds ``rows`` rows of ``length`` tokens.

    The comparison at the end of a quantization is off: no other tool makes one, and here it follows anyway.
    """
    given: dict[str, Any] = {
        "scheme": scheme_name(job),
        "method": job.method,
        "act_order": {"none": "off"}.get(job.act_order, job.act_order),
        "iterations": job.iterations,
        "samples": rows,
        "sequence_length": length,
        "batch_size": job.batch_size,
        "data": job.data,
        "seed": job.seed,
        "check_tokens": 0,
        "device": "cpu",
    }
    if job.scheme == "INT":
        given["group_size"] = job.group_size
    from attar.options import option_fields
    from attar.quantization.settings import QuantizeSettings

    known = {option.field.name: option for option in option_fields(QuantizeSettings)}
    fitting = {
        name: value
        for name, value in given.items()
        if not known[name].by or job.method in known[name].variants
    }
    return {**fitting, **job.options}


def scheme_name(job: jobs.Job) -> str:
    """attar's name of a job's scheme."""
    if job.scheme != "INT":
        return job.scheme
    return f"W{job.bits}A16{'' if job.symmetric else '_ASYM'}"


def activations(folder: Path) -> dict[str, Any]:
    """How the inputs of a packed checkpoint's Linears are rounded, as its config says."""
    from attar.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    groups = (checkpoint.config.get("quantization_config") or {}).get("config_groups", {})
    result: dict[str, Any] = {}
    for group in groups.values():
        inputs = group.get("input_activations")
        if not inputs:
            continue
        for tensor in checkpoint.tensors:
            name, _, leaf = tensor.rpartition(".")
            if leaf != "weight_scale" or not applies(name, group["targets"]):
                continue
            result[name] = {
                "type": inputs["type"],
                "bits": inputs["num_bits"],
                "symmetric": inputs["symmetric"],
                "strategy": inputs["strategy"],
                "dynamic": bool(inputs["dynamic"]),
            }
            if not inputs["dynamic"]:
                zero = f"{name}.input_zero_point"
                result[name]["scale"] = float(checkpoint.load(f"{name}.input_scale"))
                result[name]["zero"] = float(checkpoint.load(zero)) if zero in checkpoint.tensors else 0.0
    return result


def applies(name: str, targets: list[str]) -> bool:
    """Whether a group's targets mean a module: ``Linear``, its name, or a ``re:`` pattern at its start."""
    import re

    return any(
        target in ("Linear", name) or (target.startswith("re:") and re.match(target[3:], name))
        for target in targets
    )


def main() -> None:
    """Run one job."""
    job = jobs.read()
    import torch

    import attar
    from attar.data.packing import calibration_batches
    from attar.data.sources import COMPRESSION
    from attar.models.loading.load import load_tokenizer

    rows = jobs.load_tokens(job)
    settings = settings_of(job, *rows.shape)
    ours = calibration_batches(
        load_tokenizer(job.model),
        job.data,
        samples=rows.shape[0],
        sequence_length=rows.shape[1],
        batch_size=job.batch_size,
        seed=job.seed,
        split=COMPRESSION,
    )
    if not torch.equal(torch.cat(ours), rows):
        raise SystemExit(
            "attar would calibrate on other tokens than the file's: seed, data or tokenizer differ"
        )
    packed = Path(f"{job.out}-packed")
    with jobs.Watch(job) as watch:
        attar.quantize(job.model, packed, force=True, **settings)
    attar.export(packed, job.out, format="dense", force=True)
    if how := activations(packed):
        (Path(job.out) / jobs.ACTIVATIONS).write_text(json.dumps(how, indent=1) + "\n")
    if not job.save:
        shutil.rmtree(packed)
    jobs.finish(job, watch, {"attar": attar.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
