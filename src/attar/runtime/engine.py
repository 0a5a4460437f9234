"""The loop that joins scheduler, runner and sampling.

    add(prompt, params) → id          refused here, or never
    step() → events                   schedule → run → commit → draw (or verify) → append or finish
    cancel(id) → events

One thread calls it (``async_engine.py`` is for several). It knows tokens; text only through ``decode``.

An error ends its own request, with all its texts, and no other: its blocks come back, and its last events
have the reason "error" and the exception. That holds for a step that cannot be run (``retry.py`` finds out
whose fault it is), for memory (``scheduler.py``, ``packing.py``), for drawing, log-probabilities, text,
grammar and stops, for drafts that are judged. What is not one sequence's fault ends those that run. Only a
failed ``check``, which means that the engine's books are wrong, is raised.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from attar.errors import SettingsError
from attar.runtime import retry
from attar.runtime.admission import check_params, check_tokens
from attar.runtime.batch import Planned, StepOutput
from attar.runtime.completion import Completion
from attar.runtime.drawing import SampledTokens, draw_tokens, score_prompt
from attar.runtime.job import RequestState, make_completions
from attar.runtime.kv.evict import Eviction
from attar.runtime.packing import pack_due
from attar.runtime.results import Event, FinishReason
from attar.runtime.sampling.grammar import Grammars, Matcher
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Request
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.step import Runner, StepInput

T = TypeVar("T")
DecodeTokens = Callable[[Sequence[int], bool], str]
"""Tokens to text; the flag says whether special tokens are left out."""
DEFAULT = SamplingParams()
CHECK_S = 10.0
"""Seconds between two full checks of an idle engine."""


class Engine:
    """Runs requests until they are finished.

    Args:
        runner: the model and its pool of blocks.
        scheduler: of the same pool.
        ends: the model's end tokens.
        decode: tokens to text; None: events have tokens only, and stop strings are refused.
        vocabulary: columns of the logits that stand for a token; None: all.
        eviction: asked after each step which sequences are packed; a runner that packs goes with it.
        grammars: of the tokenizer; None: texts that keep to a grammar are refused.
        speculator: drafts tokens; None: every pass gives one token a text.
        clock: seconds; arrivals and deadlines are on it.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        ends: Sequence[int] = (),
        decode: DecodeTokens | None = None,
        vocabulary: int | None = None,
        eviction: Eviction | None = None,
        grammars: Grammars | None = None,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.scheduler, self.clock, self.speculator = runner, scheduler, clock, speculator
        self.ends, self.decode, self.eviction, self.grammars = tuple(ends), decode, eviction, grammars
        self.vocabulary = min(vocabulary or runner.vocabulary, runner.vocabulary)
        self._jobs: dict[str, RequestState] = {}
        self._numbers = map(str, itertools.count())
        self._inside = "kivi" in getattr(runner, "features", ())  # full blocks are rounded
        self._ran, self._last_check = False, -math.inf  # whether anything ran since the last check

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return self.scheduler.idle

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams = DEFAULT,
        *,
        id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
        matcher: Matcher | None = None,
    ) -> str:
        """Put a request among the waiting ones.

        Args:
            prompt: token ids, at least one.
            id: its name; None: a number.
            priority: smaller goes first.
            deadline_s: seconds from now after which it is given up.
            salt: the tenant; prefixes are shared inside a salt only.
            matcher: of the parameters' grammar where it is compiled already; None: it is compiled now.

        Returns:
            its name.

        Raises:
            DataError: the prompt is empty, or a token is not of the vocabulary.
            SettingsError: the parameters do not suit the model, or the request can never run. GrammarError,
                a kind of it: the grammar takes more than is allowed.
            MissingExtraError: a grammar is asked for, and llguidance is not installed.
            BusyError: too much is waiting already.
        """
        now = self.clock()
        self._check(prompt, params, id)
        if matcher is None and self.grammars is not None:
            matcher = self.grammars.matcher(params)
        name = self._name() if id is None else id
        request = Request(
            id=name,
            prompt=tuple(prompt),
            max_tokens=params.max_tokens,
            n=params.n,
            priority=priority,
            arrival=now,
            deadline=None if deadline_s is None else now + deadline_s,
            salt=salt,
            prompt_logits=params.prompt_logprobs is not None,
        )
        sequence = self.scheduler.add(request)
        left = sequence.limit - len(request.prompt)
        decode = self.decode and partial(_decoded, self.decode, params.skip_special_tokens)
        try:
            texts = make_completions(
                request, params, ends=self.ends, limit=left, decode=decode, matcher=matcher
            )
        except BaseException:
            self.scheduler.finish(sequence, "error")
            raise
        self._jobs[name] = RequestState(name, request.prompt, params, texts, now)
        return name

    def step(self) -> list[Event]:
        """Run one step; the news of every text that has any. Without work nothing happens."""
        now = self.clock()
        step, events = self._scheduled(now)
        if step is None:
            return self._rested(events)
        self._started(step, now)
        step, logits, failures = retry.run(self.runner, step)
        running = {each.id: each for each in self.scheduler.running}
        for sequence, failure in failures.items():
            events += self._fail(running[sequence], failure)
        outputs = self.scheduler.commit(step)
        events += self._finished()
        events += self._drawn(outputs, logits[:, : self.vocabulary])
        if self.eviction is not None:
            for packed, failure in pack_due(self.scheduler, self.eviction, self.runner):  # type: ignore[arg-type]
                events += self._fail(packed, failure)
        return self._rested(events)

    def cancel(self, id: str) -> list[Event]:
        """End what is left of a request; unknown and finished ones are no error."""
        return self._rested([e for each in self.scheduler.cancel(id) for e in self._ended(each)])

    def rest(self) -> float | None:
        """Look at the books of an idle engine: count its blocks, or check them one by one if that was not
        done for CHECK_S seconds. Call it behind a step whose events have gone out, for with a large pool it
        takes a while.

        Returns:
            seconds after which it is worth calling again; None: there is nothing to look at.

        Raises:
            AssertionError: as :meth:`check`.
        """
        if not self.idle or not self._ran:
            return None
        left = self._last_check + CHECK_S - self.clock()
        if left <= 0:
            self._ran, self._last_check = False, self.clock()
            self.check()
            return None
        manager = self.scheduler.manager
        leaked = manager.capacity - manager.free - manager.cached
        assert not leaked, f"{leaked} blocks leaked"
        return left

    def check(self) -> None:
        """Raises AssertionError naming what is wrong: blocks that leaked, a request without a sequence."""
        self.scheduler.check()
        assert not self.idle or not self._jobs, f"requests {list(self._jobs)} have no sequence"

    def _check(self, prompt: Sequence[int], params: SamplingParams, id: str | None) -> None:
        if id in self._jobs:
            raise SettingsError("id", id, "one that no running request has")
        params.fit(self.vocabulary)
        features = getattr(self.runner, "features", {})
        check_params(params, features, words=self.decode is not None, grammars=self.grammars is not None)
        check_tokens(prompt, self.runner.vocabulary)

    def _name(self) -> str:
        """The next number that no request has taken for a name."""
        return next(number for number in self._numbers if number not in self._jobs)

    def _text(self, sequence: Running) -> Completion:
        return self._jobs[sequence.request.id].texts[sequence.index]

    def _rested(self, events: list[Event]) -> list[Event]:
        """The same events; with the last of all requests there is something to look at."""
        if events and self.idle:
            self._with_drafts(lambda speculator: speculator.follow(()))
            self._ran = True
        return events

    def _scheduled(self, now: float) -> tuple[StepInput | None, list[Event]]:
        """The next step, and what ended before it."""
        try:
            step = self.scheduler.schedule(now, None if self.speculator is None else self._drafts)
        except Exception as failure:
            step, events = None, []
            for sequence in [*self.scheduler.running] or [*self.scheduler.waiting][:1]:
                events += self._fail(sequence, failure)
            if not events:
                raise
            return step, self._finished() + events
        return step, self._finished()

    def _drafts(self, planned: Planned) -> Planned:
        """The planned step with drafts, or as it was."""
        drafted = self._with_drafts(
            lambda speculator: speculator.plan(planned, self.scheduler, self._text, self._inside)
        )
        if drafted is None:
            for sequence, _ in planned:
                sequence.drafts, sequence.parents = [], None
        return planned if drafted is None else drafted

    def _with_drafts(self, act: Callable[[Speculator], T]) -> T | None:
        """Ask the speculator; where it fails, texts go on without."""
        if self.speculator is None or self.speculator.stopped:
            return None
        try:
            return act(self.speculator)
        except Exception as failure:
            self.speculator.stop(failure)
            return None

    def _started(self, step: StepInput, now: float) -> None:
        running = {sequence.id: sequence for sequence in self.scheduler.running}
        for span in step.spans:
            self._jobs[running[span.sequence].request.id].start(now, span.start)

    def _drawn(self, outputs: Sequence[StepOutput], logits: Tensor) -> list[Event]:
        """Tokens for every sequence that is due some."""
        events: list[Event] = []
        for output in outputs:
            try:
                if not output.sequence.finished:
                    score_prompt(self._jobs[output.sequence.request.id], output, logits)
            except Exception as failure:
                events += self._fail(output.sequence, failure)
        due = [output for output in outputs if output.draws and not output.sequence.finished]
        texts = [self._text(output.sequence) for output in due]
        found = draw_tokens(logits, due, texts, self.speculator)
        self._with_drafts(lambda speculator: speculator.note(due, found, logits))
        for output, text, drawn in zip(due, texts, found, strict=True):
            if isinstance(drawn, Exception):
                events += self._fail(output.sequence, drawn)
            elif not output.sequence.finished:
                events += self._grown(output.sequence, text, drawn, logits)
        return events

    def _grown(
        self, sequence: Running, text: Completion, drawn: SampledTokens, logits: Tensor
    ) -> list[Event]:
        """A text has more tokens, and may end with one of them."""
        try:
            event = text.take(drawn.tokens, drawn.logprobs(logits, text.params.logprobs))
        except Exception as failure:
            return self._fail(sequence, failure)
        job = self._jobs[event.request]
        job.drafted, job.accepted = job.drafted + drawn.drafted, job.accepted + len(drawn.path)
        if event.finish_reason is not None:
            self.scheduler.finish(sequence, event.finish_reason)
            return [self._stamped(event)]
        try:
            self._append(sequence, drawn)
        except Exception as failure:
            return [self._stamped(event), *self._fail(sequence, failure)]
        return [self._stamped(event)]

    def _append(self, sequence: Running, drawn: SampledTokens) -> None:
        table = self.scheduler.manager.table(sequence.id)
        if moves := drawn.moves(table.length):
            self.runner.move([(table.slot(old), table.slot(new)) for old, new in moves])
        self.scheduler.append(sequence, drawn.tokens)

    def _fail(self, sequence: Running, failure: Exception) -> list[Event]:
        """Something went wrong with a sequence: its request ends, with all its texts that have not."""
        ended = self.scheduler.cancel(sequence.request.id, "error", failure)
        return [event for each in ended for event in self._ended(each)]

    def _finished(self) -> list[Event]:
        """The last events of what the scheduler finished by itself."""
        return [event for sequence in self.scheduler.ended() for event in self._ended(sequence)]

    def _ended(self, sequence: Running) -> list[Event]:
        """The last events of a sequence that the scheduler finished: of n texts where it had not forked."""
        reason: FinishReason = sequence.reason  # type: ignore[assignment]
        texts = self._jobs[sequence.request.id].texts[sequence.index : sequence.index + sequence.width]
        return [self._stamped(text.end(reason, sequence.failure)) for text in texts]

    def _stamped(self, event: Event) -> Event:
        job = self._jobs[event.request]
        event = job.stamped(event, self.clock())
        if job.finished:
            del self._jobs[event.request]
        return event


def _decoded(decode: DecodeTokens, skip: bool, ids: Sequence[int]) -> str:
    """Text of tokens; a panic of the tokenizer's library, which is no Exception, becomes one."""
    try:
        return decode(ids, skip)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(f"the tokenizer: {error}") from error
