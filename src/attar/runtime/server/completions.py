"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from attar.runtime.results import Event, TokenLogprob, gather
from attar.runtime.server.answers import head, reason, usage, why
from attar.runtime.server.chosen import completion_params
from attar.runtime.server.failures import ApiError
from attar.runtime.server.flow import RequestHandler
from attar.runtime.server.logprobs import of_completion
from attar.runtime.server.protocol import CompletionRequest
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
