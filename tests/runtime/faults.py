"""Errors put into an engine's calls, each tied to one request: what every other request is held against.

    faults = Faults(engine, monkeypatch)
    faults.guilty[name] = Fault("detokenize", after=3)      # the fourth such call for it, and all later ones
    faults.choose = lambda name, params: Fault(...) | None   # or: asked for each request as it is added

PLACES are the engine's calls. ``run``, ``move``, ``fork``, ``forget`` and ``pack`` are the runner's,
``admit``, ``reserve``, ``commit`` and ``pages`` the block manager's. Those in HARMLESS belong to no request:
they raise while a guilty one runs, and must cost no text at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from attar.runtime import engine as engine_module
from attar.runtime.completion import Completion
from attar.runtime.engine import Engine
from attar.runtime.sampling import sampled_tokens
from attar.runtime.sampling.params import SamplingParams

TEXT = ("sample", "logprobs", "detokenize", "stop", "grammar", "row")
RUNNER = ("run", "move", "fork", "pack")
MEMORY = ("admit", "reserve", "commit", "pages")
OTHERS = ("prompt", "verify", "texts")
HARMLESS = ("propose", "observe", "note", "plan", "forget")
"""Of no sequence: they end no request."""
PLACES = (*TEXT, *RUNNER, *MEMORY, *OTHERS, *HARMLESS)


class FaultError(RuntimeError):
    """Raised on purpose."""


@dataclass
class Fault:
    """One request's.

    Args:
        place: one of PLACES.
        after: number of calls that succeed first.
        error: made with the place's name.
    """

    place: str
    after: int = 0
    error: Callable[[str], BaseException] = FaultError


class Tagged(int):
    """A number of log-probabilities that knows whose it is."""

    name: str


class Faults:
    """The errors of one engine.

    Args:
        engine: its runner, manager, speculator and ``add`` are wrapped.
        monkeypatch: takes back what is changed in modules.

    Attributes:
        guilty: by request.
        choose: asked for a request's fault when it is added; None: it has none.
        raised: (place, request) of every error.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.guilty, self.raised = engine, dict[str, Fault](), list[tuple[str, str]]()
        self.choose: Callable[[str, SamplingParams], Fault | None] = lambda name, params: None
        self._named: dict[int, tuple[SamplingParams, str]] = {}
        self._wrap_memory(engine)
        self._wrap_runner(engine)
        self._wrap_texts(engine, monkeypatch)
        self._wrap_speculator(engine)

    @property
    def broken(self) -> set[str]:
        """Requests that an error was raised for, and whose text may not be whole."""
        return {name for index, name in self.raised if index not in HARMLESS}

    def hit(self, place: str, *names: str) -> None:
        """Raises where one of the requests is due an error at this place."""
        for name in names:
            fault = self.guilty.get(name)
            if fault is None or fault.place != place:
                continue
            fault.after -= 1
            if fault.after < 0:
                self.raised.append((place, name))
                raise fault.error(place)

    def _names(self, sequences: Iterable[int]) -> list[str]:
        live = self.engine.scheduler._live
        return [live[sequence].request.id for sequence in sequences if sequence in live]

    def _wrap(self, owner: Any, method: str, place: str, whose: Callable[..., Iterable[int]]) -> None:
        plain = getattr(owner, method)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.hit(place, *self._names(whose(*arguments)))
            return plain(*arguments, **options)

        setattr(owner, method, wrapped)

    def _wrap_memory(self, engine: Engine) -> None:
        manager = engine.scheduler.manager
        for method in ("admit", "reserve", "commit"):
            self._wrap(manager, method, method, lambda sequence, *rest: [sequence])
        self._wrap(manager, "pack", "pages", lambda sequence, *rest: [sequence])

    def _wrap_runner(self, engine: Engine) -> None:
        runner: Any = engine.runner
        self._wrap(runner, "run", "run", lambda step: [span.sequence for span in step.spans])
        self._wrap(runner, "fork", "fork", lambda sequence, child: [sequence])
        self._wrap(runner, "forget", "forget", lambda sequence: [sequence])
        self._wrap(runner, "move", "move", self._holders)
        if hasattr(runner, "pack"):
            self._wrap(runner, "pack", "pack", lambda packing: [packing.sequence])

    def _holders(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """The sequence whose slots are moved."""
        manager, block = self.engine.scheduler.manager, pairs[0][1] // self.engine.runner.block_size
        return [one for one in manager.sequences if block in manager.table(one).blocks]

    def _wrap_texts(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        add, sample, logprob = engine.add, engine_module.sample, engine_module.token_logprob

        def added(prompt: Sequence[int], params: SamplingParams, **options: Any) -> str:
            name = add(prompt, params, **options)
            fault = self.choose(name, params)
            if fault is not None:
                self.guilty[name] = fault
            state = engine._requests[name]
            state.params = self._tagged(params, name)
            for text in state.completions:
                self._wrap_text(text, state.params, name)
            return name

        def sampled(logits: Any, rows: Any, keys: Any) -> list[int]:
            known = [self._named[id(row.params)] for row in rows if id(row.params) in self._named]
            self.hit("sample", *(name for _, name in known))
            return sample(logits, rows, keys)

        def scored(logits: Any, token: int, count: int) -> Any:
            if isinstance(count, Tagged):
                self.hit("logprobs", count.name)
                self.hit("prompt", count.name)
            return logprob(logits, token, count)

        monkeypatch.setattr(engine, "add", added)
        monkeypatch.setattr(engine_module, "sample", sampled)
        monkeypatch.setattr(engine_module, "token_logprob", scored)
        monkeypatch.setattr(sampled_tokens, "token_logprob", scored)

    def _tagged(self, params: SamplingParams, name: str) -> SamplingParams:
        """The same parameters, known by their identity and by their counts."""
        counts = {}
        for field in ("logprobs", "prompt_logprobs"):
            if (value := getattr(params, field)) is not None:
                counts[field] = Tagged(value)
                counts[field].name = name
        result = replace(params, **counts)
        self._named[id(result)] = (result, name)
        return result

    def _wrap_text(self, text: Completion, params: SamplingParams, name: str) -> None:
        text.params = params
        parts = [
            (text, "row", "row"),
            (text, "append", "texts"),
            (text._detokenizer, "add", "detokenize"),
            (text._detokenizer, "flush", "detokenize"),
            (text._stops, "add", "stop"),
            (text._matcher, "consume", "grammar"),
            (text._matcher, "allowed", "grammar"),
        ]
        for owner, method, index in parts:
            if owner is not None:
                self._wrap_part(owner, method, index, name)

    def _wrap_part(self, owner: Any, method: str, place: str, name: str) -> None:
        plain = getattr(owner, method)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.hit(place, name)
            return plain(*arguments, **options)

        setattr(owner, method, wrapped)

    def _wrap_speculator(self, engine: Engine) -> None:
        speculator: Any = engine.speculator
        if speculator is None:
            return
        live = engine.scheduler._live
        self._wrap(speculator, "verify", "verify", lambda output, *rest: [output.sequence.id])
        self._wrap(speculator, "_learn", "note", lambda *_: [*live])
        self._wrap(speculator, "_passed_by", "plan", lambda plan: [entry[0].id for entry in plan])
        self._wrap(speculator.proposer, "propose", "propose", lambda wishes: [one.sequence for one in wishes])
        self._wrap(speculator.proposer, "observe", "observe", lambda news: [one.sequence for one in news])
