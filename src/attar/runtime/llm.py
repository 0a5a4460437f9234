"""``attar.LLM``: a model, its tokenizer and an engine, for programs.

    llm = LLM("attar:tiny")
    llm.generate(["def ", "class "], SamplingParams(temperature=0.7, n=2))  → one Result per prompt
    for event in llm.stream("def "): ...                                      → pieces as they come
    async with llm.streams() as streams: ...                                  → many at a time, for asyncio

One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from attar.checkpoint import Checkpoint
from attar.errors import NumericsError, SettingsError
from attar.progress import SILENT, Progress
from attar.runtime.admission import Limits
from attar.runtime.async_engine import AsyncEngine
from attar.runtime.describe import Description, describe
from attar.runtime.engine import DEFAULT, Engine
from attar.runtime.kv.compose import check_together, evicting
from attar.runtime.loading import Loaded, load
from attar.runtime.pooling import FINAL, pooler_of
from attar.runtime.prefixes import check_store, open_store
from attar.runtime.results import Event, Result, gather_result
from attar.runtime.sampling.grammar import Grammars
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.scheduler import Scheduler
from attar.runtime.speculate.build import layers_read, make_speculator
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.tokenizer import Prompt, PromptTokenizer, list_prompts


class LLM:
    """A language model that answers prompts.

    Args:
        model: a folder, a ``.gguf`` file, a hub id, ``attar:tiny``, or an open checkpoint.
        prefix_cache: whether prompts share the blocks of a common prefix; None: unless the eviction chooses
            by attention (H2O, SnapKV, Reread).
        limits: how much runs at a time, and how much may wait.
        prefix_store: FOLDER or FOLDER:SIZE that keeps the blocks of prompts for later processes; None: none.
        embeddings: keep the final hidden states of prompts, which requests with ``pooling`` read.
        options: fields of :class:`attar.runtime.runner.choice.RunnerSettings` (dtype, device, kv_dtype,
            kv_tokens, eviction, runner, weights, ...) and of
            :class:`attar.runtime.speculate.wanted.SpeculationSettings` (speculate, draft, ...).

    Raises:
        CheckpointError: the folder is missing or damaged.
        ModelError: not a causal language model, or one the runtime cannot run, by name.
        SettingsError: a setting out of range.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        limits: Limits | None = None,
        prefix_cache: bool | None = None,
        prefix_store: str | None = None,
        embeddings: bool = False,
        **options: Any,
    ) -> None:
        names = [field.name for field in fields(SpeculationSettings) if field.name in options]
        speculation = SpeculationSettings(**{name: options.pop(name) for name in names})
        speculation.check_with(evicting(options.get("eviction")))
        layers = layers_read(speculation.draft, evicting(options.get("eviction")))
        if embeddings:
            check_together({**evicting(options.get("eviction")), "hidden_states": ("embeddings", True)})
            layers = (*layers, FINAL)
        if prefix_store:
            check_store(prefix_store, prefix_cache, options, layers)
        sequences = (limits or Limits()).sequences
        loaded = load(model, sequences=sequences, prefix_cache=prefix_cache, **options, hidden_layers=layers)
        shared = ("device", "block_size", "activations")  # a draft model keeps its own dtype
        of_draft = {name: options[name] for name in shared if name in options}
        speculator = make_speculator(speculation, loaded, model, **of_draft)
        self._assemble(loaded, limits, prefix_cache, speculator)
        if prefix_store:
            self.engine.scheduler.manager.store = open_store(prefix_store, loaded)
        if embeddings:
            self.engine.pooler = pooler_of(loaded)

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        *,
        limits: Limits | None = None,
        prefix_cache: bool | None = None,
        speculator: Speculator | None = None,
    ) -> LLM:
        """From a model that is loaded already."""
        llm = cls.__new__(cls)
        llm._assemble(loaded, limits, prefix_cache, speculator)
        return llm

    def _assemble(
        self, loaded: Loaded, limits: Limits | None, prefix_cache: bool | None, speculator: Speculator | None
    ) -> None:
        runner, limits = loaded.runner, limits or Limits()
        manager = loaded.manager(limits, prefix_cache)
        scheduler = Scheduler(manager, limits, context=runner.context, memory=runner)
        self.name, self.tokenizer = loaded.name, loaded.tokenizer
        self.prompt_tokenizer = PromptTokenizer(loaded.tokenizer)
        vocabulary, has_text = runner.vocabulary, loaded.tokenizer is not None
        if has_text:
            vocabulary = min(vocabulary, len(loaded.tokenizer))
        self.engine = Engine(
            runner,
            scheduler,
            ends=loaded.ends,
            decode=self.prompt_tokenizer.decode if has_text else None,
            vocabulary=vocabulary,
            eviction=loaded.eviction,
            grammars=Grammars(loaded.tokenizer, vocabulary) if has_text else None,
            speculator=speculator,
        )
        self._why_not_compiled = loaded.why
        self._events: dict[str, list[Event]] = {}  # by request, not yet returned

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT,
        *,
        progress: Progress = SILENT,
    ) -> list[Result]:
        """Complete prompts, batched: one result for each, in their order.

        Args:
            prompts: text or token ids, one or several.
            params: for all of them, or one for each.

        Raises:
            DataError: a prompt is empty.
            SettingsError: parameters that do not suit the model or the prompt.
            NumericsError: the model's logits are NaN.
        """
        texts = list_prompts(prompts)
        each_params = [params] * len(texts) if isinstance(params, SamplingParams) else list(params)
        if len(each_params) != len(texts):
            allowed = f"one, or one for each of {len(texts)} prompts"
            raise SettingsError("params", f"{len(each_params)} of them", allowed)
        encoded = [self.encode(prompt) for prompt in texts]
        ids: list[str] = []
        try:
            ids += self._add(encoded, each_params)
            events = self._finish(ids, progress)
        finally:
            self._drop(ids)
        rows = zip(texts, encoded, events, each_params, strict=True)
        return [
            gather_result(
                prompt if isinstance(prompt, str) else None, tokens, event, prompt_params.logprobs is not None
            )
            for prompt, tokens, event, prompt_params in rows
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams = DEFAULT,
    ) -> Result:
        """Answer a conversation, ``[{"role": "user", "content": "..."}]``, with the model's own template.

        Raises:
            as :meth:`generate`; DataError where the tokenizer has no chat template, or it refuses.
        """
        return self.generate([self.encode_chat(messages)], params)[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Event]:
        """The completion of one prompt piece by piece; closing the iterator cancels the request.

        Args:
            prompt: text or token ids.
            stopped: called after every step; true ends the iterator without a last event.

        Raises:
            as :meth:`generate`.
        """
        names: list[str] = []
        try:
            names += self._add([self.encode(prompt)], [params])
            left = params.n
            while left:
                self._step()
                events, self._events[names[0]] = self._events[names[0]], []
                for event in events:
                    self._raise(event)
                    left -= event.finished
                    yield event
                if stopped():
                    return
        finally:
            self._drop(names)

    def streams(self) -> AsyncEngine:
        """For asyncio: the engine runs in its own thread, and nothing else may use this object meanwhile."""
        return AsyncEngine(self.engine)

    def describe(self) -> Description:
        """What runs the model, and how: for people, logs and metrics."""
        return describe(self.name, self.engine, self._why_not_compiled)

    def encode(self, prompt: Prompt) -> list[int]:
        """See :meth:`PromptTokenizer.encode`."""
        return self.prompt_tokenizer.encode(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """See :meth:`PromptTokenizer.encode_chat`."""
        return self.prompt_tokenizer.encode_chat(messages)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See :meth:`PromptTokenizer.decode`."""
        return self.prompt_tokenizer.decode(ids, skip_special_tokens)

    def _add(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Iterator[str]:
        for prompt, prompt_params in zip(prompts, params, strict=True):
            name = self.engine.add(prompt, prompt_params)
            self._events[name] = []
            yield name

    def _finish(self, names: Sequence[str], progress: Progress) -> list[list[Event]]:
        """All events of some requests."""
        left = len(names)
        with progress.task("generate", total=left) as task:
            while left:
                for event in self._step():
                    self._raise(event)
                    if event.usage is not None and event.request in names:
                        left -= 1
                        task.advance()
        return [self._events[name] for name in names]

    def _step(self) -> list[Event]:
        """One step of the engine; the events are stored by request."""
        events = self.engine.step()
        for event in events:
            if event.request in self._events:
                self._events[event.request].append(event)
        return events

    def _raise(self, event: Event) -> None:
        """A failed completion is raised to the caller."""
        if event.finish_reason != "error":
            return
        raise event.failure or NumericsError(event.error or "the model failed")

    def _drop(self, names: Sequence[str]) -> None:
        """Cancel what is left of the requests, and delete their events."""
        for name in names:
            self.engine.cancel(name)
            del self._events[name]
        self.engine.check_idle()
