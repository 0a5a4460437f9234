"""POST /v1/chat/completions: a conversation becomes a prompt, and the completion an answer with its reasoning
and its calls of tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from attar.runtime.results import Event, Sample, TokenLogprob, gather
from attar.runtime.sampling.json_schema import UnsupportedSchemaError
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.answer import AnswerForm, AnswerParser
from attar.serving.http.bodies import token_sources
from attar.serving.http.endpoints import MIN_LOGPROB, BodyBuilder, finish_reasons, sources_of
from attar.serving.http.errors import ApiError
from attar.serving.http.protocol import ChatRequest, TokenizeRequest
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import respond
from attar.serving.http.sampling_params import chat_params
from attar.serving.http.service import Service
from attar.serving.http.tokenizer import ChatOptions, ServerTokenizer
from attar.serving.http.tool_calls.parts import AnswerPiece, join_pieces
from attar.serving.http.tool_calls.tool_use import ToolUse, tool_use

NO_REASONING = "none"  # the effort
THINKING_VARIABLES = ("enable_thinking", "thinking")  # by which templates turn reasoning on and off
PROMPT_END = 8  # tokens at the end of a prompt that may have begun the reasoning


@dataclass(frozen=True)
class RunningChat:
    """A conversation whose answer is being written.

    Attributes:
        parser: makes the parser of a completion.
    """

    handler: RequestHandler
    tools: ToolUse | None
    parser: Callable[[], AnswerParser]


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    start = monotonic()
    running = await start_chat(service, body, request, "chatcmpl", start)
    tools, shown = running.tools, body.include_reasoning is not False
    named = tools is not None and tools.named
    options: dict[str, Any] = {"named": named, "reasoning": shown}
    build = partial(ChatBuilder, body, running.handler, running.parser, **options)
    with naming_tools(tools):
        return await respond(running.handler, build, stream=body.stream)


async def start_chat(
    service: Service,
    body: ChatRequest,
    request: Request,
    prefix: str,
    start: float,
    before: Sequence[int] = (),
    as_many_as_fit: bool = False,
) -> RunningChat:
    """Submit a conversation to the engine.

    Args:
        prefix: of the request's id.
        start: time of arrival.
        before: token ids before the conversation.
        as_many_as_fit: a limit of tokens beyond the KV cache is none; else it is refused.
    """
    tools, params = sampling_of(service, body)
    with service.admission.preparing(service.check_completions(1, params.n), service.caller(request)):
        keep, guided = service.kept_tokens(body.truncate_prompt_tokens, params), params.guide is not None
        ids, prompt_end = await encode_prompt(service, body, tools, guided, keep, before)
        room = service.backend.kv_tokens if as_many_as_fit else None
        if room is not None and len(ids) + (params.max_tokens or 0) > room:
            params = replace(params, max_tokens=None)
        parser = partial(service.answers.parser, tools, prompt_end, guided)
        handler = RequestHandler(service, request, prefix, params, [ids], priority=body.priority, start=start)
        await handler.submit()
    return RunningChat(handler, tools, parser)  # what fails from here on would leave the handler open


def sampling_of(service: Service, body: ChatRequest) -> tuple[ToolUse | None, SamplingParams]:
    """The tools of a request, and its sampling parameters with the grammar that they ask for.

    Raises:
        ApiError, SettingsError: a field, or what the fields ask for together, is wrong.
    """
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    params = chat_params(body, service.defaults)
    params.fit(service.backend.vocabulary)
    schema = None if params.json_schema is None else str(params.json_schema)
    with naming_tools(tools):
        fields = service.answers.constraints(tools, service.tokenizer.special_token, schema)
    return tools, replace(params, **fields)


async def encode_prompt(
    service: Service,
    body: ChatRequest,
    tools: ToolUse | None,
    guided: bool,
    keep: int | None = None,
    before: Sequence[int] = (),
) -> tuple[list[int], str]:
    """Token ids of a conversation, and the text of the last of them. Reasoning that the template has begun is
    ended at once where a grammar holds the answer, or where the request wants none.

    Args:
        guided: a grammar holds the answer.
        keep: only this number of last tokens; None: all.
        before: token ids before the conversation.
    """
    answers, options = service.answers, chat_options(body, tools, service.answers)
    ids = await service.encode_chat(body.messages, options, keep)
    ids = service.check_prompt([*before, *ids]) if before else ids
    prompt_end = service.tokenizer.decode(ids[-PROMPT_END:])
    ends = guided or body.reasoning_effort == NO_REASONING
    if ends and not options.continued and answers.begins_reasoning(prompt_end):
        prompt_end = answers.no_reasoning
        ids = service.check_prompt(ids + service.tokenizer.encode(prompt_end, special=False))
    return ids, prompt_end


@contextmanager
def naming_tools(tools: ToolUse | None) -> Iterator[None]:
    """The client wrote tools: an error of the grammar made of them names these."""
    try:
        yield
    except UnsupportedSchemaError as error:
        raise _wrong_tools(str(error)) from error
    except ApiError as error:
        if tools is None or error.param != "grammar":
            raise
        reason = error.message.rpartition("enforced (")[2].removesuffix(")")
        raise _wrong_tools(reason, error.status, error.code) from error


def _wrong_tools(reason: str, status: int = 400, code: str | None = None) -> ApiError:
    message = f"Invalid value for 'tools': a call of them cannot be held to their parameters ({reason})"
    return ApiError(status, message, param="tools", code=code or "invalid_value")


def chat_options(body: ChatRequest | TokenizeRequest, tools: ToolUse | None, form: AnswerForm) -> ChatOptions:
    """How the conversation of a request becomes a prompt."""
    variables = dict(body.chat_template_kwargs or {})
    effort = getattr(body, "reasoning_effort", None)
    if effort == NO_REASONING:
        variables = dict.fromkeys(THINKING_VARIABLES, False) | variables
        effort = "low" if form.calls.channels else effort  # gpt-oss reasons in any case
    if effort is not None and form.knows_effort:
        variables.setdefault("reasoning_effort", effort)
    return ChatOptions(
        tools=() if tools is None else tools.shown,
        answer_begins=body.add_generation_prompt is not False,
        continued=bool(body.continue_final_message),
        variables=variables,
    )


class ChatBuilder(BodyBuilder):
    """JSON of /v1/chat/completions.

    Args:
        parser: makes the parser of a completion.
        named: the request names the one tool to call; then ``finish_reason`` is ``stop``, as at OpenAI.
        reasoning: is in the answer.
    """

    body_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        body: ChatRequest,
        handler: RequestHandler,
        parser: Callable[[], AnswerParser],
        named: bool = False,
        reasoning: bool = True,
    ) -> None:
        super().__init__(body, handler)
        self._reasoning = reasoning
        self._logprobs, self._named, self._answers = bool(body.logprobs), named, handler.service.answers
        self._parser, self._parsers = parser, dict[int, AnswerParser]()  # of choices that have begun
        self._calling: set[int] = set()  # choices with a call

    def body(self, events: list[list[Event]]) -> dict[str, Any]:
        """The whole body, from the events of each choice."""
        return self._complete_body(
            [self._choice(choice, choice_events) for choice, choice_events in enumerate(events)]
        )

    def chunks(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """The chunks of an event: the role once, the pieces of the answer, and the finish reason in a chunk
        of its own."""
        chunks = []
        if choice not in self._parsers:
            self._parsers[choice] = self._parser()
            chunks.append(self._delta(choice, {"role": "assistant", "content": "", "refusal": None}))
        pieces = self._parsers[choice].add(event.text)
        if event.finished:
            pieces += self._parsers[choice].finish()
        shown = [piece for piece in pieces if self._reasoning or not piece.reasoning]
        deltas = [self._piece(choice, piece) for piece in shown]
        if (event.logprobs or event.proposers) and not deltas:
            deltas = [{"content": ""}]
        parts = [self._delta(choice, delta) for delta in deltas]
        if parts:
            parts[0]["choices"][0] |= token_sources(event.token_ids, event.proposers)
        if event.logprobs:
            parts[0]["choices"][0]["logprobs"] = chat_logprobs(event.logprobs, self._tokenizer)
        chunks += parts
        if event.finished:
            chunks.append(self._delta(choice, {}))
            chunks[-1]["choices"][0] |= self._finish(choice in self._calling, event)
        return chunks

    def _piece(self, choice: int, piece: AnswerPiece) -> dict[str, Any]:
        """The delta of a piece of an answer."""
        if piece.reasoning:
            return _reasoning_fields(piece.reasoning)
        call = piece.call
        if call is None:
            return {"content": piece.text}
        function = {"arguments": call.arguments}
        if not call.name:
            return {"tool_calls": [{"index": call.index, "function": function}]}
        self._calling.add(choice)
        begun = {"id": self._answers.new_call_id(), "type": "function"}
        return {"tool_calls": [{"index": call.index, **begun, "function": {"name": call.name, **function}}]}

    def _delta(self, choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        return self._chunk({"index": choice, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, choice: int, events: list[Event]) -> dict[str, Any]:
        sample = gather(events, logprobs=self._logprobs)
        parser = self._parser()
        answer = join_pieces([*parser.add(sample.text), *parser.finish()])
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning and self._reasoning:
            message |= _reasoning_fields(answer.reasoning)
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {
                    "id": self._answers.new_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        head = {
            "index": choice,
            "message": message,
            "logprobs": chat_logprobs(sample.logprobs or (), self._tokenizer) if self._logprobs else None,
        }
        return head | self._finish(bool(answer.calls), sample) | sources_of(sample)

    def _finish(self, calls: bool, end: Event | Sample) -> dict[str, Any]:
        reasons = finish_reasons(end.finish_reason, end.stop_reason)
        if calls and reasons["finish_reason"] == "stop" and not self._named:
            reasons["finish_reason"] = "tool_calls"
        return reasons


def _reasoning_fields(text: str) -> dict[str, str]:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def chat_logprobs(scores: Sequence[TokenLogprob], tokenizer: ServerTokenizer) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    content = [
        _chat_entry(tokenizer, score.token, score.logprob)
        | {"top_logprobs": [_chat_entry(tokenizer, token, logprob) for token, logprob in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: ServerTokenizer, token: int, logprob: float) -> dict[str, Any]:
    text, raw = tokenizer.piece(token)
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}
