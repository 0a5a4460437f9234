"""Quantize with GPTQModel, inside its environment. See job.py for what comes in and what goes out.

Methods: gptq; act_order none is plain GPTQ, static its group-aware reordering (its default), group its
``desc_act``. gptaq adds asymmetric calibration. rtn is its weight-only path.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import job as jobs

METHODS = ("rtn", "gptq", "gptaq", "awq")


def configured(job: jobs.Job):
    """The tool's configuration of a job."""
    from gptqmodel.quantization.config import AWQConfig, GPTAQConfig, GPTQConfig, RTNConfig

    common = {
        "bits": job.bits,
        "group_size": job.group_size or -1,
        "sym": job.symmetric,
        "device": "cpu",
    }
    if job.method == "rtn":
        return RTNConfig(**common)
    if job.method == "awq":
        return AWQConfig(**common)
    return GPTQConfig(
        **common,
        desc_act=job.act_order == "group",
        act_group_aware=job.act_order == "static",
        gptaq=GPTAQConfig() if job.method == "gptaq" else None,
    )


def kernel(job: jobs.Job) -> str:
    """Which of its modules hold the codes: those that a CPU can run (its default for AWQ asks for CUDA)."""
    return "awq_torch" if job.method == "awq" else "gptq_torch"


def decoded(job: jobs.Job, folder: Path) -> dict:
    """Every weight of a saved model, as the tool's own loader decodes it."""
    from gptqmodel import BACKEND, GPTQModel

    loaded = GPTQModel.load(str(folder), backend=BACKEND(kernel(job)), device="cpu").model
    state = dict(loaded.state_dict())
    for name, module in loaded.named_modules():
        if hasattr(module, "dequantize_weight"):
            state[f"{name}.weight"] = module.dequantize_weight().T
    return state


def main() -> None:
    """Run one job."""
    job = jobs.read()
    if job.method not in METHODS or job.scheme != "INT":
        raise SystemExit(
            f"GPTQModel has no {job.method!r} in {job.scheme} here, only {', '.join(METHODS)} in INT"
        )
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, os.cpu_count() or 1)))
    import gptqmodel
    import torch
    import transformers

    transformers.set_seed(job.seed)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in jobs.load_tokens(job)]
    model = gptqmodel.GPTQModel.load(job.model, configured(job))
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(f"{job.out}-packed") if job.save else Path(folder)
        with jobs.Watch(job) as watch:
            model.quantize(
                rows,
                batch_size=job.batch_size,
                calibration_data_min_length=1,
                backend=gptqmodel.BACKEND(kernel(job)),
            )
        model.save(str(packed))
        if job.save:
            watch.stop()
        jobs.write_dense(job, decoded(job, packed))
    jobs.finish(job, watch, {"gptqmodel": gptqmodel.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
