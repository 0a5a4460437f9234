"""What is measured on calibration or held-out text, in several processes."""

import json
import os
from pathlib import Path

import torch

import attar
from attar.checkpoint.processes import rank
from tests import tiny_mixtures, tiny_models

DATA = str(Path(torch.__file__).parent / "amp")
SIZES = {"samples": 6, "batch_size": 2, "sequence_length": 32, "precision": "fp32", "data": DATA}
PRUNE = {
    "wanda": {"method": "wanda", "sparsity": "2:4", "reconstruct": "none"},
    "owl": {"method": "wanda", "sparsity": "0.5", "allocation": "owl", "reconstruct": "linear"},
    "sparsegpt": {"method": "sparsegpt", "sparsity": "0.5", "reconstruct": "none"},
    "neurons": {"method": "neurons", "ratio": 0.25, "reconstruct": "linear"},
    "layers": {"method": "layers", "ratio": 0.34},
    "block": {"method": "wanda", "sparsity": "0.5", "reconstruct": "block", "reconstruct_epochs": 1},
}
QUANTIZE = {
    "fp8": {"method": "rtn", "scheme": "FP8", "kv_cache": "fp8"},
    "bits": {"method": "rtn", "bits": 4.4, "group_size": 32},
    "bits_gptq": {"method": "gptq", "bits": 4.4, "group_size": 32},
    "smoothquant": {"method": "smoothquant", "scheme": "W8A8"},
    "autoround": {"method": "autoround", "scheme": "W4A16", "group_size": 32, "iterations": 4},
    "yaqa": {"method": "yaqa", "scheme": "W4A16", "group_size": 32},
}
EXPORT = {
    "importance": {"format": "gguf", "type": "Q4_0"},
    "rounded": {"format": "gguf", "type": "Q4_0", "rounding": "gptq"},
    "exl2": {"format": "exl2", "bits": 4.6},
}
GPTQ = {"method": "gptq", "scheme": "W4A16", "group_size": 32, "scales": "absmax", "refine": 0}
MIXTURE = {
    "experts": (attar.prune, {"method": "experts", "ratio": 0.25}),
    "mixture": (attar.quantize, {**GPTQ, "moe_floor": 4.0, "check_tokens": 0}),
}
QUESTIONS = [{"q": f"{n} and", "choices": ["a dog", "b", "a"], "label": n % 3} for n in range(7)]


def models(folder):
    """A model whose Linears have 128 inputs, and a mixture."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3}
    dense = tiny_models.save(tiny_models.build("llama3", **sizes), Path(folder) / "dense")
    return str(dense), str(tiny_models.save(tiny_mixtures.build("olmoe"), Path(folder) / "mixture"))


def sweep_all(dense, mixture, out):
    """Every case in this process; the outputs are folders of ``out``, and what an evaluation says."""
    out = Path(out)
    os.environ["ATTAR_CACHE"] = str(out / "cache")
    for name, options in PRUNE.items():
        attar.prune(dense, out / name, **SIZES, **options)
    for name, options in QUANTIZE.items():
        attar.quantize(dense, out / name, check_tokens=0, **SIZES, **options)
    for name, options in EXPORT.items():
        attar.export(dense, out / name, **SIZES, **options)
    for name, (verb, options) in MIXTURE.items():
        verb(mixture, out / name, **SIZES, **options)
    questions = out / "questions.jsonl"
    if not rank():
        questions.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    text = {"data": DATA, "tokens": 320, "sequence_length": 32, "batch_size": 2, "runner": "transformers"}
    measured = attar.evaluate(
        out / "fp8", reference=dense, speed=False, sample="", tasks=(str(questions),), **text
    )
    if not rank():
        (out / "measured.json").write_text(json.dumps(measured.to_dict()))
