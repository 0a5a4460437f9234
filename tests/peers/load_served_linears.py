"""Reads quantized folders of tiny Llamas with the own code of vLLM or SGLang, by serving/http/vllm/reader.py.

    python load_served_linears.py FILES ENGINE FOLDER...

FILES are the engine's Python files, ENGINE is vllm or sglang; prints a list with a report for each folder.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "attar" / "serving" / "http" / "vllm"))
import reader

reader.MODULES["sglang"] = {
    "own": ("sglang.srt.layers.quantization", "sglang.srt.layers.parameter"),
    "linear": "sglang.srt.layers.linear",
    "configs": {
        "compressed-tensors": "compressed_tensors.compressed_tensors:CompressedTensorsConfig",
        "gptq": "gptq.gptq:GPTQMarlinConfig",
        "awq": "awq.awq:AWQMarlinConfig",
        "modelopt": "modelopt_quant:ModelOptFp8Config",
        "modelopt_fp4": "modelopt_quant:ModelOptFp4Config",
    },
    "package": "sglang.srt.layers.quantization",
}
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROJECTIONS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def linears(stored):
    """Outputs and inputs of a Llama's Linears, by name."""
    width, inner = stored["hidden_size"], stored["intermediate_size"]
    kv = width // stored["num_attention_heads"] * stored["num_key_value_heads"]
    outputs = dict(zip(PROJECTIONS, (width, kv, kv, width, inner, inner, width), strict=True))
    return {
        f"model.layers.{number}.{name}": (rows, inner if name == "mlp.down_proj" else width)
        for number in range(stored["num_hidden_layers"])
        for name, rows in outputs.items()
    }


def read(folder, engine):
    """The engine's report on a folder."""
    return reader.read(folder, engine, linears(json.loads((folder / "config.json").read_text())))


if __name__ == "__main__":
    reader.use(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps([read(Path(folder), sys.argv[2]) for folder in sys.argv[3:]]))
