"""attar's settings as options of ``vllm serve``. Read: vLLM 0.33.0.

How a folder is quantized says its config, and vLLM reads it there: ``--quantization`` could only force a
slower kernel on it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.checkpoint.draft_head import MODEL_TYPE, draft_head_of
from attar.checkpoint.geometry import geometry
from attar.errors import ModelError, SettingsError
from attar.runtime.admission import Limits
from attar.serving.http.reasoning import TAGS
from attar.serving.http.settings import ServeCommand
from attar.serving.http.tool_calls import FORMATS

HEADS = ("dspark", "dflash", "eagle", "eagle3")
BLOCK = 16  # tokens of a block of the cache
DRAFTS = 4  # of a model or n-grams, where the number is not given
KV_TYPES = {
    "auto": "",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "fp8",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
}
"""vLLM's caches by attar's names."""
TOOLS = {
    "harmony": "openai",
    "hermes": "hermes",
    "llama3": "llama3_json",
    "mistral": "mistral",
    "pythonic": "pythonic",
    "qwen_xml": "qwen3_xml",
}
REASONING = {"think": "qwen3", "mistral": "mistral", "seed": "seed_oss"}
ALONE = ("runner", "activations", "weights", "eviction", "prefix_store")
"""Settings of attar's engine that vLLM has nothing for."""
OURS = ("--host", "--port", "--uds", "--api-key", "--served-model-name", "--ssl-keyfile", "--ssl-certfile")
"""Options that attar gives or takes the place of."""


def more_options(engine: str) -> list[str]:
    """What ``--engine "vllm ..."`` passes on.

    Raises:
        SettingsError: another engine, or an option that is attar's.
    """
    try:
        name, *words = shlex.split(engine)
    except ValueError:
        name, words = "", []
    reserved = [word for word in words if word.partition("=")[0] in OURS]
    if name != "vllm" or reserved:
        allowed = (
            f"without {reserved[0]}, which is attar's"
            if reserved
            else "attar, or vllm and options of its own"
        )
        raise SettingsError("engine", engine, allowed)
    return words


def vllm_options(command: ServeCommand, checkpoint: Checkpoint, template: str) -> list[str]:
    """The options for a command, without those of the socket.

    Args:
        template: words of the chat template.

    Raises:
        SettingsError: a setting that vLLM does not have; names it.
        ModelError: a draft head that vLLM does not read.
    """
    _refuse(command)
    options = command.options
    words = ["--served-model-name", command.settings.name or command.model]
    for name, value in _pairs(command, checkpoint):
        words += [f"--{name}", value]
    words += {None: [], True: ["--enable-prefix-caching"], False: ["--no-enable-prefix-caching"]}[
        options.get("prefix_cache")
    ]
    if command.settings.priority or command.settings.keys:
        words += ["--scheduling-policy", "priority"]
    if command.lora:
        adapters = [f"{name}={path}" for name, path in command.lora.paths.items()]
        words += ["--enable-lora", "--max-loras", str(command.lora.max_loras), "--lora-modules", *adapters]
    words += _parsers(command, template)
    return [*words, *more_options(command.settings.engine)]


def _refuse(command: ServeCommand) -> None:
    """Raise SettingsError for what vLLM does not have."""
    options, answers, engine = command.options, command.answers, "left out with --engine vllm"
    defaults = {"runner": "auto", "activations": "auto"}
    for name in ALONE:
        if options.get(name) not in (None, defaults.get(name)):
            raise SettingsError(name, options[name], engine)
    if options.get("verification") not in (None, "exact"):
        raise SettingsError("verification", options["verification"], f"exact, or {engine}")
    if str(options.get("device", "cpu")) not in ("cpu", "cuda"):
        raise SettingsError("device", options["device"], f"{engine}: CUDA_VISIBLE_DEVICES chooses")
    others = {
        "role": command.services.role,
        "draft_endpoint": command.services.draft_endpoint,
        "compare": command.settings.compare,
        "named_model": command.models.named_model,
        "model_folder": command.models.model_folder,
        "model_memory": command.models.model_memory,
        "lora_folder": command.lora.lora_folder,
        "pooling": command.embeddings.pooling.replace("auto", ""),
        "volatile_line": answers.volatile_line,
        "chat_template": answers.chat_template * (answers.chat_template == "plain"),
        "generation_config": answers.generation_config * (answers.generation_config not in ("auto", "none")),
    }
    for name, value in others.items():
        if value:
            raise SettingsError(name, value, engine)
    given, plain = options.get("limits") or Limits(), Limits()
    for field in fields(plain):
        value = getattr(given, field.name)
        if field.name not in ("sequences", "step_tokens") and value != getattr(plain, field.name):
            raise SettingsError(field.name, value, engine)


def _pairs(command: ServeCommand, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Options with a value."""
    options, answers = command.options, command.answers
    if (dtype := options.get("dtype", "auto")) != "auto":
        yield "dtype", dtype
    kv_dtype = options.get("kv_dtype", "auto")
    if kv_dtype not in KV_TYPES:
        raise SettingsError("kv_dtype", kv_dtype, f"{', '.join(KV_TYPES)} with --engine vllm")
    if KV_TYPES[kv_dtype]:
        yield "kv-cache-dtype", KV_TYPES[kv_dtype]
    if tokens := options.get("kv_tokens"):
        yield "block-size", str(BLOCK)
        yield "num-gpu-blocks-override", str(-(-tokens // BLOCK))
        context = geometry(checkpoint.config, "").context
        if context is None or tokens < context:
            yield "max-model-len", str(tokens)
    limits, plain = options.get("limits") or Limits(), Limits()
    if limits.sequences != plain.sequences:
        yield "max-num-seqs", str(limits.sequences)
    if limits.step_tokens != plain.step_tokens:
        yield "max-num-batched-tokens", str(limits.step_tokens)
    if answers.chat_template:
        yield "chat-template", answers.chat_template
    if answers.generation_config == "none":
        yield "generation-config", "vllm"
    if draft := speculation(options):
        yield "speculative-config", json.dumps(draft)


def _parsers(command: ServeCommand, template: str) -> Iterator[str]:
    """How calls and reasoning are read, by the template where they are not named."""
    tools, tags = command.answers.tool_parser, command.answers.reasoning_parser
    if tools == "auto":
        tools = next((name for name, form in FORMATS.items() if form.is_in(template)), "json")
    if tags == "auto":
        tags = next((name for name, (_, closing) in TAGS.items() if closing in template), "none")
    if tools not in TOOLS and command.answers.tool_parser != "auto":
        raise SettingsError("tool_parser", tools, f"{', '.join(TOOLS)} with --engine vllm")
    if tools in TOOLS:
        yield from ("--enable-auto-tool-choice", "--tool-call-parser", TOOLS[tools])
    if tools == "harmony":
        yield from ("--reasoning-parser", "openai_gptoss")
    elif tags in REASONING:
        yield from ("--reasoning-parser", REASONING[tags])


def speculation(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's ``--speculative-config``; empty: no drafts.

    Raises:
        SettingsError: a method that vLLM does not have.
        ModelError: a head in a layout that vLLM does not read.
    """
    method, draft, count = (options.get(name) for name in ("speculate", "draft", "drafts"))
    counted = {} if count is None else {"num_speculative_tokens": count}
    if draft is not None:
        return _drafter(draft) | counted
    known = {"ngram": DRAFTS, "mtp": 1, "suffix": None}
    if method is None:
        return {}
    if method not in known:
        raise SettingsError("speculate", method, f"{', '.join(known)} or a --draft with --engine vllm")
    default = {} if known[method] is None else {"num_speculative_tokens": known[method]}
    return {"method": method} | default | counted


def _drafter(draft: str) -> dict[str, Any]:
    """Of a draft model or head; as many drafts as the head was trained for, where it says so."""
    checkpoint = open_checkpoint(draft)
    head = draft_head_of(checkpoint.config, checkpoint.tensors)
    if head is None:
        return {"method": "draft_model", "model": str(checkpoint.path), "num_speculative_tokens": DRAFTS}
    kind = head["kind"]
    if kind not in HEADS:
        raise ModelError(f"{draft}: vLLM has no {kind} heads", hint=f"it has {', '.join(HEADS)}")
    if checkpoint.config.get("model_type") == MODEL_TYPE:
        format = "eagle" if kind == "eagle" else "speculators"
        hint = f"attar export {draft} -o OUT --format {format}, then --draft OUT"
        raise ModelError(f"{draft}: vLLM does not read attar's own layout of heads", hint=hint)
    drafts = head["drafts"] or DRAFTS
    return {"method": kind, "model": str(checkpoint.path), "num_speculative_tokens": drafts}
