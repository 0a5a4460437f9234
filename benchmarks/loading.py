"""What loading a quantized checkpoint takes: processor seconds and the most memory, for each runner.

    python benchmarks/loading.py --shape 1.1b

Weights are random 4-bit codes in groups of 128 (W4A16, compressed-tensors), embeddings and head bfloat16.
Each runner loads in a process of its own, with a pool of 512 tokens; ``before`` is what Python and torch take
without a model, and the most that the process ever held is the peak. ``dense`` is modules with float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {  # hidden, intermediate, layers, heads, kv_heads, vocabulary
    "tiny": (256, 512, 2, 8, 4, 2048),
    "88m": (768, 2048, 12, 12, 4, 8192),
    "1.1b": (2048, 5632, 22, 32, 4, 32000),
}
MIB = 1 << 20


def make(folder: Path, shape: str) -> None:
    """A checkpoint of random codes, a shard for each layer."""
    import torch
    from safetensors.torch import save_file

    from attar.formats.coded import Coded
    from attar.formats.compressed_tensors import ConfigGroup, quantization_config
    from attar.formats.layouts import encode
    from attar.formats.rules import PACK, WeightRule

    hidden, wide, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    rule, own = WeightRule("int", 4, "group", 128), hidden // heads * kv_heads

    def linear(rows: int, columns: int) -> dict[str, torch.Tensor]:
        codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
        scale = torch.rand(rows, columns // 128) * 0.01 + 0.01
        return encode(Coded(codes, scale), rule, PACK, torch.bfloat16)

    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (own, hidden)}
    sizes |= {"self_attn.v_proj": (own, hidden), "self_attn.o_proj": (hidden, hidden)}
    sizes |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    index: dict[str, str] = {}

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors = {
            f"{at}{name}.{leaf}": value
            for name, size in sizes.items()
            for leaf, value in linear(*size).items()
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"{at}{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
        write(f"model-{layer:05}.safetensors", tensors)
    ends = {
        name: (torch.randn(vocabulary, hidden) * 0.02).bfloat16()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    write("model-ends.safetensors", {**ends, "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "hidden_act": "silu",
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "quantization_config": quantization_config([ConfigGroup(("Linear",), rule)], ignore=["lm_head"]),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def peak() -> float:
    """Peak memory of this process, MiB (getrusage may report that of the parent)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError("no VmHWM: this needs Linux")


def measure(folder: str, runner: str, dtype: str) -> None:
    """Load in this process; prints a JSON line."""
    from attar.runtime.loading import load

    before, start = peak(), time.process_time()
    loaded = load(folder, runner=runner, dtype=dtype, kv_tokens=512)
    seconds = time.process_time() - start
    measured = {"runner": type(loaded.runner).__name__, "before": before, "peak": peak(), "seconds": seconds}
    print(json.dumps(measured))


def main() -> None:
    """Make the checkpoint, load it by every runner, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--runners", nargs="+", default=["compiled", "modules", "dense"])
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "RUNNER", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.shape)
        size = sum(file.stat().st_size for file in Path(folder).iterdir()) / MIB
        head = f"| {args.shape}, 4-bit, {size:.0f} MiB on disk "
        print(f"{head}| processor seconds | before, MiB | peak, MiB | peak - before |")
        print("|---|---|---|---|---|")
        for name in args.runners:
            asked = ("modules", "float32") if name == "dense" else (name, "auto")
            command = [sys.executable, __file__, "--measure", folder, *asked]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            measured = json.loads(done.stdout.splitlines()[-1])
            numbers = (measured["before"], measured["peak"], measured["peak"] - measured["before"])
            cells = " | ".join(f"{number:.0f}" for number in numbers)
            print(f"| {name} | {measured['seconds']:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
