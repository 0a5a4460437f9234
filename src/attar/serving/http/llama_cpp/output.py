"""From a request's events to llama.cpp's answer: JSON, or server-sent events without ``[DONE]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attar.runtime.results import Event, TokenLogprob, Usage
from attar.serving.http.endpoints import MIN_LOGPROB
from attar.serving.http.errors import ApiError
from attar.serving.http.llama_cpp.protocol import LlamaCppBody
from attar.serving.http.llama_options import llama_names
from attar.serving.http.request_handler import RequestHandler
from attar.serving.http.responses import ALIVE, SSE, sse_event

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
