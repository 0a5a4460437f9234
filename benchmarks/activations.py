"""What rounding activations, keys and values costs, and what it gains: settings of the compiled step and
llama.cpp on one GGUF file, against exact float32 arithmetic on the file's codes.

    python benchmarks/activations.py --text FILE [MODEL] [--rows 8] [--length 512] [--rounds 5] [--threads 2]
        [--parts loss speed] [--peers llama.cpp]

    KL, |Δ log p|    mean over tokens: to the exact distribution (nats), and of the text's own next token
    top-1            share of tokens with the same likeliest successor
    answer           to "What is the capital of France?", greedy, through the model's chat template
    decode 1, 8      tokens/s in all, one token a step for 1 or 8 sequences, from position 128 on
    prompt           tokens/s of a prompt of 256 in one step
    of 8 bits        medians over rounds of speed by that of the first setting in the same round
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_cases import CONTEXT, Attar, LlamaCpp, Runner
from torch import Tensor

from attar.checkpoint import open_checkpoint
from attar.checkpoint.paths import find
from attar.models.loading.load import load_model
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded, load
from attar.runtime.runner.compiled import Compiled
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.step import StepInput, TokenSpan

SETTINGS: dict[str, dict[str, Any]] = {
    "8 bits, KV bfloat16": {"bits": 8, "kv_dtype": "bfloat16"},
    "8 bits, KV float16": {"bits": 8, "kv_dtype": "float16"},
    "16 bits, KV bfloat16": {"bits": 16, "kv_dtype": "bfloat16"},
    "16 bits, KV float16": {"bits": 16, "kv_dtype": "float16"},
    "16 bits, KV float32": {"bits": 16, "kv_dtype": "float32"},
}
QUESTION = "What is the capital of France?"
TASKS: dict[str, Callable[[Runner], float]] = {  # tokens a second
    "decode 1": lambda runner: 24 / runner.steps(1, 128, 24),
    "decode 8": lambda runner: 8 * 8 / runner.steps(8, 128, 8),
    "prompt": lambda runner: 256 / runner.prompt(256),
}


@dataclass
class Loss:
    """Means over tokens, against exact arithmetic."""

    kl: float
    difference: float
    agreement: float
    answer: str


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    loaded: Any = load(arguments.model, runner="compiled", kv_tokens=16)
    ours = {
        name: runner_of(loaded.runner.weights, threads=arguments.threads, **settings)
        for name, settings in SETTINGS.items()
    }
    peers: dict[str, LlamaCpp] = {}
    if arguments.peers:
        file = str(find(arguments.model))
        peers["llama.cpp"] = LlamaCpp(file=file, threads=arguments.threads, repack=False)
    if "loss" in arguments.parts:
        losses(loaded, ours, peers, arguments)
    if "speed" in arguments.parts:
        speeds({**ours, **peers}, arguments.rounds)
    for runner in (*ours.values(), *peers.values()):
        runner.close()


def runner_of(weights: Any, **settings: Any) -> Attar:
    """With room for the longest case."""
    return Attar(Compiled(weights, blocks=CONTEXT // 16, **settings), weights.nbytes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="attar:smollm2")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=["loss", "speed"], choices=["loss", "speed"])
    parser.add_argument("--peers", nargs="*", default=["llama.cpp"], choices=["llama.cpp"])
    return parser.parse_args()


def losses(
    loaded: Loaded, ours: dict[str, Attar], peers: dict[str, LlamaCpp], arguments: argparse.Namespace
) -> None:
    """A table."""
    text = arguments.text.read_text(encoding="utf-8")[: 8 * arguments.rows * arguments.length]
    ids = loaded.tokenizer(text)["input_ids"]
    rows = [ids[n * arguments.length : (n + 1) * arguments.length] for n in range(arguments.rows)]
    model = load_model(open_checkpoint(arguments.model), dtype=torch.float32)
    with torch.no_grad():
        exact = [torch.log_softmax(model(torch.tensor([row])).logits[0].float(), -1) for row in rows]
    prompt = LLM.of(loaded).encode_chat([{"role": "user", "content": QUESTION}])
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=loaded.ends[0],
        pad_token_id=loaded.ends[0],
    )
    del model
    print("| | KL | mean &#124;Δ log p&#124; | top-1 | answer |\n|---|---|---|---|---|")
    print(f"| float32 | 0 | 0 | 100 % | {shown(loaded, generated[0, len(prompt) :].tolist())} |")
    for name, runner in ours.items():
        other = Loaded(runner.runner, loaded.tokenizer, loaded.ends)
        params = SamplingParams(temperature=0.0, max_tokens=24)
        answer = shown(loaded, list(LLM.of(other).generate([prompt], params)[0].token_ids))
        report(name, loss(rows, exact, runner_logits(runner), answer))
    for name, peer in peers.items():
        greedy = peer.ask({"greedy": prompt, "tokens": 24, "end": loaded.ends[0]})["ids"]
        report(name, loss(rows, exact, peer_logits(peer), shown(loaded, greedy)))


def shown(loaded: Loaded, ids: list[int]) -> str:
    return " ".join(str(loaded.tokenizer.decode(ids, skip_special_tokens=True)).split())


def runner_logits(runner: Attar) -> Callable[[list[int]], Tensor]:
    def logits(row: list[int]) -> Tensor:
        blocks = tuple(range(-(-len(row) // 16)))
        return runner.runner.run(StepInput(row, (TokenSpan(0, 0, len(row), blocks, len(row)),)))

    return logits


def peer_logits(peer: LlamaCpp) -> Callable[[list[int]], Tensor]:
    def logits(row: list[int]) -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "logits.npy")
            peer.ask({"score": row, "to": file})
            return torch.from_numpy(np.load(file))

    return logits


def loss(
    rows: list[list[int]], exact: list[Tensor], logits: Callable[[list[int]], Tensor], answer: str
) -> Loss:
    parts = []
    for row, wanted in zip(rows, exact, strict=True):
        logprobs = torch.log_softmax(logits(row).float(), -1)
        following = torch.tensor(row[1:])[:, None]
        parts.append(
            [
                float((wanted.exp() * (wanted - logprobs)).sum(-1).mean()),
                float((logprobs[:-1].gather(1, following) - wanted[:-1].gather(1, following)).abs().mean()),
                float((logprobs.argmax(1) == wanted.argmax(1)).float().mean()),
            ]
        )
    kl, difference, agreement = (statistics.fmean(part) for part in zip(*parts, strict=True))
    return Loss(kl, difference, agreement, answer)


def report(name: str, loss: Loss) -> None:
    line = f"| {name} | {loss.kl:.1e} | {loss.difference:.4f} | {loss.agreement:.1%} | {loss.answer} |"
    print(line, flush=True)


def speeds(runners: dict[str, Any], rounds: int) -> None:
    """A table, after a round that does not count."""
    seen: dict[tuple[str, str], list[float]] = {(name, task): [] for name in runners for task in TASKS}
    for number in range(rounds + 1):
        for task, rate in TASKS.items():
            for name in list(runners)[:: 1 if number % 2 else -1]:
                speed = rate(runners[name])
                if number:
                    seen[name, task].append(speed)
    first = next(iter(runners))
    print(f"\n| tokens/s | {' | '.join(f'{task} | of 8 bits' for task in TASKS)} |\n|{'---|' * 7}")
    for name in runners:
        cells = []
        for task in TASKS:
            ratio = statistics.median(a / b for a, b in zip(seen[name, task], seen[first, task], strict=True))
            cells.append(f"{statistics.median(seen[name, task]):.1f} | {ratio:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
