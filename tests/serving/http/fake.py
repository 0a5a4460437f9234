"""An engine without a model: it says its words one by one; a tokenizer whose tokens are bytes."""

from __future__ import annotations

import asyncio
import math

from attar.errors import DataError
from attar.runtime.admission import BusyError
from attar.runtime.kv.block_map import BlockMap
from attar.runtime.results import TARGET, Event, TokenLogprob, Usage
from attar.runtime.speculate.speculative_pass import SpeculationCounts
from attar.serving.http.backend import Stats

ANSWER = "Hello, wörld."
FAIL, BUSY, SLOW = 1, 2, 3  # first tokens of prompts that mean trouble
BUG = 4
PROPOSER = "suffix"  # of every second token


class FakeTokenizer:
    """UTF-8 bytes; 256 begins a text.

    Attributes:
        template: the words of a chat template.
    """

    longest, infill = 4, {}
    has_chat_template = tells_roles = True

    def __init__(self, template=""):
        self.template, self.options = template, None

    def special_token(self, text):
        return None

    def token(self, text):
        return self.infill.get(text)

    def encode(self, text, special=True):
        return [256] * special + list(text.encode())

    def decode(self, ids):
        return bytes(id for id in ids if id < 256).decode("utf-8", "replace")

    def piece(self, id):
        raw = bytes([id]) if id < 256 else b""
        return raw.decode("utf-8", "replace"), raw

    def chat(self, messages, options=None):
        self.options = options
        if any(message["role"] == "function" for message in messages):
            raise DataError("the model's chat template refuses the messages: role function")
        return [256, *"".join(f"{m['role']}: {m['content']}\n" for m in messages).encode()]


class FakeBackend:
    """Answers each prompt with ANSWER, a character at a time."""

    kv_tokens = None

    def __init__(self, context=100, answer=ANSWER):
        self.context, self.vocabulary, self.alive, self.failure = context, 257, True, None
        self.answer, self.waiting = answer, 0
        self.loop = None
        self.open, self.cancelled, self.asked, self.closed = {}, [], [], False
        self.release = asyncio.Event()

    async def submit(self, prompt, params, *, id, priority=0, deadline_s=None, salt=""):
        self.loop = asyncio.get_running_loop()
        self.asked.append(
            (tuple(prompt), params, {"priority": priority, "deadline_s": deadline_s, "salt": salt})
        )
        first = prompt[0]
        if first == BUSY:
            raise BusyError("7 requests are waiting, the limit is 7")
        if first == BUG:
            raise ZeroDivisionError("a bug")
        self.open[id] = True
        try:
            async for event in self._events(prompt, params, id):
                yield event
        finally:
            del self.open[id]

    async def _events(self, prompt, params, id):
        letters = self.answer[: params.max_tokens]
        for sample in range(params.n):
            for index, letter in enumerate(letters):
                await (self.release.wait() if prompt[0] == SLOW and index else asyncio.sleep(0))
                yield self._event(prompt, params, id, sample, index, letter, letters)
                if prompt[0] == FAIL and index == 2:
                    yield Event(id, sample, finish_reason="error", error="RuntimeError: secret")
                    return

    def _event(self, prompt, params, id, sample, position, letter, letters):
        last = position == len(letters) - 1
        reason = ("length" if len(letters) == params.max_tokens else "stop") if last else None
        scored = ()
        if params.logprobs is not None:
            top = [(letter.encode()[0], -0.5), (195, -1.0), (7, -math.inf)][: params.logprobs]
            scored = (TokenLogprob(letter.encode()[0], -0.5, tuple(top)),)
        usage = None
        if last and sample == params.n - 1:
            usage = Usage(len(prompt), len(letters) * params.n, 3, 0.01, 0.02, 0.03)
        before = None
        if params.prompt_logprobs is not None and sample == 0 and position == 0:
            before = (None, *(TokenLogprob(token, -1.0) for token in prompt[1:]))
        proposers = (PROPOSER if position % 2 else TARGET,) if params.proposers else ()
        token = letter.encode()[0]
        return Event(id, sample, letter, (token,), scored, reason, None, None, before, usage, proposers)

    def cancel(self, id):
        self.cancelled.append(id)

    def stats(self):
        result = SpeculationCounts(5, 20, 12, [5, 4, 2, 1])
        blocks = {"free": 2, "cached": 1, "used": 1}
        return Stats(len(self.open), self.waiting, 0.25, blocks, 100, 40, 2, result)

    def block_map(self):
        return BlockMap(16, {"free": 2, "cached": 1, "owned": 1, "shared": 0}, 0, 1, "ffco")

    async def close(self):
        self.closed = True
