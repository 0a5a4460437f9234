"""INT8 files against bitsandbytes and transformers in an environment of their own.

The environment is ``$ATTAR_PEERS/bitsandbytes`` (benchmarks/peers/environments.py builds it).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.formats import bitsandbytes as ours_format
from attar.formats.coded import Coded
from attar.formats.readers import reader
from attar.models.loading.load import load_model
from attar.quantization.grids import IntGrid
from attar.quantization.methods.rtn import rtn
from tests import tiny_models
from tests.quantization.packing import save

PYTHON = Path(os.environ.get("ATTAR_PEERS", "/nonexistent")) / "bitsandbytes" / "bin" / "python"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason="no $ATTAR_PEERS/bitsandbytes"),
]
if sys.platform != "linux":
    pytest.skip("bitsandbytes' CPU build is tested on Linux", allow_module_level=True)

LOAD = """
import sys, torch, bitsandbytes as bnb
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
folder, out = sys.argv[1:]
rows = torch.load(out + ".rows")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
made = {}
layers = {name: m for name, m in model.named_modules() if isinstance(m, bnb.nn.Linear8bitLt)}
for name, layer in layers.items():
    layer.register_forward_hook(
        lambda _, x, y, name=name: made.update({"in." + name: x[0].clone(), "out." + name: y.clone()})
    )
with torch.no_grad():
    made["logits"] = model(input_ids=rows).logits
    for name, layer in layers.items():
        made[name] = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.state.SCB)
    made["dense_logits"] = model.dequantize()(input_ids=rows).logits
save_file({name: value.contiguous() for name, value in made.items()}, out)
"""

QUANTIZE = """
import sys, torch, bitsandbytes as bnb
from safetensors.torch import load_file, save_file
source, out = sys.argv[1:]
layer = bnb.nn.Linear8bitLt(96, 40, bias=False, has_fp16_weights=False)
layer.load_state_dict({"weight": load_file(source)["weight"]})
save_file(dict(layer.to("cpu").state_dict()), out)
"""


def run(script, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def export(folder, family):
    """A float32 checkpoint whose Linears are INT8 but for the head."""
    checkpoint = open_checkpoint(save(folder, family, dtype=torch.float32))
    turned, tensors = family == "gpt2", {name: checkpoint.load(name) for name in checkpoint.tensors}
    for name in [name for name in tensors if name.endswith("weight") and ("proj" in name or "c_" in name)]:
        weight = tensors.pop(name)
        quantized = rtn(weight.T if turned else weight, IntGrid(8, 0, storage=torch.float32))
        result = ours_format.encode_int8(Coded(quantized.codes, quantized.parameters.scale))
        tensors |= {f"{name.removesuffix('weight')}{leaf}": value for leaf, value in result.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "quantization_config": ours_format.int8_config(["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def llm_int8(x, weight, bias):
    """LLM.int8() with decoded weights (N, K): inputs rounded by token, columns of large ones as they are."""
    x = x.reshape(-1, x.shape[-1])
    half = x.half()
    outliers = half.abs() >= ours_format.THRESHOLD
    columns = outliers.any(0)
    kept = half.masked_fill(outliers, 0)
    peak = kept.abs().amax(1, keepdim=True).float()
    codes = torch.round(kept * (127.0 / peak))
    codes[:, columns] = 0
    result = (codes * peak / 127.0) @ weight.T + x[:, columns] @ weight[:, columns].T
    return result if bias is None else result + bias


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_transformers_loads_it_and_its_logits_are_those_of_our_weights(family, tmp_path):
    checkpoint = export(tmp_path / "int8", family)
    ours, out = load_model(checkpoint), tmp_path / "theirs.safetensors"
    rows = tiny_models.tokens(ours)
    torch.save(rows, f"{out}.rows")
    run(LOAD, checkpoint.path, out)
    theirs, wanted = load_file(out), tiny_models.logits(ours, rows)
    assert (theirs["dense_logits"] - wanted).abs().max() < 1e-4
    assert (theirs["logits"] - wanted).norm() < 0.05 * wanted.norm()  # inputs are rounded to int8
    coded = [name.removesuffix(".weight") for name in checkpoint.tensors if reader(checkpoint).codes(name)]
    assert sorted(coded) == sorted(name.removeprefix("in.") for name in theirs if name.startswith("in."))
    assert len(coded) > 10
    for name in coded:
        layer = ours.get_submodule(name)
        weight = layer.weight.T if family == "gpt2" else layer.weight
        assert torch.allclose(theirs[name], weight, rtol=1e-6, atol=0), name
        got = theirs[f"out.{name}"].flatten(0, -2)
        emulated = llm_int8(theirs[f"in.{name}"], weight, layer.bias).detach()
        assert (got - emulated).norm() < 1e-4 * emulated.norm(), name


def test_we_read_what_bitsandbytes_writes(tmp_path):
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight}, tmp_path / "in.safetensors")
    run(QUANTIZE, tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    result = load_file(tmp_path / "out.safetensors")
    assert result.keys() == ours_format.layout_int8((40, 96)).keys()
    ours = ours_format.encode_int8(ours_format.unpack_int8(result))
    for name, value in result.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert torch.allclose(ours[name].float(), value.float(), rtol=1e-6, atol=0), name
    error = (ours_format.decode_int8(result, torch.float32) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 220).all()
