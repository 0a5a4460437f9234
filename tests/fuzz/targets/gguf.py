"""GGUF files: container, metadata, config, tokenizer and the decoding of every tensor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from attar.errors import AttarError
from attar.formats.gguf.open import open_gguf
from attar.formats.gguf.reader import GGUFReader
from tests import tiny_models
from tests.formats.gguf.gguf_files import write_gguf

FAMILIES = ("smollm", "qwen2", "gemma2")


def seeds(folder: Path) -> list[bytes]:
    """Tiny models of several families and types, with their tokenizers."""
    files = []
    for family, kind in zip(FAMILIES, ("Q4_0", "F16", "Q8_0"), strict=True):
        size = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
        model = tiny_models.save(tiny_models.build(family, **size), folder / family)
        files.append(write_gguf(model, folder / f"{family}.gguf", kind).read_bytes())
    return files


def target(folder: Path) -> Callable[[bytes], bool]:
    """Opens the bytes as a file and decodes what it holds."""
    path = folder / "input.gguf"
    os.environ["ATTAR_CACHE"] = str(folder / "cache")

    def handle(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            checkpoint = open_gguf(path)
            reader = GGUFReader(checkpoint)
            for name in list(checkpoint.tensors)[:3]:
                reader.check(name)
                reader.decode(name)
            return True
        except AttarError:
            return False
        finally:
            shutil.rmtree(folder / "cache", ignore_errors=True)

    return handle
