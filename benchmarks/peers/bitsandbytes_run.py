"""Quantize to NF4 with bitsandbytes, inside its environment. See job.py for what comes in and what goes out.

Methods: rtn; group_size is its block size. ``double`` also quantizes the scales.
"""

from __future__ import annotations

import job as jobs

METHODS = ("rtn", "double")


def main() -> None:
    """Run one job."""
    job = jobs.read()
    if job.method not in METHODS or job.scheme != "NF4":
        raise SystemExit(
            f"bitsandbytes has no {job.method!r} in {job.scheme} here, only {', '.join(METHODS)} in NF4"
        )
    import bitsandbytes
    import torch
    import transformers
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.dtype, "auto")
    )
    linears, packed, state = jobs.block_linears(model), {}, dict(model.state_dict())
    with jobs.Watch(job) as watch:
        for name, linear in linears.items():
            packed[name] = quantize_4bit(
                linear.weight.data,
                blocksize=job.group_size,
                quant_type="nf4",
                compress_statistics=job.method == "double",
            )
    for name, (codes, how) in packed.items():
        state[f"{name}.weight"] = dequantize_4bit(codes, how).reshape(linears[name].weight.shape)
    jobs.write_dense(job, state)
    jobs.finish(job, watch, {"bitsandbytes": bitsandbytes.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
