"""The loop that joins scheduler, runner and sampling.

    add(prompt, params) → id          refused here, or never
    step() → events                   schedule → run → commit → draw (or verify) → append or finish
    cancel(id) → events

One thread calls it (``stream.py`` is for several). It knows tokens; text only through ``decode``. What goes
wrong in a step ends the requests of that step, whose blocks come back, and no other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from attar.errors import NumericsError, SettingsError
from attar.runtime.admission import check_params, check_tokens
from attar.runtime.batch import Drafting, Output
from attar.runtime.drawing import Drawn, draw_tokens, score_prompt
from attar.runtime.job import Job, make_texts
from attar.runtime.kv.evict import Eviction
from attar.runtime.packing import pack_due
from attar.runtime.results import Event, FinishReason
from attar.runtime.sampling.grammar import Grammars
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Request
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.step import Runner, Step
from attar.runtime.text import Text

Words = Callable[[Sequence[int], bool], str]
"""Tokens to text; the flag says whether special tokens are left out."""
DEFAULT = SamplingParams()


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
        decode: Words | None = None,
        vocabulary: int | None = None,
        eviction: Eviction | None = None,
        grammars: Grammars | None = None,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.scheduler, self.clock, self.speculator = runner, scheduler, clock, speculator
        self.ends, self.decode, self.eviction, self.grammars = tuple(ends), decode, eviction, grammars
        self.vocabulary = min(vocabulary or runner.vocabulary, runner.vocabulary)
        self.failure: Exception | None = None  # the last one of the runner, for whoever wants to raise it
        self._jobs: dict[str, Job] = {}
        self._numbers = map(str, itertools.count())
        inside = "kivi" in getattr(runner, "features", ())  # full blocks are rounded
        plan = speculator and partial(speculator.plan, scheduler=scheduler, text=self._text, inside=inside)
        self._drafting: Drafting | None = plan or None

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
    ) -> str:
        """Put a request among the waiting ones.

        Args:
            prompt: token ids, at least one.
            id: its name; None: a number.
            priority: smaller goes first.
            deadline_s: seconds from now after which it is given up.
            salt: the tenant; prefixes are shared inside a salt only.

        Returns:
            its name.

        Raises:
            DataError: the prompt is empty, or a token is not of the vocabulary.
            SettingsError: the parameters do not suit the model, or the request can never run.
            MissingExtraError: a grammar is asked for, and llguidance is not installed.
            BusyError: too much is waiting already.
        """
        now = self.clock()
        self._check(prompt, params, id)
        matcher = None if self.grammars is None else self.grammars.matcher(params)
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
        texts = make_texts(request, params, ends=self.ends, limit=left, decode=decode, matcher=matcher)
        self._jobs[name] = Job(name, request.prompt, params, texts, now)
        return name

    def step(self) -> list[Event]:
        """Run one step; the news of every text that has any. Without work nothing happens."""
        now = self.clock()
        step = self.scheduler.schedule(now, self._drafting)
        events = [event for sequence in self.scheduler.ended() for event in self._ended(sequence)]
        if step is not None:
            self._started(step, now)
            try:
                logits = self.runner.run(step)
                outputs = self.scheduler.commit(step)
            except Exception as failure:
                events += self._failed(step, failure)
            else:
                events += self._drawn(outputs, logits[:, : self.vocabulary])
                if self.eviction is not None:
                    pack_due(self.scheduler, self.eviction, self.runner)  # type: ignore[arg-type]
        return self._rested(events)

    def cancel(self, id: str) -> list[Event]:
        """End what is left of a request; unknown and finished ones are no error."""
        return self._rested([e for each in self.scheduler.cancel(id) for e in self._ended(each)])

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

    def _text(self, sequence: Running) -> Text:
        return self._jobs[sequence.request.id].texts[sequence.index]

    def _rested(self, events: list[Event]) -> list[Event]:
        """The same events; with the last of all requests everything must have come back."""
        if events and self.idle:
            if self.speculator is not None:
                self.speculator.follow(())
            self.check()
        return events

    def _started(self, step: Step, now: float) -> None:
        running = {sequence.id: sequence for sequence in self.scheduler.running}
        for span in step.spans:
            self._jobs[running[span.sequence].request.id].start(now, span.start)

    def _drawn(self, outputs: Sequence[Output], logits: Tensor) -> list[Event]:
        """Tokens for every sequence that is due some."""
        for output in outputs:
            score_prompt(self._jobs[output.sequence.request.id], output, logits)
        due = [output for output in outputs if output.draws]
        texts = [self._text(output.sequence) for output in due]
        found = draw_tokens(logits, due, texts, self.speculator)
        if self.speculator is not None:
            self.speculator.note(due, found, logits)
        events = []
        for output, text, drawn in zip(due, texts, found, strict=True):
            if isinstance(drawn, NumericsError):
                self.scheduler.finish(output.sequence, "error")
                events += self._ended(output.sequence, str(drawn))
            else:
                events.append(self._grown(output.sequence, text, drawn, logits))
        return events

    def _grown(self, sequence: Running, text: Text, drawn: Drawn, logits: Tensor) -> Event:
        """A text has more tokens, and may end with one of them."""
        event = text.take(drawn.tokens, drawn.logprobs(logits, text.params.logprobs))
        job = self._jobs[event.request]
        job.drafted, job.accepted = job.drafted + drawn.drafted, job.accepted + len(drawn.path)
        if event.finish_reason is not None:
            self.scheduler.finish(sequence, event.finish_reason)
            return self._stamped(event)
        table = self.scheduler.manager.table(sequence.id)
        if moves := drawn.moves(table.length):
            self.runner.move([(table.slot(old), table.slot(new)) for old, new in moves])
        self.scheduler.append(sequence, drawn.tokens)
        return self._stamped(event)

    def _failed(self, step: Step, failure: Exception) -> list[Event]:
        """The runner broke, or a fork: the step's requests end, with all their texts."""
        self.failure = failure
        spans = [span.sequence for span in step.spans]
        broken = [each.request.id for each in self.scheduler.running if each.id in spans]
        events = []
        for sequence in [each for each in self.scheduler.running if each.request.id in broken]:
            self.scheduler.finish(sequence, "error")
            events += self._ended(sequence, f"{type(failure).__name__}: {failure}")
        return events

    def _ended(self, sequence: Running, error: str | None = None) -> list[Event]:
        """The last events of a sequence that the scheduler finished: of n texts where it had not forked."""
        reason: FinishReason = sequence.reason  # type: ignore[assignment]
        texts = self._jobs[sequence.request.id].texts[sequence.index : sequence.index + sequence.width]
        return [self._stamped(text.end(reason, error)) for text in texts]

    def _stamped(self, event: Event) -> Event:
        job = self._jobs[event.request]
        event = job.stamped(event, self.clock())
        if job.finished:
            del self._jobs[event.request]
        return event


def _decoded(decode: Words, skip: bool, ids: Sequence[int]) -> str:
    return decode(ids, skip)
