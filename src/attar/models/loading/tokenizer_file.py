"""A tokenizer of transformers that tokenizes as its tokenizer.json says.

Some forty tokenizer classes of transformers 5 take vocabulary, merges and post-processor from tokenizer.json,
and build normalizer, pre-tokenizer, decoder and the model's switches anew, whatever the file has. The file is
what a model was trained with, and what other engines read, so it goes before the class. Settings of
tokenizer_config.json that contradict it (``add_prefix_space``, ``add_bos_token``, those of BERT's normalizer)
go before the file, as they did when classes built nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from attar.checkpoint.jsonfile import read_json

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
AROUND = ("add_bos_token", "add_eos_token")
STAGES = ("normalizer", "pre_tokenizer")
PROBE = (
    "I've 'told HE'S  there, 12 345 6789 x²+½ v1.2.3\n\n  def f(a_b):\n\treturn a[0] != b  \r\n nai\u0308ve "
    "Café CamelCASE iPhone 北京 1984年 こん мир ٣٤ 🚀👩\u200d👩 !!!...``` ~~ a\u00a0b   c\t\t d  \n "
)
"""A text that tokenizers split differently."""


def follow_file(tokenizer: Any, folder: Path) -> bool:
    """Give a tokenizer the backend of the tokenizer.json that it was loaded from. Returns whether it makes
    other tokens of a probe text now.

    Args:
        tokenizer: of transformers; changed.
        folder: its folder.

    Raises:
        CheckpointError: a file is no JSON.
    """
    file, built = folder / "tokenizer.json", getattr(tokenizer, "_tokenizer", None)
    if not isinstance(built, Tokenizer) or not file.is_file():
        return False
    files = [read_json(folder / name) if (folder / name).is_file() else {} for name in SETTINGS]
    stored = Tokenizer.from_file(str(file))
    if _contradicted(stored, files[0]):
        return False
    known, named = stored.get_added_tokens_decoder(), set(_texts(files))
    for index, token in sorted(built.get_added_tokens_decoder().items()):
        same = index in known and known[index].__getstate__() == token.__getstate__()
        if not same and (index in known or token.content in named):
            stored.add_tokens([token])
    if any(built.token_to_id(text) not in (None, index) for text, index in stored.get_vocab().items()):
        return False  # the class has a vocabulary of its own
    for role in ROLES:
        if stored.token_to_id(str(getattr(tokenizer, role))) is None:  # a token that the class alone has
            setattr(tokenizer, role, None)
    if _state(stored.normalizer).get("type") == "BertNormalizer":
        stored.normalizer = built.normalizer
    if stored.post_processor is None or any(name in files[0] for name in AROUND):
        stored.post_processor = built.post_processor
    stored.encode_special_tokens = built.encode_special_tokens
    stored.no_truncation()
    stored.no_padding()
    tokenizer._tokenizer = stored
    return bool(_tokens(stored) != _tokens(built))


def _texts(value: Any) -> Iterator[str]:
    """Every text in the content of a JSON file, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    for part in value if isinstance(value, list) else ():
        yield from _texts(part)


def _tokens(tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(PROBE, add_special_tokens=False).ids
    return ids


def _state(stage: Any) -> dict[str, Any]:
    """A stage as tokenizer.json spells it."""
    return {} if stage is None else dict(json.loads(stage.__getstate__()))


def _contradicted(stored: Tokenizer, settings: Mapping[str, Any]) -> bool:
    """Whether ``add_prefix_space`` is stated otherwise than the file's stages have it."""
    stated = settings.get("add_prefix_space")
    prefixes = [prefix for name in STAGES for prefix in _prefixes(_state(getattr(stored, name)))]
    return isinstance(stated, bool) and bool(prefixes) and stated not in prefixes


def _prefixes(stage: Mapping[str, Any]) -> Iterator[bool]:
    """Whether each step of a stage that may put a space before a text does so."""
    for step in stage.get("normalizers") or stage.get("pretokenizers") or ():
        yield from _prefixes(step)
    kind = stage.get("type")
    if kind == "ByteLevel":
        yield bool(stage.get("add_prefix_space"))
    elif kind == "Metaspace":
        yield stage.get("prepend_scheme", "always") != "never"
    elif kind == "Prepend":
        yield True
