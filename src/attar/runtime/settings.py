"""The runtime's settings as the command line has them: flat, and free of torch and numpy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from attar.errors import DataError, SettingsError, nearest
from attar.runtime.kv.compose import check_together, store_feature
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.settings import SpeculationSettings

METHODS = {
    "reread": ("capacity", "recent"),
    "streaming": ("sinks", "window"),
    "h2o": ("heavy", "recent"),
    "snapkv": ("capacity", "window"),
}
DEFAULT = "reread"  # the method of a number alone
_DRAFTING = ("speculate", "draft", "drafts", "verification")
_LIMITS = ("step_tokens", "sequences", "chunk", "waiting", "waiting_tokens", "prefix_first")


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What runs a model: runner, keys and values, scheduler."""

    runner: str = _option("auto", "what computes; auto: compiled where it can hold the weights as stored",
                          choices=("auto", "compiled", "modules"))  # fmt: skip
    activations: int | str = _option(
        "auto", "bits of what products take; auto: 16 where the processor has instructions for it, else 8",
        choices=("auto", 16, 8),
    )  # fmt: skip
    weights: str | None = _option(None, "round dense weights while they are loaded", choices=("int8", "int4"))
    dtype: str = _option("auto", "what to compute in; auto: float32 on a CPU, the checkpoint's own on a GPU",
                         choices=("auto", "float32", "bfloat16", "float16"))  # fmt: skip
    device: str = _option("cpu", "cpu, cuda or cuda:0")
    kv_dtype: str = _option(
        "auto", "how keys and values are kept: float32, bfloat16, float16, int8, fp8, kivi4, kivi2"
    )
    kv_tokens: int | None = _option(
        None, "tokens that the pool of keys and values holds; none: what 1 GiB holds"
    )
    block_size: int = _option(16, "tokens of a block, the unit of sharing")
    eviction: str = _option("none", "bounds each text's keys and values: reread:CAPACITY,RECENT (or CAPACITY "
                            "alone), snapkv:CAPACITY,WINDOW, streaming:SINKS,WINDOW or h2o:HEAVY,RECENT; "
                            "numbers may be absent")  # fmt: skip
    prefix_cache: str = _option(
        "auto", "whether prompts share what they begin with", choices=("auto", "on", "off")
    )
    speculate: str | None = _option(
        None,
        "how tokens are drafted, several of which one pass verifies",
        choices=("ngram", "lookahead", "self"),
    )
    draft: str | None = _option(None, "a model that drafts: a folder, a .gguf file, a hub id or attar:tiny")
    drafts: int | None = _option(None, "tokens drafted for one text in a pass at most; none: by the method")
    verification: str | None = _option(
        None,
        "coupled: a seeded text is the same without drafts; exact: more of a drawn draft is accepted; "
        "none: coupled where there is a seed",
        choices=("coupled", "exact"),
    )
    step_tokens: int = _option(512, "tokens of one step at most")
    sequences: int = _option(64, "texts that run at the same time at most")
    chunk: int | None = _option(None, "tokens of one prompt in one step at most")
    waiting: int | None = _option(None, "requests that wait at most")
    waiting_tokens: int | None = _option(None, "tokens of their prompts at most")
    prefix_first: bool = _option(False, "among waiting requests the longest shared prefix goes first")

    def __post_init__(self) -> None:
        name, _ = _eviction(self.eviction)
        asked = {store_feature(self.kv_dtype): ("kv_dtype", self.kv_dtype)}
        if name:
            asked[name] = ("eviction", self.eviction)
        if self.prefix_cache == "on":
            asked["prefix_reuse"] = ("prefix_cache", "on")
        check_together(asked)
        self._wanted().check_with(asked)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of :class:`attar.runtime.llm.LLM`.

        Raises:
            SettingsError: numbers out of range.
        """
        from attar.runtime.admission import Limits
        from attar.runtime.kv.evict import EVICTIONS

        name, numbers = _eviction(self.eviction)
        plain = ("runner", "activations", "weights", "dtype", "device", "kv_dtype", "kv_tokens", "block_size")
        return {
            **{each: getattr(self, each) for each in (*plain, *_DRAFTING)},
            "eviction": EVICTIONS[name](**numbers) if name else None,  # type: ignore[arg-type]
            "prefix_cache": {"auto": None, "on": True, "off": False}[self.prefix_cache],
            "limits": Limits(**{each: getattr(self, each) for each in _LIMITS}),
        }

    def _wanted(self) -> SpeculationSettings:
        return SpeculationSettings(**{each: getattr(self, each) for each in _DRAFTING})


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How a text is chosen."""

    max_tokens: int = _option(128, "tokens generated at most for each text")
    temperature: float = _option(0.0, "0: always the likeliest token; above: sampled")
    top_p: float = _option(1.0, "the likeliest tokens are kept until their mass is at least this")
    top_k: int = _option(0, "so many likeliest tokens are kept; 0: all")
    min_p: float = _option(0.0, "tokens below this share of the likeliest one's probability are dropped")
    min_tokens: int = _option(0, "before so many nothing ends the text")
    n: int = _option(1, "texts for each prompt")
    stop: tuple[str, ...] = _option((), "text that ends it")
    stop_ids: tuple[int, ...] = _option((), "token that ends it")
    ignore_eos: bool = _option(False, "go on behind the model's end token")
    seed: int | None = _option(0, "of the sampling; none: a new one each time")
    logprobs: int | None = _option(None, "with --json: log-probabilities, of so many likeliest tokens too")
    prompt_logprobs: int | None = _option(None, "with --json: the same for the prompt's tokens")
    repetition_penalty: float = _option(1.0, "logits of tokens that are there already are divided by it")
    presence_penalty: float = _option(0.0, "taken from the logits of tokens that are in the text")
    frequency_penalty: float = _option(0.0, "taken from them as often as they are in it")
    logit_bias: tuple[str, ...] = _option((), "TOKEN=BIAS, added to a token's logit")
    regex: str | None = _option(None, "the whole text matches this pattern")
    json_schema: str | None = _option(None, "the text is JSON of this schema; @FILE reads it from a file")
    grammar: str | None = _option(None, "the text is of this Lark grammar; @FILE reads it from a file")
    skip_special_tokens: bool = _option(True, "leave special tokens out of the text")

    def __post_init__(self) -> None:
        self.params()

    def params(self) -> SamplingParams:
        """The parameters of a request; files are read.

        Raises:
            SettingsError: a value that is not allowed.
            DataError: a file that cannot be read.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("json_schema", "grammar"):
            values[name] = _read(values[name])
        values["logit_bias"] = tuple(map(_bias, self.logit_bias))
        return SamplingParams(**values)


@dataclass(frozen=True, kw_only=True)
class ChatSettings(TextSettings):
    """How an answer is chosen."""

    max_tokens: int = _option(1024, "tokens of an answer at most")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What ``attar bench`` measures."""

    batch: tuple[int, ...] = _option((1, 8), "texts that run together")
    context: tuple[int, ...] = _option((128,), "tokens of each prompt")
    tokens: int = _option(64, "tokens generated for each text")
    rounds: int = _option(3, "times that all is measured; medians are shown")
    seed: int = _option(0, "of the random prompts")

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("tokens", 2), ("rounds", 1)):
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                if each < least:
                    raise SettingsError(name, each, f"at least {least}")


def _eviction(written: str) -> tuple[str, dict[str, int]]:
    """A method of eviction and its numbers, from ``name:number,number``; "" for none."""
    name, _, numbers = (f"{DEFAULT}:{written}" if written.isdecimal() else written).partition(":")
    if written == "none":
        return "", {}
    if name not in METHODS:
        close = nearest(name, METHODS)
        wish = f" (did you mean {close}?)" if close else ""
        raise SettingsError(
            "eviction", written, f"none, {', '.join(METHODS)}{wish}, each with two numbers or none"
        )
    given = [each.strip() for each in numbers.split(",")] if numbers else []
    if len(given) > 2 or not all(each.isdecimal() for each in given):
        first, second = METHODS[name]
        raise SettingsError("eviction", written, f"{name}:{first.upper()},{second.upper()} in whole numbers")
    return name, dict(zip(METHODS[name], map(int, given), strict=False))


def _bias(written: str) -> tuple[int, float]:
    token, _, bias = written.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise SettingsError("logit_bias", written, "TOKEN=BIAS in numbers") from None


def _read(written: str | None) -> str | None:
    if written is None or not written.startswith("@"):
        return written
    try:
        return Path(written[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DataError(
            f"{written[1:]}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
