"""From a request's fields to ``SamplingParams``: what is absent keeps OpenAI's default."""

from __future__ import annotations

from typing import Any

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
)

_SAME = (
    "n",
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "regex",
    "grammar",
)
_LEAST_MASS = 1e-9  # of the likeliest tokens: top_p 0 takes the likeliest, as elsewhere


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Of /v1/completions; with ``echo`` the prompt is scored as the text is.

    Raises:
        SettingsError: fields that do not go together.
    """
    scored = body.logprobs if body.echo else None
    # a prompt that is only scored makes a token all the same, which nobody sees
    tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    return SamplingParams(
        **sampling_fields(body), max_tokens=tokens, logprobs=body.logprobs, prompt_logprobs=scored
    )


def chat_params(body: ChatRequest) -> SamplingParams:
    """Of /v1/chat/completions; without a limit the answer may fill the context.

    Raises:
        SettingsError: fields that do not go together.
    """
    tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return SamplingParams(
        **sampling_fields(body),
        max_tokens=tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def sampling_fields(body: SamplingRequest) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.top_p is not None:
        given["top_p"] = max(body.top_p, _LEAST_MASS)
    given["stop_ids"] = tuple(body.stop_token_ids or ())
    given["top_k"] = max(body.top_k or 0, 0)  # vLLM's -1 keeps all, as 0 does
    given["seed"] = None if body.seed is None else body.seed % 2**64
    if body.response_format is not None:
        given["json_schema"] = body.response_format.schema_text()
    return given
