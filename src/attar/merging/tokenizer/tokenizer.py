"""Tokenizer files: read, extended by the tokens of other tokenizers, and written.

A tokenizer is extended in ``tokenizer.json``: a new token gets the next free id, and

    a plain token       enters the model's vocabulary; BPE merges that build it are appended after the
                        tokenizer's own, which keep their priority; with Unigram it keeps its score
    an added token      (``<|im_start|>``) is matched in the text before tokenization, with the flags of its
                        own tokenizer

A tokenizer extended by one that continues its training therefore tokenizes exactly like that one.

Differs from mergekit, which adds every new token as an added token, matched literally: pieces of a byte-level
BPE (``Ġword``) then never match, and pieces without a mark match inside any word.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors
from attar.checkpoint.companions import tokenizer_files
from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError, ModelError
from attar.models.loading import load

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
PLAIN_FLAGS: dict[str, bool] = dict.fromkeys(FLAGS, False)
FALLBACK = "PreTrainedTokenizerFast"
"""The class of transformers that takes ``tokenizer.json`` as it is."""

_RARE = 10.0
"""In a Unigram model an added token needs a score: the lowest score minus this."""


@dataclass(frozen=True)
class TokenizerTokens:
    """A tokenizer's tokens.

    Attributes:
        ids: token ids by the token's text, in ascending order.
        added: flags of the added tokens, which are matched literally, by their text.
        backend: content of ``tokenizer.json``; None for a tokenizer that is Python code.
        changed: it differs from the files in ``folder``.
    """

    folder: Path
    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    backend: Mapping[str, Any] | None = field(default=None, repr=False)
    changed: bool = False


def read_tokenizer(folder: Path) -> TokenizerTokens:
    """The tokenizer in a model's folder; it may have more tokens than the model has rows.

    Raises:
        CheckpointError: there is none, or it cannot be loaded.
    """
    if not tokenizer_files(folder):
        raise CheckpointError(
            f"{folder}: no tokenizer", hint="copy tokenizer.json and tokenizer_config.json there"
        )
    loaded = load.read_tokenizer(folder)
    ids = dict(sorted(loaded.get_vocab().items(), key=lambda item: (item[1], item[0])))
    added = {
        token.content: {flag: bool(getattr(token, flag)) for flag in FLAGS}
        for _, token in sorted(loaded.added_tokens_decoder.items())
    }
    backend = json.loads(loaded.backend_tokenizer.to_str()) if loaded.is_fast else None
    return TokenizerTokens(folder, ids, added, backend)


def with_stored_tokens(tokens: TokenizerTokens, stored: Collection[str]) -> TokenizerTokens:
    """A tokenizer without the tokens that no model has a row for, such as a ``<pad>`` whose embedding was
    never resized.

    Args:
        tokens: not changed; returned itself if nothing is dropped, or if it is Python code.
        stored: the texts that are kept.
    """
    ids = {text: token_id for text, token_id in tokens.ids.items() if text in stored}
    if len(ids) == len(tokens.ids) or tokens.backend is None:
        return tokens
    backend = copy.deepcopy(dict(tokens.backend))
    backend["added_tokens"] = [entry for entry in backend["added_tokens"] if entry["content"] in ids]
    model = backend["model"]
    if model["type"] == "Unigram":
        model["vocab"] = model["vocab"][: max(ids.values(), default=-1) + 1]  # a piece's id is its index
    else:
        model["vocab"] = {text: token_id for text, token_id in model["vocab"].items() if text in ids}
    if model["type"] == "BPE":
        model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= ids.keys()]
    added = {text: flags for text, flags in tokens.added.items() if text in ids}
    return TokenizerTokens(tokens.folder, ids, added, backend, changed=True)


def extend_tokenizer(
    tokens: TokenizerTokens, others: Sequence[TokenizerTokens], extra: Iterable[str] = ()
) -> TokenizerTokens:
    """A tokenizer with the tokens of others added: all their plain tokens, then their added ones, then
    ``extra``.

    Args:
        tokens: not changed; returned itself if nothing is new.
        others: in this order; the first definition of a token wins.
        extra: further added tokens.

    Raises:
        ModelError: something is new, and the tokenizer cannot be extended.
    """
    plain = [text for other in others for text in other.ids if text not in other.added]
    literal = [text for other in others for text in other.ids if text in other.added]
    new = [text for text in dict.fromkeys((*plain, *literal, *extra)) if text not in tokens.ids]
    if not new:
        return tokens
    if tokens.backend is None:
        raise ModelError(
            f"{tokens.folder}: this tokenizer is Python code, which cannot take {len(new)} new tokens",
            hint="tokenizer source: a model whose tokenizer has a tokenizer.json",
        )
    first_id = max(tokens.ids.values(), default=-1) + 1
    ids = {**tokens.ids, **{text: first_id + index for index, text in enumerate(new)}}
    new_plain = set(plain).intersection(new)
    flags = {text: entry for other in reversed(others) for text, entry in other.added.items()}
    new_added = {text: flags.get(text, PLAIN_FLAGS) for text in new if text not in new_plain}
    added = {**tokens.added, **new_added}
    backend = copy.deepcopy(dict(tokens.backend))
    _add_tokens(backend, ids, added, new_plain, others, tokens.folder)
    return TokenizerTokens(tokens.folder, ids, added, backend, changed=True)


def _add_tokens(
    backend: dict[str, Any],
    ids: Mapping[str, int],
    added: Mapping[str, Mapping[str, bool]],
    new_plain: set[str],
    others: Sequence[TokenizerTokens],
    folder: Path,
) -> None:
    """Add the new tokens to the content of a ``tokenizer.json``, in place.

    Added tokens enter the model's own vocabulary too; otherwise loading the file would give them ids after
    the vocabulary's new end.
    """
    model = backend["model"]
    known = {entry["content"] for entry in backend["added_tokens"]}
    backend["added_tokens"] += [
        {"id": ids[text], "content": text, **flags} for text, flags in added.items() if text not in known
    ]
    backend["added_tokens"].sort(key=lambda entry: int(entry["id"]))
    if model["type"] == "Unigram":
        _add_unigram_pieces(model["vocab"], ids, others, folder)
        return
    model["vocab"] = dict(sorted(({**model["vocab"], **ids}).items(), key=lambda item: item[1]))
    if model["type"] == "BPE":
        model["merges"] += _new_merges(model["merges"], ids, new_plain, others)


def _add_unigram_pieces(
    pieces: list[list[Any]], ids: Mapping[str, int], others: Sequence[TokenizerTokens], folder: Path
) -> None:
    """Append new pieces with their scores; a piece's id is its index in the list."""
    scores: dict[str, float] = {}
    for other in reversed(others):
        model = (other.backend or {}).get("model", {})
        if model.get("type") == "Unigram":
            scores |= {text: score for text, score in model["vocab"] if text not in other.added}
    lowest = min((score for _, score in pieces), default=0.0) - _RARE
    by_id = {token_id: text for text, token_id in ids.items()}
    for token_id in range(len(pieces), max(by_id) + 1):
        if token_id not in by_id:
            raise ModelError(
                f"{folder}: this Unigram tokenizer has no token {token_id}, so that no tokens can follow it"
            )
        pieces.append([by_id[token_id], scores.get(by_id[token_id], lowest)])


def _new_merges(
    known_merges: Sequence[Any], ids: Mapping[str, int], new: set[str], others: Sequence[TokenizerTokens]
) -> list[list[str]]:
    """Merges of other BPE tokenizers that build a new token from known ones, in their order."""
    known = {tuple(pair) for pair in known_merges}
    merges: list[list[str]] = []
    for other in others:
        model = (other.backend or {}).get("model", {})
        for left, right in model.get("merges", ()) if model.get("type") == "BPE" else ():
            pair = (left, right)
            if left + right in new and left in ids and right in ids and pair not in known:
                known.add(pair)
                merges.append([left, right])
    return merges


def write_tokenizer(tokens: TokenizerTokens, folder: Path) -> list[str]:
    """Write a tokenizer's files in place of the folder's tokenizer files. Returns the names written, sorted.

    An unchanged tokenizer is copied byte for byte. A changed one is ``tokenizer.json`` and
    ``tokenizer_config.json``, loaded again to check that transformers gives every token its id; if the class
    in the config does not, :data:`FALLBACK` is named instead.

    Raises:
        ModelError: transformers would read the new tokenizer differently.
        OutputError: no space, or no permission.
    """
    if tokens.changed:
        contents = _changed_files(tokens)
    else:
        names = tokenizer_files(tokens.folder)
        contents = {name: (tokens.folder / name).read_bytes() for name in names}
    with explain_os_errors(folder):
        for name in tokenizer_files(folder):
            (folder / name).unlink()
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    return sorted(contents)


def _changed_files(tokens: TokenizerTokens) -> dict[str, bytes]:
    config_path = tokens.folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    files = {"tokenizer.json": _json(tokens.backend or {})}
    if isinstance(config.get("added_tokens_decoder"), dict):
        config["added_tokens_decoder"] |= {
            str(tokens.ids[text]): {"content": text, **flags} for text, flags in tokens.added.items()
        }
        config["added_tokens_decoder"] = {
            token_id: entry
            for token_id, entry in config["added_tokens_decoder"].items()
            if _text(entry) in tokens.ids
        }
    config = _of_known_tokens(config, tokens.ids)
    special = tokens.folder / "special_tokens_map.json"
    if special.is_file():
        files[special.name] = _json(_of_known_tokens(read_json(special), tokens.ids))
    problem = ""
    for name in (config.get("tokenizer_class"), FALLBACK):
        cls = {"tokenizer_class": name} if name else {}
        files["tokenizer_config.json"] = _json({**config, **cls})
        problem = _read_back(tokens, files)
        if not problem:
            return files
    raise ModelError(
        f"{tokens.folder}: the extended tokenizer does not read back: {problem}",
        hint="tokenizer source: base, or the name of another model",
    )


def _read_back(tokens: TokenizerTokens, files: Mapping[str, bytes]) -> str:
    """The problem with these files; empty if there is none."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        config = tokens.folder / "config.json"
        if config.is_file():
            (folder / config.name).write_bytes(config.read_bytes())
        try:
            loaded = read_tokenizer(folder)
        except CheckpointError as error:
            return error.message.replace(str(folder), tokens.folder.name)
    wrong = next((text for text, token_id in tokens.ids.items() if loaded.ids.get(text) != token_id), None)
    if wrong is not None:
        return f"token {wrong!r} has id {loaded.ids.get(wrong)} instead of {tokens.ids[wrong]}"
    extra = next((text for text in loaded.ids if text not in tokens.ids), None)
    return "" if extra is None else f"there is another token {extra!r}"


def _of_known_tokens(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """A tokenizer's settings without the special tokens that were dropped."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        if name.endswith("_special_tokens") and isinstance(value, list):
            kept[name] = [item for item in value if _text(item) in ids]
        elif not name.endswith("_token") or _text(value) is None or _text(value) in ids:
            kept[name] = value
    return kept


def _text(token: Any) -> str | None:
    """The text of a token given as a text or with its flags; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
