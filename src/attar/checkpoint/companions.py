"""The small files that travel with the weights: tokenizer, generation settings, chat template, licence
texts."""

from __future__ import annotations

import shutil
from pathlib import Path

from attar.checkpoint.atomic import explain_os_errors

TOKENIZER = (
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
)
"""What a tokenizer is made of. Its bytes count in a checkpoint's fingerprint."""

TEXTS = (
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*",
    "[Nn][Oo][Tt][Ii][Cc][Ee]*",
    "[Cc][Oo][Pp][Yy][Ii][Nn][Gg]*",
    "USE_POLICY*",
)
"""What else belongs to a model. A README is not among them: it describes the weights it came with."""


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the tokenizer's files in a folder, sorted."""
    return _found(folder, TOKENIZER)


def companion_files(folder: Path) -> list[str]:
    """Names, relative to the folder, of all files that travel with its weights, sorted."""
    return _found(folder, TOKENIZER + TEXTS)


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy tokenizer, generation settings, chat templates and licence texts, byte for byte.

    Args:
        source: a checkpoint folder.
        target: the folder to copy to; a file of the same name there is replaced.

    Returns:
        the names copied, sorted.

    Raises:
        OutputError: no space, or no permission.
    """
    names = companion_files(source)
    with explain_os_errors(target):
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    return names


def _found(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted(
        {
            path.relative_to(folder).as_posix()
            for pattern in patterns
            for path in folder.glob(pattern)
            if path.is_file()
        }
    )
