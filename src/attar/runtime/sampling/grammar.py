"""Constrained decoding: tokens that would violate a grammar cannot be sampled.

    JSON schema | regex | Lark grammar  →  compiled once  →  a matcher per completion  →  a mask per token

The library is llguidance (Earley parser over derivatives of regular expressions, masks from a trie of the
vocabulary). It refuses what it cannot enforce instead of ignoring it, takes milliseconds for a schema, and
has no dependencies; xgrammar depends on triton and ignores ``uniqueItems``, outlines-core takes seconds for
``{"type": "object"}``.

An end token can be sampled only where the grammar is satisfied; where nothing else can follow, the completion
ends by itself. Stop strings, and stop ids that are tokens of the grammar, end a completion anywhere. What a
JSON schema may hold is in ``json_schema.py``.

The cost of a grammar is limited (``LIMITS``, in units of work and not of time, so that the same grammar is
refused on every machine): a grammar that no text satisfies, or whose first mask costs too much, is refused
when it is compiled; where a later mask costs too much, its completion ends with the same error.

Letters: V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attar.errors import GrammarError, MissingExtraError, SettingsError
from attar.runtime.fair_cache import FairCache
from attar.runtime.sampling.grammar_trial import GrammarTrial
from attar.runtime.sampling.json_schema import BLANKS, schema_grammar
from attar.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # compiled grammars of all tenants
_SPECIAL = {
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    "special": True,
}
_SHOWN = 60  # characters of a grammar in a message
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # to compile; some 20 ms
    "step_lexer_fuel": 200_000,  # for a mask; some 15 ms
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # up to 2 kB each
    "max_grammar_size": 500_000,
}
"""llguidance's LLParserLimits: its defaults, except for the states of the lexer, which cost memory."""
_NOTHING = "no text can follow it: does a rule call nothing but itself?"
_REASONS = {"NoExtension": _NOTHING, "NoExtensionBias": _NOTHING}


@dataclass
class MaskTime:
    """Seconds of the processor that the masks of a request took since they were last charged."""

    seconds: float = 0.0


class Matcher:
    """The state of one completion in its grammar. Its mask is computed when it is first asked for.

    Args:
        matcher: llguidance's, in this state; not shared.
        vocabulary: V.
        end: llguidance's own end token.
        guide: the name of the parameter, and the grammar.

    Attributes:
        time: shared with its copies.
        last_s: seconds of the last mask.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, end: int, guide: tuple[str, str]) -> None:
        self._matcher, self._vocabulary, self._end, self._guide = matcher, vocabulary, end, guide
        self.time, self.last_s = MaskTime(), 0.0
        self._computed: _Mask | None = None

    def copy(self, time: MaskTime | None = None) -> Matcher:
        """A second matcher in the same state.

        Args:
            time: of another request; None: the same.
        """
        twin = Matcher.__new__(Matcher)
        twin.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy(), time=time or self.time)
        return twin

    def after(self, tokens: Sequence[int]) -> Matcher:
        """A second matcher after further tokens, for the positions of a draft; it stops at the first token
        that the grammar forbids."""
        ahead = self.copy()
        for token in tokens:
            if not bool(ahead._mask.tokens[token]):
                break
            ahead.consume(token)
        return ahead

    @property
    def complete(self) -> bool:
        """Whether it does, and nothing can follow."""
        mask = self._mask
        return self._may_end and mask.failure is None and not bool(mask.tokens.any())

    @property
    def _may_end(self) -> bool:
        """Whether the text may end here."""
        return self._mask.may_end

    def allowed(self, ends: Sequence[int] = ()) -> Tensor:
        """Tokens that may come next. Returns bool (V,), a new tensor where there are ends.

        Args:
            ends: tokens that end the completion: allowed where it may end; before, only if the grammar
                allows them as text.

        Raises:
            GrammarError: as :meth:`check`.
        """
        self.check()
        if not ends:
            return self._mask.tokens
        tokens = self._mask.tokens.clone()
        tokens[list(ends)] |= self._may_end
        return tokens

    def check(self) -> None:
        """Raises GrammarError where the grammar exceeds the limits, or no text satisfies it."""
        if self._mask.failure is not None:
            raise _refused(*self._guide, self._mask.failure, GrammarError)

    def consume(self, token: int) -> None:
        """One more token, which was allowed and is no end token."""
        self._matcher.consume_token(token)
        self._computed = None

    @property
    def _mask(self) -> _Mask:
        """Of the next token."""
        if self._computed is None:
            began = thread_time()
            self._computed = self._compute_mask()
            self.last_s = thread_time() - began
            self.time.seconds += self.last_s
        return self._computed

    def _compute_mask(self) -> _Mask:
        """The end token's bit tells whether the text may end here."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        failure = _reason(self._matcher.get_error()) if self._matcher.is_error() else None
        bits = np.unpackbits(packed, bitorder="little", count=self._end + 1).view(np.bool_)
        return _Mask(torch.from_numpy(bits[: self._vocabulary]), bool(bits[self._end]), failure)


@dataclass(frozen=True)
class _Mask:
    """What may come next: tokens bool (V,), and the end; or why nothing may."""

    tokens: Tensor
    may_end: bool
    failure: str | None


class Grammars:
    """Compiled grammars of one tokenizer; threads may share it.

    Args:
        tokenizer: of transformers; the fast kind.
        vocabulary: V, columns of the logits that stand for a token.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._trie: tuple[LLTokenizer, int] | None = None
        self._compiled = FairCache[Matcher](KEPT)
        self._trie_lock = Lock()
        self._trial: GrammarTrial | None = None

    def prepare(self) -> None:
        """For a server: build the vocabulary trie ahead of the first grammar, because llguidance holds the
        interpreter lock meanwhile, and compile grammars in another process first. Nothing happens where it is
        not installed or does not support the tokenizer."""
        with suppress(ImportError, ValueError):
            self._vocabulary_trie()
            self._trial = GrammarTrial(*_tokenizer_json(self._tokenizer, self._vocabulary), LIMITS)

    def matcher(self, params: SamplingParams, tenant: str = "") -> Matcher | None:
        """In the initial state; None where the parameters have no grammar.

        Args:
            tenant: compiled grammars are shared inside a tenant only: the time to compile one would tell that
                somebody has used it.

        Raises:
            MissingExtraError: llguidance is not installed.
            SettingsError: the grammar is invalid or not supported, with the reason. GrammarError, a subclass:
                it exceeds the limits.
        """
        guide = params.guide
        if guide is None:
            return None
        compiled = self._compiled.get(tenant, guide)
        if compiled is None:
            compiled = self._compile(*guide)
            self._compiled.put(tenant, guide, compiled)
        return compiled.copy(MaskTime())

    def _compile(self, name: str, text: str) -> Matcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise MissingExtraError("llguidance", "grammar") from None
        try:
            trie, end = self._vocabulary_trie()
        except ValueError as error:
            raise _refused(name, text, f"of the model's tokenizer: {_reason(str(error))}") from error
        lark = _to_lark(name, text)
        if self._trial is not None and (reason := self._trial.fails(lark)) is not None:
            raise _refused(name, text, reason, GrammarError)
        compiled = LLMatcher(trie, lark, log_level=0, limits=LLParserLimits(**LIMITS))
        if compiled.is_error():
            raise _refused(name, text, _reason(compiled.get_error()))
        matcher = Matcher(compiled, self._vocabulary, end, (name, text))
        matcher.check()
        if matcher.complete:
            raise _refused(name, text, "it allows the empty text alone")
        return matcher

    def _vocabulary_trie(self) -> tuple[LLTokenizer, int]:
        with self._trie_lock:
            if self._trie is None:
                self._trie = _make_trie(self._tokenizer, self._vocabulary)
            return self._trie


def _make_trie(tokenizer: Any, vocabulary: int) -> tuple[LLTokenizer, int]:
    """The vocabulary for llguidance, with an additional end token after the last.

    The model's own end tokens can differ from request to request, and a stop id may be text.

    Raises:
        ValueError: llguidance does not support the tokenizer.
    """
    from llguidance import LLTokenizer

    text, end = _tokenizer_json(tokenizer, vocabulary)
    return LLTokenizer(text, n_vocab=end + 1, eos_token=end), end


def _tokenizer_json(tokenizer: Any, vocabulary: int) -> tuple[str, int]:
    """For ``_make_trie``: tokenizer.json with the end token, and its id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("it has no fast kind")
    end = max(vocabulary, *(token + 1 for token in backend.get_vocab(with_added_tokens=True).values()))
    tokenizer_json = json.loads(backend.to_str())
    added = [*tokenizer_json["added_tokens"], {"id": end, "content": "<|end of grammar|>", **_SPECIAL}]
    tokenizer_json |= {"padding": None, "truncation": None, "added_tokens": added}
    return json.dumps(tokenizer_json), end


def _to_lark(name: str, text: str) -> str:
    """A grammar in llguidance's format."""
    from llguidance import LLMatcher

    if name == "regex":
        return LLMatcher.grammar_from_regex(text)
    if name == "grammar":
        return LLMatcher.grammar_from_lark(text)
    try:
        kind, text = _schema_grammar(text)
        if kind == "lark":
            return LLMatcher.grammar_from_lark(text)
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": BLANKS})
    except RecursionError as error:
        raise _refused(name, text, "it is nested too deeply") from error
    except ValueError as error:
        raise _refused(name, text, _reason(str(error))) from error


def _schema_grammar(text: str) -> tuple[str, str]:
    """As :func:`schema_grammar`; what is no schema is the library's to refuse."""
    schema = None
    with suppress(ValueError, RecursionError):
        schema = json.loads(text)
    return (
        schema_grammar({} if schema is True else schema)
        if isinstance(schema, dict | bool)
        else ("json", text)
    )


def _refused(name: str, text: str, reason: str, error: type[SettingsError] = SettingsError) -> SettingsError:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return error(name, shown, f"one that can be enforced ({reason})")


def _reason(message: str) -> str:
    """One line of llguidance's message: the parser's own error where there is one."""
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines() if line.strip()]
    first = lines[0] if lines else "unknown"
    inner = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    reason = (inner or first).rpartition("failed to compile JSON schema: ")[2]
    return _REASONS.get(reason, reason)
