"""A model's tokenizer by ``tokenizers`` alone, where transformers would add nothing to tokenizer.json.

Many tokenizer classes of transformers have settings of their own; the generic one, which GGUF files and
attar's own models have, takes tokenizer.json as it is. A folder is read here only where every special token
is in tokenizer.json and nothing else changes the text; all others are read by transformers
(:func:`attar.models.loading.load.load_tokenizer`), whose tokenizers have the same methods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from attar.chat_template import render_with
from attar.checkpoint.jsonfile import read_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HARMLESS = frozenset(
    (
        *NAMED,
        "tokenizer_class",
        "clean_up_tokenization_spaces",  # of transformers' decode, which is not called here
        "model_max_length",
        "chat_template",
        "backend",
        "is_local",
        "local_files_only",
        "padding_side",
        "model_input_names",
        "name_or_path",
        "license",
    )
)
_OTHER_FILES = ("tekken.json", "special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class PlainTokenizer:
    """Text to token ids and back, under the names that transformers' tokenizers have.

    Args:
        backend: of tokenizer.json; truncation and padding are turned off.
        special: special tokens by role, such as ``eos_token``.
        chat_template: Jinja, several by name, or None.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special: Mapping[str, str],
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer, self.chat_template = backend, chat_template
        self.special_tokens_map = dict(special)

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Token ids by the name ``input_ids``: a list, or one for each text of a list."""
        backend = self.backend_tokenizer
        if isinstance(text, str):
            return {"input_ids": backend.encode(text, add_special_tokens=add_special_tokens).ids}
        encodings = backend.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        chat_template: str | None = None,
        **settings: Any,
    ) -> str:
        """The text of a conversation; settings are those of
        :func:`attar.chat_template.render_chat`.

        Args:
            chat_template: in place of the tokenizer's own.

        Raises:
            ValueError: there is no template, or no message.
            Exception: what the template raises.
        """
        assert not tokenize, "text alone"
        return render_with(self, conversation, chat_template or self.chat_template, **settings)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of token ids; blanks are not tidied."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added ones too."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def convert_ids_to_tokens(self, id: int) -> str | None:
        """The token of an id."""
        token: str | None = self.backend_tokenizer.id_to_token(id)
        return token

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by id."""
        added: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    @property
    def all_special_tokens(self) -> list[str]:
        """Each once, in the order of the roles."""
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @property
    def all_special_ids(self) -> list[int]:
        """Of :attr:`all_special_tokens`."""
        ids: list[int] = [self.backend_tokenizer.token_to_id(token) for token in self.all_special_tokens]  # type: ignore[misc]
        return ids

    @property
    def eos_token_id(self) -> int | None:
        """Of the token that ends a text."""
        return self._id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Of the token that begins a text."""
        return self._id("bos_token")

    @property
    def sep_token_id(self) -> int | None:
        """Of the token between two texts."""
        return self._id("sep_token")

    @property
    def cls_token_id(self) -> int | None:
        """Of the token that represents a text."""
        return self._id("cls_token")

    def _id(self, role: str) -> int | None:
        token = self.special_tokens_map.get(role)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def plain_tokenizer(folder: Path, config: Mapping[str, Any]) -> PlainTokenizer | None:
    """The tokenizer of a model's folder, or None where transformers must read it.

    Args:
        folder: with tokenizer.json and tokenizer_config.json.
        config: content of the model's config.json.

    Raises:
        CheckpointError: a file is no JSON.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (file.is_file() and settings.is_file()) or any((folder / name).exists() for name in _OTHER_FILES):
        return None
    stored = read_json(settings)
    special = _special(stored)
    if special is None or not _generic(stored):
        return None
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises nothing narrower; transformers' reading names the fault
        return None
    if not _complete(backend, special, stored.get("added_tokens_decoder")):
        return None
    rows = config.get("vocab_size")
    if isinstance(rows, int) and max(backend.get_vocab().values(), default=-1) >= rows:
        return None  # load_tokenizer refuses it by name
    return PlainTokenizer(backend, special, _template(folder, stored.get("chat_template")))


def _generic(stored: Mapping[str, Any]) -> bool:
    """Whether the generic class takes tokenizer.json as it is."""
    unknown = [name for name in stored if name not in _HARMLESS and name != "added_tokens_decoder"]
    has_unknown = any(stored[name] for name in unknown)  # an empty or false field means nothing
    settles = stored.get("tokenizer_class") in GENERIC and "add_bos_token" not in stored
    settles = settles and "add_eos_token" not in stored
    return settles and not has_unknown


def _special(stored: Mapping[str, Any]) -> dict[str, str] | None:
    """Special tokens by role; None where one is of an unknown form."""
    special: dict[str, str] = {}
    for role in NAMED:
        token = stored.get(role)
        token = token.get("content") if isinstance(token, Mapping) else token
        if token is not None and not isinstance(token, str):
            return None
        if token is not None:
            special[role] = token
    return special


def _complete(backend: Tokenizer, special: Mapping[str, str], decoder: Any) -> bool:
    """Whether tokenizer.json has all special tokens as such, and the added ones as the config has them."""
    described = {entry["id"]: entry for entry in json.loads(backend.to_str())["added_tokens"]}
    marked = {entry["content"] for entry in described.values() if entry["special"]}
    if any(token not in marked for token in special.values()):
        return False
    for index, token in (decoder or {}).items():
        entry = described.get(int(index))
        if entry is None or any(token.get(flag) != entry[flag] for flag in _FLAGS):
            return False
    return True


def _template(folder: Path, stored: Any) -> str | dict[str, str] | None:
    """The chat template of a separate file, else the config's, which may be several."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(stored, list):
        return {entry["name"]: entry["template"] for entry in stored}
    return stored if isinstance(stored, str) else None
