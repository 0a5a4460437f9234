"""Tokenizers as files: what tokens one has, one extended by tokens of others, and its files written.

A tokenizer is extended inside ``tokenizer.json``: a new token gets the next free number, and

    a plain token       enters the model's vocabulary; with BPE the merges that build it follow behind the
                        tokenizer's own, so that text is cut as before first; with Unigram it keeps its score
    an added token      (``<|im_start|>``) is found in the text before anything else, with the flags that
                        its own tokenizer has for it

A tokenizer extended by one that continues its training therefore cuts text exactly as that one does.

Differs from mergekit: it adds every new token as an added token, taken literally. Pieces of a byte-level BPE
(``Ġword``) are then never found, and pieces without a mark are found inside any word.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from attar.checkpoint.atomic import explain_os_errors
from attar.checkpoint.companions import tokenizer_files
from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError, ModelError
from attar.models.configs import first_line, quiet

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
PLAIN_FLAGS: dict[str, bool] = dict.fromkeys(FLAGS, False)
FALLBACK = "PreTrainedTokenizerFast"
"""The class of transformers that takes ``tokenizer.json`` as it is."""

_RARE = 10.0
"""How far below the least score an added token's stands in a Unigram model, where it must have one."""


@dataclass(frozen=True)
class Tokens:
    """A tokenizer's tokens.

    Attributes:
        folder: where its files are.
        ids: number of every token by its text, in the order of the numbers.
        added: flags of the tokens that are found literally, by their text.
        backend: content of ``tokenizer.json``; None for a tokenizer that is Python code.
        changed: its files are not those in ``folder`` any more.
    """

    folder: Path
    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    backend: Mapping[str, Any] | None = field(default=None, repr=False)
    changed: bool = False


def read_tokens(folder: Path) -> Tokens:
    """The tokenizer beside a model, one with more tokens than the model has rows too.

    Raises:
        CheckpointError: there is none, or it cannot be loaded.
    """
    if not tokenizer_files(folder):
        raise CheckpointError(
            f"{folder}: no tokenizer", hint="copy tokenizer.json and tokenizer_config.json there"
        )
    with quiet():
        try:
            loaded = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
    ids = dict(sorted(loaded.get_vocab().items(), key=lambda item: (item[1], item[0])))
    added = {
        token.content: {flag: bool(getattr(token, flag)) for flag in FLAGS}
        for _, token in sorted(loaded.added_tokens_decoder.items())
    }
    backend = json.loads(loaded.backend_tokenizer.to_str()) if loaded.is_fast else None
    return Tokens(folder, ids, added, backend)


def only(tokens: Tokens, stored: Collection[str]) -> Tokens:
    """A tokenizer without the tokens that no model has a row for, such as a ``<pad>`` whose embedding was
    never resized.

    Args:
        tokens: not changed; returned itself where nothing is dropped, and where it is Python code.
        stored: the texts that stay.
    """
    ids = {text: number for text, number in tokens.ids.items() if text in stored}
    if len(ids) == len(tokens.ids) or tokens.backend is None:
        return tokens
    backend = copy.deepcopy(dict(tokens.backend))
    backend["added_tokens"] = [entry for entry in backend["added_tokens"] if entry["content"] in ids]
    model = backend["model"]
    if model["type"] == "Unigram":
        model["vocab"] = model["vocab"][: max(ids.values(), default=-1) + 1]  # a piece's number is its place
    else:
        model["vocab"] = {text: number for text, number in model["vocab"].items() if text in ids}
    if model["type"] == "BPE":
        model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= ids.keys()]
    added = {text: flags for text, flags in tokens.added.items() if text in ids}
    return Tokens(tokens.folder, ids, added, backend, changed=True)


def extend(tokens: Tokens, others: Sequence[Tokens], extra: Iterable[str] = ()) -> Tokens:
    """A tokenizer with the tokens of others added: all their plain tokens, then their added ones, then
    ``extra``.

    Args:
        tokens: what is extended; not changed, and returned itself where nothing is new.
        others: in this order; the first definition of a token counts.
        extra: further texts, to be found literally.

    Raises:
        ModelError: something is new, and the tokenizer cannot be extended.
    """
    ids, added = dict(tokens.ids), dict(tokens.added)
    following = max(ids.values(), default=-1) + 1
    plain = [text for other in others for text in other.ids if text not in other.added]
    literal = {text: flags for other in reversed(others) for text, flags in other.added.items()}
    in_order = [text for other in others for text in other.ids if text in other.added]
    new_plain: list[str] = []
    for text, is_plain in [(text, True) for text in plain] + [(text, False) for text in (*in_order, *extra)]:
        if text in ids:
            continue
        ids[text], following = following, following + 1
        if is_plain:
            new_plain.append(text)
        else:
            added[text] = literal.get(text, PLAIN_FLAGS)
    if len(ids) == len(tokens.ids):
        return tokens
    if tokens.backend is None:
        raise ModelError(
            f"{tokens.folder}: this tokenizer is Python code, which cannot take {len(ids) - len(tokens.ids)} "
            "new tokens",
            hint="tokenizer source: a model whose tokenizer has a tokenizer.json",
        )
    backend = copy.deepcopy(dict(tokens.backend))
    _enter(backend, ids, added, new_plain, others, tokens.folder)
    return Tokens(tokens.folder, ids, added, backend, changed=True)


def _enter(
    backend: dict[str, Any],
    ids: Mapping[str, int],
    added: Mapping[str, Mapping[str, bool]],
    new_plain: Sequence[str],
    others: Sequence[Tokens],
    folder: Path,
) -> None:
    """Bring the content of a ``tokenizer.json`` up to the new tokens.

    Every token, an added one too, has its number in the model's own vocabulary: added tokens that are not
    there get numbers behind the vocabulary's end when the file is loaded, and that end has moved.
    """
    model = backend["model"]
    known = {entry["content"] for entry in backend["added_tokens"]}
    backend["added_tokens"] += [
        {"id": ids[text], "content": text, **flags} for text, flags in added.items() if text not in known
    ]
    backend["added_tokens"].sort(key=lambda entry: int(entry["id"]))
    if model["type"] == "Unigram":
        _enter_unigram(model["vocab"], ids, others, folder)
        return
    model["vocab"] = dict(sorted(({**model["vocab"], **ids}).items(), key=lambda item: item[1]))
    if model["type"] == "BPE":
        model["merges"] += _merges(model["merges"], ids, set(new_plain), others)


def _enter_unigram(
    pieces: list[list[Any]], ids: Mapping[str, int], others: Sequence[Tokens], folder: Path
) -> None:
    """Append new pieces with their scores; a piece's number is its place in the list."""
    scores: dict[str, float] = {}
    for other in reversed(others):
        model = (other.backend or {}).get("model", {})
        if model.get("type") == "Unigram":
            scores |= {text: score for text, score in model["vocab"] if text not in other.added}
    least = min((score for _, score in pieces), default=0.0) - _RARE
    by_id = {number: text for text, number in ids.items()}
    for place in range(len(pieces), max(by_id) + 1):
        if place not in by_id:
            raise ModelError(
                f"{folder}: this Unigram tokenizer has no token {place}, so that no tokens can follow it"
            )
        pieces.append([by_id[place], scores.get(by_id[place], least)])


def _merges(
    own: Sequence[Any], ids: Mapping[str, int], new: set[str], others: Sequence[Tokens]
) -> list[list[str]]:
    """Merges of other BPE tokenizers that end in a new token and start from known ones, in their order."""
    taken = {tuple(pair) for pair in own}
    found: list[list[str]] = []
    for other in others:
        model = (other.backend or {}).get("model", {})
        for left, right in model.get("merges", ()) if model.get("type") == "BPE" else ():
            pair = (left, right)
            if left + right in new and left in ids and right in ids and pair not in taken:
                taken.add(pair)
                found.append([left, right])
    return found


def write_tokens(tokens: Tokens, folder: Path) -> list[str]:
    """Write a tokenizer's files; tokenizer files that stand there already are removed first.

    An unchanged tokenizer is copied byte for byte. A changed one is ``tokenizer.json`` and
    ``tokenizer_config.json``, loaded once again to see that transformers gives every token its number; where
    the class that the config names does not, :data:`FALLBACK` is named instead.

    Returns:
        the names written, sorted.

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


def _changed_files(tokens: Tokens) -> dict[str, bytes]:
    config_path = tokens.folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    files = {"tokenizer.json": _json(tokens.backend or {})}
    if isinstance(config.get("added_tokens_decoder"), dict):
        config["added_tokens_decoder"] |= {
            str(tokens.ids[text]): {"content": text, **flags} for text, flags in tokens.added.items()
        }
        config["added_tokens_decoder"] = {
            number: entry
            for number, entry in config["added_tokens_decoder"].items()
            if _text(entry) in tokens.ids
        }
    config = _of_known_tokens(config, tokens.ids)
    special = tokens.folder / "special_tokens_map.json"
    if special.is_file():
        files[special.name] = _json(_of_known_tokens(read_json(special), tokens.ids))
    problem = ""
    for name in (config.get("tokenizer_class"), FALLBACK):
        stated = {"tokenizer_class": name} if name else {}
        files["tokenizer_config.json"] = _json({**config, **stated})
        problem = _read_back(tokens, files)
        if not problem:
            return files
    raise ModelError(
        f"{tokens.folder}: the extended tokenizer does not read back: {problem}",
        hint="tokenizer source: base, or the name of another model",
    )


def _read_back(tokens: Tokens, files: Mapping[str, bytes]) -> str:
    """What is wrong with these files, or nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        config = tokens.folder / "config.json"
        if config.is_file():
            (folder / config.name).write_bytes(config.read_bytes())
        try:
            found = read_tokens(folder)
        except CheckpointError as error:
            return error.message.replace(str(folder), tokens.folder.name)
    wrong = next((text for text, number in tokens.ids.items() if found.ids.get(text) != number), None)
    if wrong is not None:
        return f"token {wrong!r} has number {found.ids.get(wrong)} instead of {tokens.ids[wrong]}"
    surplus = next((text for text in found.ids if text not in tokens.ids), None)
    return "" if surplus is None else f"there is a token {surplus!r} more"


def _of_known_tokens(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """A tokenizer's settings without the special tokens that it does not have any more."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        if name.endswith("_special_tokens") and isinstance(value, list):
            kept[name] = [item for item in value if _text(item) in ids]
        elif not name.endswith("_token") or _text(value) is None or _text(value) in ids:
            kept[name] = value
    return kept


def _text(token: Any) -> str | None:
    """A token's text, written as a text or with its flags; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
