"""Prune with llm-compressor, inside its environment. See job.py for what comes in and what goes out.

Methods: wanda, sparsegpt. ``out`` has the weights in the type in which the model stores them.
"""

from __future__ import annotations

import job as jobs

METHODS = ("wanda", "sparsegpt")


def modifier(job: jobs.Job):
    """The modifier of a job: every Linear but the head, in a fraction or a pattern."""
    from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
    from llmcompressor.modifiers.pruning.wanda import WandaPruningModifier

    kept, _, of = job.sparsity.partition(":")
    if of:
        asked = {"sparsity": 1.0 - int(kept) / int(of), "mask_structure": job.sparsity}
    else:
        asked = {"sparsity": float(job.sparsity)}
    kind = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}[job.method]
    return kind(targets=["Linear"], ignore=["re:.*lm_head"], **asked)


def main() -> None:
    """Run one job."""
    job = jobs.read()
    if job.method not in METHODS:
        raise SystemExit(f"llm-compressor has no {job.method!r} here, only {', '.join(METHODS)}")
    import datasets
    import llmcompressor
    import torch
    import transformers

    transformers.set_seed(job.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.dtype, "auto")
    )
    stored = transformers.AutoConfig.from_pretrained(job.model).dtype
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
    rows = jobs.load_tokens(job)
    data = datasets.Dataset.from_dict(
        {"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}
    )
    with jobs.Watch(job) as watch:
        llmcompressor.oneshot(
            model=model,
            tokenizer=tokenizer,
            dataset=data,
            recipe=[modifier(job)],
            batch_size=job.batch_size,
            num_calibration_samples=len(rows),
            max_seq_length=rows.shape[1],
            shuffle_calibration_samples=False,
        )
    state = {name: tensor.to(stored) for name, tensor in model.state_dict().items()}
    if job.save:
        model.save_pretrained(f"{job.out}-packed")
        watch.stop()
    jobs.write_dense(job, state)
    jobs.finish(job, watch, {"llmcompressor": llmcompressor.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
