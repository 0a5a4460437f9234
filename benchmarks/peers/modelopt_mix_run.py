"""The bits that ModelOpt's auto_quantize gives each layer, inside its environment.

    python modelopt_mix_run.py '{"model", "tokens", "bits": average, "modules": [names]}'

Its default search (by gradients, then a linear program) over the bits that attar's plans have, in groups of
``GROUP`` inputs; q, k and v, and gate and up, share theirs by its own rules. Scales do not count in the
average. The last line on standard output is the bits by module, in JSON.
"""

from __future__ import annotations

import json
import os
import sys

BITS = (2, 3, 4, 5, 6, 8)
GROUP = 128
BATCH = 4  # rows


def main() -> None:
    """Search, and print."""
    job = json.loads(sys.argv[1])
    answer = os.dup(1)
    os.dup2(2, 1)
    import modelopt.torch.quantization as mtq
    import transformers
    from safetensors.torch import load_file

    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    rows = load_file(job["tokens"])["tokens"]
    batches = [{"input_ids": batch, "labels": batch} for batch in rows.split(BATCH)]
    formats = [
        {
            "quant_cfg": [
                {"quantizer_name": "*", "enable": False},
                {
                    "quantizer_name": "*weight_quantizer",
                    "cfg": {"num_bits": bits, "block_sizes": {-1: GROUP}},
                    "enable": True,
                },
            ],
            "algorithm": "max",
            "effective_bits": bits,
        }
        for bits in BITS
    ]
    model, _ = mtq.auto_quantize(
        model,
        constraints={
            "effective_bits": job["bits"],
            "cost": {"excluded_module_name_patterns": ["*lm_head*"]},
        },
        module_search_spaces=[
            {
                "module_name_patterns": [f"*{module}" for module in job["modules"]],
                "quantization_formats": formats,
                "allow_no_quant": False,
            }
        ],
        disabled_layers="*lm_head*",
        data_loader=batches,
        forward_step=lambda model, batch: model(**batch),
        loss_func=lambda output, batch: output.loss,
        num_calib_steps=len(batches),
        num_score_steps=len(batches),
    )
    chosen = {name: int(model.get_submodule(name).weight_quantizer.num_bits) for name in job["modules"]}
    os.write(answer, (json.dumps(chosen) + "\n").encode())


if __name__ == "__main__":
    main()
