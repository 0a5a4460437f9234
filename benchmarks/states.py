"""Layers that carry states: what rounding costs there, and how fast the compiled step runs them.

    python benchmarks/states.py tensors [--models attar:tiny-hybrid attar:tiny-mamba] [--tokens 4096]
                                   KL in nats per token where one kind of tensor is rounded to 4 and 8 bits
    python benchmarks/states.py states [--tokens 2048]
                                   KL where states are rounded after every token of a text that is decoded
    python benchmarks/states.py speed [--shapes qwen3_5 granite mamba2] [--weights bf16] [--rounds 3] [--peer]
                                   the compiled step, transformers' modules, and llama.cpp in a type of as
                                   many bits, in seconds of the processor

``scripts/train_tiny.py --family qwen3_5`` and ``--family granitemoehybrid`` train the models; text is
python-stdlib's held-out split. Matrices are rounded to nearest with a scale for 32 inputs (``--group``),
vectors with one for the whole vector. Shapes of ``speed`` are those of Qwen3.5-4B, Granite 4.0-H-Micro,
Mamba2-1.3B, Falcon-H1-1.5B and Nemotron-H-4B with few layers (``--layers``) of random weights: bfloat16 in
the compiled step, float32 in modules, as a CPU has them unasked.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time as clock  # of all threads: other work on the machine counts less
from typing import Any

import torch
import transformers
from decode_cases import LlamaCpp
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import attar
from attar.checkpoint.paths import resolve
from attar.data.packing import pack
from attar.kernels.product import default_activation_bits
from attar.measure.metrics import kl
from attar.quantization.grids.integer import IntGrid
from attar.runtime.loading import load
from attar.runtime.runner.compiled import Compiled, compiled
from attar.runtime.runner.compiled_states import STATES
from attar.runtime.runner.modules import Modules
from attar.runtime.step import StepInput, TokenSpan

MODELS = ("attar:tiny-hybrid", "attar:tiny-mamba")
VOCABULARY = 2048  # of attar:tiny, whose tokenizer llama.cpp's files have
PEER = "llama.cpp"
TYPES = {"bf16": "F16", "int8": "Q8_0", "int4": "Q4_0"}  # of llama.cpp, of as many bits
KINDS = {
    "delta rule: in_proj_qkv": r"linear_attn\.in_proj_qkv\.weight",
    "delta rule: in_proj_z": r"linear_attn\.in_proj_z\.weight",
    "delta rule: in_proj_a": r"linear_attn\.in_proj_a\.weight",
    "delta rule: in_proj_b": r"linear_attn\.in_proj_b\.weight",
    "delta rule: out_proj": r"linear_attn\.out_proj\.weight",
    "Mamba 2: in_proj, z": r"mamba\.in_proj\.weight z",
    "Mamba 2: in_proj, x": r"mamba\.in_proj\.weight x",
    "Mamba 2: in_proj, B and C": r"mamba\.in_proj\.weight BC",
    "Mamba 2: in_proj, dt": r"mamba\.in_proj\.weight dt",
    "Mamba 2: out_proj": r"mamba\.out_proj\.weight",
    "convolution": r"conv1d\.weight",
    "A": r"A_log",
    "bias of dt": r"dt_bias",
    "D": r"mamba\.D$",
    "norm of the output": r"(mamba|linear_attn)\.norm\.weight",
    "attention": r"self_attn\.[qkvo]_proj\.weight",
    "MLP": r"mlp\..*weight",
}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {"hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4}
        | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    ),
    "granite": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "shared_intermediate_size": 8192,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        }
        | {"num_attention_heads": 32, "num_key_value_heads": 8}
        | {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"hidden_size": 2048, "num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1},
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64}
        | {"mamba_d_state": 256},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {"hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 32, "head_dim": 128}
        | {"mamba_num_heads": 112, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("tensors", "states", "speed"))
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--weights", default="bf16", choices=("bf16", "int8", "int4"))
    for name, value in (("layers", 4), ("rounds", 3), ("prompt", 256), ("steps", 8), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peer", action="store_true", help="llama.cpp as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"tensors": tensors, "states": states, "speed": speed}[options.part](options)


def text(path: Any, tokens: int, length: int) -> Tensor:
    """Held-out text, (rows, length)."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    return pack(tokenizer, "python-stdlib", "evaluation", length=length, rows=tokens // length, seed=0).rows


@torch.no_grad()
def tensors(options: argparse.Namespace) -> None:
    """KL where one kind is rounded."""
    for name in options.models:
        path = resolve(name)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        rows = text(path, options.tokens or 4096, 512)
        want = [model(batch).logits for batch in rows.split(1)]
        print(f"{name}, {rows.numel():,} tokens of python-stdlib\n")
        print("| rounded | numbers | KL, 4 bits | KL, 8 bits |\n|---|---|---|---|")
        for kind, pattern in KINDS.items():
            costs = []
            for bits in (4, 8):
                with rounded(model, pattern, bits, options.group) as numbers:
                    parts = [
                        float(kl(a[0], model(batch).logits[0]).mean())
                        for a, batch in zip(want, rows.split(1), strict=True)
                    ]
                costs.append(statistics.mean(parts))
            if numbers:
                print(f"| {kind} | {numbers:,} | {costs[0]:.5f} | {costs[1]:.6f} |", flush=True)
        print()


@contextmanager
def rounded(model: Any, pattern: str, bits: int, group: int) -> Iterator[int]:
    """Within it the parameters of a kind are rounded; their numbers."""
    saved, count = [], 0
    for name, parameter in model.named_parameters():
        for part, rows in parts_of(model, name, len(parameter)):
            if re.search(pattern, f"{name} {part}".strip()):
                value = parameter[rows]
                saved.append((parameter, rows, value.clone()))
                matrix = value.flatten(1) if value.ndim > 1 else value[None]
                wide = matrix.shape[1] % group == 0 and value.ndim > 1
                grid = IntGrid(bits, group if wide else 0)
                codes = grid.quantize(matrix, grid.choose(matrix))
                parameter[rows] = codes.dequantize().view_as(value)
                count += value.numel()
    yield count
    for parameter, rows, value in saved:
        parameter[rows] = value


def parts_of(model: Any, name: str, length: int) -> list[tuple[str, slice]]:
    """The rows of Mamba 2's first product by what they make; all rows of others."""
    if not name.endswith("mamba.in_proj.weight"):
        return [("", slice(None))]
    c = model.config
    width = c.mamba_n_heads * c.mamba_d_head
    ends = [width, 2 * width, 2 * width + 2 * c.mamba_n_groups * c.mamba_d_state, length]
    return [(part, slice(a, b)) for part, a, b in zip(("z", "x", "BC", "dt"), [0, *ends], ends, strict=False)]


def states(options: argparse.Namespace) -> None:
    """KL where states are rounded after every token."""
    for name in options.models:
        path, count = resolve(name), options.tokens or 2048
        ids = text(path, count, count)[0].tolist()
        runner: Any = load(path, runner="compiled", kv_dtype="float32", kv_tokens=count).runner
        keys = next(layer.recurrence.shape.keys for layer in runner.weights.layers if layer.recurrence)
        want = decoded(runner, ids, lambda states: None)
        print(f"{name}, {count:,} tokens decoded\n")
        print("| states | KL, first half | KL, second half | KL, last 128 |\n|---|---|---|---|")
        for form, round_ in FORMS.items():
            logits = decoded(runner, ids, lambda states, f=round_, n=keys: states.copy_(f(states, n)))
            costs = kl(want, logits)
            half = count // 2
            parts = (costs[:half], costs[half:], costs[-128:])
            print(f"| {form} | {' | '.join(f'{float(part.mean()):.2e}' for part in parts)} |", flush=True)
        print()


def decoded(runner: Compiled, ids: list[int], change: Callable[[Tensor], Any]) -> Tensor:
    """Logits (tokens, vocabulary) of a text that is run token by token; ``change``: of the states between."""
    runner.forget(0)
    rows, blocks = [], tuple(range(-(-len(ids) // runner.block_size)))
    for at, token in enumerate(ids):
        rows.append(runner.run(StepInput([token], (TokenSpan(0, at, at + 1, blocks, 1),))))
        change(runner.states.before(TokenSpan(0, at + 1, at + 2, blocks, 1)).layers[STATES])
    return torch.cat(rows)


def columns(states: Tensor, keys: int, most: float) -> tuple[Tensor, Tensor]:
    """States as (..., keys, 16) over a scale of each column, and the scale: the largest is ``most``."""
    parts = states.view(-1, keys, 16)
    scale = (parts.abs().amax(1, keepdim=True) / most).clamp(min=1e-30)
    return parts / scale, scale


def as_int8(states: Tensor, keys: int) -> Tensor:
    """Rounded to 8 bits."""
    parts, scale = columns(states, keys, 127.0)
    return (parts.round() * scale).flatten()


def as_float8(states: Tensor, keys: int) -> Tensor:
    """Rounded to FP8 (E4M3)."""
    parts, scale = columns(states, keys, 448.0)
    return (parts.to(torch.float8_e4m3fn).float() * scale).flatten()


FORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "bfloat16": lambda states, keys: states.bfloat16().float(),
    "int8, a scale for each column of a head": as_int8,
    "FP8, likewise": as_float8,
}


def speed(options: argparse.Namespace) -> None:
    """Seconds of the processor, in turns, with a ratio in each round."""
    for shape in options.shapes:
        config, model_class, sizes = SHAPES[shape]
        torch.manual_seed(0)
        count = options.layers
        kinds = {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (count // 4)}
        kinds = kinds if shape in ("qwen3_5", "granite") else {}
        made = getattr(transformers, config)(**sizes, num_hidden_layers=count, vocab_size=VOCABULARY, **kinds)
        model = getattr(transformers, model_class)(made).eval()
        blocks = -(-(options.prompt + options.steps) // 16)
        ours = compiled(
            made,
            model.state_dict(),
            weights=options.weights,
            blocks=blocks,
            threads=options.threads,
            bits=default_activation_bits(),
        )
        runners = {"modules": Modules(model, blocks=blocks, block_size=16), "compiled": ours}
        peer = llama_cpp(model, options) if options.peer else None
        tasks = {
            f"prompt of {options.prompt}": [(0, options.prompt)],
            "decode": [(options.prompt + at, 1) for at in range(options.steps)],
        }
        names = [*runners, *([PEER] if peer else [])]
        seconds: dict[str, dict[str, list[float]]] = {task: {name: [] for name in names} for task in tasks}
        for number in range(options.rounds + 1):
            for name in names[:: 1 if number % 2 else -1]:
                if peer and name == PEER:
                    times = [peer.prompt(options.prompt), peer.steps(1, options.prompt, options.steps)]
                else:
                    runners[name].forget(0)
                    times = [ran(runners[name], spans, blocks) for spans in tasks.values()]
                for (task, spans), taken in zip(tasks.items(), times, strict=True):
                    if number:
                        seconds[task][name].append(taken / len(spans))
        if peer:
            peer.close()
        for task, times in seconds.items():
            ours_s = times.pop("compiled")
            cells = [f"compiled {1000 * statistics.median(ours_s):.1f} ms"]
            for name, rounds in times.items():
                ratios = [a / b for a, b in zip(rounds, ours_s, strict=True)]
                spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
                cells.append(f"{name} {1000 * statistics.median(rounds):.1f} ms, {spread}")
            print(f"{shape}, {task}: {'; '.join(cells)}", flush=True)


def ran(runner: Modules | Compiled, spans: list[tuple[int, int]], blocks: int) -> float:
    """Seconds of the processor for spans of (start, tokens), a step each."""
    began = clock()
    for start, tokens in spans:
        span = TokenSpan(0, start, start + tokens, tuple(range(blocks)), 1)
        runner.run(StepInput([at % 1000 for at in range(tokens)], (span,)))
    return clock() - began


def llama_cpp(model: Any, options: argparse.Namespace) -> LlamaCpp:
    """The same model in llama.cpp, its file gone once it is read."""
    with tempfile.TemporaryDirectory() as folder:
        dense, file = Path(folder) / "dense", Path(folder) / "model.gguf"
        model.to(torch.bfloat16).save_pretrained(dense)
        AutoTokenizer.from_pretrained(resolve("attar:tiny")).save_pretrained(dense)
        attar.export(dense, file, format="gguf", type=TYPES[options.weights], imatrix="none", progress=False)
        model.float()
        return LlamaCpp(file=str(file), threads=options.threads, clock="cpu")


if __name__ == "__main__":
    main()
