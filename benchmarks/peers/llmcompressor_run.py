"""Quantize with llm-compressor, inside its environment. See job.py for what comes in and what goes out.

Methods: rtn (QuantizationModifier), gptq, awq, smoothquant (then RTN), smoothquant-gptq.
"""

from __future__ import annotations

import job as jobs

ROUTERS = ("re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$")
METHODS = ("rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq")


def recipe(job: jobs.Job) -> list:
    """The modifiers of a job."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    common = {"ignore": ["lm_head", *ROUTERS], **scheme(job)}
    before = []
    if job.method == "awq":
        before = [AWQModifier()]
    elif job.method.startswith("smoothquant"):
        before = [SmoothQuantModifier(smoothing_strength=0.8)]
    if job.method.endswith("gptq"):
        order = None if job.act_order == "none" else job.act_order
        return [*before, GPTQModifier(actorder=order, **common)]
    return [*before, QuantizationModifier(**common)]


def scheme(job: jobs.Job) -> dict:
    """A preset by its name, or whole-number weights in groups."""
    if job.scheme != "INT":
        return {"targets": ["Linear"], "scheme": job.scheme}
    weights = {
        "num_bits": job.bits,
        "type": "int",
        "symmetric": job.symmetric,
        "strategy": "group" if job.group_size else "channel",
        "group_size": job.group_size or None,
    }
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def decoded(model) -> tuple[dict, dict]:
    """(every tensor with the weights as their codes decode, how each Linear's input is quantized)."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    state, activations = dict(model.state_dict()), {}
    for name, module in model.named_modules():
        if getattr(module, "weight_scale", None) is None:
            continue
        args = module.quantization_scheme.weights
        zero = getattr(module, "weight_zero_point", None)
        above = getattr(module, "weight_global_scale", None)
        state[f"{name}.weight"] = fake_quantize(
            module.weight.data, module.weight_scale, zero, args, global_scale=above
        )
        inputs = module.quantization_scheme.input_activations
        if inputs is not None:
            activations[name] = described(module, inputs)
    return state, activations


def described(module, inputs) -> dict:
    """How the input of a Linear is quantized, in plain JSON."""
    given = {
        "type": inputs.type.value if hasattr(inputs.type, "value") else inputs.type,
        "bits": inputs.num_bits,
        "symmetric": inputs.symmetric,
        "strategy": inputs.strategy.value if hasattr(inputs.strategy, "value") else inputs.strategy,
        "dynamic": bool(inputs.dynamic),
    }
    if not inputs.dynamic:
        given["scale"] = float(module.input_scale)
        zero = getattr(module, "input_zero_point", None)
        given["zero"] = 0.0 if zero is None else float(zero)
    return given


def main() -> None:
    """Run one job."""
    job = jobs.read()
    if job.method not in METHODS:
        raise SystemExit(f"llm-compressor has no {job.method!r} here, only {', '.join(METHODS)}")
    import datasets
    import llmcompressor
    import torch
    import transformers

    torch.Tensor.pin_memory = lambda self, *_, **__: self  # AWQ pins batches, which fails without a GPU
    transformers.set_seed(job.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, job.dtype, "auto")
    )
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
            recipe=recipe(job),
            batch_size=job.batch_size,
            num_calibration_samples=len(rows),
            max_seq_length=rows.shape[1],
            shuffle_calibration_samples=False,
        )
    state, activations = decoded(model)
    if job.save:
        model.save_pretrained(f"{job.out}-packed", save_compressed=True)
        watch.stop()
    jobs.write_dense(job, state, activations)
    jobs.finish(job, watch, {"llmcompressor": llmcompressor.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
