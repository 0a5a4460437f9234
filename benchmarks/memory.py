"""Peak memory of the stream and sweep walks, each in a process of its own.

    python benchmarks/memory.py            prints a table; needs 5 GB of disk for a minute

stream: a W8A16 round-to-nearest pass over a 2 GB checkpoint. sweep: Hessians of every Linear for Llamas of 3
and of 12 equal blocks. Peaks are resident set sizes (VmHWM, which starts afresh in each process) above those
of an interpreter that has made the same imports and run one matrix product.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from safetensors.torch import save_file

MB = 1e6

PEAK = """
    import re
    from pathlib import Path
    def peak():
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""

STREAM = """
    import sys, torch
    bare = peak()
    from attar.checkpoint import open_checkpoint
    from attar.checkpoint.shards import Slot
    from attar.quantization.grids import IntGrid
    from attar.quantization.rtn import rtn
    from attar.walks.stream import stream
    out = Path(sys.argv[2]); out.mkdir()
    stream(open_checkpoint(sys.argv[1]), lambda info: [Slot(info.name, "I8", info.shape)],
           lambda name, load: {name: rtn(load(), IntGrid(8, 128)).codes}, out)
    print(peak() - bare)
"""

SWEEP = """
    import sys, torch
    from transformers import LlamaForCausalLM
    import attar.walks.sweep, attar.models.load, attar.models.anatomy
    from attar.checkpoint import open_checkpoint
    from attar.quantization.hessian import Hessian
    from attar.walks.sweep import Solution, sweep
    torch.randn(512, 512) @ torch.randn(512, 512)
    class Solver:
        original = False
        def accumulator(self, names, inputs): return Hessian(inputs)
        def solve(self, weights, seen):
            return {name: Solution(w, {"codes": w.to(torch.int8)}) for name, w in weights.items()}
        def restore(self, name, tensors): raise AssertionError
    tokens = [torch.randint(0, 512, (4, 128)) for _ in range(4)]
    checkpoint = open_checkpoint(sys.argv[1])
    before = peak()
    sweep(checkpoint, tokens, Solver(), work=Path(sys.argv[2]))
    print(peak() - before)
"""

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
}


def measure(script: str, *arguments: Path) -> float:
    """Run a script in a fresh interpreter; the bytes it prints."""
    command = [sys.executable, "-c", textwrap.dedent(PEAK) + textwrap.dedent(script), *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def stream_peak(folder: Path, tensors: int = 64, shards: int = 4) -> tuple[float, int]:
    """(peak bytes above the bare interpreter, bytes of the checkpoint) of a pass over bf16 matrices of 32 MiB
    each."""
    source = folder / "stream"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    block = (torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    index: dict[str, str] = {}
    for shard in range(shards):
        part = {f"layer.{i:02d}.weight": block + i * 1e-3 for i in range(shard, tensors, shards)}
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, source / file)
        index |= dict.fromkeys(part, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return measure(STREAM, source, folder / "stream-out"), tensors * block.nbytes


def sweep_peak(folder: Path, depth: int) -> float:
    """Peak bytes above the imports of a sweep over a Llama of ``depth`` blocks of 15 M parameters."""
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=depth, **SHAPE)
    transformers.utils.logging.disable_progress_bar()
    source = folder / f"sweep-{depth}"
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    return measure(SWEEP, source, folder / f"work-{depth}")


def sweep_bound() -> float:
    """1.5 x (block in float32 and once more in bfloat16 + activations, one batch inside the MLP included +
    what waiting passes hold + the largest Hessian)."""
    block = (4 + 2) * (1024 * 1024 * 2.5 + 3 * 1024 * 4096)
    activations = 4 * 4 * 128 * (4 * 1024 + 4 * 4096)
    waiting = 4 * 4 * 4 * 128 * (5 * 1024 + 4096)
    accumulators = 4 * 4096 * 4096
    return 1.5 * (block + activations + waiting + accumulators)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        used, size = stream_peak(folder)
        print(f"{'walk':<28}{'peak MB':>10}{'bound MB':>10}")
        print(f"{f'stream over {size / 1e9:.1f} GB':<28}{used / MB:>10.0f}{700:>10}")
        for depth in (3, 12):
            used = sweep_peak(folder, depth)
            print(f"{f'sweep, {depth} blocks of 15 M':<28}{used / MB:>10.0f}{sweep_bound() / MB:>10.0f}")


if __name__ == "__main__":
    main()
