"""Run by the Python of llama-cpp-python's environment: what llama.cpp makes of texts.

Standard input: a JSON list of {"path": a GGUF file, "texts": hexadecimal UTF-8}. Standard output: for each
file what :func:`answer` returns, null for one that llama.cpp does not load.
"""

import ctypes
import json
import os
import sys

import llama_cpp


def tokenize(vocab, text, special, parse):
    room = len(text) + 16
    buffer = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocab, text, len(text), buffer, room, special, parse)
    return list(buffer[:count])


def detokenize(vocab, ids):
    room = 64 + 64 * len(ids)
    buffer = ctypes.create_string_buffer(room)
    tokens = (llama_cpp.llama_token * len(ids))(*ids)
    count = llama_cpp.llama_detokenize(vocab, tokens, len(ids), buffer, room, False, True)
    return buffer.raw[:count].hex()


def pieces(vocab, ids):
    buffer = ctypes.create_string_buffer(512)
    actual = b""
    for token in ids:
        count = llama_cpp.llama_token_to_piece(vocab, token, buffer, 512, 0, True)
        actual += buffer.raw[:count]
    return actual.hex()


def answer(vocab, texts):
    count = llama_cpp.llama_vocab_n_tokens(vocab)
    actual = {
        "tokens": count,
        "ends": [token for token in range(count) if llama_cpp.llama_vocab_is_eog(vocab, token)],
        **{
            role: getattr(llama_cpp, f"llama_vocab_{role}")(vocab)
            for role in ("bos", "eos", "eot", "pad", "sep")
        },
        "texts": [],
    }
    for text in texts:
        parsed = tokenize(vocab, text, False, True)
        actual["texts"].append(
            {
                "plain": tokenize(vocab, text, False, False),
                "parsed": parsed,
                "added": tokenize(vocab, text, True, True),
                "detokenized": detokenize(vocab, parsed),
                "pieces": pieces(vocab, parsed),
            }
        )
    return actual


def main():
    out = os.dup(1)
    os.dup2(2, 1)
    llama_cpp.llama_backend_init()
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    results = []
    for job in json.load(sys.stdin):
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(job["path"].encode(), settings)
        texts = [bytes.fromhex(text) for text in job["texts"]]
        results.append(answer(llama_cpp.llama_model_get_vocab(model), texts) if model else None)
    os.write(out, json.dumps(results).encode())


main()
