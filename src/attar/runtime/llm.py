"""``attar.LLM``: a model, its tokenizer and an engine, for programs.

    llm = LLM("attar:tiny")
    llm.generate(["def ", "class "], SamplingParams(temperature=0.7, n=2))  → one Result per prompt
    for event in llm.stream("def "): ...                                      → pieces as they come
    async with llm.streams() as streams: ...                                  → many at a time, for asyncio

One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attar.checkpoint import Checkpoint
from attar.errors import NumericsError, SettingsError
from attar.progress import SILENT, Progress
from attar.runtime.admission import Limits
from attar.runtime.async_engine import AsyncEngine
from attar.runtime.describe import Description, describe
from attar.runtime.engine import DEFAULT, Engine
from attar.runtime.kv.compose import evicting
from attar.runtime.kv.evict import Eviction
from attar.runtime.loading import Loaded, load
from attar.runtime.results import Event, Result, gather_result
from attar.runtime.sampling.grammar import Grammars
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.scheduler import Scheduler
from attar.runtime.speculate.build import make_speculator
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.tokenizer import Prompt, PromptTokenizer, list_prompts


class LLM:
    """A language model that answers prompts.

    Args:
        model: a folder, a ``.gguf`` file, a hub id, ``attar:tiny``, or an open checkpoint.
        dtype: float32, bfloat16, float16, or auto: float32 on a CPU, the checkpoint's own elsewhere.
        device: cpu, cuda or cuda:0.
        kv_dtype: how keys and values are kept, a name of ``kv.store.STORES``; auto is the model's dtype.
        kv_tokens: tokens that the pool of keys and values holds; None: what 1 GiB holds, at most 16 contexts.
        block_size: tokens of a block: the unit of sharing.
        eviction: bounds the keys and values of each text, an object of ``kv.evict``; None: not at all.
        prefix_cache: whether prompts that begin alike share the beginning; None: unless the eviction
            chooses by attention (H2O, SnapKV).
        limits: how much runs together, and how much may wait.
        runner: compiled, modules, or auto: compiled where it holds the weights as they are stored and does
            all that is asked for (docs/runtime.md), else modules.
        activations: bits of what products of packed weights take: 16, 8, or auto: 16 where the processor has
            instructions that keep a step's speed, else 8 (docs/runtime.md).
        weights: int8 or int4: dense weights are rounded while they are loaded, by the compiled runner.
        speculate: ngram, lookahead or self: how tokens are drafted, several of which a pass verifies.
        draft: a model that drafts; its tokenizer may be another.
        drafts: of one text in a pass at most; None: what suits the method. Those that do not pay are not run.
        verification: coupled: the text is the same without drafts; exact: its law is, and more drafts of a
            model are accepted; None: coupled where a request has a seed.

    Raises:
        CheckpointError: the folder is missing or damaged.
        ModelError: not a causal language model, or one the runtime cannot run, by name.
        SettingsError: a setting out of range.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        kv_dtype: str = "auto",
        kv_tokens: int | None = None,
        block_size: int = 16,
        eviction: Eviction | None = None,
        prefix_cache: bool | None = None,
        limits: Limits | None = None,
        runner: str = "auto",
        activations: int | str = "auto",
        weights: str | None = None,
        speculate: str | None = None,
        draft: str | Path | Checkpoint | None = None,
        drafts: int | None = None,
        verification: str | None = None,
    ) -> None:
        wanted = SpeculationSettings(
            speculate=speculate, draft=draft, drafts=drafts, verification=verification
        )
        wanted.check_with(evicting(eviction))
        alike: dict[str, Any] = {"device": device, "block_size": block_size}  # a draft keeps its own dtype
        alike["activations"] = activations
        kept: dict[str, Any] = {"kv_dtype": kv_dtype, "kv_tokens": kv_tokens, "eviction": eviction}
        loaded = load(model, runner=runner, weights=weights, dtype=dtype, **alike, **kept)
        self._assemble(loaded, limits, prefix_cache, make_speculator(wanted, loaded, model, **alike))

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        *,
        limits: Limits | None = None,
        prefix_cache: bool | None = None,
        speculator: Speculator | None = None,
    ) -> LLM:
        """One made of parts that are loaded already."""
        made = cls.__new__(cls)
        made._assemble(loaded, limits, prefix_cache, speculator)
        return made

    def _assemble(
        self, loaded: Loaded, limits: Limits | None, prefix_cache: bool | None, drafter: Speculator | None
    ) -> None:
        runner = loaded.runner
        limits = limits or Limits()
        manager = loaded.manager(limits, prefix_cache)
        scheduler = Scheduler(manager, limits, context=runner.context, memory=runner)
        self.name, self.tokenizer, self.codec = (
            loaded.name,
            loaded.tokenizer,
            PromptTokenizer(loaded.tokenizer),
        )
        vocabulary, speaks = runner.vocabulary, loaded.tokenizer is not None
        if speaks:
            vocabulary = min(vocabulary, len(loaded.tokenizer))
        self.engine = Engine(
            runner,
            scheduler,
            ends=loaded.ends,
            decode=self.codec.decode if speaks else None,
            vocabulary=vocabulary,
            eviction=loaded.eviction,
            grammars=Grammars(loaded.tokenizer, vocabulary) if speaks else None,
            speculator=drafter,
        )
        self._why = loaded.why
        self._inbox: dict[str, list[Event]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT,
        *,
        progress: Progress = SILENT,
    ) -> list[Result]:
        """Answer prompts, together: one result for each, in their order.

        Args:
            prompts: text or token ids, one or several.
            params: for all of them, or one for each.

        Raises:
            DataError: a prompt is empty.
            SettingsError: parameters that do not suit the model or the prompt.
            NumericsError: the model's logits are NaN.
        """
        asked = list_prompts(prompts)
        wished = [params] * len(asked) if isinstance(params, SamplingParams) else list(params)
        if len(wished) != len(asked):
            raise SettingsError(
                "params", f"{len(wished)} of them", f"one, or one for each of {len(asked)} prompts"
            )
        encoded = [self.encode(prompt) for prompt in asked]
        names: list[str] = []
        try:
            names += self._add(encoded, wished)
            events = self._finish(names, progress)
        finally:
            self._drop(names)
        return [
            gather_result(prompt if isinstance(prompt, str) else None, ids, mine, each.logprobs is not None)
            for prompt, ids, mine, each in zip(asked, encoded, events, wished, strict=True)
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
        """The answer to one prompt piece by piece; what is left is cancelled when the iterator is closed.

        Args:
            prompt: text or token ids.
            params: of this answer.
            stopped: asked after every step; true ends the answer without a last event.

        Raises:
            as :meth:`generate`.
        """
        names: list[str] = []
        try:
            names += self._add([self.encode(prompt)], [params])
            left = params.n
            while left:
                self._pump()
                fresh, self._inbox[names[0]] = self._inbox[names[0]], []
                for event in fresh:
                    self._raise(event)
                    left -= event.finished
                    yield event
                if stopped():
                    return
        finally:
            self._drop(names)

    def streams(self) -> AsyncEngine:
        """For asyncio: the engine runs in a thread of its own, and nothing else may use this object then."""
        return AsyncEngine(self.engine)

    def describe(self) -> Description:
        """What runs the model, and how: for people, logs and metrics."""
        return describe(self.name, self.engine, self._why)

    def encode(self, prompt: Prompt) -> list[int]:
        """See :meth:`PromptTokenizer.encode`."""
        return self.codec.encode(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """See :meth:`PromptTokenizer.encode_chat`."""
        return self.codec.encode_chat(messages)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See :meth:`PromptTokenizer.decode`."""
        return self.codec.decode(ids, skip_special_tokens)

    def _add(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Iterator[str]:
        for prompt, each in zip(prompts, params, strict=True):
            name = self.engine.add(prompt, each)
            self._inbox[name] = []
            yield name

    def _finish(self, names: Sequence[str], progress: Progress) -> list[list[Event]]:
        """All events of some requests."""
        left = len(names)
        with progress.task("generate", total=left) as task:
            while left:
                for event in self._pump():
                    self._raise(event)
                    if event.usage is not None and event.request in names:
                        left -= 1
                        task.advance()
        return [self._inbox[name] for name in names]

    def _pump(self) -> list[Event]:
        """One step; events are put aside for whoever waits for them."""
        events = self.engine.step()
        for event in events:
            if event.request in self._inbox:
                self._inbox[event.request].append(event)
        return events

    def _raise(self, event: Event) -> None:
        """A failed text is an error of the caller's call."""
        if event.finish_reason != "error":
            return
        raise event.failure or NumericsError(event.error or "the model failed")

    def _drop(self, names: Sequence[str]) -> None:
        """Cancel what is left of the requests, and forget them."""
        for name in names:
            self.engine.cancel(name)
            del self._inbox[name]
        self.engine.check_idle()
