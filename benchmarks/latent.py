"""Latent attention (MLA): a cache of latents in the compiled step and in transformers' modules, and one of
every head's keys and values.

    python benchmarks/latent.py [--runners modules compiled expanded] [--weights int4] [--layers 2]
        [--context 4096] [--prompt 512] [--steps 8] [--rounds 5] [--threads 1]

A DeepSeek-V2-Lite of random weights with few layers and one small expert, so that attention is what takes
time: 16 heads of 128 + 64 and 128, a latent of 512. The same weights everywhere: bfloat16 in the compiled
step, float32 in modules, as a CPU has them unasked. In turns: each round gives a ratio to the first runner.
The expanded cache is what a hooked ``kv_b_proj`` falls back to; ``--weights`` rounds the compiled step's.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from time import process_time as clock  # of all threads: other work on the machine counts less
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from attar.kernels.decode import pool_bytes
from attar.kernels.product import default_activation_bits
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.modules import Modules
from attar.runtime.step import StepInput, TokenSpan

BLOCK = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 99,
    "max_position_embeddings": 16_384,
}


def main() -> None:
    """Print bytes a token, and the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 2), ("context", 4096), ("prompt", 512), ("steps", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runners", nargs="+", default=["modules", "compiled", "expanded"])
    parser.add_argument("--weights", default="bf16", choices=("bf16", "int8", "int4"))
    parser.add_argument("--kv-dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "int8"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**SHAPE, num_hidden_layers=options.layers)).eval()
    blocks = -(-(options.context + options.steps + options.prompt) // BLOCK)
    runners = {name: made(name, model, blocks, options) for name in options.runners}
    tasks = {
        f"decode at {options.context}": [(options.context + at, 1) for at in range(options.steps)],
        f"prompt {options.prompt}": [(0, options.prompt)],
        f"prompt {options.prompt} behind {options.context}": [(options.context, options.prompt)],
    }
    for task, spans in tasks.items():
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for number in range(options.rounds + 1):
            for name in list(runners)[:: 1 if number % 2 else -1]:
                began = clock()
                for start, count in spans:
                    run(runners[name], start, count, blocks)
                if number:
                    seconds[name].append((clock() - began) / len(spans))
        for name, times in seconds.items():
            ratios = [a / b for a, b in zip(seconds[options.runners[0]], times, strict=True)]
            spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{task}, {name}: {1000 * statistics.median(times):.1f} ms, {spread}", flush=True)


def made(name: str, model: Any, blocks: int, options: argparse.Namespace) -> Any:
    """A runner of the model, with its bytes printed."""
    if name == "compiled":
        runner: Any = compiled(
            model.config,
            model.state_dict(),
            weights=options.weights,
            blocks=blocks,
            kv_dtype=options.kv_dtype,
            threads=options.threads,
            bits=default_activation_bits(),
        )
        nbytes = pool_bytes(runner.weights, blocks, BLOCK, kv_dtype=options.kv_dtype)
    else:
        copied = copy.deepcopy(model)
        if name == "expanded":
            copied.model.layers[0].self_attn.kv_b_proj.register_forward_pre_hook(lambda _, inputs: None)
        runner = Modules(copied, blocks=blocks, block_size=BLOCK, kv_dtype=options.kv_dtype)
        assert bool(runner.pool.geometry.latent) == (name == "modules"), "the other cache"
        nbytes = runner.pool.nbytes
    print(f"{name}: {nbytes // (blocks * BLOCK * options.layers):,} bytes a token and layer")
    return runner


def run(runner: Any, start: int, count: int, blocks: int) -> None:
    """A step of one sequence, whose cache is there (zeros before anything was written)."""
    span = TokenSpan(0, start, start + count, tuple(range(blocks)), 1)
    runner.run(StepInput([at % 1000 for at in range(count)], (span,)))


if __name__ == "__main__":
    main()
