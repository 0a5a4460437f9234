"""The loop that joins scheduler, runner and sampling.

    add(prompt, params) → id
    step() → events           plan → add drafts → build → run → commit → sample (or verify drafts) → append
    cancel(id) → events

One thread calls it (``async_engine.py`` serves several callers). It handles tokens, and text only through
``decode``.

An error ends its own request with all its completions, and no other request: the blocks are released, and the
last events have the reason "error" and the exception. This holds for a step that fails on the runner
(``execution.py`` finds the sequence at fault), for cache memory, sampling, log-probabilities, text, grammars,
stop strings and verification. An error that cannot be assigned to one sequence ends all running ones. Only a
failed ``check``, which means that the engine's bookkeeping is wrong, is raised.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from attar.errors import SettingsError
from attar.runtime import execution
from attar.runtime.admission import check_params, check_tokens
from attar.runtime.completion import Completion, RequestState
from attar.runtime.kv.evict import Eviction
from attar.runtime.pooling import PromptPooler
from attar.runtime.results import Event, FinishReason
from attar.runtime.sampling.grammar import Grammars, Matcher
from attar.runtime.sampling.mask_budget import MaskBudget
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.sample import sample
from attar.runtime.sampling.sampled_tokens import SampledTokens, token_logprob
from attar.runtime.scheduler import Scheduler, StepOutput
from attar.runtime.sequence import Request
from attar.runtime.sequence import Sequence as Running
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.step import Runner, StepInput

PromptObserver = Callable[[int, Tensor], None]
"""Called in the engine's thread with the index of a prompt token and the logits that follow it."""
DecodeTokens = Callable[[Sequence[int], bool], str]
"""Tokens to text; the flag leaves special tokens out."""
DEFAULT = SamplingParams()
CHECK_S = 10.0
"""Least seconds between two full checks of an idle engine."""


class Engine:
    """Runs requests until they are finished.

    Args:
        decode: tokens to text; None: events have tokens only, and stop strings are refused.
        vocabulary: columns of the logits that stand for a token; None: all.
        eviction: decides after each step which sequences are packed; the runner must support it.
        grammars: of the tokenizer; None: requests with a grammar are refused.
        speculator: drafts tokens; None: every step gives one token for each completion.
        pooler: pools the states of prompts; None: requests for embeddings are refused.
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
        pooler: PromptPooler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.scheduler, self.clock, self.speculator = runner, scheduler, clock, speculator
        self.ends, self.decode, self.eviction, self.grammars = tuple(ends), decode, eviction, grammars
        self.vocabulary = min(vocabulary or runner.vocabulary, runner.vocabulary)
        self.pooler = pooler
        self._requests: dict[str, RequestState] = {}
        self._numbers = map(str, itertools.count())
        self._inside = "kivi" in getattr(runner, "features", ())  # full blocks are quantized
        self._masks, self._pass_s = MaskBudget(), 0.0
        self._held: dict[int, Running] = {}  # whose next mask waits for its budget, by id
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
        adapter: str = "",
        matcher: Matcher | None = None,
        observe: tuple[int, PromptObserver] | None = None,
    ) -> str:
        """Add a request to the waiting ones. Returns its id.

        Args:
            prompt: token ids, at least one.
            id: its name; None: a number.
            priority: smaller goes first.
            deadline_s: seconds from now after which the request is ended.
            salt: the tenant; prefixes are shared inside a salt only, and requests with different adapters
                have different ones.
            adapter: key of a LoRA adapter of the runner; empty: none.
            matcher: of the parameters' grammar where it is compiled already; None: it is compiled now.
            observe: a token of the prompt, and what is called with the logits of it and of those after it.

        Raises:
            DataError: the prompt is empty, or a token is outside the vocabulary.
            SettingsError: the parameters do not suit the model, or the request can never run. GrammarError,
                a subclass: the grammar exceeds the limits.
            MissingExtraError: there is a grammar, and llguidance is not installed.
            BusyError: the queue is full.
        """
        now = self.clock()
        self._check_request(prompt, params, id)
        if adapter and adapter not in getattr(self.runner, "adapters", ()):
            raise SettingsError("adapter", adapter, "one that is loaded")
        if matcher is None and self.grammars is not None:
            matcher = self.grammars.matcher(params, salt)
        logits_from = observe[0] if observe else None if params.prompt_logprobs is None else 0
        request = Request(
            id=self._next_id() if id is None else id,
            prompt=tuple(prompt),
            max_tokens=params.max_tokens,
            n=params.n,
            priority=priority,
            arrival=now,
            deadline=None if deadline_s is None else now + deadline_s,
            salt=salt,
            adapter=adapter,
            logits_from=logits_from,
        )
        sequence = self.scheduler.add(request)
        limit = sequence.limit - len(request.prompt)
        decode = self.decode and partial(_decode, self.decode, params.skip_special_tokens)
        try:
            self._requests[request.id] = RequestState.of(
                request, params, ends=self.ends, limit=limit, decode=decode, matcher=matcher
            )
            self._requests[request.id].observe = observe and observe[1]
        except BaseException:
            self.scheduler.finish(sequence, "error")
            raise
        return request.id

    def step(self) -> list[Event]:
        """Run one step; an event of each completion that got tokens or ended. Without work nothing
        happens."""
        now = self.clock()
        events, step = self._compute_masks(), None
        try:
            planned = self.scheduler.plan(now)
            if self.speculator is not None:
                planned = self.speculator.add_drafts(planned, self.scheduler, self._completion, self._inside)
            step = self.scheduler.build(planned)
        except Exception as failure:
            events += self._fail_running(failure)
        events += self._scheduler_events()
        if step is not None:
            events += self._run(step, now)
        return self._after_step(events)

    def cancel(self, id: str) -> list[Event]:
        """End what is left of a request; unknown and finished ones are no error."""
        sequences = self.scheduler.cancel(id)
        return self._after_step([event for sequence in sequences for event in self._last_events(sequence)])

    def uses(self, adapter: str) -> bool:
        """Whether a request has an adapter."""
        return any(state.request.adapter == adapter for state in self._requests.values())

    def check_idle(self) -> float | None:
        """Check the bookkeeping of an idle engine: count its blocks, or run the full :meth:`check` if the
        last one is CHECK_S seconds ago. Call it once a step's events are delivered: a full check of a large
        pool takes a while. Returns seconds after which it should be called again; None: nothing is left to
        check.

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
        """Raises AssertionError naming what is wrong: leaked blocks or states, a request without a
        sequence."""
        self.scheduler.check()
        states = getattr(self.runner, "states", None)
        running = {sequence.id for sequence in self.scheduler.running}
        leaked = [] if states is None else [held for held in states.sequences if held not in running]
        assert not leaked, f"states of sequences {leaked} leaked"
        assert not self.idle or not self._requests, f"requests {list(self._requests)} have no sequence"

    def _check_request(self, prompt: Sequence[int], params: SamplingParams, id: str | None) -> None:
        if id in self._requests:
            raise SettingsError("id", id, "one that no running request has")
        params.fit(self.vocabulary)
        if params.pooling is not None and (self.pooler is None or params.max_tokens != 1):
            raise SettingsError("pooling", params.pooling, "None, unless states are kept and max_tokens is 1")
        features = getattr(self.runner, "features", {})
        check_params(params, features, decodes=self.decode is not None, grammars=self.grammars is not None)
        check_tokens(prompt, self.runner.vocabulary)

    def _next_id(self) -> str:
        """The next number that is no request's id."""
        return next(number for number in self._numbers if number not in self._requests)

    def _completion(self, sequence: Running) -> Completion:
        return self._requests[sequence.request.id].completions[sequence.index]

    def _after_step(self, events: list[Event]) -> list[Event]:
        """The same events; after the last request's, the engine has something to check."""
        if events and self.idle:
            self._ran = True
            if self.speculator is not None:
                self.speculator.drop_finished(())
        return events

    def _run(self, step: StepInput, now: float) -> list[Event]:
        """Run a step, and give the sequences its tokens."""
        events: list[Event] = []
        running = {sequence.id: sequence for sequence in self.scheduler.running}
        for span in step.spans:
            self._requests[running[span.sequence].request.id].start(now, span.start)
        began = time.thread_time()
        step, logits, failures = execution.run(self.runner, step)
        self._pass_s = time.thread_time() - began
        for sequence, failure in failures.items():
            events += self._fail(running[sequence], failure)
        outputs = self.scheduler.commit(step)
        events += self._scheduler_events()
        events += self._sample(outputs, logits[:, : self.vocabulary])
        if self.eviction is not None:
            for packed, failure in execution.pack_due(self.scheduler, self.eviction, self.runner):  # type: ignore[arg-type]
                events += self._fail(packed, failure)
        return events

    def _fail_running(self, failure: Exception) -> list[Event]:
        """An error that belongs to no sequence: all running requests end with it, or the first that waits.

        Raises:
            Exception: the error, where there is no request.
        """
        events: list[Event] = []
        for sequence in [*self.scheduler.running] or [*self.scheduler.waiting][:1]:
            events += self._fail(sequence, failure)
        if not events:
            raise failure
        return events

    def _compute_masks(self) -> list[Event]:
        """A step begins: masks that the last ones had no time for, and the ends that they show."""
        events: list[Event] = []
        if self.grammars is not None and any(state.guided for state in self._requests.values()):
            self._masks.begin([sequence.request.payer for sequence in self.scheduler.running], self._pass_s)
        for sequence in list(self._held.values()):
            if sequence.finished or self._masks.open(sequence.request.payer):
                del self._held[sequence.id]
                events += self._resume(sequence)
        return events

    def _resume(self, sequence: Running) -> list[Event]:
        """The mask of a held sequence, which runs on, or has ended with its last token."""
        sequence.held = False
        if sequence.finished:
            return []
        completion = self._completion(sequence)
        reason = completion.reason_of_grammar()
        self._masks.charge(sequence.request.payer, completion.mask_s())
        if reason is None:
            return []
        self.scheduler.finish(sequence, reason)
        return [self._complete(completion.finish(reason))]

    def _sample(self, outputs: Sequence[StepOutput], logits: Tensor) -> list[Event]:
        """New tokens for every sequence whose last token was run."""
        events: list[Event] = []
        for output in outputs:
            try:
                if not output.sequence.finished:
                    score_prompt(self._requests[output.sequence.request.id], output, logits)
            except Exception as failure:
                events += self._fail(output.sequence, failure)
        due = [output for output in outputs if output.draws and not output.sequence.finished]
        completions = [self._completion(output.sequence) for output in due]
        results = sample_tokens(logits, due, completions, self.speculator)
        if self.speculator is not None:
            self.speculator.note(due, results, logits)
        for output, completion, sampled in zip(due, completions, results, strict=True):
            if isinstance(sampled, Exception):
                events += self._fail(output.sequence, sampled)
            elif not output.sequence.finished:
                events += self._append(output.sequence, completion, sampled, logits)
        return events

    def _append(
        self, sequence: Running, completion: Completion, sampled: SampledTokens, logits: Tensor
    ) -> list[Event]:
        """A completion gets its tokens, and may end with one of them."""
        params, payer = completion.params, sequence.request.payer
        held = completion.guided and not self._masks.open(payer)
        try:
            logprobs = sampled.logprobs(logits, params.logprobs)
            sources = sampled.sources(params.proposers)
            event = completion.append(sampled.tokens, logprobs, sources, defer=held)
            self._masks.charge(payer, completion.mask_s())
            if params.pooling is not None and self.pooler is not None:
                row = self.scheduler.manager.table(sequence.id).row
                embedding = self.pooler.pool(row, len(sequence.request.prompt), params.pooling)
                event = replace(event, embedding=embedding)
        except Exception as failure:
            return self._fail(sequence, failure)
        state = self._requests[event.request]
        state.drafted, state.accepted = state.drafted + sampled.drafted, state.accepted + len(sampled.path)
        state.lossy = state.lossy or sampled.lossy
        if event.finish_reason is not None:
            self.scheduler.finish(sequence, event.finish_reason)
            return [self._complete(event)]
        try:
            table = self.scheduler.manager.table(sequence.id)
            if moves := sampled.moves(table.length):
                self.runner.move([(table.slot(old), table.slot(new)) for old, new in moves])
            self.scheduler.append(sequence, sampled.tokens)
            if held:
                sequence.held, self._held[sequence.id] = True, sequence
        except Exception as failure:
            return [self._complete(event), *self._fail(sequence, failure)]
        return [self._complete(event)]

    def _fail(self, sequence: Running, failure: Exception) -> list[Event]:
        """The request of a sequence ends with an error, with all its unfinished completions."""
        ended = self.scheduler.cancel(sequence.request.id, "error", failure)
        return [event for sequence in ended for event in self._last_events(sequence)]

    def _scheduler_events(self) -> list[Event]:
        """The last events of sequences that the scheduler finished by itself."""
        return [event for sequence in self.scheduler.ended() for event in self._last_events(sequence)]

    def _last_events(self, sequence: Running) -> list[Event]:
        """The last events of a finished sequence: of all n completions where it had not forked."""
        reason: FinishReason = sequence.reason  # type: ignore[assignment]
        completions = self._requests[sequence.request.id].completions
        completions = completions[sequence.index : sequence.index + sequence.width]
        return [self._complete(completion.finish(reason, sequence.failure)) for completion in completions]

    def _complete(self, event: Event) -> Event:
        """The event with what concerns the whole request, which is forgotten after its last event."""
        state = self._requests[event.request]
        event = state.complete(event, self.clock())
        if state.finished:
            del self._requests[event.request]
        return event


def sample_tokens(
    logits: Tensor,
    outputs: Sequence[StepOutput],
    completions: Sequence[Completion],
    speculator: Speculator | None = None,
) -> list[SampledTokens | Exception]:
    """Tokens for each output, from all rows of the step (R, V). An error is returned in the place of the
    output that it concerns; the other outputs get their tokens."""
    results: dict[int, SampledTokens | Exception] = {}
    plain = []
    for index, (output, completion) in enumerate(zip(outputs, completions, strict=True)):
        if speculator is None or not speculator.has(output):
            plain.append(index)
            continue
        try:
            results[index] = speculator.verify(output, logits, completion)
        except Exception as error:
            results[index] = error
    rows = [outputs[index].rows[-1] for index in plain]
    tokens = _sample_rows(logits, rows, [completions[index] for index in plain])
    for index, row, token in zip(plain, rows, tokens, strict=True):
        results[index] = token if isinstance(token, Exception) else SampledTokens((token,), (row,))
    return [results[index] for index in range(len(outputs))]


def _sample_rows(
    logits: Tensor, rows: Sequence[int], completions: Sequence[Completion]
) -> list[int | Exception]:
    """A token for each of some rows of (R, V): together, or one by one where that fails."""
    if not completions:
        return []
    try:
        selected = logits if rows == list(range(len(logits))) else logits[rows]
        params = [completion.row() for completion in completions]
        return list(sample(selected, params, [completion.key() for completion in completions]))
    except Exception as error:
        if len(completions) == 1:
            return [error]
        pairs = zip(rows, completions, strict=True)
        return [_sample_rows(logits, [row], [completion])[0] for row, completion in pairs]


def score_prompt(state: RequestState, output: StepOutput, logits: Tensor) -> None:
    """Log-probabilities of the prompt's tokens, where asked for: ``state`` keeps them. Its observer gets the
    logits of each token, (V,), which change after the call."""
    count, observe = state.params.prompt_logprobs, state.observe
    if state.request.logits_from is None or output.sequence.index:
        return
    prompt = state.request.prompt
    for position, row in enumerate(output.rows, output.position + 1):
        if position < len(prompt):
            if count is not None:
                state.prompt_logprobs.append(token_logprob(logits[row], prompt[position], count))
            if observe is not None:
                observe(position - 1, logits[row])


def _decode(decode: DecodeTokens, skip: bool, ids: Sequence[int]) -> str:
    """Text of tokens; a panic of the tokenizer's library, which is no Exception, becomes one."""
    try:
        return decode(ids, skip)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(f"the tokenizer: {error}") from error
