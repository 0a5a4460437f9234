"""POST /v1/completions: from a checked body to a running request, and the JSON of its responses; and what
other endpoints share with it.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from attar.runtime.results import Event, FinishReason, Sample, TokenLogprob, gather
from attar.serving.http.bodies import FinishReasonBody, token_sources
from attar.serving.http.errors import ApiError
from attar.serving.http.protocol import CompletionRequest, SamplingRequest
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import ALIVE, DONE, SSE, respond, sse_event
from attar.serving.http.sampling_params import completion_params
from attar.serving.http.service import Service
from attar.serving.http.tokenizer import ServerTokenizer

MIN_LOGPROB = -9999.0  # OpenAI's value for a probability of 0: JSON has no infinity


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Complete one or several prompts."""
    start = monotonic()
    params = completion_params(body, service.defaults)
    params.fit(service.backend.vocabulary)
    prompts = body.prompts
    if len(prompts) > service.settings.max_prompts:
        message = f"{len(prompts)} prompts in one request; the limit is {service.settings.max_prompts}"
        raise ApiError(400, message, param="prompt", code="too_many_prompts")
    completions = service.check_completions(len(prompts), params.n)
    with service.admission.preparing(completions, service.caller(request)):
        keep = service.kept_tokens(body.truncate_prompt_tokens, params)
        ids = [await _token_ids(service, prompt, keep) for prompt in prompts]
        echoes = await service.threads.run_small(_echoes, service, body)
        handler = RequestHandler(service, request, "cmpl", params, ids, priority=body.priority, start=start)
        await handler.submit()
    return await respond(handler, partial(CompletionBuilder, body, handler, echoes), stream=body.stream)


async def _token_ids(service: Service, prompt: str | list[int], keep: int | None) -> list[int]:
    if isinstance(prompt, str):
        return await service.encode(prompt, keep=keep)
    return service.check_prompt(prompt if keep is None else prompt[-keep:])


def _echoes(service: Service, body: CompletionRequest) -> list[str]:
    """The text before each prompt's completions: the prompt with ``echo``, else nothing."""
    if not body.echo:
        return [""] * len(body.prompts)
    return [
        prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt) for prompt in body.prompts
    ]


class BodyBuilder:
    """What completions and chat completions share: the first fields of a body or chunk, and the usage."""

    body_kind: str
    chunk_kind: str
    alive, done, media_type = ALIVE, DONE, SSE
    write = staticmethod(sse_event)

    def __init__(self, body: SamplingRequest, handler: RequestHandler) -> None:
        self._handler, self._tokenizer = handler, handler.service.tokenizer
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunk with the usage, where it was requested."""
        if not self._include_usage:
            return []
        return [self._head(self.chunk_kind) | {"choices": [], "usage": self._usage()}]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The chunk of an error."""
        return error.body

    def _complete_body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head(self.body_kind) | {"choices": choices, "usage": self._usage()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk; with ``usage: null`` where the last chunk has the usage."""
        return (
            self._head(self.chunk_kind)
            | {"choices": [choice]}
            | ({"usage": None} if self._include_usage else {})
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._handler.id,
            "object": kind,
            "created": self._handler.created,
            "model": self._handler.service.model,
        }

    def _completion_tokens(self) -> int:
        return self._handler.completion_tokens

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._handler.prompt_tokens, self._completion_tokens()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._handler.cached_tokens},
        } | (
            {"lossy": True} if self._handler.lossy else {}
        )  # typical acceptance: not the model's distribution


class CompletionBuilder(BodyBuilder):
    """JSON of /v1/completions.

    Args:
        echoes: the text before each prompt's completions.
    """

    body_kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionRequest, handler: RequestHandler, echoes: list[str]) -> None:
        super().__init__(body, handler)
        self._echoes, self._echo = echoes, bool(body.echo)
        self._logprobs, self._scores_only = body.logprobs is not None, body.max_tokens == 0
        self._offsets: dict[int, TextOffsets] = {}  # of each choice that has begun

    def body(self, events: list[list[Event]]) -> dict[str, Any]:
        """The whole body, from the events of each choice."""
        return self._complete_body([self._choice(choice, events) for choice in range(len(events))])

    def chunks(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """The chunk of an event; none where it shows nothing."""
        text = event.text
        if choice not in self._offsets:
            shown = not self._handler.params.skip_special_tokens
            self._offsets[choice] = TextOffsets(self._tokenizer, special=shown)
            text = self._echoes[self._prompt_index(choice)] + text
        if not (text or event.logprobs or event.proposers or event.finished):
            return []
        logprobs = None
        if event.logprobs:
            offsets = self._offsets[choice]
            logprobs = completion_logprobs(event.logprobs, event.token_ids, self._tokenizer, offsets)
        reasons = finish_reasons(event.finish_reason, event.stop_reason)
        sources = token_sources(event.token_ids, event.proposers)
        return [self._chunk({"index": choice, "text": text, "logprobs": logprobs} | reasons | sources)]

    def _completion_tokens(self) -> int:
        return 0 if self._scores_only else super()._completion_tokens()

    def _prompt_index(self, choice: int) -> int:
        return choice // self._handler.params.n

    def _choice(self, choice: int, events: list[list[Event]]) -> dict[str, Any]:
        sample = gather(events[choice], logprobs=self._logprobs)
        if self._scores_only:
            empty: Any = {"text": "", "token_ids": (), "logprobs": (), "proposers": ()}
            sample = replace(sample, **empty, finish_reason="length")
        index, logprobs = self._prompt_index(choice), None
        if self._logprobs:
            ids, scores = list(sample.token_ids), list[TokenLogprob | None](sample.logprobs or ())
            if self._echo:
                ids = self._handler.prompts[index] + ids
                scores = [*_prompt_logprobs(events[index * self._handler.params.n]), *scores]
            offsets = TextOffsets(self._tokenizer, self._echoes[index] + sample.text)
            logprobs = completion_logprobs(scores, ids, self._tokenizer, offsets)
        head = {"index": choice, "text": self._echoes[index] + sample.text, "logprobs": logprobs}
        return head | finish_reasons(sample.finish_reason, sample.stop_reason) | sources_of(sample)


def finish_reasons(finish: FinishReason | None, stop: str | int | None) -> dict[str, Any]:
    """``finish_reason`` as at OpenAI, where whatever cuts a completion short is ``length``, and
    ``stop_reason`` as in vLLM: the stop string or token, or attar's reason where OpenAI has none."""
    reason: FinishReasonBody | None = None if finish is None else "stop" if finish == "stop" else "length"
    return {"finish_reason": reason, "stop_reason": finish if finish in ("deadline", "capacity") else stop}


def sources_of(sample: Sample) -> dict[str, Any]:
    """Who proposed the tokens of a completion, where that was asked for."""
    return token_sources(sample.token_ids, sample.proposers)


def _prompt_logprobs(events: list[Event]) -> tuple[TokenLogprob | None, ...]:
    return next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), ())


class TextOffsets:
    """Where tokens begin in their text, in characters; a token with the rest of a character begins with it.

    Args:
        text: all of it, which tells the tokens that it leaves out; None: not known yet.
        special: special tokens are in a text that is not known.
    """

    def __init__(self, tokenizer: ServerTokenizer, text: str | None = None, special: bool = False) -> None:
        self._tokenizer, self._text, self._special = tokenizer, text, special
        self._offset, self._decoder = 0, getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> int:
        """The offset of the next token."""
        offset, (name, raw) = self._offset, self._tokenizer.piece(token)
        if self._text is not None and not offset and name[:1] == " " and self._text[:1] != " ":
            raw = raw[1:]  # the blank that a text's first word does not get
        if self._tokenizer.special_token(name) != token or self._shows(name):
            self._offset += len(self._decoder.decode(raw))
        return offset

    def _shows(self, name: str) -> bool:
        return self._special if self._text is None else self._text.startswith(name, self._offset)


def completion_logprobs(
    scores: Sequence[TokenLogprob | None],
    ids: Sequence[int],
    tokenizer: ServerTokenizer,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion.

    Args:
        scores: one for each token; None for the first token of a prompt.
        offsets: of the text, which has come up to these tokens.
    """
    return {
        "tokens": [token_name(tokenizer, token) for token in ids],
        "token_logprobs": [None if score is None else max(score.logprob, MIN_LOGPROB) for score in scores],
        "top_logprobs": [None if score is None else _top_logprobs(score, tokenizer) for score in scores],
        "text_offset": [offsets.add(token) for token in ids],
    }


def token_name(tokenizer: ServerTokenizer, token: int) -> str:
    """A token as a string: its text, or its bytes where they are not valid text."""
    text, raw = tokenizer.piece(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _top_logprobs(score: TokenLogprob, tokenizer: ServerTokenizer) -> dict[str, float]:
    """The likeliest tokens and the token itself; of two with one name the likelier stays."""
    logprobs: dict[str, float] = {}
    for token, logprob in (*score.top, (score.token, score.logprob)):
        logprobs.setdefault(token_name(tokenizer, token), max(logprob, MIN_LOGPROB))
    return logprobs
