"""Quantize with auto-round, inside its environment. See job.py for what comes in and what goes out.

Methods: autoround (signed gradient descent on rounding and clip, ``iterations`` a block), autoround-ext (with
its ``enable_alg_ext``), rtn (its own, with the scale search that it does by default).
"""

from __future__ import annotations

import os
import tempfile

import job as jobs

METHODS = ("autoround", "autoround-ext", "rtn")
TYPES = {"INT": "int", "NVFP4A16": "nv_fp"}  # scheme: its name of the number format


def main() -> None:
    """Run one job."""
    job = jobs.read()
    if job.method not in METHODS or job.scheme not in TYPES:
        kinds = f"{', '.join(METHODS)} in {' and '.join(TYPES)}"
        raise SystemExit(f"auto-round has no {job.method!r} in {job.scheme} here, only {kinds}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # it writes into folders of its own choice
        import auto_round
        import torch
        import transformers

        rows = jobs.load_tokens(job)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            job.model, dtype=getattr(torch, job.dtype, "auto")
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
        data = [
            {"input_ids": part, "attention_mask": torch.ones_like(part)}
            for part in rows.split(job.batch_size)
        ]
        with jobs.Watch(job) as watch:
            tool = auto_round.AutoRound(
                model,
                tokenizer,
                scheme={
                    "bits": job.bits,
                    "group_size": job.group_size or -1,
                    "sym": job.symmetric,
                    "data_type": TYPES[job.scheme],
                },
                dataset=data,
                nsamples=len(rows),
                seqlen=rows.shape[1],
                batch_size=job.batch_size,
                iters=0 if job.method == "rtn" else job.iterations,
                enable_alg_ext=job.method == "autoround-ext",
                seed=job.seed,
                device_map="cpu",
                low_cpu_mem_usage=False,
            )
            quantized, _ = tool.quantize()
        state = dict(quantized.state_dict())
        if job.save:
            tool.save_quantized(f"{job.out}-packed", format="auto_round")
            watch.stop()
        jobs.write_dense(job, state)
    jobs.finish(job, watch, {"auto-round": auto_round.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
