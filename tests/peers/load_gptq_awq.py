"""Runs in the environment of GPTQModel: loads checkpoints as their users do, and writes down what it got.

    python load_gptq_awq.py JOB.json

``load``: [folder, way] pairs. transformers picks the kernel with way ``auto``, and takes GPTQModel's torch
kernel with ``torch``; ``direct`` is GPTQModel without transformers' loader. ``FOLDER/WAY.safetensors`` then
holds the logits and, but for ``auto``, each weight as the kernel decodes it; ``FOLDER/WAY.json`` the kernels,
or the error. ``quantize``: a dense folder and the files to make of it. ``pack``: weights, scales and zero
points for GPTQModel's and AWQ's own packers.
"""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig


def load(folder, way):
    """A checkpoint as a model."""
    fields = json.loads((folder / "config.json").read_text())["quantization_config"]
    awq = fields["quant_method"] == "awq"
    if way == "direct":
        backend = BACKEND("awq_torch" if awq else "gptq_torch")
        return GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=torch.float16).model
    more = {}
    if way == "torch":
        kind, backend = (AwqConfig, "torch_awq") if awq else (GPTQConfig, "gptq_torch")
        more = {"quantization_config": kind(bits=fields["bits"], backend=backend)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, **more)


def weight(module):
    """The weight (N, K) of a quantized Linear, by its own kernel's code, not compiled."""
    if "Awq" in type(module).__name__:
        parts = (module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
        return dequantize_gemm(*parts).T.contiguous()
    return type(module).dequantize_weight(module).T.contiguous()


def run(folder, way, tokens):
    """Load, and write down."""
    model = load(folder, way)
    actual = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    with torch.no_grad():
        kept = {"logits": model(input_ids=tokens).logits.float()}
    if way != "auto":
        kept |= {f"{name}.weight": weight(module) for name, module in actual.items()}
    save_file(kept, folder / f"{way}.safetensors")
    return {"kernels": sorted({type(module).__name__ for module in actual.values()}), "count": len(actual)}


def quantize(model, out, bits, symmetric, order, form):
    """A checkpoint that GPTQModel makes itself."""
    config = QuantizeConfig(
        bits=bits, group_size=32, sym=symmetric, desc_act=order, format=form, offload_to_disk=False
    )
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 300, (64,), generator=g).tolist() for _ in range(4)]
    result = GPTQModel.load(model, config, device="cpu")
    result.quantize(
        [{"input_ids": row, "attention_mask": [1] * 64} for row in rows],
        batch_size=4,
        calibration_data_min_length=1,
        backend=BACKEND.GPTQ_TORCH,
    )
    result.save(out)


def pack(file):
    """What their packers make of weight, scale and zero; the file's name is BITS-NAME."""
    parts = load_file(file)
    bits, dense = int(file.name.split("-")[0]), parts["weight"]
    linear = torch.nn.Linear(dense.shape[1], dense.shape[0], bias=False)
    linear.weight.data = dense
    size = dense.shape[1] // parts["scale"].shape[1]
    shape = {"in_features": dense.shape[1], "out_features": dense.shape[0]}
    result = TorchLinear(bits=bits, group_size=size, sym=False, desc_act=True, **shape)
    result.pack_original(linear, parts["scale"], parts["zero"], parts["g_idx"].long())
    kept = {leaf: getattr(result, leaf) for leaf in ("qweight", "qzeros", "scales", "g_idx")}
    if bits == 4:
        codes, zero = parts["codes"].T.contiguous().int(), parts["zero"].T.contiguous().int()
        kept["awq_qweight"], kept["awq_qzeros"] = pack_awq(codes, zero, 4)
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, f"{file}.out")


def main():
    """Do the job; an error in one part is written down and the others go on."""
    job = json.loads(Path(sys.argv[1]).read_text())
    for out, *message in job["quantize"]:
        quantize(job["model"], out, *message)
    for file in job["pack"]:
        pack(Path(file))
    tokens = torch.tensor(job["tokens"])
    for folder, way in job["load"]:
        try:
            result = run(Path(folder), way, tokens)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        Path(folder, f"{way}.json").write_text(json.dumps(result))


main()
