"""Pieces of an answer to the items and events of a response.

    response.created, response.in_progress
    of each item: output_item.added, content_part.added, deltas, done, content_part.done, output_item.done
    response.completed, response.incomplete or response.failed

Items are reasoning, a message, and calls of functions, in the order in which the model wrote them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from attar.runtime.results import Event
from attar.serving.http.answer import AnswerForm, AnswerParser
from attar.serving.http.answer_items import AnswerItem, AnswerItems, ItemStep
from attar.serving.http.errors import ApiError
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import ALIVE, SSE, named_event

Chunk = dict[str, Any]
_TYPES = {"text": "message", "reasoning": "reasoning"}  # of items
_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}  # item to the type of its part


class ResponseOutput:
    """The JSON of one response.

    Args:
        repeated: fields of the request that are in the response.
        finished: called with the response once it is complete.
    """

    alive, done, media_type = ALIVE, b"", SSE

    def __init__(
        self,
        handler: RequestHandler,
        form: AnswerForm,
        parser: AnswerParser,
        repeated: dict[str, Any],
        finished: Callable[[dict[str, Any]], None],
    ) -> None:
        self._handler, self._form, self._finished = handler, form, finished
        self._answer = AnswerItems(parser)
        self._repeated, self._items = repeated, list[dict[str, Any]]()
        self._number, self._begun = 0, False
        self._status = "in_progress"
        self._incomplete: dict[str, str] | None = None

    def body(self, events: list[list[Event]]) -> dict[str, Any]:
        """The whole response."""
        for event in events[0]:
            self.chunks(0, event)
        self.last_chunks()
        return self._response()

    def chunks(self, choice: int, event: Event) -> list[Chunk]:
        """The events that a piece of the completion makes."""
        chunks: list[Chunk] = []
        if not self._begun:
            self._begun = True
            for name in ("response.created", "response.in_progress"):
                chunks.append(self._event(name, response=self._response()))
        if event.finished:
            cut = event.finish_reason != "stop"
            self._status = "incomplete" if cut else "completed"
            self._incomplete = {"reason": "max_output_tokens"} if cut else None
        return chunks + [chunk for step in self._answer.read(event) for chunk in self._step(step)]

    def last_chunks(self) -> list[Chunk]:
        """The end of the last item, and of the response."""
        chunks = [chunk for step in self._answer.close() for chunk in self._step(step)]
        response = self._response()
        self._finished(response)
        return [*chunks, self._event(f"response.{self._status}", response=response)]

    def failure(self, error: ApiError) -> Chunk:
        """The event of an error after the first one."""
        self._status = "failed"
        response = self._response() | {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=response)

    def write(self, chunk: Chunk) -> bytes:
        """A server-sent event with its name."""
        return named_event(chunk)

    def _step(self, step: ItemStep) -> list[Chunk]:
        item = step.item
        if step.kind == "end":
            return self._end(item)
        if item.kind == "call":
            if step.kind == "begin":
                return [self._begin_call(item.name)]
            return [self._of_item("response.function_call_arguments.delta", delta=step.text)]
        kind = _TYPES[item.kind]
        if step.kind == "begin":
            return self._begin_text(kind)
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [self._of_item(f"response.{_TEXT[kind]}.delta", delta=step.text, content_index=0, **extra)]

    def _begin_text(self, kind: str) -> list[Chunk]:
        item: dict[str, Any] = {"type": kind, "id": _new_id(kind), "status": "in_progress", "content": []}
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= more
        added = self._begin(item)
        return [added, self._part("response.content_part.added", _part(kind, ""))]

    def _begin_call(self, name: str) -> Chunk:
        call = {"type": "function_call", "id": _new_id("function_call"), "call_id": self._form.new_call_id()}
        return self._begin({**call, "name": name, "arguments": "", "status": "in_progress"})

    def _begin(self, item: dict[str, Any]) -> Chunk:
        self._items.append(item)
        return self._event("response.output_item.added", output_index=self._index, item=dict(item))

    def _end(self, answered: AnswerItem) -> list[Chunk]:
        item, text = self._items[-1], answered.text
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        if item["type"] == "function_call":
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            ends = [self._of_item(name, arguments=text, name=item["name"])]
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{_TEXT[item['type']]}.done"
            ends = [self._of_item(name, content_index=0, text=text, **extra)]
            ends.append(self._part("response.content_part.done", part))
        return [*ends, self._event("response.output_item.done", output_index=self._index, item=dict(item))]

    def _part(self, name: str, part: dict[str, Any]) -> Chunk:
        return self._of_item(name, content_index=0, part=part)

    def _of_item(self, name: str, /, **fields: Any) -> Chunk:
        return self._event(name, item_id=self._items[-1]["id"], output_index=self._index, **fields)

    def _event(self, name: str, /, **fields: Any) -> Chunk:
        number, self._number = self._number, self._number + 1
        return {"type": name, "sequence_number": number, **fields}

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _response(self) -> dict[str, Any]:
        """The response as it is now; with the usage at its end."""
        ended = self._status != "in_progress"
        return {
            "id": self._handler.id,
            "object": "response",
            "created_at": self._handler.created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "error": None,
            "incomplete_details": self._incomplete,
            **self._repeated,
            "output": [dict(item) for item in self._items] if ended else [],
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        handler = self._handler
        return {
            "input_tokens": handler.prompt_tokens,
            "input_tokens_details": {"cached_tokens": handler.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": handler.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.reasoning_tokens},
            "total_tokens": handler.prompt_tokens + handler.completion_tokens,
        }


def items_of(answer: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """The output of a response as input of the next."""
    output: Sequence[dict[str, Any]] = answer["output"]
    return output


def _part(kind: str, text: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _TEXT[kind], "text": text, **extra}


def _new_id(kind: str) -> str:
    return f"{ {'message': 'msg', 'reasoning': 'rs', 'function_call': 'fc'}[kind] }_{uuid4().hex}"
