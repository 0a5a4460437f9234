"""The small files that are copied with the weights: tokenizer, generation settings, chat template, licence
texts."""

from __future__ import annotations

import shutil
from pathlib import Path

from attar.checkpoint.atomic import explain_os_errors, write_json
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.names import check_links
from attar.errors import CheckpointError

CONFIG = "config.json"
GENERATION = "generation_config.json"
KV_BASIS = "attar-kv.json"  # runtime/kv/basis_file.py
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_pipeline")
"""Keys of JSON files that name Python files of the same folder."""
LARGEST = 1 << 20  # bytes of a JSON file of settings

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
"""A tokenizer's files; they are part of a checkpoint's fingerprint."""

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
"""Other files of a model. No README: it describes the original weights."""


OTHERS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.gguf",
    "*.imatrix",
    "*config*.json",
    "*/config.json",
    "attar-text.json",
    KV_BASIS,
    "modules.json",
    "Modelfile",
    "README.md",
)
"""What else belongs to a model without a card."""


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the tokenizer's files in a folder, sorted."""
    return _matches(folder, TOKENIZER)


def model_files(folder: Path) -> list[str]:
    """Names of the files of a model without a card, sorted; hidden ones are none of them."""
    return _matches(folder, TOKENIZER + TEXTS + OTHERS)


def check_companions(folder: Path) -> None:
    """Refuse a model whose companions are links to elsewhere: what is copied would be another file of the
    user. Raises CheckpointError."""
    check_links(folder, _matches(folder, TOKENIZER + TEXTS))


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy tokenizer, generation settings, chat templates and licence texts between checkpoint folders.
    Returns the names copied, relative to the folder, sorted; files of these names in ``target`` are
    replaced.

    Where config.json of ``target`` names Python files, all of those of ``source`` are copied, too; elsewhere
    (transformers has the family itself) no copied file names any.

    Raises:
        CheckpointError: one is a link out of the folder.
        OutputError: no space, or no permission.
    """
    code = CONFIG in _code_files(target)
    names = _matches(source, (*TOKENIZER, *TEXTS, *(("*.py",) if code else ())))
    check_links(source, names)
    with explain_os_errors(target):
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
        for name in () if code else _code_files(target):
            content = {key: value for key, value in read_json(target / name).items() if key not in CODE_KEYS}
            write_json(target / name, content)
    return names


def _code_files(folder: Path) -> list[str]:
    """The JSON files of a folder that name Python files."""
    return [name for name in _matches(folder, ("*.json",)) if _names_code(folder / name)]


def _names_code(path: Path) -> bool:
    """Whether a JSON file has one of the keys; one that is no object has none."""
    if path.stat().st_size > LARGEST:  # a vocabulary, no settings
        return False
    try:
        content = read_json(path)
    except CheckpointError:
        return False
    return any(key in content for key in CODE_KEYS)


def _matches(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    names = {path.relative_to(folder).as_posix() for path in paths}
    return sorted(name for name in names if not name.startswith(".") and "/." not in name)
