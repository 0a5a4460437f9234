"""POST /completion and /infill, GET /props and /slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.runtime.results import Event, TokenLogprob, Usage
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.endpoints import MIN_LOGPROB
from attar.serving.http.errors import ApiError
from attar.serving.http.infill import infill_ends, infill_prompt
from attar.serving.http.llama_cpp.protocol import (
    DEFAULTS,
    InfillRequest,
    LlamaCppBody,
    LlamaCppCompletionRequest,
    PromptPart,
)
from attar.serving.http.llama_options import llama_names
from attar.serving.http.model_table import ModelTable
from attar.serving.http.request_body import BodyRoute
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import ALIVE, SSE, respond, sse_event
from attar.serving.http.service import Service
from attar.serving.http.tool_calls.tool_use import knows_tools
from attar.version import __version__

LlamaCppChunk = dict[str, Any]
_SHOWN = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "ignore_eos"),
)


class LlamaCppOutput:
    """The answer to /completion and /infill.

    Args:
        prompts: text of each prompt.
        single: the answer is one object, and no list of them.
    """

    alive, done, media_type = ALIVE, b"", SSE
    write = staticmethod(sse_event)

    def __init__(
        self, body: LlamaCppBody, handler: RequestHandler, prompts: Sequence[str], single: bool
    ) -> None:
        self._handler, self._prompts, self._single = handler, prompts, single
        self._silent = body.most_tokens == 0
        self._tokens = bool(body.return_tokens) or bool(body.stream)
        self._scored = bool(body.n_probs)
        self._written: dict[int, int] = {}  # tokens of each choice
        self._lines: set[int] = set()  # choices with a line break
        self._usages: dict[int, Usage] = {}  # of each prompt

    def body(self, events: list[list[Event]]) -> Any:
        """The whole answer."""
        answers = []
        for choice, listed in enumerate(events):
            chunks = [self._chunk(choice, event) for event in listed]
            joined = {name: _joined(chunks, name) for name in ("content", "tokens")}
            if self._scored:
                joined["completion_probabilities"] = _joined(chunks, "completion_probabilities")
            answers.append(self._end(choice, listed[-1]) | joined)
        return answers[0] if self._single else answers

    def chunks(self, choice: int, event: Event) -> list[LlamaCppChunk]:
        """The chunk of an event, and that of the end."""
        chunk = self._chunk(choice, event)
        end = [self._end(choice, event)] if event.finished else []
        return [chunk, *end] if chunk["content"] or chunk["tokens"] else end

    def last_chunks(self) -> list[LlamaCppChunk]:
        """None: each completion has its own end."""
        return []

    def failure(self, error: ApiError) -> LlamaCppChunk:
        """The chunk of an error."""
        return error.body

    def _chunk(self, choice: int, event: Event) -> LlamaCppChunk:
        text, tokens = ("", ()) if self._silent else (event.text, event.token_ids)
        self._written[choice] = self._written.get(choice, 0) + len(tokens)
        if "\n" in text:
            self._lines.add(choice)
        if event.usage is not None:
            self._usages[choice // self._handler.params.n] = event.usage
        chunk = self._counts(choice) | {
            "content": text,
            "tokens": list(tokens) if self._tokens else [],
            "stop": False,
        }
        scores = event.logprobs if self._scored and not self._silent else ()
        return chunk | ({"completion_probabilities": self._scores(scores)} if scores else {})

    def _counts(self, choice: int) -> LlamaCppChunk:
        prompt = self._handler.prompts[choice // self._handler.params.n]
        counts = {"tokens_predicted": self._written[choice], "tokens_evaluated": len(prompt)}
        return {"index": choice, "id_slot": -1} | counts

    def _end(self, choice: int, event: Event) -> LlamaCppChunk:
        handler, index = self._handler, choice // self._handler.params.n
        context = handler.service.backend.context
        counts, usage = self._counts(choice), self._usages.get(index)
        length = counts["tokens_evaluated"] + counts["tokens_predicted"]
        word = event.stop_reason if isinstance(event.stop_reason, str) else ""
        stopped = event.finish_reason == "stop"
        return counts | {
            "content": "",
            "tokens": [],
            "stop": True,
            "model": handler.service.model,
            "prompt": self._prompts[index],
            "generation_settings": generation_settings(handler),
            "has_new_line": choice in self._lines,
            "truncated": not stopped and context is not None and length >= context,
            "stop_type": "limit" if not stopped else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": 0 if usage is None else usage.cached_tokens,
            "timings": {} if usage is None else timings(usage, counts["tokens_predicted"]),
        }

    def _scores(self, scores: Sequence[TokenLogprob]) -> list[LlamaCppChunk]:
        return [
            self._score(score.token, score.logprob)
            | {"top_logprobs": [self._score(token, logprob) for token, logprob in score.top]}
            for score in scores
        ]

    def _score(self, token: int, logprob: float) -> LlamaCppChunk:
        text, raw = self._handler.service.tokenizer.piece(token)
        return {"id": token, "token": text, "bytes": list(raw), "logprob": max(logprob, MIN_LOGPROB)}


def generation_settings(handler: RequestHandler) -> dict[str, Any]:
    """The parameters of a request, by llama.cpp's names."""
    params, service = handler.params, handler.service
    return {
        "n_ctx": service.backend.context or 0,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "stop": list(params.stop),
        **llama_names({name: getattr(params, name) for name in _SHOWN}),
        "n_probs": params.logprobs or 0,
    }


def timings(usage: Usage, written: int) -> dict[str, float]:
    """Tokens and milliseconds of prefill and decode.

    Args:
        written: tokens of this completion.
    """
    first = usage.total_s if usage.first_token_s is None else usage.first_token_s
    read = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        **_speed("prompt", read, first - (usage.queue_s or 0.0)),
        **_speed("predicted", written, usage.total_s - first),
    }


def _speed(part: str, tokens: int, seconds: float) -> dict[str, float]:
    seconds = max(seconds, 0.0)
    return {
        f"{part}_n": tokens,
        f"{part}_ms": seconds * 1000,
        f"{part}_per_token_ms": seconds * 1000 / tokens if tokens else 0.0,
        f"{part}_per_second": tokens / seconds if seconds else 0.0,
    }


def _joined(chunks: Sequence[LlamaCppChunk], name: str) -> Any:
    """Texts or lists of all chunks as one."""
    parts = [chunk[name] for chunk in chunks if name in chunk]
    return "".join(parts) if name == "content" else [item for part in parts for item in part]


_SLOTS = 1024  # of a list, at most


def make_llama_cpp_routes(models: ModelTable) -> APIRouter:
    """The paths, which are not in the published document."""
    router = APIRouter(route_class=BodyRoute, include_in_schema=False)

    @router.post("/completions")
    @router.post("/completion")
    async def llama_cpp_completion(body: LlamaCppCompletionRequest, request: Request) -> Response:
        return await complete(await models.use(body.model, request), body, request)

    @router.post("/infill")
    async def llama_cpp_infill(body: InfillRequest, request: Request) -> Response:
        return await infill(await models.use(body.model, request), body, request)

    @router.get("/props")
    async def llama_cpp_props() -> Response:
        return JSONResponse(properties(models.first))

    @router.get("/slots")
    async def llama_cpp_slots(fail_on_no_slot: str = "") -> Response:
        if fail_on_no_slot and not models.first.backend.stats().free:
            raise ApiError(503, "no slot available", code="busy", retry_s=1)
        return JSONResponse(slots(models.first))

    return router


async def complete(service: Service, body: LlamaCppCompletionRequest, request: Request) -> Response:
    """Complete one or several prompts."""
    start, prompts = monotonic(), body.prompts
    if len(prompts) > service.settings.max_prompts:
        message = f"{len(prompts)} prompts in one request; the limit is {service.settings.max_prompts}"
        raise ApiError(400, message, param="prompt", code="too_many_prompts")
    params = _params(service, body)
    with service.admission.preparing(
        service.check_completions(len(prompts), params.n), service.caller(request)
    ):
        ids = [await _encode(service, prompt) for prompt in prompts]
        texts = [await _decode(service, prompt) for prompt in ids]
        handler = await _submit(service, request, params, ids, start)
    return await _answer(handler, body, body.single, texts)


async def infill(service: Service, body: InfillRequest, request: Request) -> Response:
    """Complete the text between a prefix and a suffix."""
    start = monotonic()
    params = replace(_params(service, body), stop_ids=infill_ends(service.tokenizer))
    files = [(file.filename, file.text) for file in body.input_extra]
    with service.admission.preparing(service.check_completions(1, params.n), service.caller(request)):
        ids = await infill_prompt(
            service,
            body.input_prefix,
            body.input_suffix,
            begun=body.prompt,
            files=files,
            param="input_suffix",
        )
        texts = [await _decode(service, ids)]
        handler = await _submit(service, request, params, [ids], start)
    return await _answer(handler, body, params.n == 1, texts)


def properties(service: Service) -> dict[str, Any]:
    """The server as llama.cpp's clients see it; the path of the model is not shown."""
    stats, template = service.backend.stats(), service.tokenizer.template
    return {
        "default_generation_settings": _slot(service, 0, False)
        | {"params": llama_names({**DEFAULTS, **service.defaults})},
        "total_slots": stats.running + stats.free,
        "model_alias": service.model,
        "model_path": service.model,
        "chat_template": template,
        "chat_template_caps": {"supports_tools": knows_tools(template)},
        "modalities": {"vision": False, "audio": False},
        "build_info": f"attar-{__version__}",
        "is_sleeping": False,
    }


def slots(service: Service) -> list[dict[str, Any]]:
    """A row for each sequence that may run; nothing of what it runs."""
    stats = service.backend.stats()
    count = min(stats.running + stats.free, _SLOTS)
    return [_slot(service, number, number < stats.running) for number in range(count)]


def _slot(service: Service, number: int, is_running: bool) -> dict[str, Any]:
    return {
        "id": number,
        "id_task": -1,
        "n_ctx": service.backend.context or 0,
        "speculative": service.backend.stats().speculation is not None,
        "is_processing": is_running,
    }


def _params(service: Service, body: LlamaCppBody) -> SamplingParams:
    params = SamplingParams(**body.all_fields(service.defaults))
    params.fit(service.backend.vocabulary)
    return params


async def _encode(service: Service, prompt: PromptPart) -> list[int]:
    """Token ids of a prompt; the tokenizer's own tokens are around it where it begins with a text."""
    ids: list[int] = []
    for number, part in enumerate(prompt):
        ids += [part] if isinstance(part, int) else await service.encode_text(part, None, special=not number)
    return service.check_prompt(ids)


async def _decode(service: Service, ids: list[int]) -> str:
    text: str = await service.threads.run_sized(len(ids), service.tokenizer.decode, ids)
    return text


async def _submit(
    service: Service, request: Request, params: SamplingParams, ids: list[list[int]], start: float
) -> RequestHandler:
    handler = RequestHandler(service, request, "llama", params, ids, priority=None, start=start)
    await handler.submit()
    return handler


async def _answer(
    handler: RequestHandler, body: LlamaCppBody, single: bool, prompts: Sequence[str]
) -> Response:
    build = partial(LlamaCppOutput, body, handler, prompts, single)
    return await respond(handler, build, stream=body.stream)
