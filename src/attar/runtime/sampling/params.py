"""How the tokens of one request are sampled.

    logits → penalties → bias → masks → temperature → top-k → top-p → min-p → sample

The names are those of OpenAI's API where it has one, else vLLM's. Values are checked at construction; what
depends on the model (is a token id inside the vocabulary?) is checked by :meth:`SamplingParams.fit`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attar.errors import SettingsError

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
MAX_N = 128
MAX_LOGPROBS = 100
MAX_GRAMMAR_CHARACTERS = 1 << 18
POOLINGS = ("mean", "last")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters of one request; the defaults sample from the model's own distribution.

    Args:
        temperature: the logits are divided by it; 0 takes the most likely token.
        top_p: the most likely tokens are kept until their mass is at least this; 1 keeps all.
        top_k: number of most likely tokens to keep; 0 keeps all.
        min_p: tokens below this share of the largest probability are dropped.
        max_tokens: most generated tokens; None: until the context is full.
        min_tokens: before this number nothing ends a completion: end tokens cannot be sampled, and stop
            strings are ignored.
        n: independent completions of the prompt.
        stop: strings that end a completion and are cut off; a single string is allowed.
        stop_ids: tokens that end a completion, in addition to the model's end tokens; without their text.
        ignore_eos: the model's end tokens do not end a completion.
        seed: equal seeds give equal completions, whatever else is in the batch; None: a random one each time.
        logprobs: for each token its natural log-probability and those of this number of most likely tokens;
            they are the model's own, before penalties and temperature.
        prompt_logprobs: the same for each token of the prompt; such a request reads no prefix cache.
        repetition_penalty: logits of tokens in prompt or completion are divided by it where positive,
            multiplied where negative; 1 is none.
        presence_penalty: subtracted from the logit of each token that is in the completion so far.
        frequency_penalty: subtracted once for each time the token is in the completion so far.
        logit_bias: token id to a number added to its logit; -100 or less practically bans it.
        regex: the completion matches this pattern.
        json_schema: the completion is JSON that the schema allows; as text or as a mapping.
        grammar: the completion satisfies this grammar, in Lark's notation; at most one of these three.
        skip_special_tokens: special tokens are left out of the text.
        include_stop: the stop string, or the token of ``stop_ids``, that ends a completion is in its text.
        proposers: for each token who proposed it.
        pooling: mean or last: the embedding of the prompt comes with the first token, from an engine that
            keeps the states (:attr:`attar.runtime.results.Event.embedding`).

    Raises:
        SettingsError: a value that is not allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 128
    min_tokens: int = 0
    n: int = 1
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    skip_special_tokens: bool = True
    include_stop: bool = False
    proposers: bool = False
    pooling: str | None = None

    def __post_init__(self) -> None:
        self._normalise()
        for name, low, high in _NUMBERS:
            _check_number(name, getattr(self, name), low, high)
        for name, least, most in _COUNTS:
            _check_count(name, getattr(self, name), least, most)
        _check_stops(self.stop)
        for token in self.stop_ids:
            _check_count("stop_ids", token, 0, None)
        for token, bias in self.biases:
            _check_count("logit_bias", token, 0, None)
            _check_number("logit_bias", bias, -1e6, 1e6)
        if self.pooling not in (None, *POOLINGS):
            raise SettingsError("pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SettingsError("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        _check_guides([(name, getattr(self, name)) for name in GUIDES])

    def _normalise(self) -> None:
        """Lists become tuples, so that equal parameters are equal and can be hashed."""
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "logit_bias", tuple(sorted((token, value) for token, value in bias)))
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether there are penalties, which depend on the tokens before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def guide(self) -> tuple[str, str] | None:
        """The name of the grammar's field, and the grammar; None: no grammar."""
        return next(((name, text) for name in GUIDES if (text := getattr(self, name)) is not None), None)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The logit biases as pairs."""
        return tuple(self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias)

    def fit(self, vocabulary: int) -> None:
        """Check the token ids against a vocabulary.

        Raises:
            SettingsError: an id outside [0, vocabulary).
        """
        ids = [("stop_ids", token) for token in self.stop_ids]
        ids += [("logit_bias", token) for token, _ in self.biases]
        for name, token in ids:
            if token >= vocabulary:
                raise SettingsError(name, token, f"a token id below {vocabulary:,}")


_NUMBERS: tuple[tuple[str, float, float], ...] = (  # inclusive
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-6, 1e6),  # beyond, logits overflow
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
)
_COUNTS: tuple[tuple[str, int, int | None], ...] = (
    ("top_k", 0, None),
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("n", 1, MAX_N),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
GUIDES = ("regex", "json_schema", "grammar")
_POSITIVE = ("top_p",)  # 0 itself is refused
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if name in _POSITIVE and value == 0:
        raise SettingsError(name, value, f"above 0 and at most {most:g}")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most:  # type: ignore[operator]
        raise SettingsError(name, value, f"a number from {least:g} to {most:g}")


def _check_count(name: str, value: object, least: int, most: int | None) -> None:
    if value is None and name in _OPTIONAL:
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):  # type: ignore[operator]
        allowed = f"at least {least}" if most is None else f"from {least} to {most:,}"
        raise SettingsError(name, value, f"a whole number {allowed}")


def _check_guides(guides: Sequence[tuple[str, object]]) -> None:
    given = [(name, text) for name, text in guides if text is not None]
    for name, text in given:
        if not isinstance(text, str):
            raise SettingsError(name, text, "text")
        if len(text) > MAX_GRAMMAR_CHARACTERS:
            allowed = f"at most {MAX_GRAMMAR_CHARACTERS:,} characters"
            raise SettingsError(name, f"{text[:20]}...", allowed)
        if not _is_unicode(text):
            raise SettingsError(name, text[:20], "text without half a surrogate pair")
    if len(given) > 1:
        raise SettingsError(given[0][0], given[0][1], f"None where {given[1][0]} is given")


def _is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8, as the grammar library reads it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise SettingsError("stop", f"{len(stops)} strings", f"at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise SettingsError("stop", stop, "strings that are not empty")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise SettingsError("stop", stop[:20] + "...", f"at most {MAX_STOP_CHARACTERS} characters each")
