"""The bits that auto-round's AutoScheme gives each layer, inside its environment.

    python autoround_mix_run.py '{"model", "tokens", "bits": average, "modules": [names]}'

Its options are the bits that attar's plans have, in groups of ``GROUP`` inputs; q, k and v, and gate and up,
share theirs, as in attar's plans. Scales do not count in the average. The last line on standard output is the
bits by module, in JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

BITS = (2, 3, 4, 8)  # what auto-round has packings for
GROUP = 128
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def main() -> None:
    """Search, and print."""
    job = json.loads(sys.argv[1])
    answer = os.dup(1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # it writes into folders of its own choice
        import auto_round
        import transformers
        from auto_round.auto_scheme.gen_auto_scheme import AutoScheme
        from auto_round.schemes import QuantizationScheme
        from safetensors.torch import load_file

        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
        rows = load_file(job["tokens"])["tokens"]
        text = Path(folder) / "text.json"
        text.write_text(json.dumps([{"text": tokenizer.decode(row)} for row in rows]))
        schemes = [
            QuantizationScheme(bits=bits, group_size=GROUP, sym=True, data_type="int") for bits in BITS
        ]
        tool = auto_round.AutoRound(
            model,
            tokenizer,
            scheme=AutoScheme(
                avg_bits=job["bits"],
                options=schemes,
                shared_layers=SHARED,
                ignore_scale_zp_bits=True,
                nsamples=len(rows),
                seqlen=rows.shape[1] // 2,  # the text of a row may have fewer tokens once it is read again
                dataset=str(text),
                enable_torch_compile=False,
            ),
            iters=0,
            dataset=str(text),
            nsamples=len(rows),
            seqlen=rows.shape[1] // 2,
            device_map="cpu",
            enable_torch_compile=False,
        )
        tool.quantize()
        config = tool.layer_config
    chosen = {module: int(config[module]["bits"]) for module in job["modules"]}
    os.write(answer, (json.dumps(chosen) + "\n").encode())


if __name__ == "__main__":
    main()
