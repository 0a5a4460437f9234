"""Serving: attar's server beside llama.cpp's, the same file, the same load, by turns.

    python benchmarks/serve.py [--type Q4_0] [--rate 4] [--requests 48] [--rounds 3] [--kv-tokens 8192]

The model is a Llama of random weights, 88 M parameters (shape S of ``benchmarks/decode.py``), with the
tokenizer of attar:tiny, exported to GGUF; both servers read that file. Requests come as a Poisson process;
prompts share prefixes. Every round has prompts of its own, the same for both; servers take turns, and the
first one changes.
llama.cpp's server is built when it is first needed (``benchmarks/peers/environments.py``). Medians of the
rounds:

    tokens/s    generated, from the first request to the last answer
    first       seconds to the first piece of text, p50 and p99 of the requests
    between     milliseconds between two pieces, p50 and p99 of all of them
    goodput     requests in a second with a first piece within --first seconds and tokens within --between ms
    cache       share of the key-value pool that requests hold while others wait: mean, and most (ours alone)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import environments
from serve_load import Seen, make_load, play

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768},
    "S": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
    "M": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "intermediate_size": 5632},
}
HERE = Path(__file__).parent


@dataclass
class Measured:
    """Of one server, a number for each round."""

    name: str
    port: int
    numbers: dict[str, list[float]] = field(default_factory=dict)
    usage: list[tuple[float, float]] = field(default_factory=list)  # (share of the pool, requests that wait)

    def add(self, **numbers: float) -> None:
        for name, value in numbers.items():
            self.numbers.setdefault(name, []).append(value)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="S", choices=sorted(SHAPES))
    parser.add_argument("--type", default="Q4_0", help="of the GGUF file")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rate", type=float, default=4.0, help="requests in a second; 0: all at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=256, help="tokens of each")
    parser.add_argument("--kv-tokens", type=int, default=8192, help="of the pool, in both servers")
    parser.add_argument("--sequences", type=int, default=32, help="that run together in ours")
    parser.add_argument("--slots", type=int, default=16, help="of llama.cpp, which share the pool")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--first", type=float, default=1.0)
    parser.add_argument("--between", type=float, default=100.0)
    parser.add_argument(
        "--servers", nargs="+", default=["attar", "llama.cpp"], choices=["attar", "llama.cpp"]
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as room:
        file, vocabulary = make_model(Path(room), arguments.shape, arguments.type)
        with servers(arguments, file) as both:
            for number in range(arguments.rounds + 1):  # the first does not count
                count = arguments.requests if number else 8
                asks = make_load(
                    number, count, arguments.rate, arguments.prefixes, arguments.prefix, vocabulary
                )
                for server in both if number % 2 else both[::-1]:
                    seen, seconds = asyncio.run(watched(server, asks))
                    failed = [each.failed for each in seen if each.failed]
                    assert not failed, f"{server.name}: {len(failed)} of {count} failed: {failed[0]}"
                    if number:
                        note(server, seen, seconds, arguments)
                    else:
                        server.usage.clear()
    load = f"{arguments.rate:g} requests/s, {arguments.rounds} x {arguments.requests} requests"
    print(f"{arguments.shape} {arguments.type}, {load}")
    for server in both:
        report(server)


def make_model(room: Path, shape: str, kind: str) -> tuple[Path, int]:
    """The GGUF file of random weights, and how many tokens it knows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from attar.checkpoint import open_checkpoint
    from attar.deployment.settings import ExportSettings
    from attar.deployment.stage import export
    from attar.models.load import TOKENIZER_FILES

    tiny = open_checkpoint("attar:tiny")
    vocabulary = int(tiny.config["vocab_size"])
    heads = max(SHAPES[shape]["num_attention_heads"] // 3, 1)
    config = LlamaConfig(
        **{**SHAPES[shape], "num_key_value_heads": 4 if shape != "tiny" else heads},
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(room / "model")
    for name in TOKENIZER_FILES:
        if (tiny.path / name).is_file():
            shutil.copy(tiny.path / name, room / "model" / name)
    file = room / "model.gguf"
    export(room / "model", file, ExportSettings(format="gguf", type=kind))
    return file, vocabulary


# ---- servers


@contextmanager
def servers(arguments: argparse.Namespace, file: Path) -> Iterator[list[Measured]]:
    """Both, ready."""
    made, processes = [], []
    try:
        for name in arguments.servers:
            port = free_port()
            command = ours(arguments, file, port) if name == "attar" else theirs(arguments, file, port)
            environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
            log = (file.parent / f"{name}.log").open("w")
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            wait(port, processes[-1], Path(log.name))
            made.append(Measured(name, port))
        yield made
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def ours(arguments: argparse.Namespace, file: Path, port: int) -> list[Any]:
    job = {"model": str(file), "port": port, "threads": arguments.threads, "kv_tokens": arguments.kv_tokens}
    job |= {"sequences": arguments.sequences, "weights": None, "runner": "compiled"}
    return [sys.executable, HERE / "peers" / "attar_serve_run.py", json.dumps(job)]


def theirs(arguments: argparse.Namespace, file: Path, port: int) -> list[Any]:
    """One pool for all slots, as ours is; the prompt cache is on, as it is by default."""
    threads = str(arguments.threads)
    pool = ["-c", str(arguments.kv_tokens), "-np", str(arguments.slots), "--kv-unified"]
    return [environments.server(), "-m", file, "--port", str(port), "-t", threads, "-tb", threads, *pool]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers."""
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-2000:]
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit(f"no answer: {log.read_text()[-2000:]}")


# ---- measuring


async def watched(server: Measured, asks: list[Any]) -> tuple[list[Seen], float]:
    """The load, with a look at the pool ten times a second."""
    looking = asyncio.create_task(look(server)) if server.name == "attar" else None
    try:
        return await play(server.port, asks)
    finally:
        if looking is not None:
            looking.cancel()


async def look(server: Measured) -> None:
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        names = ("kv_cache_usage_perc", "num_requests_waiting")
        found = [re.search(rf"^attar:{name}\S* (\S+)$", text, re.M) for name in names]
        usage, waiting = (float(each[1]) if each else 0.0 for each in found)
        server.usage.append((usage, waiting))
        await asyncio.sleep(0.1)


def note(server: Measured, seen: list[Seen], seconds: float, arguments: argparse.Namespace) -> None:
    """The numbers of a round."""
    first = [each.chunks[0] for each in seen]
    gaps = [b - a for each in seen for a, b in zip(each.chunks, each.chunks[1:], strict=False)]
    good = sum(
        each.chunks[0] <= arguments.first and each.between * 1000 <= arguments.between for each in seen
    )
    server.add(
        rate=sum(each.tokens for each in seen) / seconds,
        first_50=quantile(first, 0.5),
        first_99=quantile(first, 0.99),
        between_50=1000 * quantile(gaps, 0.5),
        between_99=1000 * quantile(gaps, 0.99),
        good=good / seconds,
    )


def quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def report(server: Measured) -> None:
    """A line."""
    median = {name: statistics.median(values) for name, values in server.numbers.items()}
    line = f"{server.name:<10} {median['rate']:7.1f} tokens/s"
    line += f"   first {median['first_50']:6.3f} {median['first_99']:6.3f} s"
    line += f"   between {median['between_50']:6.1f} {median['between_99']:6.1f} ms"
    line += f"   goodput {median['good']:5.2f}/s"
    pressed = [usage for usage, waiting in server.usage if waiting]
    if pressed:
        line += f"   cache {statistics.mean(pressed):4.0%} {max(pressed):4.0%}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
