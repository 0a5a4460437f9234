"""Bodies of /completion and /infill, as llama.cpp's server documents them; unknown fields are noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from attar.runtime.sampling.params import MAX_LOGPROBS, MAX_N
from attar.serving.http.body_model import field_error
from attar.serving.http.llama_options import LlamaOptions, noted_fields

PromptPart = list[int | str]
"""A prompt: token ids and texts that follow each other."""

DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's, where neither the request nor the model's generation_config.json says anything."""
_MAX_BIASES = 300
_BANNED = -1e6


class LlamaCppBody(LlamaOptions):
    """What both endpoints share."""

    ANY_MEDIA_TYPE: ClassVar[bool] = True

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = Field(None, ge=-2, le=2**31)
    max_tokens: int | None = Field(None, ge=-1, le=2**31)  # another name of it
    n_cmpl: int | None = Field(None, ge=1, le=MAX_N)
    ignore_eos: bool | None = None
    logit_bias: list[Any] | dict[str, Any] | None = None
    n_probs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    post_sampling_probs: bool | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    return_tokens: bool | None = None

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, value: Any) -> Any:
        read_biases(value)
        return value

    @model_validator(mode="after")
    def _check_supported(self) -> LlamaCppBody:
        if self.grammar:
            reason = "a grammar in GBNF is not read; give json_schema, or Lark's grammar to /v1/completions"
            raise field_error("grammar", reason)
        if self.post_sampling_probs:
            raise field_error("post_sampling_probs", "probabilities are the model's own, before sampling")
        return self

    @property
    def ignored_fields(self) -> list[str]:
        """Names of the fields without an effect, for a header."""
        return noted_fields(self.model_extra)

    @property
    def most_tokens(self) -> int | None:
        """Of a completion; None: until the context is full; 0: the prompt is read, and nothing written."""
        most = self.max_tokens if self.n_predict is None else self.n_predict
        return None if most is None or most < 0 else most

    def all_fields(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Sampling parameters.

        Args:
            defaults: of the model.
        """
        given = {
            "ignore_eos": self.ignore_eos,
            "logit_bias": read_biases(self.logit_bias) or None,
            "logprobs": self.n_probs or None,
            "json_schema": self.json_schema,
            "n": self.n_cmpl,
        }
        named = {name: value for name, value in given.items() if value is not None}
        most = self.most_tokens
        limit = {"max_tokens": None if most is None else max(most, 1)}
        return {**DEFAULTS, **defaults, **self.sampling_fields(), **named, **limit}


class LlamaCppCompletionRequest(LlamaCppBody):
    """The body of POST /completion."""

    prompt: Any

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        read_prompts(prompt)
        return prompt

    @property
    def prompts(self) -> list[PromptPart]:
        """Each prompt."""
        return read_prompts(self.prompt)

    @property
    def single(self) -> bool:
        """Whether the answer is one object, and no list of them."""
        return self.n_cmpl in (None, 1) and not _is_list_of_prompts(self.prompt)


class ExtraFile(BaseModel):
    """A file that the model may read."""

    model_config = ConfigDict(strict=True)

    filename: str = ""
    text: str


class InfillRequest(LlamaCppBody):
    """The body of POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = Field(default_factory=list)
    prompt: str = ""


def read_prompts(prompt: Any) -> list[PromptPart]:
    """Prompts from a text, token ids, both mixed, an object with a text, or a list of these.

    Raises:
        ValueError: it is something else.
    """
    prompts = prompt if _is_list_of_prompts(prompt) else [prompt]
    if not prompts:
        raise ValueError("there is no prompt")
    return [_read_prompt(part) for part in prompts]


def read_biases(value: list[Any] | dict[str, Any] | None) -> dict[int, float]:
    """Token id to a number added to its logit, from pairs or an object; ``false`` bans a token.

    Raises:
        ValueError: it is something else.
    """
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    if len(pairs) > _MAX_BIASES:
        raise ValueError(f"{len(pairs):,} biases; the limit is {_MAX_BIASES}")
    biases: dict[int, float] = {}
    for pair in pairs:
        token, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
            token = int(token)
        number = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= -_BANNED
        if type(token) is not int or token < 0 or not (number or bias is False):
            raise ValueError("it is [[token id, number or false], ...]; texts are not read")
        biases[token] = _BANNED if bias is False else float(bias or 0)
    return biases


def _is_list_of_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt)


def _read_prompt(prompt: Any) -> PromptPart:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise ValueError("multimodal_data cannot be read: this model takes text alone")
        prompt = [text] if isinstance(text := prompt.get("prompt_string"), str) else None
    parts = prompt if isinstance(prompt, list) else [prompt]
    if not parts or not all(isinstance(part, str) or (type(part) is int and part >= 0) for part in parts):
        raise ValueError("it is a text, token ids from 0, or both in a list")
    return parts
