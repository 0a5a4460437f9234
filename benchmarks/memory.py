"""Peak memory of the stream and sweep walks, of the gate after quantize, and of a layer of experts, each in a
process of its own.

    python benchmarks/memory.py                 prints a table; needs 5 GB of disk for a minute
    python benchmarks/memory.py --parts gate    one part of it
    python benchmarks/memory.py --parts experts --layers 2 --experts 128 --methods gptq qronos

stream: a W8A16 round-to-nearest pass over a 2 GB checkpoint. sweep: Hessians of every Linear for Llamas of 3
and of 12 equal blocks. gate: 2,048 tokens of a model with 262,144 tokens in its vocabulary, compared with a
changed copy; the bound is 1.5 times its head, stored and in float32, with the logits that are kept. experts:
int4 of layers in the shape of Qwen3-30B-A3B (128 experts of 2,048 x 768, random weights), rounded with 8,192
tokens and written (``--methods statistics``: the Hessian of each expert, and nothing solved, which
takes a fraction of the time); the bound is 8 GB, all of the process, its imports too. Peaks of the others are
resident set sizes (VmHWM, which starts afresh in each process) above those of an interpreter that has made
the same imports and run one matrix product.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from safetensors.torch import save_file

from attar.sensitivity.compare import KEPT

MB = 1e6
PARTS = ("stream", "sweep", "gate")
ALL = (*PARTS, "experts")

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
    from attar.checkpoint.shards import TensorSpec
    from attar.quantization.grids import IntGrid
    from attar.quantization.methods.rtn import rtn
    from attar.walks.stream import stream
    out = Path(sys.argv[2]); out.mkdir()
    stream(open_checkpoint(sys.argv[1]), lambda info: [TensorSpec(info.name, "I8", info.shape)],
           lambda name, load: {name: rtn(load(), IntGrid(8, 128)).codes}, out)
    print(peak() - bare)
"""

SWEEP = """
    import sys, torch
    from transformers import LlamaForCausalLM
    import attar.walks.sweep, attar.models.loading.load, attar.models.anatomy.discover
    from attar.checkpoint import open_checkpoint
    from attar.quantization.hessian import Hessian
    from attar.walks.solvers import LinearSolver, Solution
    from attar.walks.sweep import SweepOptions, sweep_linears
    torch.randn(512, 512) @ torch.randn(512, 512)
    class Solver(LinearSolver):
        def accumulator(self, names, inputs): return Hessian(inputs)
        def solve(self, weights, seen):
            return {name: Solution(w, {"codes": w.to(torch.int8)}) for name, w in weights.items()}
        def restore(self, name, tensors): raise AssertionError
    tokens = [torch.randint(0, 512, (4, 128)) for _ in range(4)]
    checkpoint = open_checkpoint(sys.argv[1])
    before = peak()
    sweep_linears(checkpoint, tokens, Solver(), SweepOptions(work=Path(sys.argv[2])))
    print(peak() - before)
"""

GATE = """
    import sys, torch, transformers
    from attar.checkpoint import open_checkpoint
    from attar.sensitivity.compare import compare
    torch.randn(512, 512) @ torch.randn(512, 512)
    tokens = [torch.randint(0, 262144, (4, 512))]
    checkpoints = [open_checkpoint(path) for path in sys.argv[1:3]]
    before = peak()
    assert compare(*checkpoints, tokens, work=Path(sys.argv[3])).kl > 0
    print(peak() - before)
"""

EXPERTS = """
    import json, sys, torch
    from attar.checkpoint import open_checkpoint
    from attar.quantization.layerwise import LayerSolver
    from attar.quantization.plan import plan
    from attar.quantization.rounding import METHODS, SweepCodes
    from attar.quantization.settings import quantize_settings
    from attar.quantization.write import write
    from attar.quantization.hessian import Hessian
    from attar.walks.expert_inputs import ExpertTokens
    from attar.walks.solvers import LinearSolver, Solution
    from attar.walks.sweep import SweepOptions, sweep_linears
    source, work, method = open_checkpoint(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    rounding = "gptq" if method == "statistics" else method
    settings = quantize_settings(method=rounding, scheme="W4A16", **json.loads(sys.argv[4]))
    chosen = plan(source, settings.storage)
    layers = {layer.module: layer for layer in chosen.sites.values()}
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 512, (4, 512), generator=generator) for _ in range(4)]
    options = {"select": layers.__contains__, "precision": "fp32"}
    if method == "statistics":
        class Solver(LinearSolver):
            def accumulator(self, names, inputs): return Hessian(inputs)
            def solve(self, weights, seen):
                seen.value()
                return {name: Solution(w, {"codes": w.to(torch.int8)}) for name, w in weights.items()}
            def restore(self, name, tensors): raise AssertionError
        counted = ExpertTokens(floor=0.0)
        sweep_linears(source, tokens, Solver(), SweepOptions(work=work, experts=counted, **options))
        print(f"{peak()} {peak()}")
        raise SystemExit
    solver = LayerSolver(layers, METHODS[method], settings.rounding)
    swept = sweep_linears(source, tokens, solver, SweepOptions(work=work / "sweep", **options))
    rounded = peak()
    (work / "out").mkdir()
    write(source, chosen, SweepCodes(chosen, swept), work / "out", work / "shards")
    print(f"{rounded} {peak()}")
"""

A3B = {  # Qwen3-30B-A3B
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 512,
}
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


def gate_peak(folder: Path) -> tuple[float, int]:
    """(peak bytes above the imports, bytes of the head in float32) of the gate's comparison."""
    import transformers

    shape = {**SHAPE, "vocab_size": 2**18, "hidden_size": 256, "head_dim": 16}
    config = transformers.LlamaConfig(num_hidden_layers=1, **shape)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "original")
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.1)
    model.save_pretrained(folder / "changed")
    used = measure(GATE, folder / "original", folder / "changed", folder / "gate-work")
    return used, 4 * model.lm_head.weight.numel()


def expert_layers(folder: Path, layers: int, experts: int) -> Path:
    """A checkpoint of random weights in bf16, a file for each expert."""
    import transformers

    from attar.models.loading.empty import empty_model

    config = transformers.Qwen3MoeConfig(num_hidden_layers=layers, num_experts=experts, **A3B)
    config.architectures = ["Qwen3MoeForCausalLM"]
    source = folder / "experts"
    config.save_pretrained(source)
    generator, index = torch.Generator().manual_seed(0), {}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in empty_model(config, unstacked=True).named_parameters():
        file = name.partition(".experts.")[2].partition(".")[0] or "rest"
        weight = torch.randn(parameter.shape, generator=generator).bfloat16()
        files.setdefault(file, {})[name] = (weight if weight.dim() == 1 else 0.02 * weight).contiguous()
        if file != "rest" and len(files[file]) == 3:  # of one layer
            written = f"model-{len(index):06d}.safetensors"
            save_file(files.pop(file), source / written)
            index |= dict.fromkeys([name.replace("down_proj", leaf) for leaf in
                                    ("gate_proj", "up_proj", "down_proj")], written)  # fmt: skip
    save_file(files["rest"], source / "model-rest.safetensors")
    index |= dict.fromkeys(files["rest"], "model-rest.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return source


def experts_peaks(source: Path, work: Path, method: str, settings: str) -> tuple[float, float]:
    """(peak bytes after rounding, after writing) of the whole process."""
    work.mkdir()
    command = [sys.executable, "-c", textwrap.dedent(PEAK) + textwrap.dedent(EXPERTS)]
    command += [str(source), str(work), method, settings]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rounded, written = map(float, done.stdout.split()[-2:])
    return rounded, written


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=ALL, default=PARTS)
    parser.add_argument("--layers", type=int, default=1, help="experts: layers")
    parser.add_argument("--experts", type=int, default=128, help="experts: of a layer")
    parser.add_argument(
        "--methods", nargs="+", default=["gptq"], help="experts: roundings; statistics: Hessians alone"
    )
    parser.add_argument("--settings", default="{}", help="experts: settings of the rounding, in JSON")
    options = parser.parse_args()
    parts = options.parts
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{'walk':<28}{'peak MB':>10}{'bound MB':>10}")
        if "stream" in parts:
            used, size = stream_peak(folder)
            print(f"{f'stream over {size / 1e9:.1f} GB':<28}{used / MB:>10.0f}{700:>10}")
        for depth in (3, 12) if "sweep" in parts else ():
            used = sweep_peak(folder, depth)
            print(f"{f'sweep, {depth} blocks of 15 M':<28}{used / MB:>10.0f}{sweep_bound() / MB:>10.0f}")
        if "gate" in parts:
            used, head = gate_peak(folder)
            bound = 1.5 * (1.5 * head + KEPT)
            print(f"{f'gate, head of {head / MB:.0f} MB':<28}{used / MB:>10.0f}{bound / MB:>10.0f}")
        if "experts" in parts:
            source = expert_layers(folder, options.layers, options.experts)
            for method in options.methods:
                rounded, written = experts_peaks(source, folder / method, method, options.settings)
                print(
                    f"{f'{options.experts} experts, {method}':<28}{rounded / MB:>10.0f}{8000:>10}", flush=True
                )
                print(f"{'  and written':<28}{written / MB:>10.0f}{8000:>10}", flush=True)


if __name__ == "__main__":
    main()
