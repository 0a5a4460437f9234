"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from attar.runtime.results import Event, TokenLogprob, gather
from attar.runtime.server.backend import Words
from attar.runtime.server.errors import ApiError
from attar.runtime.server.protocol import ChatRequest, CompletionRequest, head, reason, usage, why
from attar.runtime.server.request_handler import RequestHandler
from attar.runtime.server.sampling_params import chat_params, completion_params
from attar.runtime.server.service import Service

KIND = "text_completion"


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    start = monotonic()
    service.check_model(body.model)
    params = service.params(completion_params, body)
    prompts = body.prompts
    if len(prompts) > service.settings.max_prompts:
        message = f"{len(prompts)} prompts in one request; the limit is {service.settings.max_prompts}"
        raise ApiError(400, message, param="prompt", code="too_many_prompts")
    texts = service.check_texts(len(prompts), params.n)
    with service.gate.entering(texts, service.caller(request)):
        ids = [await _tokens(service, prompt) for prompt in prompts]
        echoes = await service.lanes.small(_echoes, service, body)
        flow = await service.start(request, "cmpl", params, ids, priority=body.priority, start=start)
    answer = CompletionResponse(service, body, flow, ids, echoes)
    if not body.stream:
        return await service.whole(flow, answer.whole)
    return await service.streamed(flow, answer.chunks, answer.end)


async def _tokens(service: Service, prompt: str | list[int]) -> list[int]:
    return await service.tokens(prompt) if isinstance(prompt, str) else service.check_prompt(prompt)


def _echoes(service: Service, body: CompletionRequest) -> list[str]:
    """What stands in front of each prompt's texts: the prompt, where the request wants it."""
    if not body.echo:
        return [""] * len(body.prompts)
    return [each if isinstance(each, str) else service.words.decode(each) for each in body.prompts]


class CompletionResponse:
    """One answer while it is made.

    Args:
        prompts: token ids.
        echoes: the text in front of each prompt's texts.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        flow: RequestHandler,
        prompts: list[list[int]],
        echoes: list[str],
    ) -> None:
        self._service, self._body, self._flow = service, body, flow
        self._prompts, self._echoes = prompts, echoes
        self._scores_only = body.max_tokens == 0
        self._offsets: dict[int, int] = {}  # characters shown of a choice; absent: it has not begun

    def whole(self, events: list[list[Event]]) -> dict[str, Any]:
        """The body."""
        choices = [self._choice(index, mine, events) for index, mine in enumerate(events)]
        return self._head() | {"choices": choices, "usage": self._usage()}

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """What an event shows."""
        text = event.text
        if index not in self._offsets:
            self._offsets[index] = 0
            text = self._echo(index) + text
        if not text and not event.logprobs and not event.finished:
            return []
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if event.logprobs:
            offset = self._offsets[index]
            choice["logprobs"] = self._scores(event.logprobs, event.token_ids, offset)
        self._offsets[index] += len(text)
        choice |= {
            "finish_reason": reason(event.finish_reason),
            "stop_reason": why(event.finish_reason, event.stop_reason),
        }
        return [self._head() | {"choices": [choice]} | self._no_usage()]

    def end(self) -> list[dict[str, Any]]:
        """The chunk behind the last text: the usage, where it is asked for."""
        return [self._head() | {"choices": [], "usage": self._usage()}] if self._no_usage() else []

    def _choice(self, index: int, mine: list[Event], events: list[list[Event]]) -> dict[str, Any]:
        wanted = self._body.logprobs is not None
        sample = gather(mine, logprobs=wanted)
        if self._scores_only:
            sample = replace(sample, text="", token_ids=(), logprobs=(), finish_reason="length")
        echo = self._echo(index)
        scores = None
        if wanted:
            ids, scored = list(sample.token_ids), list(sample.logprobs or ())
            if self._body.echo:
                place = index // self._flow.params.n
                ids = self._prompts[place] + ids
                scored = [*_of_prompt(events[place * self._flow.params.n]), *scored]  # type: ignore[list-item]
            scores = self._scores(scored, ids, 0)
        return {
            "index": index,
            "text": echo + sample.text,
            "logprobs": scores,
            "finish_reason": reason(sample.finish_reason),
            "stop_reason": why(sample.finish_reason, sample.stop_reason),
        }

    def _scores(self, scored: Any, ids: Any, offset: int) -> dict[str, Any]:
        return of_completion(scored, ids, self._service.words, offset)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._flow.params.n]

    def _head(self) -> dict[str, Any]:
        return head(self._flow.id, KIND, self._service.model, self._flow.created)

    def _usage(self) -> dict[str, Any]:
        completion = 0 if self._scores_only else self._flow.completion_tokens
        return usage(self._flow.prompt_tokens, completion, self._flow.cached_tokens)

    def _no_usage(self) -> dict[str, Any]:
        """``usage: null`` in every chunk but the last, where the last will have it."""
        options = self._body.stream_options
        return {"usage": None} if options is not None and options.include_usage else {}


def _of_prompt(events: list[Event]) -> tuple[TokenLogprob | None, ...]:
    return next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), ())


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    start = monotonic()
    service.check_model(body.model)
    params = service.params(chat_params, body)
    with service.gate.entering(service.check_texts(1, params.n), service.caller(request)):
        ids = await service.chat_tokens(body.messages)
        flow = await service.start(request, "chatcmpl", params, [ids], priority=body.priority, start=start)
    answer = ChatResponse(service, body, flow)
    if not body.stream:
        return await service.whole(flow, answer.whole)
    return await service.streamed(flow, answer.chunks, answer.end)


class ChatResponse:
    """One answer while it is made."""

    def __init__(self, service: Service, body: ChatRequest, flow: RequestHandler) -> None:
        self._service, self._body, self._flow = service, body, flow
        self._begun: dict[int, bool] = {}  # choices whose role has been said

    def whole(self, events: list[list[Event]]) -> dict[str, Any]:
        """The body."""
        choices = [self._choice(index, mine) for index, mine in enumerate(events)]
        return self._head("chat.completion") | {"choices": choices, "usage": self._usage()}

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """What an event shows: the role once, the text, and the reason in a chunk of its own."""
        made = []
        if not self._begun.get(index):
            self._begun[index] = True
            made.append(self._chunk(index, {"role": "assistant", "content": "", "refusal": None}))
        if event.text or event.logprobs:
            scores = of_chat(event.logprobs, self._service.words) if event.logprobs else None
            made.append(self._chunk(index, {"content": event.text}, scores))
        if event.finished:
            last = self._chunk(index, {})
            last["choices"][0]["finish_reason"] = reason(event.finish_reason)
            last["choices"][0]["stop_reason"] = why(event.finish_reason, event.stop_reason)
            made.append(last)
        return made

    def end(self) -> list[dict[str, Any]]:
        """The chunk behind the last text: the usage, where it is asked for."""
        last = self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage()}
        return [last] if self._no_usage() else []

    def _choice(self, index: int, events: list[Event]) -> dict[str, Any]:
        sample = gather(events, logprobs=bool(self._body.logprobs))
        scores = of_chat(sample.logprobs or (), self._service.words) if self._body.logprobs else None
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": scores,
            "finish_reason": reason(sample.finish_reason),
            "stop_reason": why(sample.finish_reason, sample.stop_reason),
        }

    def _chunk(self, index: int, delta: dict[str, Any], scores: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": None}
        return self._head("chat.completion.chunk") | {"choices": [choice]} | self._no_usage()

    def _head(self, kind: str) -> dict[str, Any]:
        return head(self._flow.id, kind, self._service.model, self._flow.created)

    def _usage(self) -> dict[str, Any]:
        return usage(self._flow.prompt_tokens, self._flow.completion_tokens, self._flow.cached_tokens)

    def _no_usage(self) -> dict[str, Any]:
        """``usage: null`` in every chunk but the last, where the last will have it."""
        options = self._body.stream_options
        return {"usage": None} if options is not None and options.include_usage else {}


LEAST = -9999.0  # OpenAI's sign of a probability of 0: JSON has no infinity


def of_chat(scored: Sequence[TokenLogprob], words: Words) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    content = [
        _entry(words, each.token, each.logprob)
        | {"top_logprobs": [_entry(words, token, logprob) for token, logprob in each.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


def of_completion(
    scored: Sequence[TokenLogprob | None], ids: Sequence[int], words: Words, offset: int
) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion.

    Args:
        scored: one for each token; None for a first token, which follows nothing.
        ids: the tokens.
        offset: characters of the text before them.
    """
    names = [name(words, token) for token in ids]
    offsets = []
    for word in names:
        offsets.append(offset)
        offset += len(word)
    return {
        "tokens": names,
        "token_logprobs": [None if each is None else max(each.logprob, LEAST) for each in scored],
        "top_logprobs": [None if each is None else _top(each, words) for each in scored],
        "text_offset": offsets,
    }


def name(words: Words, token: int) -> str:
    """A token in one string: its text, or its bytes where they are not text."""
    text, raw = words.piece(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _top(each: TokenLogprob, words: Words) -> dict[str, float]:
    """The likeliest and the token itself; of two with one name the likelier stays."""
    found: dict[str, float] = {}
    for token, logprob in (*each.top, (each.token, each.logprob)):
        found.setdefault(name(words, token), max(logprob, LEAST))
    return found


def _entry(words: Words, token: int, logprob: float) -> dict[str, Any]:
    text, raw = words.piece(token)
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}
