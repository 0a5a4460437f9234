"""The runtime's settings on the command line: flat, and free of torch and numpy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.errors import DataError, SettingsError, nearest
from attar.options import check_at_least, setting
from attar.runtime.kv.compose import check_together, store_feature
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.settings import ALONE, MODES, WITH_DRAFT, SpeculationSettings

if TYPE_CHECKING:
    from attar.runtime.admission import Limits

METHODS = {
    "reread": ("capacity", "recent"),
    "streaming": ("sinks", "window"),
    "h2o": ("heavy", "recent"),
    "snapkv": ("capacity", "window"),
}
DEFAULT = "reread"  # the method of a number alone


@dataclass(frozen=True, kw_only=True)
class SchedulingSettings:
    """How much runs at a time, and how much may wait."""

    step_tokens: int = setting(512, "most tokens of a step")
    sequences: int = setting(64, "most sequences that run at the same time")
    chunk: int | None = setting(None, "most tokens of one prompt in a step; none: all that fit")
    waiting: int | None = setting(None, "most requests that wait; none: any number")
    waiting_tokens: int | None = setting(None, "most tokens of the prompts that wait; none: any number")
    prefix_first: bool = setting(False, "among waiting requests the longest cached prefix goes first")

    def __post_init__(self) -> None:
        self.limits()

    def limits(self) -> Limits:
        """The limits of the scheduler.

        Raises:
            SettingsError: numbers out of range.
        """
        from attar.runtime.admission import Limits

        names = {field.name for field in fields(SchedulingSettings)}
        return Limits(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class EngineSettings(SchedulingSettings):
    """How a model runs: runner, KV cache, scheduler, speculation."""

    runner: str = setting("auto", "what computes; auto: compiled, on a GPU device, where weights stay stored",
                          choices=("auto", "compiled", "device", "modules"))  # fmt: skip
    activations: int | str = setting(
        "auto", "bits of products' inputs; auto: 16 where the processor has instructions for it, else 8",
        choices=("auto", 16, 8),
    )  # fmt: skip
    weights: str | None = setting(
        None, "round dense weights while they are loaded; none: as stored", choices=("int8", "int4")
    )
    dtype: str = setting("auto", "what to compute in; auto: float32 on a CPU, the checkpoint's own on a GPU",
                         choices=("auto", "float32", "bfloat16", "float16"))  # fmt: skip
    device: str = setting("cpu", "cpu, cuda or cuda:0")
    kv_dtype: str = setting(
        "auto", "format of keys and values: float32, bfloat16, float16, int8, fp8, int4, kivi4, kivi2"
    )
    kv_tokens: int | None = setting(
        None,
        "tokens that the KV cache holds; none: what 1 GiB holds, with the states that a draft head reads",
    )
    eviction: str = setting("none", "bounds each sequence's KV cache: reread:CAPACITY,RECENT (or CAPACITY "
                            "alone), snapkv:CAPACITY,WINDOW, streaming:SINKS,WINDOW or h2o:HEAVY,RECENT; "
                            "numbers may be omitted; none: every token stays")  # fmt: skip
    prefix_cache: str = setting(
        "auto", "whether prompts share the blocks of a common prefix", choices=("auto", "on", "off")
    )
    prefix_store: str | None = setting(
        None,
        "FOLDER or FOLDER:SIZE (10GB) that keeps the keys and values of prompts: after a restart, and for "
        "other servers of the model; none: they end with the process",
    )
    speculate: str | None = setting(
        None,
        "how tokens are drafted, which one pass verifies together; with --draft: suffix, trees and the draft "
        "in one tree, as without --speculate, or draft, it alone; none: only what --draft says",
        choices=tuple(dict.fromkeys((*ALONE, *WITH_DRAFT))),
    )
    draft: str | None = setting(
        None,
        "a model that drafts, or a head trained for this one: a folder, a .gguf file, a hub id, attar:tiny; "
        "suffix trees draft too",
    )
    drafts: int | None = setting(None, "most tokens drafted for a sequence in a pass; none: by the method")
    verification: str | None = setting(
        None,
        "coupled: a seeded completion is the same without drafts; exact: more sampled drafts are accepted; "
        "typical: LOSSY, likely drafts are accepted whatever would have been sampled; none: coupled where "
        "there is a seed",
        choices=MODES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name, _ = _parse_eviction(self.eviction)
        features = {store_feature(self.kv_dtype): ("kv_dtype", self.kv_dtype)}
        if name:
            features[name] = ("eviction", self.eviction)
        if self.prefix_cache == "on":
            features["prefix_reuse"] = ("prefix_cache", "on")
        check_together(features)
        if self.prefix_store:
            from attar.runtime.kv.prefix_store import store_setting

            store_setting(self.prefix_store)
        SpeculationSettings(**self._values_of(SpeculationSettings)).check_with(features)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of :class:`attar.runtime.llm.LLM`."""
        from attar.runtime.kv.evict import EVICTIONS

        name, numbers = _parse_eviction(self.eviction)
        limits = {field.name for field in fields(SchedulingSettings)}
        others = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in limits}
        return others | {
            "eviction": EVICTIONS[name](**numbers) if name else None,  # type: ignore[arg-type]
            "prefix_cache": {"auto": None, "on": True, "off": False}[self.prefix_cache],
            "limits": self.limits(),
        }

    def _values_of(self, owner: Any) -> dict[str, Any]:
        """The fields of another dataclass that these settings have too."""
        names = {field.name for field in fields(self)}
        return {name: getattr(self, name) for field in fields(owner) if (name := field.name) in names}


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How a completion is sampled."""

    max_tokens: int = setting(128, "most tokens generated for each completion")
    temperature: float = setting(0.0, "0: always the most likely token; above: sampled")
    top_p: float = setting(1.0, "the most likely tokens are kept until their mass is at least this")
    top_k: int = setting(0, "number of most likely tokens to keep; 0: all")
    min_p: float = setting(0.0, "tokens below this share of the largest probability are dropped")
    min_tokens: int = setting(0, "before this number of tokens nothing ends a completion")
    n: int = setting(1, "completions of each prompt")
    stop: tuple[str, ...] = setting((), "string that ends a completion")
    stop_ids: tuple[int, ...] = setting((), "token that ends a completion")
    ignore_eos: bool = setting(False, "go on after the model's end token")
    seed: int | None = setting(0, "of the sampling; none: a random one each time")
    logprobs: int | None = setting(None, "with --json: log-probabilities, also of this many likely tokens")
    prompt_logprobs: int | None = setting(None, "with --json: the same for the prompt's tokens")
    repetition_penalty: float = setting(1.0, "logits of tokens in prompt or completion are divided by it")
    presence_penalty: float = setting(0.0, "subtracted from the logits of tokens in the completion")
    frequency_penalty: float = setting(0.0, "the same, once for each time a token is there")
    logit_bias: tuple[str, ...] = setting((), "TOKEN=BIAS, added to a token's logit")
    regex: str | None = setting(None, "the completion matches this pattern")
    json_schema: str | None = setting(None, "the completion is JSON of this schema; @FILE reads a file")
    grammar: str | None = setting(None, "the completion satisfies this Lark grammar; @FILE reads a file")
    skip_special_tokens: bool = setting(True, "leave special tokens out of the text")

    def __post_init__(self) -> None:
        self.params()

    def params(self) -> SamplingParams:
        """The parameters of a request; files are read.

        Raises:
            SettingsError: a value that is not allowed.
            DataError: a file that cannot be read.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("json_schema", "grammar"):
            values[name] = _read(values[name])
        values["logit_bias"] = tuple(map(_parse_bias, self.logit_bias))
        return SamplingParams(**values)


@dataclass(frozen=True, kw_only=True)
class ChatSettings(TextSettings):
    """How an answer is sampled."""

    max_tokens: int = setting(1024, "most tokens of an answer")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What ``attar bench`` measures."""

    batch: tuple[int, ...] = setting((1, 8), "completions that run together")
    context: tuple[int, ...] = setting((128,), "tokens of each prompt")
    tokens: int = setting(64, "tokens generated for each completion")
    rounds: int = setting(3, "number of measurements; medians are shown")
    seed: int = setting(0, "of the random prompts")

    def __post_init__(self) -> None:
        check_at_least(self, batch=1, context=1, tokens=2, rounds=1)


def _parse_eviction(text: str) -> tuple[str, dict[str, int]]:
    """A method of eviction and its numbers, from ``name:number,number``; "" for none."""
    name, _, numbers = (f"{DEFAULT}:{text}" if text.isdecimal() else text).partition(":")
    if text == "none":
        return "", {}
    if name not in METHODS:
        close = nearest(name, METHODS)
        hint = f" (did you mean {close}?)" if close else ""
        allowed = f"none, {', '.join(METHODS)}{hint}, each with two numbers or none"
        raise SettingsError("eviction", text, allowed)
    values = [value.strip() for value in numbers.split(",")] if numbers else []
    if len(values) > 2 or not all(value.isdecimal() for value in values):
        first, second = METHODS[name]
        raise SettingsError("eviction", text, f"{name}:{first.upper()},{second.upper()} in whole numbers")
    return name, dict(zip(METHODS[name], map(int, values), strict=False))


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise SettingsError("logit_bias", text, "TOKEN=BIAS in numbers") from None


def _read(text: str | None) -> str | None:
    if text is None or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(f"{text[1:]}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
