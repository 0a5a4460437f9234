"""Serving: attar's server against llama.cpp's, the same file, the same load, by turns.

    python benchmarks/serve.py [--model S] [--type Q4_0] [--rate 2] [--requests 32] [--rounds 3] [--slots 16]

The model is a Llama of random weights (shape S, 88 M parameters, as in ``benchmarks/decode.py``) with the
tokenizer of attar:tiny, or a checkpoint; both servers read the same GGUF file, and have as many threads,
sequences that run together and tokens in the pool. Requests come as a Poisson process; prompts share
prefixes. Every round has prompts of its own, the same for both; servers take turns, and the first one
changes. Greedy, and every answer has the length that is asked for. llama.cpp's server is built when it is
first needed (``benchmarks/peers/environments.py``). Medians of the rounds:

    tokens/s   generated, from the first request to the last answer
    first      seconds to the first piece of text, p50 and p99 of the requests
    token      milliseconds of a token behind the first: of each request the time from its first to its last
               piece by its tokens; p50 and p99 of the requests
    silence    the longest between two pieces of a request, milliseconds, p50 and p99 of the requests
    pieces     tokens in one, mean
    cache      share of the key-value pool that requests hold while others wait: mean, and most (ours alone)
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from serve_load import Seen, make_load, play
from serve_pair import SHAPES, Server, make_file, servers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="S", help=f"{', '.join(SHAPES)} or a checkpoint")
    parser.add_argument("--type", default="Q4_0", help="of the GGUF file")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2.0, help="requests in a second; 0: all at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=256, help="tokens of each")
    parser.add_argument("--kv-tokens", type=int, default=8192, help="of the pool")
    parser.add_argument("--slots", type=int, default=16, help="sequences that run together, in both servers")
    parser.add_argument("--unified", action="store_true", help="one pool for llama.cpp's slots, too: slower")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp's, where its AMX code crashes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--servers", nargs="+", default=["attar", "llama.cpp"], choices=["attar", "llama.cpp"]
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as workdir:
        file, vocabulary = make_file(Path(workdir), arguments.model, arguments.type)
        with servers(arguments, file) as both:
            for number in range(arguments.rounds + 1):  # the first does not count
                count = arguments.requests if number else 8
                load = (arguments.rate, arguments.prefixes, arguments.prefix, vocabulary)
                asks = make_load(number, count, *load)
                for server in both if number % 2 else both[::-1]:
                    seen, seconds = asyncio.run(watched(server, asks))
                    failed = [client.failed for client in seen if client.failed]
                    assert not failed, f"{server.name}: {len(failed)} of {count} failed: {failed[0]}"
                    if number:
                        note(server, seen, seconds)
                    else:
                        server.usage.clear()
    rate = f"{arguments.rate:g} requests/s" if arguments.rate else "all at once"
    rounds = f"{arguments.rounds} x {arguments.requests} requests"
    pool = f"{arguments.slots} slots, {arguments.kv_tokens:,} tokens"
    print(f"{arguments.model} {arguments.type}, {rate}, {rounds}, {pool}")
    for server in both:
        report(server)


async def watched(server: Server, asks: list[Any]) -> tuple[list[Seen], float]:
    """The load, with a look at the pool ten times a second."""
    looking = asyncio.create_task(look(server)) if server.name == "attar" else None
    try:
        return await play(server.port, asks)
    finally:
        if looking is not None:
            looking.cancel()


async def look(server: Server) -> None:
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        names = ("kv_cache_usage_perc", "num_requests_waiting")
        matches = [re.search(rf"^attar:{name}\S* (\S+)$", text, re.M) for name in names]
        usage, waiting = (float(match[1]) if match else 0.0 for match in matches)
        server.usage.append((usage, waiting))
        await asyncio.sleep(0.1)


def note(server: Server, seen: list[Seen], seconds: float) -> None:
    """The numbers of a round."""
    for name, values in {
        "first": [client.chunks[0] for client in seen],
        "token": [1000 * client.between for client in seen],
        "silence": [1000 * client.silence for client in seen],
    }.items():
        server.add(**{f"{name}_50": quantile(values, 0.5), f"{name}_99": quantile(values, 0.99)})
    tokens, pieces = (sum(client.tokens for client in seen), sum(len(client.chunks) for client in seen))
    server.add(rate=tokens / seconds, pieces=tokens / pieces)


def quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def report(server: Server) -> None:
    """A line."""
    median = {name: statistics.median(values) for name, values in server.numbers.items()}
    line = f"{server.name:<10} {median['rate']:7.1f} tokens/s"
    line += f"   first {median['first_50']:6.3f} {median['first_99']:6.3f} s"
    line += f"   token {median['token_50']:6.1f} {median['token_99']:6.1f} ms"
    line += f"   silence {median['silence_50']:6.0f} {median['silence_99']:6.0f} ms"
    line += f"   pieces {median['pieces']:4.2f}"
    pressed = [usage for usage, waiting in server.usage if waiting]
    if pressed:
        line += f"   cache {statistics.mean(pressed):4.0%} {max(pressed):4.0%}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
