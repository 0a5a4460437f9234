"""The KV cache on a real model and real text: what its formats keep, what eviction leaves of a long prompt.

    python benchmarks/real.py --parts kv
    python benchmarks/real_kv.py --tables formats --lengths 4096 8192 --formats bfloat16 int8 "llama.cpp Q8_0"
    python benchmarks/real_kv.py --tables formats --lengths 2048 --formats "int4 calibrated" "int4 5 bits"
    python benchmarks/real_kv.py --tables eviction --texts wikitext python --lengths 4096 --count 2
    python benchmarks/real_kv.py --tables needle --cases 16 --prompt 2048 --methods SnapKV Reread
    python benchmarks/real_kv.py --tables recall --cases 16 --prompt 2048 --formats int8 kivi2 int4

Everything runs through the runtime's modules, block tables and pool, in float32 arithmetic. A text is a
prompt of all but ``--tail`` tokens, in chunks of 512, and a tail that is given in one step, whose tokens see
what is kept of the prompt and the tail before them. KL is that of the tail's next-token distributions from
the same runtime's with everything kept in float32; nats a token.

Methods that choose once, when the prompt is read, share its pass: each goes on from a fork of it. The needle
is that of ``benchmarks/needle.py``: a name with a word, stated three times in foreign code, and its name
again at the end; the word must be likelier than nine others.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_cases import LlamaCpp
from needle import RIVALS, hidden
from torch import Tensor

import attar
from attar.checkpoint import open_checkpoint
from attar.checkpoint.hashing import cache_folder
from attar.data.python_text import texts as python_files
from attar.models.loading.load import load_tokenizer
from attar.progress import SILENT
from attar.quantization.kv_basis import basis_over
from attar.quantization.kv_bits import choose_formats, layer_losses
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.evict import H2O, Eviction, Reread, SnapKV, Streaming
from attar.runtime.kv.memory import LayerShape, block_bytes
from attar.runtime.kv.pool import KVPool
from attar.runtime.kv.store import STORES
from attar.runtime.kv.store.mixed import MixedStore
from attar.runtime.kv.store.rotated import CacheBasis, RotatedStore
from attar.runtime.loading import load
from attar.runtime.runner.modules import Modules
from attar.runtime.runner.observers import LastQueries, StridedQueries
from attar.runtime.runner.probe import Rotary
from attar.runtime.step import StepInput, TokenSpan

MODEL = "attar:smollm2"
# As quantize --kv-cache int4 --kv-bits BITS does, on WikiText-2's validation text; 0: int4 in all.
CALIBRATED = {"int4 calibrated": 0.0, "int4 5 bits": 5.0, "int4 6 bits": 6.0}
PEER = "llama.cpp"
PEERS = {f"{PEER} {kind}": bits for kind, bits in (("F16", 16.0), ("Q8_0", 8.5), ("Q4_0", 4.5))}
CHUNK, BLOCK = 512, 32
DATA = Path(__file__).parents[2] / "shared" / "data"


class Sequences:
    """A runner whose sequences are run by hand."""

    def __init__(self, runner: Modules) -> None:
        window, sinks = runner.lookback
        most = runner.most(CHUNK)
        self.runner = runner
        self.tokens: dict[int, list[int]] = {}
        self.manager = BlockManager(
            runner.capacity, BLOCK, reuse=False, window=window, sinks=sinks, most=most
        )

    def read(self, sequence: int, tokens: Sequence[int]) -> None:
        """A prompt in chunks, packed as its method says; nothing is returned."""
        assert self.manager.admit(sequence, tokens, most_cached=0) == 0
        self.tokens[sequence] = []
        for start in range(0, len(tokens), CHUNK):
            self.run(sequence, tokens[start : start + CHUNK])
            method = self.runner.eviction
            length = self.manager.table(sequence).length
            kept = method.due(length, start + CHUNK >= len(tokens)) if method else None
            if kept is not None:
                self.pack(sequence, kept)

    def run(self, sequence: int, tokens: Sequence[int], wants: int = 0) -> Tensor:
        """Tokens in one step; logits float32 (wants, vocabulary) of the last ones."""
        assert self.manager.reserve(sequence, len(tokens)), "the pool is too small"
        table, done = self.manager.table(sequence), self.tokens[sequence]
        kept = table.length if table.packed else None
        span = TokenSpan(sequence, len(done), len(done) + len(tokens), table.row, wants, kept)
        logits = self.runner.run(StepInput(tokens, (span,), self.manager.copies()))
        done += tokens
        self.manager.commit(sequence, len(tokens), done)
        return logits

    def pack(self, sequence: int, kept: int) -> None:
        packing = self.manager.pack(sequence, kept)
        assert packing is not None, "the pool is too small"
        self.runner.pack(packing)

    def fork(self, sequence: int, child: int) -> None:
        self.manager.fork(sequence, child)
        self.runner.fork(sequence, child)
        self.tokens[child] = list(self.tokens[sequence])

    def release(self, sequence: int) -> None:
        self.manager.release(sequence)
        self.runner.forget(sequence)
        del self.tokens[sequence]


@dataclass(frozen=True)
class Quality:
    """Of a tail of tokens.

    Attributes:
        perplexity: of its tokens behind the first.
        kl: mean over the same places, from everything kept, nats.
        top: share of places with the same likeliest token.
    """

    perplexity: float
    kl: float
    top: float


def quality(logits: Tensor, tail: Sequence[int], full: Tensor) -> Quality:
    """Of logits (t, vocabulary) behind each token of a tail; ``full``: log-probabilities to compare with."""
    logprobs = logits.log_softmax(-1)
    given = torch.tensor(tail[1:])
    loss = -logprobs[:-1].gather(1, given[:, None]).mean()
    kl = (full.exp() * (full - logprobs)).sum(-1).mean()
    top = (logprobs.argmax(-1) == full.argmax(-1)).float().mean()
    return Quality(float(loss.exp()), float(kl), float(top))


def kv(rest: list[str]) -> str:
    """The tables that were asked for."""
    parser = argparse.ArgumentParser(prog="real.py --parts kv", allow_abbrev=False)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192], help="prompt and tail")
    parser.add_argument("--texts", nargs="+", default=["wikitext"], choices=SOURCES)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--count", type=int, default=1, help="texts of each kind and length")
    parser.add_argument("--tail", type=int, default=128)
    parser.add_argument(
        "--formats", nargs="+", default=list(STORES)[1:], choices=[*STORES, *CALIBRATED, *PEERS]
    )
    parser.add_argument("--cases", type=int, default=16, help="needles")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens in front of a needle's question")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.2, 0.1])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    args, _ = parser.parse_known_args(rest)
    return "\n\n".join("\n".join(TABLES[name](args)) for name in args.tables)


def runner(
    length: int, kv_dtype: str = "float32", eviction: Eviction | None = None, data: Path = DATA
) -> Modules:
    """The model in float32, with room for a prompt and three forks of it."""
    options = {"runner": "modules", "dtype": "float32", "kv_dtype": kv_dtype.split()[0], "block_size": BLOCK}
    runner = load(MODEL, kv_tokens=4 * length, eviction=eviction, **options).runner
    assert isinstance(runner, Modules)
    if kv_dtype in CALIBRATED:
        basis, pool = calibrated_basis(data, CALIBRATED[kv_dtype]), runner.pool
        runner.pool = KVPool(pool.geometry, "int4", dtype=pool.dtype, formats=basis.formats)
        assert isinstance(runner.pool.store, RotatedStore | MixedStore)
        runner.pool.store.basis = basis
    return runner


@functools.cache
def calibration_rows(data: Path) -> list[list[int]]:
    """Four of 2,048 tokens."""
    text = (data / "wikitext-2" / "valid.txt").read_text()
    tokens = load_tokenizer(MODEL)(text, verbose=False)["input_ids"]
    return [tokens[start : start + 2048] for start in range(0, 4 * 2048, 2048)]


@functools.cache
def measured_layers(data: Path) -> list[float]:
    """What each layer loses in int4, over two rows."""
    basis, rows = calibrated_basis(data, 0.0), calibration_rows(data)[:2]
    return layer_losses(open_checkpoint(MODEL), basis, rows, SILENT)


@functools.cache
def calibrated_basis(data: Path, kv_bits: float) -> CacheBasis:
    """With the formats of layers under an average; 0: int4."""
    if not kv_bits:
        return basis_over(open_checkpoint(MODEL), calibration_rows(data), SILENT)
    basis = calibrated_basis(data, 0.0)
    choice = choose_formats(measured_layers(data), basis, kv_bits)
    print(kv_bits, choice.report(), file=sys.stderr, flush=True)
    return replace(basis, formats=choice.formats)


def passages(source: str, length: int, count: int, data: Path) -> list[list[int]]:
    """Windows of ``length`` tokens, one after the other."""
    tokens = load_tokenizer(MODEL)(SOURCES[source](data), verbose=False)["input_ids"]
    windows = [tokens[start : start + length] for start in range(0, count * length, length)]
    if len(windows[-1]) < length:
        raise SystemExit(f"{source}: {len(tokens):,} tokens are not {count} texts of {length:,}")
    return windows


def _wikitext(data: Path) -> str:
    return (data / "wikitext-2" / "test.txt").read_text()


def _python(data: Path | None = None) -> str:
    return "\n".join(text for _, text in python_files("evaluation"))[:400_000]


def _problems(data: Path) -> str:
    """Questions with their worked answers, one after the other: a prompt of many examples."""
    rows = [json.loads(line) for line in (data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    return "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows[:300])


SOURCES: dict[str, Callable[[Path], str]] = {"wikitext": _wikitext, "python": _python, "gsm8k": _problems}

METHODS: dict[str, Callable[[int], Eviction]] = {
    "StreamingLLM": lambda capacity: Streaming(sinks=4, window=capacity - 4),
    "H2O": lambda capacity: H2O(heavy=capacity - capacity // 2, recent=capacity // 2),
    "SnapKV": lambda capacity: SnapKV(capacity=capacity, window=32),
    "Reread": lambda capacity: Reread(capacity=capacity),
}


def eviction(args: argparse.Namespace) -> Iterator[str]:
    """A row for each method and share, a text and a length after the other."""
    yield (
        f"SmolLM2-135M-Instruct in float32, the last {args.tail} tokens of each text, {args.count} of each "
        "kind: perplexity, its change, KL, same likeliest token\n"
    )
    yield "| text | tokens | method | kept | perplexity | change | KL, nats | same token |"
    yield "|---|---|---|---|---|---|---|---|"
    for source in args.texts:
        for length in args.lengths:
            yield from _evicted(source, length, args)


def _evicted(source: str, length: int, args: argparse.Namespace) -> Iterator[str]:
    """The rows of one kind of text and length: means over its texts."""
    results: dict[tuple[str, float], list[Quality]] = {}
    first = list[Quality]()
    for text in passages(source, length, args.count, args.data):
        prompt, tail = text[: length - args.tail], text[length - args.tail :]
        logits = tails(prompt, tail, args.methods, args.shares)
        full = logits.pop(("everything", 1.0)).log_softmax(-1)
        first.append(quality(full, tail, full))
        for key, one in logits.items():
            results.setdefault(key, []).append(quality(one, tail, full))
            print(source, length, *key, results[key][-1], file=sys.stderr, flush=True)
    base = _mean(first)
    yield f"| {source} | {length:,} | everything | 100 % | {base.perplexity:.2f} | | | |"
    for (name, share), some in results.items():
        mean = _mean(some)
        change = f"{100 * (mean.perplexity / base.perplexity - 1):+.1f} %"
        numbers = f"{mean.perplexity:.2f} | {change} | {mean.kl:.4f} | {mean.top:.0%}"
        yield f"| {source} | {length:,} | {name} | {share:.0%} | {numbers} |"


def _mean(some: Sequence[Quality]) -> Quality:
    perplexity = math.exp(statistics.fmean(math.log(one.perplexity) for one in some))
    kl, top = (statistics.fmean(getattr(one, name) for one in some) for name in ("kl", "top"))
    return Quality(perplexity, kl, top)


def tails(
    prompt: Sequence[int], tail: Sequence[int], methods: Sequence[str], shares: Sequence[float]
) -> dict[tuple[str, float], Tensor]:
    """Logits (t, vocabulary) of a tail behind what every method keeps of its prompt at every share, and
    behind all of it: ("everything", 1.0)."""
    plain = runner(len(prompt) + len(tail))
    base = Sequences(plain)
    recorder = Recorder(plain)
    base.read(0, prompt)
    base.fork(0, 1)
    results = {("everything", 1.0): base.run(1, tail, len(tail))}
    base.release(1)
    for name in methods:
        for share in shares:
            method = METHODS[name](round(share * len(prompt)))
            if isinstance(method, SnapKV | Reread):
                results[name, share] = recorder.packed(base, method, tail)
            else:
                alone = Sequences(runner(len(prompt) + len(tail), eviction=method))
                alone.read(0, prompt)
                results[name, share] = alone.run(0, tail, len(tail))
    return results


class Recorder:
    """Keeps what both methods that choose once want of a prompt's queries, so that one pass serves all."""

    def __init__(self, plain: Modules) -> None:
        self.runner = plain
        rotary = Rotary(plain.model, range(plain.pool.geometry.layers))
        self.tail = LastQueries(SnapKV(capacity=10**9, window=32))
        self.again = StridedQueries(Reread(capacity=10**9), rotary)
        plain._observer = self

    def observe(self, *seen: Any) -> None:
        self.tail.observe(*seen)
        self.again.observe(*seen)

    def fork(self, sequence: int, child: int) -> None:
        self.tail.fork(sequence, child)
        self.again.fork(sequence, child)

    def forget(self, sequence: int) -> None:
        self.tail.forget(sequence)
        self.again.forget(sequence)

    def packed(self, base: Sequences, method: SnapKV | Reread, tail: Sequence[int]) -> Tensor:
        """Logits of a tail behind a fork of sequence 0 that the method packed."""
        base.fork(0, 1)
        watch = self.again if isinstance(method, Reread) else self.tail
        watch.method = method
        self.runner._observer = watch
        base.pack(1, method.capacity)
        logits = base.run(1, tail, len(tail))
        self.runner._observer = self
        base.release(1)
        return logits


def formats(args: argparse.Namespace) -> Iterator[str]:
    """A row for each format, a text and a length after the other."""
    yield (
        f"SmolLM2-135M-Instruct in float32, keys and values in each format, the last {args.tail} tokens of "
        f"each text, {args.count} of each kind: perplexity, its change, KL, same likeliest token\n"
    )
    yield "| text | tokens | KV | bits a value | MB | perplexity | change | KL, nats | same token |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for source in args.texts:
        for length in args.lengths:
            yield from _formatted(source, length, args)


def _formatted(source: str, length: int, args: argparse.Namespace) -> Iterator[str]:
    """The rows of one kind of text and length: means over its texts."""
    results: dict[str, list[Quality]] = {name: [] for name in ("float32", *args.formats)}
    for text in passages(source, length, args.count, args.data):
        prompt, tail = text[: length - args.tail], text[length - args.tail :]
        full = behind(prompt, tail, "float32", args.data).log_softmax(-1)
        own = peer_logits(text, args.tail, "F32").log_softmax(-1) if PEERS.keys() & results else full
        for name, some in results.items():
            if name in PEERS:
                some.append(quality(peer_logits(text, args.tail, name.split()[1]), tail, own))
                continue
            some.append(
                quality(full if name == "float32" else behind(prompt, tail, name, args.data), tail, full)
            )
            print(source, length, name, some[-1], file=sys.stderr, flush=True)
    base = _mean(results["float32"])
    for name, some in results.items():
        mean = _mean(some)
        bits, total = stored(name, length, args.data)
        change = f"{100 * (mean.perplexity / base.perplexity - 1):+.2f} %"
        numbers = f"{mean.perplexity:.2f} | {change} | {mean.kl:.5f} | {mean.top:.0%}"
        yield f"| {source} | {length:,} | {name} | {bits:.1f} | {total / 1e6:.1f} | {numbers} |"


def behind(prompt: Sequence[int], tail: Sequence[int], kv_dtype: str, data: Path = DATA) -> Tensor:
    """Logits of a tail behind a prompt whose keys and values are kept in a format."""
    alone = Sequences(runner(len(prompt) + len(tail), kv_dtype, data=data))
    alone.read(0, prompt)
    return alone.run(0, tail, len(tail))


def peer_logits(text: Sequence[int], tail: int, cache: str) -> Tensor:
    """Logits of a text's tail by llama.cpp, its keys and values kept in one of its types."""
    with tempfile.TemporaryDirectory() as folder:
        peer = LlamaCpp(file=str(peer_file()), threads=torch.get_num_threads(), cache=cache)
        file = Path(folder) / "logits.npy"
        peer.ask({"score": list(text), "to": str(file), "last": tail})
        peer.close()
        return torch.from_numpy(np.load(file))


@functools.cache
def peer_file() -> Path:
    """The model for llama.cpp, every matrix in float16, which holds what its file has."""
    file = cache_folder() / "real" / "smollm2-f16.gguf"
    if not file.exists():
        attar.export(MODEL, file, format="gguf", type="F16", progress=False)
    return file


def stored(name: str, length: int, data: Path = DATA) -> tuple[float, int]:
    """(bits of a number, bytes of a text) of keys and values in whole blocks."""
    config = open_checkpoint(MODEL).config
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if name in PEERS:
        return PEERS[name], round(PEERS[name] / 8 * 2 * layers * heads * dim * length)
    formats = calibrated_basis(data, CALIBRATED[name]).formats if CALIBRATED.get(name) else ()
    shapes = [LayerShape(heads, dim, int4=four) for four in formats or ("int4",) * layers]
    block = block_bytes(shapes, name.split()[0], BLOCK)
    return 8 * block / (2 * layers * heads * dim * BLOCK), block * -(-length // BLOCK)


def needle(args: argparse.Namespace) -> Iterator[str]:
    """Right answers: a row for each method, a column for each share."""
    tokenizer = load_tokenizer(MODEL)
    stream, vocabulary = tokenizer(_python())["input_ids"], tokenizer.get_vocab()

    def encode(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    right: dict[tuple[str, float], int] = {}
    for seed in range(args.cases):
        case = hidden(encode, vocabulary, stream, args.prompt, seed)
        for key, logits in tails(case.prompt, case.given, args.methods, args.shares).items():
            right[key] = right.get(key, 0) + (int(logits[-1][list(case.words)].argmax()) == 0)
        print(f"case {seed}: {right}", file=sys.stderr, flush=True)
    yield (
        f"{args.cases} needles in {args.prompt:,} tokens of code, chance {100 / RIVALS:.0f} %: right "
        f"answers, per cent; {100 * right['everything', 1.0] / args.cases:.0f} with everything kept\n"
    )
    yield f"| kept | {' | '.join(f'{share:.0%}' for share in args.shares)} |"
    yield f"|---|{'---:|' * len(args.shares)}"
    for name in args.methods:
        cells = (f"{100 * right[name, share] / args.cases:.0f}" for share in args.shares)
        yield f"| {name} | {' | '.join(cells)} |"


def recall(args: argparse.Namespace) -> Iterator[str]:
    """Right answers to needles: a row for each format."""
    tokenizer = load_tokenizer(MODEL)
    stream, vocabulary = tokenizer(_python())["input_ids"], tokenizer.get_vocab()
    names = ["float32", *(name for name in args.formats if name not in PEERS)]
    right = dict.fromkeys(names, 0)
    for seed in range(args.cases):
        case = hidden(lambda text: list(tokenizer(text)["input_ids"]), vocabulary, stream, args.prompt, seed)
        for name in names:
            logits = behind(case.prompt, case.given, name, args.data)
            right[name] += int(logits[-1][list(case.words)].argmax()) == 0
        print(f"case {seed}: {right}", file=sys.stderr, flush=True)
    yield f"{args.cases} needles in {args.prompt:,} tokens of code, chance {100 / RIVALS:.0f} %\n"
    yield "| KV | right |"
    yield "|---|---:|"
    yield from (f"| {name} | {count} |" for name, count in right.items())


TABLES = {"formats": formats, "eviction": eviction, "needle": needle, "recall": recall}

if __name__ == "__main__":
    print(kv(sys.argv[1:]))
