"""Prune with attar, in a process of its own. See job.py for what comes in and what goes out.

The job's ``options`` become settings of ``attar prune``. attar reads its calibration tokens itself: the
runner checks that they are those of the token file.
"""

from __future__ import annotations

from typing import Any

import job as jobs


def settings_of(job: jobs.Job, rows: int, length: int) -> dict[str, Any]:
    """Settings of ``attar.prune`` for a job whose token file holds ``rows`` rows of ``length`` tokens.

    Nothing is given back after a pruning unless the job says so: no other tool does it.
    """
    given: dict[str, Any] = {
        "method": job.method,
        "reconstruct": "none",
        "precision": "fp32" if job.dtype == "float32" else "auto",
        "samples": rows,
        "sequence_length": length,
        "batch_size": job.batch_size,
        "data": job.data,
        "seed": job.seed,
        "device": "cpu",
    }
    if job.sparsity:
        given["sparsity"] = job.sparsity
    return {**given, **job.options}


def main() -> None:
    """Run one job."""
    job = jobs.read()
    import torch

    import attar
    from attar.data.packing import calibration_batches
    from attar.models.loading.load import load_tokenizer

    rows = jobs.load_tokens(job)
    ours = calibration_batches(
        load_tokenizer(job.model),
        job.data,
        samples=rows.shape[0],
        sequence_length=rows.shape[1],
        batch_size=job.batch_size,
        seed=job.seed,
    )
    if not torch.equal(torch.cat(ours), rows):
        raise SystemExit(
            "attar would calibrate on other tokens than the file's: seed, data or tokenizer differ"
        )
    with jobs.Watch(job) as watch:
        attar.prune(job.model, job.out, force=True, **settings_of(job, *rows.shape))
    jobs.finish(job, watch, {"attar": attar.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
