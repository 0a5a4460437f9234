"""Log-probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attar.runtime.results import TokenLogprob
from attar.runtime.server.backend import Words

LEAST = -9999.0  # OpenAI's sign of a probability of 0: JSON has no infinity


def of_chat(scored: Sequence[TokenLogprob], words: Words) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    content = [
        _entry(words, each.token, each.logprob)
        | {"top_logprobs": [_entry(words, token, logprob) for token, logprob in each.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


def of_completion(
    scored: Sequence[TokenLogprob | None], ids: Sequence[int], words: Words, offset: int
) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion.

    Args:
        scored: one for each token; None for a first token, which follows nothing.
        ids: the tokens.
        offset: characters of the text before them.
    """
    names = [name(words, token) for token in ids]
    offsets = []
    for word in names:
        offsets.append(offset)
        offset += len(word)
    return {
        "tokens": names,
        "token_logprobs": [None if each is None else max(each.logprob, LEAST) for each in scored],
        "top_logprobs": [None if each is None else _top(each, words) for each in scored],
        "text_offset": offsets,
    }


def name(words: Words, token: int) -> str:
    """A token in one string: its text, or its bytes where they are not text."""
    text, raw = words.piece(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _top(each: TokenLogprob, words: Words) -> dict[str, float]:
    """The likeliest and the token itself; of two with one name the likelier stays."""
    found: dict[str, float] = {}
    for token, logprob in (*each.top, (each.token, each.logprob)):
        found.setdefault(name(words, token), max(logprob, LEAST))
    return found


def _entry(words: Words, token: int, logprob: float) -> dict[str, Any]:
    text, raw = words.piece(token)
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}
