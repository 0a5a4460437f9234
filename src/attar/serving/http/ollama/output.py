"""From a request's events to Ollama's answer: one JSON body, or a line of JSON for each piece.

    {"model", "created_at", "message": {"role", "content"}, "done": false}
    {"model", "created_at", "message": {...}, "done": true, "done_reason", "total_duration", ...}

A call of a tool is in one line, once it is whole; its arguments are an object. A call that was cut, or whose
arguments are no object, is text. Durations are nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from attar.runtime.results import Event, TokenLogprob, Usage
from attar.serving.http.answer import AnswerParser
from attar.serving.http.chat_endpoint import chat_logprobs
from attar.serving.http.errors import ApiError
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import dump_json
from attar.serving.http.tool_calls.parts import AnswerPiece, WholeCall

NDJSON = "application/x-ndjson"
Line = dict[str, Any]


@dataclass(frozen=True)
class RequestTimes:
    """Times of a request: its arrival, and when its model was loaded; seconds of the monotonic clock."""

    start: float
    loaded: float

    def durations(self, usage: Usage | None) -> dict[str, int]:
        """With the tokens that were read and written."""
        queued, first, total = (0.0, 0.0, 0.0) if usage is None else _seconds(usage)
        return {
            "total_duration": nanoseconds(monotonic() - self.start),
            "load_duration": nanoseconds(self.loaded - self.start),
            "prompt_eval_count": 0 if usage is None else usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - queued),
            "eval_count": 0 if usage is None else usage.completion_tokens,
            "eval_duration": nanoseconds(total - first),
        }


class OllamaOutput:
    """The answer to /api/chat.

    Args:
        model: as the client named it.
        parser: of the completion.
        logprobs: whether the answer has them.
        thinking: is in the answer.
    """

    done, media_type = b"", NDJSON

    def __init__(
        self,
        model: str,
        times: RequestTimes,
        handler: RequestHandler,
        parser: AnswerParser,
        logprobs: bool = False,
        thinking: bool = True,
    ) -> None:
        self._model, self._times, self._handler, self._parser = model, times, handler, parser
        self._logprobs, self._thinking = logprobs, thinking
        self._call: WholeCall | None = None  # whose arguments are still written
        self._calls = 0  # in the answer
        self._usage: Usage | None = None
        self._finish_reason = "stop"

    def body(self, events: list[list[Event]]) -> dict[str, Any]:
        """The whole answer."""
        lines = [line for event in events[0] for line in self._lines(event)]
        answer: Line = {}
        for line in lines:
            for name, value in line.items():
                answer[name] = answer[name] + value if name in answer else value
        return self._write_line(answer) | self._end()

    def chunks(self, choice: int, event: Event) -> list[Line]:
        """The lines of an event."""
        return [self._write_line(line) | {"done": False} for line in self._lines(event)]

    def last_chunks(self) -> list[Line]:
        """The line with the counts."""
        return [self._write_line({}) | self._end()]

    def failure(self, error: ApiError) -> Line:
        """The line of an error."""
        return {"error": error.message}

    def write(self, chunk: Line) -> bytes:
        """A line."""
        return dump_json(chunk, levels=1).encode() + b"\n"

    @property
    def alive(self) -> bytes:
        """A line without text: an empty one is no JSON."""
        return self.write(self._write_line({}) | {"done": False})

    def _fields(self, line: Line) -> Line:
        """Of the answer: ``content``, ``thinking`` and ``tool_calls`` of a line, where they belong."""
        return {"message": {"role": "assistant", "content": ""} | line}

    def _end_fields(self) -> Line:
        return {}

    def _lines(self, event: Event) -> list[Line]:
        """``content``, ``thinking``, ``tool_calls`` and ``logprobs`` that an event adds, in their order."""
        pieces = self._parser.add(event.text)
        if event.finished:
            pieces += self._parser.finish()
            self._finish_reason = "stop" if event.finish_reason == "stop" else "length"
        self._usage = event.usage or self._usage
        lines = [line for piece in pieces for line in self._piece(piece)]
        if event.finished:
            lines += self._close_call()
        if self._logprobs and event.logprobs:
            lines = lines or [{}]
            lines[0]["logprobs"] = self._scores(event.logprobs)
        return lines

    def _piece(self, piece: AnswerPiece) -> list[Line]:
        if piece.call is None:
            lines = self._close_call()
            if piece.reasoning:
                return [*lines, {"thinking": piece.reasoning}] if self._thinking else lines
            return [*lines, {"content": piece.text}] if piece.text else lines
        lines = []
        if piece.call.name or self._call is None:
            lines, self._call = self._close_call(), WholeCall(piece.call.name)
        self._call.arguments += piece.call.arguments
        return lines

    def _close_call(self) -> list[Line]:
        call, self._call = self._call, None
        if call is None:
            return []
        arguments = _arguments(call.arguments or "{}")
        if arguments is None:
            return [{"content": f"{call.name}{call.arguments}"}]
        index, self._calls = self._calls, self._calls + 1
        function = {"index": index, "name": call.name, "arguments": arguments}
        return [{"tool_calls": [{"id": self._handler.service.answers.new_call_id(), "function": function}]}]

    def _scores(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        scores: list[dict[str, Any]] = chat_logprobs(logprobs, self._handler.service.tokenizer)["content"]
        return scores

    def _write_line(self, line: Line) -> Line:
        logprobs = {"logprobs": line["logprobs"]} if "logprobs" in line else {}
        fields = self._fields({name: value for name, value in line.items() if name != "logprobs"})
        return {"model": self._model, "created_at": now()} | fields | logprobs

    def _end(self) -> Line:
        reason = {"done": True, "done_reason": self._finish_reason}
        return reason | self._end_fields() | self._times.durations(self._usage)


class GenerateOutput(OllamaOutput):
    """The answer to /api/generate; without ``raw`` it has the tokens of prompt and completion."""

    def __init__(self, *arguments: Any, raw: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._raw, self._tokens = raw, list[int]()

    def _lines(self, event: Event) -> list[Line]:
        self._tokens += event.token_ids
        return super()._lines(event)

    def _fields(self, line: Line) -> Line:
        fields = {name: value for name, value in line.items() if name != "content"}
        return {"response": line.get("content", "")} | fields

    def _end_fields(self) -> Line:
        return {} if self._raw else {"context": [*self._handler.prompts[0], *self._tokens]}


def nanoseconds(seconds: float) -> int:
    """Of a duration; none is negative."""
    return max(round(seconds * 1e9), 0)


def now() -> str:
    """The time, as Go writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _seconds(usage: Usage) -> tuple[float, float, float]:
    """Until the first step, the first token and the end."""
    first = usage.first_token_s if usage.first_token_s is not None else usage.total_s
    return usage.queue_s or 0.0, first, usage.total_s


def _arguments(text: str) -> dict[str, Any] | None:
    """Arguments of a call; None: they are no object that JSON can hold."""
    try:
        arguments = json.loads(text)
        dump_json(arguments).encode()
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
