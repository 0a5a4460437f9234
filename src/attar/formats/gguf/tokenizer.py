"""Tokenizers into GGUF metadata. The way back is tokenizer_back.py.

    tokenizer.json has                                tokenizer.ggml.model
    BPE, ByteLevel                                    gpt2     tokenizer_bpe.py, pretokenizers.py
    BPE, byte_fallback; or tokenizer.model (BPE)      llama    tokenizer_spm.py, merges.py, sentencepiece.py
    Unigram; or spiece.model (unigram)                t5       tokenizer_unigram.py

Besides llama.cpp's keys there is one of ours, ``attar.tokenizer.pipeline``: what tokenizer.json says beside
its vocabulary, as JSON, since llama.cpp's keys do not tell it all. Other readers pass over it; with it the
way back gives the tokenizer that was.

Source: llama.cpp ``src/llama-vocab.cpp``, ``gguf-py/gguf/constants.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.pretokenizers import steps
from attar.formats.gguf.sentencepiece import UNIGRAM
from attar.formats.gguf.tokenizer_back import write_tokenizer
from attar.formats.gguf.tokenizer_bpe import bpe_metadata
from attar.formats.gguf.tokenizer_pipeline import PIPELINE, pipeline
from attar.formats.gguf.tokenizer_source import TokenizerFiles, read_tokenizer_files
from attar.formats.gguf.tokenizer_special import special_metadata
from attar.formats.gguf.tokenizer_spm import spm_metadata
from attar.formats.gguf.tokenizer_unigram import unigram_metadata
from attar.formats.gguf.values import MetadataValue

__all__ = ["source_metadata", "tokenizer_metadata", "write_tokenizer"]


def tokenizer_metadata(
    folder: str | Path, config: Mapping[str, Any], pre: str | None = None
) -> dict[str, MetadataValue]:
    """The GGUF metadata of a model folder's tokenizer.

    Args:
        folder: with tokenizer.json or a SentencePiece model. Only read.
        config: the content of config.json; its vocab_size is the number of tokens written.
        pre: llama.cpp's name for the pre-tokenizer of a byte-level BPE; None to recognise it.

    Returns:
        All keys below ``tokenizer.``, and ``attar.tokenizer.pipeline``.

    Raises:
        CheckpointError: there is no tokenizer, or a file is damaged.
        ModelError: llama.cpp cannot do what this tokenizer does; says which part.
        SettingsError: ``pre`` is no name of llama.cpp's.
    """
    return source_metadata(read_tokenizer_files(Path(folder), config), pre)


def source_metadata(source: TokenizerFiles, pre: str | None = None) -> dict[str, MetadataValue]:
    """:func:`tokenizer_metadata` of files that are read already."""
    kind = _kind(source)
    if kind == "gpt2":
        found = bpe_metadata(source, pre)
    else:
        found = spm_metadata(source) if kind == "llama" else unigram_metadata(source)
    found.update(special_metadata(source))
    if source.tokenizer:
        found[PIPELINE] = json.dumps(pipeline(source), ensure_ascii=False, separators=(",", ":"))
    return found


def _kind(source: TokenizerFiles) -> str:
    """Which of llama.cpp's tokenizers a folder's is."""
    if source.pieces is not None:
        return "t5" if source.pieces.kind == UNIGRAM else "llama"
    if not source.tokenizer:
        raise CheckpointError(
            f"{source.folder}: no tokenizer.json and no tokenizer.model",
            hint="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes tokenizer.json",
        )
    model = source.model
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind == "Unigram":
        return "t5"
    if kind != "BPE":
        raise ModelError(
            f"{source.file}: model {kind}: GGUF is written for BPE, SentencePiece and unigram tokenizers"
        )
    levels = [step.get("type") for step in steps(source.tokenizer.get("pre_tokenizer"))]
    return "gpt2" if "ByteLevel" in levels else "llama"
