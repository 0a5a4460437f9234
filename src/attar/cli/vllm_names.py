"""Options of ``vllm serve`` on the command line of ``attar serve``: those that mean the same are read as
attar's, the others are answered in a line.

https://docs.vllm.ai/en/latest/cli/serve/
"""

from __future__ import annotations

from collections.abc import Sequence

SAME = {
    "--served-model-name": "--name",
    "--kv-cache-dtype": "--kv-dtype",
    "--tool-call-parser": "--tool-parser",
    "--lora-modules": "--lora",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
}
WORDS = {
    "--enable-prefix-caching": ("--prefix-cache", "on"),
    "--no-enable-prefix-caching": ("--prefix-cache", "off"),
    "--enable-auto-tool-choice": (),
    "--enable-log-requests": (),
}
"""Options without a value, and what they are here: tools are called where a request has some, and the log has
a line for each request."""

VALUES = {
    "--kv-dtype": {"fp8_e4m3": "fp8"},
    "--tool-parser": {
        "llama3_json": "llama3",
        "openai": "harmony",
        "qwen3_coder": "qwen_xml",
        "qwen3_xml": "qwen_xml",
    },
    "--reasoning-parser": {"deepseek_r1": "think", "qwen3": "think", "seed_oss": "seed"},
    "--dtype": {"half": "float16", "float": "float32"},
}
"""Values of attar's options, by vLLM's."""

ELSEWHERE = {
    "max_model_len": "the context is the model's; --kv-tokens bounds what the cache holds",
    "gpu_memory_utilization": "--kv-tokens says how much the cache holds, attar plan-kv what that takes",
    "max_num_seqs": "a line of the file of --limits has it, sequences",
    "max_num_batched_tokens": "a line of the file of --limits has it, step_tokens",
    "enable_chunked_prefill": "prompts are always read in chunks",
    "tensor_parallel_size": "attar's engine is one process; --engine 'vllm -tp 2': vLLM",
    "pipeline_parallel_size": "attar serves from one process",
    "quantization": "the model's own files say how it is quantized",
    "trust_remote_code": "attar runs no code of a checkpoint",
    "revision": "MODEL is written org/name@revision",
    "model": "MODEL comes first, without an option",
    "uds": "--host unix:PATH",
    "allowed_origins": "--cors-origin, once for each",
    "speculative_config": "--speculate says how tokens are drafted, --draft by which model",
    "enable_lora": "--lora NAME=PATH and --lora-folder say which adapters there are",
}
"""Options of vLLM that attar spells differently, with underscores."""


def with_our_names(words: Sequence[str]) -> list[str]:
    """The words of a command line, vLLM's options and values as attar's."""
    translated: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            translated.append(VALUES.get(option, {}).get(word, word))
            option = ""
            continue
        if not equals and name in WORDS:
            translated += WORDS[name]
            option = ""
            continue
        option = SAME.get(name, name)
        translated.append(f"{option}={VALUES.get(option, {}).get(value, value)}" if equals else option)
    return translated
