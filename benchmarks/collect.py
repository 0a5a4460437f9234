"""Collecting: answers in a second from an endpoint that takes its time, and near-duplicates among many rows.

    python benchmarks/collect.py [--prompts 1000] [--delay 0.12] [--concurrency 16] [--words 150]
        [--rows 100000] [--parts answers near_duplicates]

    answers          ``attar collect`` from a server in a process of its own, which answers each request after
                     DELAY seconds with WORDS words. No client is faster than CONCURRENCY / DELAY. "first"
                     asks all prompts, "again" is the same command once more: all answers are in the journal,
                     and none is asked. Seconds are of the whole call, from reading the prompts to the card,
                     in a process that has loaded its client; CPU is that of the client.
    near_duplicates  the filter on ROWS made-up rows of 40 to 200 words (frequencies as in text, Zipf's law),
                     in a process of its own. One row in ten repeats another one with some words changed, so
                     that their similarity J (of runs of five words, counted here with sets of strings) is
                     anywhere between 0.5 and 1; the limit is 0.8. "repeats" have J of at least that,
                     "relatives" less; all others are strangers. What is dropped of these two is a mistake.
                     Peak is the memory that the filter takes on top of the rows.

Each part prints a table; nothing is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attar.collection.collect import collect
from attar.collection.filters.near_duplicates import SHINGLE, near_duplicates
from attar.collection.filters.settings import FilterSettings
from attar.collection.settings import CollectSettings, EndpointSettings

SPAWN = multiprocessing.get_context("spawn")
VOCABULARY = 20_000  # words
PLANTED = 0.1  # of the rows repeat another one
LIMIT = 0.8  # J
MIB = 2**20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.12, help="seconds of the server before an answer")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time")
    parser.add_argument("--words", type=int, default=150, help="of an answer")
    parser.add_argument("--rows", type=int, default=100_000, help="that are looked at for near-duplicates")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    for name in arguments.parts:
        print(PARTS[name](arguments), end="\n\n", flush=True)


def answers(arguments: argparse.Namespace) -> str:
    """The table of a first run and one that finds all in its journal."""
    bound = arguments.concurrency / arguments.delay
    lines = [
        f"{arguments.prompts:,} prompts, {arguments.delay:g} s an answer, {arguments.concurrency} at a time: "
        f"at most {bound:.1f} answers/s",
        "",
        "| run | asked | seconds | answers/s | of the bound | CPU, ms an answer |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder, server(arguments.delay, arguments.words) as url:
        prompts, out = Path(folder, "prompts.txt"), Path(folder, "answers.jsonl")
        prompts.write_text("".join(f"What is {number} times seven?\n" for number in range(arguments.prompts)))
        settings = CollectSettings(
            endpoint=EndpointSettings(model="slow", key_env="none", concurrency=arguments.concurrency)
        )
        ask_one(Path(folder), url, settings)
        for run in ("first", "again"):
            start, cpu = time.perf_counter(), time.process_time()
            result = collect(prompts, out, url, settings, force=run == "again")
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            rate = result.answers / seconds
            share = f"{rate / bound:.1%}" if result.sent else "–"
            lines.append(
                f"| {run} | {result.sent:,} | {seconds:.2f} | {rate:,.1f} | {share} | "
                f"{1000 * cpu / result.answers:.2f} |"
            )
    return "\n".join(lines)


def ask_one(folder: Path, url: str, settings: CollectSettings) -> None:
    """Load what the first request of a process loads."""
    (folder / "one.txt").write_text("Are you there?\n")
    collect(folder / "one.txt", folder / "one.jsonl", url, settings)


@contextmanager
def server(delay: float, words: int) -> Iterator[str]:
    """The address of a chat endpoint, up to and including ``/v1``, while it runs."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(theirs, delay, words), daemon=True)
    process.start()
    theirs.close()  # its end is then noticed here
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1"
    finally:
        process.terminate()
        process.join()
        ours.close()


def serve(pipe: Connection, delay: float, words: int) -> None:
    """Answer until the process ends; its port goes into the pipe."""
    asyncio.run(_serve(pipe, delay, words))


async def _serve(pipe: Connection, delay: float, words: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = re.findall(rb"(?i)content-length: *(\d+)", head)
                body = json.loads(await reader.readexactly(int(length)))
            except asyncio.IncompleteReadError:
                break
            await asyncio.sleep(delay)
            content = json.dumps(completion(body, words)).encode()
            kind = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            writer.write(kind + b"Content-Length: %d\r\n\r\n" % len(content) + content)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    pipe.send(listening.sockets[0].getsockname()[1])
    await listening.serve_forever()


def completion(body: dict[str, Any], words: int) -> dict[str, Any]:
    """The answer to a request, as OpenAI's API has it: other words for another prompt."""
    prompt = body["messages"][-1]["content"]
    draw = random.Random(prompt)
    text = " ".join(f"w{draw.randrange(VOCABULARY)}" for _ in range(words))
    message = {"role": "assistant", "content": text}
    used = {"prompt_tokens": len(prompt.split()), "completion_tokens": words}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {**used, "total_tokens": sum(used.values())},
    }


def duplicates(arguments: argparse.Namespace) -> str:
    """The table of what the filter took, dropped and missed."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=filtered, args=(theirs, arguments.rows), daemon=True)
    process.start()
    theirs.close()
    seen = ours.recv()
    process.join()
    kinds = ("repeats", "relatives", "strangers")
    dropped = " | ".join(f"{seen[kind][1]:,} of {seen[kind][0]:,}" for kind in kinds)
    return "\n".join(
        [
            f"near-duplicates at J >= {LIMIT}, dropped of each kind",
            "",
            "| rows | CPU, s | rows/s | rows alone, MB | peak, MB | repeats | relatives | strangers |",
            "|---|---|---|---|---|---|---|---|",
            f"| {arguments.rows:,} | {seen['seconds']:.1f} | {arguments.rows / seen['seconds']:,.0f} | "
            f"{seen['before']:.0f} | +{seen['peak'] - seen['before']:.0f} | {dropped} |",
        ]
    )


def filtered(pipe: Connection, count: int) -> None:
    """Filter made-up rows in this process; the numbers go into the pipe."""
    rows, originals = made_up(count)
    before, start = peak(), time.process_time()
    reasons = near_duplicates(rows, FilterSettings(similarity=LIMIT))
    seen: dict[str, Any] = {"seconds": time.process_time() - start, "before": before, "peak": peak()}
    kinds = [kind_of(row, None if of is None else rows[of]) for row, of in zip(rows, originals, strict=True)]
    for kind in ("repeats", "relatives", "strangers"):
        judged = [bool(reason) for reason, other in zip(reasons, kinds, strict=True) if other == kind]
        seen[kind] = (len(judged), sum(judged))
    pipe.send(seen)


def made_up(count: int, seed: int = 0) -> tuple[list[dict[str, str]], list[int | None]]:
    """Rows, and for each the number of the earlier one that it repeats in part, if it does.

    No row is repeated twice, nor is a repetition: a row is then judged by one other alone.
    """
    draw = random.Random(seed)
    vocabulary = [f"w{number}" for number in range(VOCABULARY)]
    weights = list(accumulate(1 / (number + 10) for number in range(VOCABULARY)))
    planted = int(PLANTED * count)
    texts = [
        draw.choices(vocabulary, cum_weights=weights, k=draw.randint(40, 200)) for _ in range(count - planted)
    ]
    originals: list[int | None] = [None] * len(texts)
    for original in draw.sample(range(len(texts)), planted):
        words = list(texts[original])
        runs = len(words) - SHINGLE + 1
        similarity = draw.uniform(0.5, 1.0)  # J = (runs - lost) / (runs + lost)
        lost = runs * (1 - similarity) / (1 + similarity)
        for place in draw.sample(range(len(words)), round(lost / SHINGLE)):
            words[place] = draw.choice(vocabulary)
        texts.append(words)
        originals.append(original)
    rows = [{"prompt": " ".join(words[:10]), "completion": " ".join(words[10:])} for words in texts]
    return rows, originals


def kind_of(row: dict[str, str], original: dict[str, str] | None) -> str:
    """What a row is to the row that it was made from; J is counted with sets of strings."""
    if original is None:
        return "strangers"
    left, right = (runs_of(f"{one['prompt']} {one['completion']}".split()) for one in (row, original))
    return "repeats" if len(left & right) / len(left | right) >= LIMIT else "relatives"


def runs_of(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + SHINGLE]) for start in range(len(words) - SHINGLE + 1)}


def peak() -> float:
    """Peak memory of this process, MB (getrusage may report that of the parent)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError("no VmHWM: this needs Linux")


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {
    "answers": answers,
    "near_duplicates": duplicates,
}

if __name__ == "__main__":
    main()
