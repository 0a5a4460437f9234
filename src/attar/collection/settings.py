"""Settings of ``attar collect``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from attar.checkpoint.licence_gate import LicenceSettings
from attar.collection.filters.settings import FilterSettings
from attar.errors import SettingsError
from attar.options import check_at_least, check_choices, setting

VERSION = 1

READINGS = ("auto", "lines", "jsonl", "topics")
LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
RESERVED = ("messages", "model", "stream", "n", "seed", "stop", "temperature", "top_p", *LIMIT_NAMES)
"""Fields of a request that have a setting of their own, or that the answer's shape depends on."""

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Which prompts are asked, how often, and under which system prompts."""

    read_as: str = setting("auto", "how the file is read; lines: a prompt each; jsonl: prompt or messages; "
                           "topics: prompts are made from a topic a line; auto: jsonl by the file's name, "
                           "else lines",
                           choices=READINGS)  # fmt: skip
    limit: int = setting(0, "prompts that are asked, the first ones; 0: all")
    samples: int = setting(1, "answers to each prompt")
    systems: tuple[str, ...] = setting((), "NAME=WEIGHT, a system prompt and how often it is drawn (none, "
                                       "answer, steps, reasons, check, learner, compare), or FILE.jsonl with "
                                       "rows of system and weight; empty: no system prompt")  # fmt: skip
    topic_prompts: int = setting(0, "with topics: prompts that are made; 0: every combination")
    audiences: tuple[str, ...] = setting((), "with topics: a reader to write for; empty: attar's own")
    genres: tuple[str, ...] = setting((), "with topics: a kind of text; empty: attar's own")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, limit=0, samples=1, topic_prompts=0)


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How the teacher answers."""

    max_tokens: int = setting(1024, "most tokens of an answer")
    limit_name: str = setting("max_tokens", "its field in the request; some models want the second",
                              choices=LIMIT_NAMES)  # fmt: skip
    temperature: float | None = setting(
        None, "of the sampling; none: the endpoint's default, and 1 for a checkpoint"
    )
    top_p: float | None = setting(
        None, "of the sampling; none: the endpoint's default, and 1 for a checkpoint"
    )
    stop: tuple[str, ...] = setting((), "string that ends an answer")
    send_seed: bool = setting(False, "send an endpoint a seed with each request (some refuse it)")
    extra: tuple[str, ...] = setting((), "NAME=VALUE, a further field of an endpoint's request; JSON or text")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, max_tokens=1, temperature=0.0)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SettingsError("top_p", self.top_p, "above 0, and at most 1")
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

    model: str = setting("", "name of the model at the endpoint")
    key_env: str = setting(
        "OPENAI_API_KEY", "environment variable that holds the endpoint's key; none: send no key"
    )
    concurrency: int = setting(16, "requests at a time")
    requests_per_minute: float = setting(0.0, "most requests in a minute; 0: no limit")
    tokens_per_minute: float = setting(0.0, "most tokens in a minute, of prompts and answers; 0: no limit")
    attempts: int = setting(8, "failures of a request after which it is given up; a 429 is none")
    timeout_s: float = setting(300.0, "seconds for an answer")
    longest_wait_s: float = setting(600.0, "seconds that an endpoint may ask to wait, or answer 429 alone")
    most_failures: int = setting(16, "failures in a row that end the run")

    def __post_init__(self) -> None:
        check_at_least(self, concurrency=1, requests_per_minute=0, tokens_per_minute=0, attempts=1)
        check_at_least(self, timeout_s=0.001, longest_wait_s=0, most_failures=1)
        if self.key_env != "none" and not _VARIABLE.fullmatch(self.key_env):
            raise SettingsError("key_env", "(not shown)", "the name of an environment variable, not the key")


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """What answers cost, and the most that is spent."""

    price_in: float = setting(0.0, "price of a million prompt tokens")
    price_out: float = setting(0.0, "price of a million answer tokens")
    budget: float | None = setting(None, "most that is spent, runs before included; none: no limit")

    def __post_init__(self) -> None:
        check_at_least(self, price_in=0.0, price_out=0.0, budget=0.0)
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
    seed: int = setting(0, "of the system prompts, the topics and a checkpoint's sampling")
    device: str = setting("cpu", "of a checkpoint: cpu, cuda or cuda:0")
