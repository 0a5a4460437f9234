"""From a request's fields to ``SamplingParams``; absent fields keep the model's defaults, or OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attar.errors import SettingsError
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
)

_UNCHANGED = (
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
_NONE: Mapping[str, Any] = {}
_MIN_TOP_P = 1e-9  # top_p 0 keeps the likeliest token, as elsewhere


def completion_params(body: CompletionRequest, defaults: Mapping[str, Any] = _NONE) -> SamplingParams:
    """Of /v1/completions; with ``echo`` the prompt's log-probabilities are computed too.

    Args:
        defaults: of fields that the request does not have.

    Raises:
        SettingsError: fields that do not go together.
    """
    # max_tokens 0 only scores the prompt: one token is generated, and not returned
    tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    return SamplingParams(
        **_shared_fields(body, defaults),
        max_tokens=tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def chat_params(body: ChatRequest, defaults: Mapping[str, Any] = _NONE) -> SamplingParams:
    """Of /v1/chat/completions; without a limit the completion may fill the context.

    Args:
        defaults: of fields that the request does not have.

    Raises:
        SettingsError: fields that do not go together.
    """
    return SamplingParams(
        **_shared_fields(body, defaults),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _shared_fields(body: SamplingRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in _UNCHANGED if getattr(body, name) is not None}
    fields = {**defaults, **given}
    if body.top_p is not None:
        fields["top_p"] = max(body.top_p, _MIN_TOP_P)
    fields["stop_ids"] = tuple(body.stop_token_ids or ())
    if body.top_k is not None:
        fields["top_k"] = max(body.top_k, 0)  # vLLM's -1 keeps all, as 0 does
    fields["include_stop"] = bool(body.include_stop_str_in_output)
    fields["proposers"] = body.attar is not None and bool(body.attar.tokens)
    fields["seed"] = None if body.seed is None else body.seed % 2**64
    if body.response_format is not None:
        fields["json_schema"] = body.response_format.schema_text()
    if body.structured_outputs is not None:
        for name, text in body.structured_outputs.guide().items():
            if fields.get(name) is not None:
                raise SettingsError("structured_outputs", "given", f"alone, without another {name}")
            fields[name] = text
    return fields
