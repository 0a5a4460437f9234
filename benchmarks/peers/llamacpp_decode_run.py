"""Times llama.cpp's decoding, inside the environment of llama-cpp-python: one process that answers requests.

    python llamacpp_decode_run.py '{"shape": {...}, "type": "Q4_0", "threads", "context", "clock"}'
    python llamacpp_decode_run.py '{"file": "model.gguf", "threads", "clock", "cache": "Q4_0"}'

The model is a GGUF file, or a Llama (with experts an OLMoE) of random weights, every matrix of one type but
the routers, written to a temporary file that is gone once it is loaded. Keys and values are of type "cache",
F16 where it is not given. Seconds are those of the wall, or of this process ("clock": "cpu"). Every line of
the standard input is a request, answered by a line {"seconds"}:

    {"count", "start", "tokens"}    steps of one token for each of `count` sequences, from position
                                    `start` on, behind a prompt that is not timed
    {"prompt"}                      a prompt of this many tokens
    {"score", "to", "last"}         logits float32 of these tokens, or of the last ones, to a file of numpy
    {"greedy", "tokens", "end"}     at most this many greedy tokens after these; answered by {"ids"}
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as api
import numpy as np

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BATCH = 512  # tokens of a prompt at a time, llama.cpp's own default


def write_model(shape: dict[str, int], kind: str, context: int, file: Path) -> None:
    """A Llama; matrices of the same shape share their numbers, for time does not depend on them."""
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    kv_heads, inner, vocabulary = (
        shape["num_key_value_heads"],
        shape["intermediate_size"],
        shape["vocab_size"],
    )
    kv = hidden // heads * kv_heads
    experts = shape.get("num_experts", 0)
    writer = gguf.GGUFWriter(file, "olmoe" if experts else "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(shape["num_experts_per_tok"])
    writer.add_tokenizer_model("no_vocab")
    matrix = matrices(kind)
    ones = np.ones(hidden, dtype=np.float32)

    def put(name: str, rows: int, columns: int, count: int = 0) -> None:
        data, type_ = matrix(rows, columns, count)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=type_)

    put("token_embd", vocabulary, hidden)
    put("output", vocabulary, hidden)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(layers):
        for name, rows in {"attn_q": hidden, "attn_k": kv, "attn_v": kv, "attn_output": hidden}.items():
            put(f"blk.{layer}.{name}", rows, hidden)
        ending = "_exps" if experts else ""
        for name in ("ffn_gate", "ffn_up"):
            put(f"blk.{layer}.{name}{ending}", inner, hidden, experts)
        put(f"blk.{layer}.ffn_down{ending}", hidden, inner, experts)
        norms = {"attn_norm": ones, "ffn_norm": ones}
        if experts:
            norms |= {"attn_q_norm": ones, "attn_k_norm": ones}  # of all heads, as many as queries have
            router = np.random.default_rng(layer).standard_normal((experts, hidden), dtype=np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router * 0.02)
        for name, weight in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def matrices(kind: str) -> Any:
    """A function (rows, columns, count) -> (data, type) of N(0, 0.02^2) in a type, each shape made once; with
    a count so many matrices stacked."""
    matrices: dict[tuple[int, int, int], tuple[Any, Any]] = {}
    type_ = gguf.GGMLQuantizationType[kind]

    def matrix(rows: int, columns: int, count: int) -> tuple[Any, Any]:
        key = rows, columns, count
        if key not in matrices:
            numbers = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32) * 0.02
            data = gguf.quants.quantize(numbers, type_)
            matrices[key] = (np.stack([data] * count) if count else data), type_
        return matrices[key]

    return matrix


class Sequences:
    """A context of `count` sequences, filled up to a position once and cut back to it before every timing."""

    def __init__(
        self, model: Any, count: int, context: int, threads: int, clock: str, cache: str = ""
    ) -> None:
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = count * context, count
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        if cache:
            params.type_k = params.type_v = gguf.GGMLQuantizationType[cache]
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.count, self.filled, self.clock = count, 0, CLOCKS[clock]
        self.context = api.llama_init_from_model(model, params)
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        if not self.context:
            raise SystemExit("llama_init_from_model failed")

    def decode(self, tokens: list[tuple[int, int]], wants: bool = True) -> None:
        """Runs (sequence, position) pairs; the last token's logits, or with several sequences all of them."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for index, (sequence, position) in enumerate(tokens):
            batch.token[index] = position % 1000
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wants and (len(tokens) <= self.count or index + 1 == len(tokens))
        if api.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        if wants:
            api.llama_get_logits_ith(self.context, -1)

    def read(self, ids: list[int], start: int, last: int = 0) -> Any:
        """Logits (len(ids), vocabulary) of tokens from a position on, or of the last ones."""
        logits = []
        for first in range(0, len(ids), BATCH):
            some = ids[first : first + BATCH]
            self.batch.n_tokens = len(some)
            for index, token in enumerate(some):
                self.batch.token[index], self.batch.pos[index] = token, start + first + index
                self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, 0
                self.batch.logits[index] = True
            if api.llama_decode(self.context, self.batch):
                raise SystemExit("llama_decode failed")
            rows = np.ctypeslib.as_array(api.llama_get_logits(self.context), (len(some), self.vocabulary))
            kept = max(first + len(some) - len(ids) + last, 0) if last else len(some)
            logits.append(rows[len(some) - min(kept, len(some)) :].copy())
        return np.concatenate(logits)

    def greedy(self, ids: list[int], tokens: int, end: int) -> list[int]:
        """The likeliest tokens, up to the end token."""
        self.cut(0)
        rows, generated = self.read(ids, 0), []
        while len(generated) < tokens and (token := int(rows[-1].argmax())) != end:
            generated.append(token)
            rows = self.read([token], len(ids) + len(generated) - 1)
        return generated

    def cut(self, length: int) -> None:
        """Forgets what is behind, or fills what is missing."""
        memory = api.llama_get_memory(self.context)
        for sequence in range(self.count):
            filled = self.filled
            if not api.llama_memory_seq_rm(memory, sequence, length, -1):  # states cannot go back
                api.llama_memory_seq_rm(memory, sequence, 0, -1)
                filled = 0
            for start in range(filled, length, BATCH):
                self.decode([(sequence, at) for at in range(start, min(start + BATCH, length))], wants=False)
        self.filled = length

    def steps(self, start: int, tokens: int) -> float:
        """Seconds of that many steps."""
        self.cut(start)
        began = self.clock()
        for at in range(start, start + tokens):
            self.decode([(sequence, at) for sequence in range(self.count)])
        return self.clock() - began

    def prompt(self, tokens: int) -> float:
        """Seconds of a prompt."""
        self.cut(0)
        began = self.clock()
        for start in range(0, tokens, BATCH):
            self.decode([(0, at) for at in range(start, min(start + BATCH, tokens))])
        self.filled = tokens if self.count == 1 else 0
        return self.clock() - began


def loaded(file: Path, repack: bool) -> Any:
    """The model of a file, in memory of its own; ``repack``: its weights in lanes for the machine."""
    params = api.llama_model_default_params()
    params.use_mmap, params.use_extra_bufts = False, repack
    model = api.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        raise SystemExit("llama_model_load_from_file failed")
    return model


def main() -> None:
    """Load, then answer."""
    job = json.loads(sys.argv[1])
    answer = os.dup(1)
    os.dup2(2, 1)
    silent = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(job.get("file") or Path(folder) / "model.gguf")
        if "shape" in job:
            write_model(job["shape"], job["type"], job["context"], file)
        model = loaded(file, job.get("repack", True))
    contexts: dict[tuple[int, int], Sequences] = {}
    os.write(answer, b'{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        count, start = request.get("count", 1), request.get("start", 0)
        given = request.get("score") or request.get("greedy") or []
        context = -(-(start + len(given) + request.get("tokens", request.get("prompt", 0)) + 1) // 256) * 256
        if (count, context) not in contexts:
            contexts[count, context] = Sequences(
                model, count, context, job["threads"], job.get("clock", "wall"), job.get("cache", "")
            )
        os.write(answer, (json.dumps(answered(contexts[count, context], request)) + "\n").encode())


def answered(sequences: Sequences, request: dict[str, Any]) -> dict[str, Any]:
    """To one request."""
    if "score" in request:
        sequences.cut(0)
        np.save(request["to"], sequences.read(request["score"], 0, request.get("last", 0)))
        return {}
    if "greedy" in request:
        return {"ids": sequences.greedy(request["greedy"], request["tokens"], request["end"])}
    if "prompt" in request:
        return {"seconds": sequences.prompt(request["prompt"])}
    return {"seconds": sequences.steps(request.get("start", 0), request["tokens"])}


if __name__ == "__main__":
    main()
