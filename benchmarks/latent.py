"""Latent attention (MLA): a cache of latents against one of every head's keys and values.

    python benchmarks/latent.py [--layers 2] [--context 4096] [--prompt 512] [--steps 8] [--rounds 5]
        [--threads 1]

A DeepSeek-V2-Lite of random weights with few layers and one small expert, so that attention is what takes
time: 16 heads of 128 + 64 and 128, a latent of 512. Both through transformers' modules, the same weights, in
turns; a ratio is the median over rounds. The expanded cache is what a hooked ``kv_b_proj`` falls back to.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

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
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**SHAPE, num_hidden_layers=options.layers)).eval()
    hooked = copy.deepcopy(model)
    hooked.model.layers[0].self_attn.kv_b_proj.register_forward_pre_hook(lambda _, inputs: None)
    blocks = -(-(options.context + options.steps + options.prompt) // BLOCK)
    runners = {
        name: Modules(one, blocks=blocks, block_size=BLOCK, kv_dtype="bfloat16")
        for name, one in (("latents", model), ("expanded", hooked))
    }
    for name, runner in runners.items():
        print(f"{name}: {runner.pool.nbytes // (blocks * BLOCK * options.layers):,} bytes a token and layer")
    assert runners["latents"].pool.geometry.latent == 512 and not runners["expanded"].pool.geometry.latent
    tasks = {
        f"decode at {options.context}": [(options.context + at, 1) for at in range(options.steps)],
        f"prompt {options.prompt}": [(0, options.prompt)],
        f"prompt {options.prompt} behind {options.context}": [(options.context, options.prompt)],
    }
    for task, spans in tasks.items():
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for number in range(options.rounds + 1):
            for name in list(runners)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                for start, count in spans:
                    run(runners[name], start, count, blocks)
                if number:
                    seconds[name].append((time.perf_counter() - began) / len(spans))
        ratios = [a / b for a, b in zip(seconds["expanded"], seconds["latents"], strict=True)]
        both = ", ".join(
            f"{name} {1000 * statistics.median(times):.1f} ms" for name, times in seconds.items()
        )
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{task}: {both}: {statistics.median(ratios):.2f}x ({spread})", flush=True)


def run(runner: Modules, start: int, count: int, blocks: int) -> None:
    """A step of one sequence, whose cache is there (zeros before anything was written)."""
    span = TokenSpan(0, start, start + count, tuple(range(blocks)), 1)
    runner.run(StepInput([at % 1000 for at in range(count)], (span,)))


if __name__ == "__main__":
    main()
