"""Special tokens, bos and eos around a text, and chat templates: the keys of all kinds of tokenizers.

    tokenizer.ggml.bos_token_id, eos_, unknown_, seperator_ (so spelled), padding_, cls_, mask_
    tokenizer.ggml.eot_token_id, eom_     further tokens that end a turn or a message
    tokenizer.ggml.add_bos_token, add_eos_token
    tokenizer.chat_template, tokenizer.chat_template.NAME, tokenizer.chat_templates (the names)

A generation config may list several tokens that end a text. llama.cpp has one ``eos``, one ``eot``, one
``eom``, and stops at tokens with some well-known texts (``llama-vocab.cpp``, ``special_eog_ids``). So the
tokenizer's own stays ``eos``, and tokens that llama.cpp does not know by their text become ``eot`` and
``eom``; a third one ends a text in attar alone (generation.py).

bos and eos follow the template of tokenizer.json's post_processor; without one, ``add_bos_token`` and
``add_eos_token`` of tokenizer_config.json. Differs from transformers 5, which ignores the latter where there
is a tokenizer.json; the models were trained when it did not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attar.errors import ModelError
from attar.formats.gguf.tokenizer.files import ROLES, TokenizerFiles, text_of
from attar.formats.gguf.values import MetadataValue

PREFIX = "tokenizer.ggml."
KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
}
FIM_KEYS = {role: f"{role}_token_id" for role in ("fim_pad", "fim_rep", "fim_sep")}
"""Tokens of filling in the middle at which llama.cpp ends a text; read, not written: it knows the texts."""
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unk": 0}, "t5": {"eos": 1, "unk": 2, "pad": 0}}
"""llama.cpp's defaults. Its default for "gpt2", token 11, is left out: no file means it."""
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<end_of_utterance>")
MESSAGE_END = "<|eom_id|>"
TEXT_ENDS = (
    *TURN_ENDS, MESSAGE_END,
    "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|endoftext|>", "</s>", "<EOT>", "_<EOT>",
    "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>", "<|tool_response>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
    "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
KNOWN_ENDS = (*TEXT_ENDS, "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[")
"""Tokens at which llama.cpp stops because of their text; the last two only without an ``eot``."""
NO_END_BESIDE = (
    ((("<|return|>", "<|call|>"), ("<|call|>", "<|flush|>"), ("<|calls|>", "<|flush|>")), "<|end|>"),
    ((("<|tool_response>",),), "</s>"),
)
"""(groups of texts, text): where all of a group are tokens, the text is no end."""


def special_token_metadata(source: TokenizerFiles) -> dict[str, MetadataValue]:
    """The keys of special tokens, of bos and eos around a text, and of chat templates.

    Raises:
        ModelError: no token ends a text, or another token than bos or eos goes around it.
    """
    ids = special_ids(source)
    if "eos" not in ids:
        raise ModelError(
            f"{source.folder}: no token ends a text, and llama.cpp would take another token for the end",
            hint="name it as eos_token in tokenizer_config.json",
        )
    bos, eos = added_around(source, ids)
    return {
        **{PREFIX + KEYS[role]: index for role, index in ids.items() if role in KEYS},
        PREFIX + "add_bos_token": bos,
        PREFIX + "add_eos_token": eos,
        **_template_keys(source.templates),
    }


def special_ids(source: TokenizerFiles) -> dict[str, int]:
    """Ids of the special tokens by role: the roles of :data:`KEYS`, and ``cls``."""
    ids: dict[str, int] = {}
    for role in ROLES:
        index = source.id_of(text_of(source.settings.get(f"{role}_token")))
        index = _configured(source, role) if index is None else index
        if index is not None and _in_range(source, index):
            ids[role] = index
    unknown = source.model.get("unk_id", source.id_of(source.model.get("unk_token")))
    if "unk" not in ids and isinstance(unknown, int):
        ids["unk"] = unknown
    for role, like in (("bos", "cls"), ("eos", "sep")):
        if role not in ids and like in ids:
            ids[role] = ids[like]
    return {**ids, **_eot_and_eom(source, ids["eos"])} if "eos" in ids else ids


def stored_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the special tokens of a GGUF file by role, roles with llama.cpp's defaults too; ids without a
    token are left out.

    Args:
        metadata: of the file, without types.
    """
    kind, tokens = metadata.get(f"{PREFIX}model"), metadata.get(f"{PREFIX}tokens")
    keys = {**KEYS, **FIM_KEYS}
    stated = {role: metadata[PREFIX + key] for role, key in keys.items() if PREFIX + key in metadata}
    ids = {**DEFAULT_IDS.get(str(kind), {}), **stated}
    count = math.inf if tokens is None else len(tokens)
    return {role: index for role, index in ids.items() if type(index) is int and 0 <= index < count}


def added_around(source: TokenizerFiles, ids: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether bos goes before a text, and eos after it.

    Raises:
        ModelError: another token does, for which llama.cpp has no key.
    """
    around = _around(source.tokenizer.get("post_processor") or {})
    if around is None:
        settings = source.settings
        return bool(settings.get("add_bos_token")) and "bos" in ids, bool(settings.get("add_eos_token"))
    first, last = around
    for texts, role in ((first, "bos"), (last, "eos")):
        if texts and [source.id_of(text) for text in texts] != [ids.get(role)]:
            raise ModelError(
                f"{source.file}: post_processor puts {' '.join(texts)} "
                f"{'before' if role == 'bos' else 'after'} a text, llama.cpp can only put {role} there",
                hint="remove it from post_processor where the chat template has it as well",
            )
    return bool(first), bool(last)


def _configured(source: TokenizerFiles, role: str) -> int | None:
    """A special token's id from config.json or generation_config.json; the first of several."""
    text = source.config.get("text_config") or {}
    for config in (source.config, text, source.generation):
        index = config.get(f"{role}_token_id")
        if isinstance(index, list) and index:
            index = index[0]
        if isinstance(index, int):
            return index
    return None


def _in_range(source: TokenizerFiles, index: int) -> bool:
    return index >= 0 and (source.size is None or index < source.size)


def _eot_and_eom(source: TokenizerFiles, eos: int) -> dict[str, int]:
    """``eot`` and ``eom``: further tokens that end a text."""
    special = {token.text: index for index, token in source.added.items() if token.special}
    ends, unnamed = ends_of(source, eos), unnamed_ends(source, eos)
    turns = [special[text] for text in TURN_ENDS if text in special and _in_range(source, special[text])]
    turns = [] if "<|return|>" in special else turns
    messages = [special[MESSAGE_END]] if MESSAGE_END in special else []
    ids: dict[str, int] = {}
    for role, known in (("eot", turns), ("eom", messages)):
        listed = [index for index in known if index in ends and index != eos]
        free = [index for index in unnamed if index not in ids.values()]
        candidates = [*listed, *free, *known]
        if candidates:
            ids[role] = candidates[0]
    return ids


def ends_of(source: TokenizerFiles, eos: int) -> list[int]:
    """The tokens that end a text by generation_config.json or config.json, else ``eos`` alone."""
    text = source.config.get("text_config") or {}
    for config in (source.generation, source.config, text):
        listed: Any = config.get("eos_token_id")
        if listed is not None:
            every = listed if isinstance(listed, list) else [listed]
            return [index for index in every if type(index) is int and _in_range(source, index)]
    return [eos]


def unnamed_ends(source: TokenizerFiles, eos: int) -> list[int]:
    """Those of :func:`ends_of` other than ``eos`` that llama.cpp does not know by their text."""
    named = {index for index, token in source.added.items() if token.special and token.text in KNOWN_ENDS}
    return [index for index in ends_of(source, eos) if index != eos and index not in named]


def _around(processor: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """The special tokens that a post_processor adds before and after a text; None without a template."""
    kind = processor.get("type")
    if kind == "Sequence":
        nested = [_around(step) for step in processor.get("processors") or ()]
        return next((around for around in nested if around is not None), None)
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][0]], [processor["sep"][0]]
    if kind != "TemplateProcessing":
        return None
    parts = processor.get("single") or []
    split = next((index for index, part in enumerate(parts) if "Sequence" in part), len(parts))
    before, after = (
        [part["SpecialToken"]["id"] for part in some if "SpecialToken" in part]
        for some in (parts[:split], parts[split:])
    )
    return before, after


def _template_keys(templates: Mapping[str, str]) -> dict[str, MetadataValue]:
    """Chat templates under the keys that llama.cpp's converter uses."""
    names = {
        name: "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
        for name in templates
        if name != "default"
    }
    metadata: dict[str, MetadataValue] = {
        f"tokenizer.chat_template.{names[name]}": templates[name] for name in names
    }
    if names:
        metadata["tokenizer.chat_templates"] = list(names.values())
    if "default" in templates:
        metadata["tokenizer.chat_template"] = templates["default"]
    return metadata
