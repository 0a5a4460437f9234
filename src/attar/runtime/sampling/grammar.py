"""Texts that keep to a grammar: tokens that would leave it cannot be drawn.

    JSON schema | regex | Lark grammar  →  compiled once  →  a matcher for each text  →  a mask for each token

The library is llguidance (Earley parser over derivatives of regular expressions, masks from a trie of the
vocabulary). It refuses what it cannot hold to instead of overlooking it, takes milliseconds for a schema, and
brings no other package; which is why it stands here, and not xgrammar (brings triton, overlooks
``uniqueItems``) or outlines-core (seconds for ``{"type": "object"}``).

An end token can be drawn only where the grammar is satisfied; where nothing else can follow, the text ends by
itself. Stop strings, and stop ids that are words of the grammar, cut a text wherever they come. The blanks
between JSON's parts have a limit, or a weak model writes them for ever.

What a grammar may take is limited (``LIMITS``, in units of work and not of time, so that the same grammar is
refused everywhere): one that no text can follow, or whose first mask takes too much, is refused when it is
compiled; where a later mask does, its text ends with the same error.

Letters: V vocabulary.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attar.errors import GrammarError, MissingExtraError, SettingsError
from attar.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # compiled grammars
BLANKS = r"[\x20\x0A\x0D\x09]{0,64}"  # between JSON's parts; deep enough for indented text
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
"""Of llguidance's LLParserLimits: its own defaults, but for the states of the lexer, which are memory."""
_NOTHING = "no text can follow it: does a rule call nothing but itself?"
_WORDS = {"NoExtension": _NOTHING, "NoExtensionBias": _NOTHING}


class Matcher:
    """Where one text stands in its grammar.

    Args:
        matcher: llguidance's, at the text's place; nobody else has it.
        vocabulary: V.
        end: llguidance's own end token.
        guide: the name of the parameter, and the grammar.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, end: int, guide: tuple[str, str]) -> None:
        self._matcher, self._vocabulary, self._end, self._guide = matcher, vocabulary, end, guide
        self._look()

    def copy(self) -> Matcher:
        """Another text at the same place."""
        made = Matcher.__new__(Matcher)
        made.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy())
        return made

    def after(self, tokens: Sequence[int]) -> Matcher:
        """Another text with further tokens, as a verifier sees a draft; it stops at the first that the
        grammar does not allow.
        """
        made = self.copy()
        for token in tokens:
            if not bool(made._words[token]):
                break
            made.take(token)
        return made

    @property
    def may_end(self) -> bool:
        """Whether the text so far is one of the grammar's."""
        return self._may_end

    @property
    def complete(self) -> bool:
        """Whether it is, and nothing can follow."""
        return self._may_end and not self._goes_on and self._failure is None

    def allowed(self, ends: Sequence[int] = ()) -> Tensor:
        """Tokens that may come next.

        Args:
            ends: tokens that end the text: allowed where it may end; before, only if they are words that the
                grammar allows.

        Returns:
            bool (V,), newly made where there are ends.

        Raises:
            GrammarError: as :meth:`check`.
        """
        self.check()
        if not ends:
            return self._words
        words = self._words.clone()
        words[list(ends)] |= self._may_end
        return words

    def check(self) -> None:
        """Raises GrammarError where the grammar takes more than is allowed, or no text can follow it."""
        if self._failure is not None:
            raise _refused(*self._guide, self._failure, GrammarError)

    def take(self, token: int) -> None:
        """The text has one more token, which was allowed and does not end it."""
        self._matcher.consume_token(token)
        self._look()

    def _look(self) -> None:
        """The mask of the next token; the end token's bit says whether the text may end here."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._failure = _reason(self._matcher.get_error()) if self._matcher.is_error() else None
        bits = np.unpackbits(packed, bitorder="little", count=self._end + 1).view(np.bool_)
        words = bits[: self._vocabulary]
        self._may_end, self._goes_on = bool(bits[self._end]), bool(words.any())
        self._words = torch.from_numpy(words)


class Grammars:
    """Compiled grammars of one tokenizer; threads may share it.

    Args:
        tokenizer: of transformers; the fast kind.
        vocabulary: V, columns of the logits that stand for a token.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._trie: tuple[LLTokenizer, int] | None = None
        self._compiled: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._lock, self._making = Lock(), Lock()

    def prepare(self) -> None:
        """Read the vocabulary, for which the first grammar would wait, and with it every thread: llguidance
        lets no other run meanwhile. Nothing where it is not installed, or knows no such tokenizer.
        """
        with suppress(ImportError, ValueError):
            self._vocabulary_trie()

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """At the beginning of a text; None where the parameters have no grammar.

        Raises:
            MissingExtraError: llguidance is not installed.
            SettingsError: the grammar is wrong, or cannot be held to, and why. GrammarError, a kind of it: it
                takes more than is allowed.
        """
        guide = params.guide
        if guide is None:
            return None
        with self._lock:
            found = self._compiled.get(guide)
        found = found or self._compile(*guide)  # it may take a second: others need not wait
        with self._lock:
            self._compiled[guide] = found
            self._compiled.move_to_end(guide)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return found.copy()

    def _compile(self, name: str, text: str) -> Matcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise MissingExtraError("llguidance", "grammar") from None
        try:
            words, end = self._vocabulary_trie()
        except ValueError as error:
            raise _refused(name, text, f"of the model's tokenizer: {_reason(str(error))}") from error
        made = LLMatcher(words, _written(name, text), log_level=0, limits=LLParserLimits(**LIMITS))
        if made.is_error():
            raise _refused(name, text, _reason(made.get_error()))
        matcher = Matcher(made, self._vocabulary, end, (name, text))
        matcher.check()
        if matcher.complete:
            raise _refused(name, text, "it allows the empty text alone")
        return matcher

    def _vocabulary_trie(self) -> tuple[LLTokenizer, int]:
        with self._making:
            if self._trie is None:
                self._trie = _make_trie(self._tokenizer, self._vocabulary)
            return self._trie


def _make_trie(tokenizer: Any, vocabulary: int) -> tuple[LLTokenizer, int]:
    """The vocabulary as llguidance has it, and an end token of its own behind the last.

    The model's own may differ from request to request, and a stop id may be a word.

    Raises:
        ValueError: the tokenizer is of no kind that llguidance knows.
    """
    from llguidance import LLTokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("it has no fast kind")
    end = max(vocabulary, *(token + 1 for token in backend.get_vocab(with_added_tokens=True).values()))
    described = json.loads(backend.to_str())
    added = [*described["added_tokens"], {"id": end, "content": "<|end of grammar|>", **_SPECIAL}]
    described |= {"padding": None, "truncation": None, "added_tokens": added}
    return LLTokenizer(json.dumps(described), n_vocab=end + 1, eos_token=end), end


def _written(name: str, text: str) -> str:
    """A grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if name == "regex":
        return LLMatcher.grammar_from_regex(text)
    if name == "grammar":
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": BLANKS})
    except ValueError as error:
        raise _refused(name, text, _reason(str(error))) from error


def _refused(name: str, text: str, reason: str, error: type[SettingsError] = SettingsError) -> SettingsError:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return error(name, shown, f"one that texts can be held to ({reason})")


def _reason(said: str) -> str:
    """One line of what llguidance says: the parser's own error where there is one."""
    lines = [line.strip() for line in said.partition("<state>")[0].splitlines() if line.strip()]
    first = lines[0] if lines else "unknown"
    inner = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    return _WORDS.get(inner or first, inner or first)
