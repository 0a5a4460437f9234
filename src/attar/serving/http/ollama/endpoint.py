"""The endpoints of Ollama's API that answer: /api/chat, /api/generate, /api/embed, /api/embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from attar.serving.http.answer import AnswerParser
from attar.serving.http.chat_endpoint import RunningChat, chat_options, naming_tools, start_chat
from attar.serving.http.conversation import ChatMessage
from attar.serving.http.embeddings.embedders import Vector
from attar.serving.http.embeddings.endpoint import TextWork, normalized, working
from attar.serving.http.embeddings.protocol import EmbeddingRequest
from attar.serving.http.errors import ApiError
from attar.serving.http.infill import infill_ends, infill_prompt
from attar.serving.http.model_table import ModelTable
from attar.serving.http.ollama.conversation_request import chat_messages, chat_request
from attar.serving.http.ollama.output import GenerateOutput, OllamaOutput, RequestTimes, nanoseconds, now
from attar.serving.http.ollama.protocol import (
    AnsweredBody,
    EmbedRequest,
    GenerateRequest,
    KeptBody,
    OldEmbedRequest,
    OllamaChatRequest,
    find_model,
    tagged,
)
from attar.serving.http.protocol import ChatRequest
from attar.serving.http.request_body import IGNORED_HEADER
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import dump_json, respond
from attar.serving.http.sampling_params import chat_params
from attar.serving.http.service import Service
from attar.serving.http.tokenizer import ChatOptions
from attar.serving.http.tool_calls.tool_use import tool_use

TOO_LONG = "context_length_exceeded"
_ANSWER = 8  # the part of the context that is left for an answer: 1 / 8


async def shortened(
    service: Service, messages: Sequence[ChatMessage], options: ChatOptions
) -> list[ChatMessage] | None:
    """The conversation without as few of its oldest turns as possible; None: its last turn alone is too long.
    A turn begins with a message of the user. Messages of the system stay.

    Raises:
        DataError: the chat template refuses what is left.
    """
    context = service.backend.context
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    if context is None or len(starts) < 2:
        return None

    def kept(start: int) -> list[ChatMessage]:
        return [
            message for index, message in enumerate(messages) if index >= start or message.role == "system"
        ]

    async def fits(start: int) -> bool:
        try:
            return len(await service.encode_chat(kept(start), options)) <= context - context // _ANSWER
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return False

    low, high = 1, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return kept(starts[low]) if await fits(starts[low]) else None


LEFT_OUT_HEADER = "X-Left-Out-Messages"
_NAMED = 10  # names in an error message, at most


@dataclass(frozen=True)
class OllamaRequest:
    """A request whose model is loaded, and stays so until it is answered."""

    service: Service
    request: Request
    times: RequestTimes


def model_named(models: ModelTable, name: str) -> str:
    """The server's name of a model.

    Raises:
        ApiError: 404, there is none.
    """
    names = list(models.sources)
    found_name = find_model(name, names)
    if found_name is None:
        listed = ", ".join(map(repr, map(tagged, names[:_NAMED]))) + (", ..." if len(names) > _NAMED else "")
        message = f"model '{name[:200]}' not found; this server has {listed}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return found_name


async def chat(models: ModelTable, body: OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation; without messages load the model, or unload it."""
    if not body.messages:
        return await load_or_unload(models, body, request, {"message": {"role": "assistant", "content": ""}})
    used = await _use(models, body, request)
    build = partial(OllamaOutput, logprobs=bool(body.logprobs))
    return await _answer(used, body, chat_messages(body.messages), build)


async def generate(models: ModelTable, body: GenerateRequest, request: Request) -> Response:
    """Complete a prompt: as a message of the user, as it is (``raw``), or between a prefix and a suffix."""
    if not body.prompt and not (body.suffix and not body.raw):
        return await load_or_unload(models, body, request, {"response": ""})
    used = await _use(models, body, request)
    service, prompt, raw = used.service, body.prompt or "", bool(body.raw)
    build = partial(GenerateOutput, logprobs=bool(body.logprobs), raw=raw)
    if body.suffix and not raw:
        ends = infill_ends(service.tokenizer)
        return await _complete(
            used, body, build, lambda: infill_prompt(service, prompt, body.suffix or ""), ends
        )
    if raw or not service.tokenizer.has_chat_template:
        text = "\n".join(part for part in (body.system, prompt) if part)
        before = list(body.context or ())

        async def ids() -> list[int]:
            return service.check_prompt(before + await service.encode(text, special=not before))

        return await _complete(used, body, build, ids)
    messages = [ChatMessage(role="system", content=body.system)] if body.system else []
    messages.append(ChatMessage(role="user", content=prompt))
    return await _answer(used, body, messages, build, body.context or ())


async def embed(models: ModelTable, body: EmbedRequest, request: Request) -> Response:
    """Embeddings of texts, each cut to what the model reads unless ``truncate`` is false."""
    used = await _use(models, body, request)
    vectors, tokens = await _embeddings(used, body, body.texts, body.truncate is not False)
    size = body.dimensions or 0
    if vectors and 0 < size < len(vectors[0]):
        vectors = [normalized(vector[:size]) for vector in vectors]
    answer = {
        "model": body.model,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": nanoseconds(monotonic() - used.times.start),
        "load_duration": nanoseconds(used.times.loaded - used.times.start),
        "prompt_eval_count": tokens,
    }
    content = await used.service.threads.run_response(dump_json, answer)
    return Response(content.encode(), media_type="application/json")


async def old_embeddings(models: ModelTable, body: OldEmbedRequest, request: Request) -> Response:
    """The embedding of one text."""
    used = await _use(models, body, request)
    vectors, _ = await _embeddings(used, body, [body.prompt] if body.prompt else [], True)
    return JSONResponse({"embedding": vectors[0].tolist() if vectors else []})


async def load_or_unload(
    models: ModelTable, body: KeptBody, request: Request, fields: dict[str, Any]
) -> Response:
    """A request without a prompt loads a model, or unloads it where ``keep_alive`` is 0."""
    reason = "load"
    if body.keep_s == 0:
        reason = "unload"
        models.let_go(model_named(models, body.model), request)
    else:
        await _use(models, body, request)
    head = {"model": body.model, "created_at": now()}
    return JSONResponse(head | fields | {"done": True, "done_reason": reason})


async def _use(models: ModelTable, body: KeptBody, request: Request) -> OllamaRequest:
    start = monotonic()
    service = await models.use(model_named(models, body.model), request, body.keep_s)
    return OllamaRequest(service, request, RequestTimes(start, monotonic()))


async def _answer(
    used: OllamaRequest,
    body: AnsweredBody,
    messages: Sequence[ChatMessage],
    build: Callable[..., OllamaOutput],
    before: Sequence[int] = (),
) -> Response:
    """Answer a conversation; the oldest turns of one that is too long are left out."""
    _check_thinking(used.service, body)
    chat = chat_request(body, messages, used.service)
    try:
        running = await _start(used, chat, before)
    except ApiError as error:
        if error.code != TOO_LONG or body.truncate is False or before:
            raise
        with used.service.admission.preparing(1, used.service.caller(used.request)):
            tools = tool_use(chat.tools, None, None)
            options = chat_options(chat, tools, used.service.answers)
            kept = await shortened(used.service, messages, options)
        if kept is None:
            raise
        running = await _start(used, chat.model_copy(update={"messages": kept}))
        response = await _respond(used, body, running, build)
        response.headers[LEFT_OUT_HEADER] = str(len(messages) - len(kept))
        return response
    return await _respond(used, body, running, build)


async def _start(used: OllamaRequest, chat: ChatRequest, before: Sequence[int] = ()) -> RunningChat:
    return await start_chat(used.service, chat, used.request, "ollama", used.times.start, before)


async def _complete(
    used: OllamaRequest,
    body: AnsweredBody,
    build: Callable[..., OllamaOutput],
    encode: Callable[[], Any],
    ends: tuple[int, ...] = (),
) -> Response:
    """Complete token ids, whose text is not read for reasoning or calls.

    Args:
        ends: tokens that end it, besides the model's.
    """
    service, start = used.service, used.times.start
    params = replace(chat_params(chat_request(body, (), service), service.defaults), stop_ids=ends)
    params.fit(service.backend.vocabulary)
    with service.admission.preparing(1, service.caller(used.request)):
        ids = await encode()
        handler = RequestHandler(service, used.request, "ollama", params, [ids], priority=None, start=start)
        await handler.submit()
    running = RunningChat(handler, None, lambda: AnswerParser(None, None))
    return await _respond(used, body, running, build)


async def _respond(
    used: OllamaRequest, body: AnsweredBody, running: RunningChat, build: Callable[..., OllamaOutput]
) -> Response:
    def builder() -> OllamaOutput:
        thinking = body.think is not False
        return build(body.model, used.times, running.handler, running.parser(), thinking=thinking)

    with naming_tools(running.tools):
        response = await respond(running.handler, builder, stream=body.streams)
    context, wanted = used.service.backend.context, body.options and body.options.num_ctx
    if wanted and context is not None and wanted > context:
        response.headers[IGNORED_HEADER] = "options.num_ctx"
    return response


def _check_thinking(service: Service, body: AnsweredBody) -> None:
    """Raise ApiError (400) where thinking is asked of a model that has none."""
    if body.think and service.answers.tags is None and not service.answers.calls.channels:
        message = f'"{body.model[:200]}" does not support thinking'
        raise ApiError(400, message, param="think", code="invalid_value")


async def _embeddings(
    used: OllamaRequest, body: KeptBody, texts: Sequence[str], cut: bool
) -> tuple[list[Vector], int]:
    """Embeddings, and the number of tokens that were read."""
    if not texts:
        return [], 0
    service = used.service
    fields = EmbeddingRequest.model_construct(model=body.model, input=list(texts))
    async with working(service, fields, used.request, len(texts)) as work:
        rows = [await _cut(work, text) for text in texts] if cut else texts
        vectors = await work.embed(rows)
    return vectors, work.tokens


async def _cut(work: TextWork, text: str) -> list[int]:
    """The first tokens of a text, as many as the model reads, with the tokenizer's token at its end."""
    service, longest = work.service, work.longest
    if longest is None:
        return await service.encode_text(text, None)
    ids = await service.encode_text(text[: longest * service.tokenizer.longest], None)
    if len(ids) <= longest:
        return ids
    around = service.tokenizer.encode("")
    end = ids[-1:] if len(around) > 1 and around[-1] == ids[-1] else []
    return ids[: longest - len(end)] + end
