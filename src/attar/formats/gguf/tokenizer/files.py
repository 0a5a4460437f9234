"""A tokenizer's files as Hugging Face has them, read together.

    tokenizer.json            model, normalizer, pre_tokenizer, post_processor, decoder, added_tokens
    tokenizer.model           SentencePiece's file, alone in some older folders (or spiece.model)
    tokenizer_config.json     special tokens by role, add_bos_token, added_tokens_decoder, chat_template
    special_tokens_map.json   special tokens by role, in older folders
    added_tokens.json         added tokens by text, in older folders
    generation_config.json    all tokens that end a text
    chat_template.jinja, additional_chat_templates/NAME.jinja

An added token is matched in the text before anything else. It is special where a file states so, or where it
has a role (bos, eos, ...), as in transformers. A chat template in a separate file goes before one in the
settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.tokenizer.sentencepiece import NAMES, SentencePiece, read_model

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class AddedToken:
    """An added token.

    Attributes:
        text: as it appears in a text.
        special: belongs to the format of the input, not to its text.
        flags: the set flags of ``lstrip``, ``rstrip``, ``single_word``, ``normalized``.
    """

    text: str
    special: bool
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer.

    Attributes:
        tokenizer: the content of tokenizer.json, empty where there is none.
        pieces: the SentencePiece model, where there is one and no tokenizer.json.
        settings: of tokenizer_config.json, completed by special_tokens_map.json and the SentencePiece model.
        vocabulary: ids by text, without added tokens that the model does not know.
        templates: chat templates by name; the main one is ``default``.
    """

    folder: Path
    tokenizer: dict[str, Any]
    pieces: SentencePiece | None
    settings: dict[str, Any]
    generation: dict[str, Any]
    config: Mapping[str, Any]
    vocabulary: dict[str, int]
    added: dict[int, AddedToken]
    templates: dict[str, str]

    @property
    def file(self) -> Path:
        """The main file, for messages."""
        return self.folder / "tokenizer.json" if self.tokenizer else self.piece_file or self.folder

    @property
    def piece_file(self) -> Path | None:
        """The SentencePiece model, if the folder has one."""
        return next((self.folder / name for name in NAMES if (self.folder / name).is_file()), None)

    @property
    def model(self) -> dict[str, Any]:
        """The model of tokenizer.json."""
        return dict(self.tokenizer.get("model") or {})

    @property
    def size(self) -> int | None:
        """Rows of the embedding, where the config states them."""
        for config in (self.config, self.config.get("text_config") or {}):
            if isinstance(config.get("vocab_size"), int):
                return int(config["vocab_size"])
        return None

    def id_of(self, text: str | None) -> int | None:
        """The id of a token by its text: an added one, or one of the model's."""
        for index, token in self.added.items():
            if token.text == text:
                return index
        return self.vocabulary.get(text) if text is not None else None


def read_tokenizer_files(folder: Path, config: Mapping[str, Any]) -> TokenizerFiles:
    """Read a tokenizer's files.

    Raises:
        CheckpointError: a file is damaged, or an added token has no id or text.
    """
    tokenizer = _optional(folder / "tokenizer.json")
    settings = {
        **_optional(folder / "special_tokens_map.json"),
        **_optional(folder / "tokenizer_config.json"),
    }
    vocabulary, pieces = _vocabulary(tokenizer), None
    file = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if not tokenizer and file is not None:
        pieces = read_model(file)
        vocabulary = {text: index for index, text in enumerate(pieces.pieces)}
        named = {f"{role}_token": pieces.pieces[index] for role, index in pieces.ids.items()}
        settings = {**named, **settings}
    return TokenizerFiles(
        folder,
        tokenizer,
        pieces,
        settings,
        _optional(folder / "generation_config.json"),
        config,
        vocabulary,
        _added(folder, tokenizer, settings, vocabulary),
        _templates(folder, settings),
    )


def check_added_ids(source: TokenizerFiles) -> None:
    """Raise where the tokenizers library, which gives a new added token the next free id, gives one another
    id than tokenizer.json states.

    Raises:
        ModelError: names the token and both ids.
    """
    size, largest = len(source.model.get("vocab") or ()), -1
    for entry in source.tokenizer.get("added_tokens") or ():
        index = source.vocabulary.get(str(entry["content"]), max(size, largest + 1))
        if index != entry["id"]:
            raise ModelError(
                f"{source.file}: the added token {entry['content']!r} has the id {entry['id']}, but the "
                f"tokenizers library gives it {index}",
                hint="AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes the files that it uses",
            )
        largest = max(largest, index)


def text_of(token: Any) -> str | None:
    """The text of a special token as tokenizer_config.json spells it: a string, or an object with it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Ids by text: BPE has a table, unigram a list of texts and scores."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        return {piece[0]: index for index, piece in enumerate(vocabulary)}
    return dict(vocabulary)


def _added(
    folder: Path, tokenizer: Mapping[str, Any], settings: Mapping[str, Any], vocabulary: Mapping[str, int]
) -> dict[int, AddedToken]:
    """Added tokens by id, from all files that list them; tokenizer.json goes first."""
    tokens: dict[int, AddedToken] = {}
    decoder = settings.get("added_tokens_decoder") or {}
    old = _optional(folder / "added_tokens.json")
    entries = [
        *(tokenizer.get("added_tokens") or ()),
        *({**entry, "id": id_} for id_, entry in decoder.items()),
    ]
    entries += [{"id": index, "content": text} for text, index in old.items()]
    for entry in entries:
        try:
            index, token = int(entry["id"]), _token(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: an added token lacks id or content: {entry!r}") from error
        tokens.setdefault(index, token)
    special = set(_special_texts(settings))
    ids = {token.text: index for index, token in tokens.items()}
    for text in _special_texts(settings):
        if text not in ids and text in vocabulary:
            tokens[vocabulary[text]] = AddedToken(text, special=True)
    return {
        index: AddedToken(token.text, token.special or token.text in special, token.flags)
        for index, token in sorted(tokens.items())
    }


def _token(entry: Mapping[str, Any]) -> AddedToken:
    flags = tuple(name for name in ("lstrip", "rstrip", "single_word", "normalized") if entry.get(name))
    return AddedToken(str(entry["content"]), bool(entry.get("special")), flags)


def _special_texts(settings: Mapping[str, Any]) -> list[str]:
    """Texts of the special tokens in tokenizer_config.json."""
    more = [settings.get("additional_special_tokens"), settings.get("extra_special_tokens")]
    more = [list(tokens.values()) if isinstance(tokens, Mapping) else tokens for tokens in more]
    listed = [token for tokens in more if isinstance(tokens, list) for token in tokens]
    texts = [text_of(token) for token in (*(settings.get(f"{role}_token") for role in ROLES), *listed)]
    return [text for text in texts if text is not None]


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name."""
    templates = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if templates or given is None:
        return templates
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, Mapping):
        return {str(name): str(template) for name, template in given.items()}
    return {str(entry["name"]): str(entry["template"]) for entry in given}
