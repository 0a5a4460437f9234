"""Runs in the environment of GPTQModel: EXL3 weights as its torch kernel decodes them.

    python decode_exl3.py golden FILE.json      hashes of CASES: tests/formats/exl3_golden.json
    python decode_exl3.py decode FILE           the weights of a safetensors file, in FILE.decoded

GPTQModel adds the two halves of a codebook's value in float32, ExLlamaV3's kernels in float16: what is hashed
is the trellis' values rounded to float16, which is the same, as each sum is exact in float32.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

CASES = [(bits, codebook) for bits in range(1, 9) for codebook in ("3inst", "mcg", "mul1")]
MULTIPLIERS = {"mcg": 0xCBAC1FED - (1 << 32), "mul1": 0x83DCD12D - (1 << 32)}
ROWS, COLUMNS = 256, 128


def numbers(*shape, seed):
    """int16 that look random, the same everywhere."""
    mixed = torch.arange(1, 1 + torch.Size(shape).numel()) * 2654435761 + seed * 40503
    return ((mixed >> 9) % 65521 - 32768).to(torch.int16).reshape(shape)


def tensors(bits, codebook):
    """A Linear of 256 inputs and 128 outputs."""
    made = {"trellis": numbers(ROWS // 16, COLUMNS // 16, int(16 * bits), seed=int(2 * bits))}
    made |= {"suh": (numbers(ROWS, seed=3) / 1e6).half(), "svh": (numbers(COLUMNS, seed=5) / 1e4).half()}
    return made | (
        {codebook: torch.tensor(MULTIPLIERS[codebook], dtype=torch.int32)} if codebook != "3inst" else {}
    )


def digest(tensor):
    """SHA-256 of its bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


def linear(parts):
    """GPTQModel's torch Linear."""
    from gptqmodel.nn_modules.exllamav3_torch import ExllamaV3TorchLinear

    rows, columns = (16 * size for size in parts["trellis"].shape[:2])
    return ExllamaV3TorchLinear.from_tensors(
        in_features=rows, out_features=columns, name="linear", tensors=parts
    )


def rounded(parts):
    """The weight (K, N) float32 from the trellis' values in float16, and these values."""
    module = linear(parts)
    inner = module.get_inner_weight_tensor(torch.float16)
    module._inner_weight_fp32 = inner.float()
    return module.get_weight_tensor(torch.float32), inner


def main(verb, file):
    if verb == "golden":
        made = {f"{codebook} {bits}": digest(rounded(tensors(bits, codebook))[1]) for bits, codebook in CASES}
        Path(file).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        return
    from safetensors.torch import load_file, save_file

    stored = load_file(file)
    bases = [name.removesuffix(".trellis") for name in stored if name.endswith(".trellis")]
    weights = {}
    for base in bases:
        parts = {n.removeprefix(f"{base}."): t for n, t in stored.items() if n.startswith(f"{base}.")}
        weights[f"{base}.weight"] = rounded(parts)[0].T.contiguous()
    save_file(weights, f"{file}.decoded")


if __name__ == "__main__":
    main(*sys.argv[1:])
