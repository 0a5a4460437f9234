"""Settings of ``attar collect``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from attar.checkpoint.licence_gate import LicenceSettings
from attar.collection.filters.settings import FilterSettings
from attar.errors import SettingsError

VERSION = 1

READINGS = ("auto", "lines", "jsonl", "topics")
LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
RESERVED = ("messages", "model", "stream", "n", "seed", "stop", "temperature", "top_p", *LIMIT_NAMES)
"""Fields of a request that have a setting of their own, or that the answer's shape depends on."""

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


def _at_least(settings: Any, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= bound:  # NaN too
            raise SettingsError(name, value, f"at least {bound}")


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Which prompts are asked, how often, and under which system prompts."""

    read_as: str = _option("auto", "how the file is read; lines: a prompt each; jsonl: prompt or messages; "
                           "topics: prompts are made from a topic a line; auto: jsonl by the file's name, "
                           "else lines",
                           choices=READINGS)  # fmt: skip
    limit: int = _option(0, "prompts that are asked, the first ones; 0: all")
    samples: int = _option(1, "answers to each prompt")
    systems: tuple[str, ...] = _option((), "NAME=WEIGHT, a system prompt and how often it is drawn (none, "
                                       "answer, steps, reasons, check, learner, compare), or FILE.jsonl with "
                                       "rows of system and weight; empty: no system prompt")  # fmt: skip
    topic_prompts: int = _option(0, "with topics: prompts that are made; 0: every combination")
    audiences: tuple[str, ...] = _option((), "with topics: a reader to write for; empty: attar's own")
    genres: tuple[str, ...] = _option((), "with topics: a kind of text; empty: attar's own")

    def __post_init__(self) -> None:
        if self.read_as not in READINGS:
            raise SettingsError("read_as", self.read_as, " or ".join(READINGS))
        _at_least(self, limit=0, samples=1, topic_prompts=0)


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How the teacher answers."""

    max_tokens: int = _option(1024, "most tokens of an answer")
    limit_name: str = _option("max_tokens", "its field in the request; some models want the second",
                              choices=LIMIT_NAMES)  # fmt: skip
    temperature: float | None = _option(
        None, "of the sampling; none: the endpoint's default, and 1 for a checkpoint"
    )
    top_p: float | None = _option(
        None, "of the sampling; none: the endpoint's default, and 1 for a checkpoint"
    )
    stop: tuple[str, ...] = _option((), "string that ends an answer")
    send_seed: bool = _option(False, "send an endpoint a seed with each request (some refuse it)")
    extra: tuple[str, ...] = _option((), "NAME=VALUE, a further field of an endpoint's request; JSON or text")

    def __post_init__(self) -> None:
        _at_least(self, max_tokens=1, temperature=0.0)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SettingsError("top_p", self.top_p, "above 0, and at most 1")
        if self.limit_name not in LIMIT_NAMES:
            raise SettingsError("limit_name", self.limit_name, " or ".join(LIMIT_NAMES))
        self.extra_fields()

    def extra_fields(self) -> dict[str, Any]:
        """The further fields, their values parsed.

        Raises:
            SettingsError: not NAME=VALUE, or a field that has a setting of its own.
        """
        fields = {}
        for text in self.extra:
            name, equals, value = text.partition("=")
            if not equals or not name.isidentifier() or name in RESERVED:
                raise SettingsError("extra", text, f"NAME=VALUE, and the name none of {', '.join(RESERVED)}")
            try:
                fields[name] = json.loads(value)
            except ValueError:
                fields[name] = value
        return fields


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """How an endpoint is asked; a checkpoint knows only the concurrency."""

    model: str = _option("", "name of the model at the endpoint")
    key_env: str = _option(
        "OPENAI_API_KEY", "environment variable that holds the endpoint's key; none: send no key"
    )
    concurrency: int = _option(16, "requests at a time")
    requests_per_minute: float = _option(0.0, "most requests in a minute; 0: no limit")
    tokens_per_minute: float = _option(0.0, "most tokens in a minute, of prompts and answers; 0: no limit")
    attempts: int = _option(8, "failures of a request after which it is given up; a 429 is none")
    timeout_s: float = _option(300.0, "seconds for an answer")
    longest_wait_s: float = _option(600.0, "seconds that an endpoint may ask to wait, or answer 429 alone")
    most_failures: int = _option(16, "failures in a row that end the run")

    def __post_init__(self) -> None:
        _at_least(self, concurrency=1, requests_per_minute=0, tokens_per_minute=0, attempts=1)
        _at_least(self, timeout_s=0.001, longest_wait_s=0, most_failures=1)
        if self.key_env != "none" and not _VARIABLE.fullmatch(self.key_env):
            raise SettingsError("key_env", "(not shown)", "the name of an environment variable, not the key")


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """What answers cost, and the most that is spent."""

    price_in: float = _option(0.0, "price of a million prompt tokens")
    price_out: float = _option(0.0, "price of a million answer tokens")
    budget: float | None = _option(None, "most that is spent, runs before included; none: no limit")

    def __post_init__(self) -> None:
        _at_least(self, price_in=0.0, price_out=0.0, budget=0.0)
        if self.budget is not None and not self.price_in + self.price_out:
            raise SettingsError("budget", self.budget, "none without --price-in and --price-out")


@dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """One collection: prompts, a teacher, limits, filters."""

    prompts: PromptSettings = field(default_factory=PromptSettings, metadata={"title": "Prompts"})
    answers: AnswerSettings = field(default_factory=AnswerSettings, metadata={"title": "Answers"})
    endpoint: EndpointSettings = field(default_factory=EndpointSettings, metadata={"title": "Endpoint"})
    cost: CostSettings = field(default_factory=CostSettings, metadata={"title": "Cost"})
    filters: FilterSettings = field(default_factory=FilterSettings, metadata={"title": "Filters"})
    licence: LicenceSettings = field(default_factory=LicenceSettings, metadata={"title": "Licences"})
    seed: int = _option(0, "of the system prompts, the topics and a checkpoint's sampling")
    device: str = _option("cpu", "of a checkpoint: cpu, cuda or cuda:0")
