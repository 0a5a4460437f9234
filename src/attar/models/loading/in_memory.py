"""A model in memory as a checkpoint: written to a folder of the cache, which is removed when Python ends."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors
from attar.checkpoint.hashing import cache_folder
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.errors import UsageError
from attar.models.loading.load import save_model

HINT = "a folder, a hub id, attar:tiny, a transformers model, or a pair of a model and its tokenizer"


def checkpoint_of(model: Any) -> Checkpoint:
    """A transformers model, alone or in a pair with its tokenizer, as an open checkpoint; it is not changed.

    Stages identify it by its content: a killed one goes on with the same weights.

    Raises:
        UsageError: neither of them.
        OutputError: the cache cannot be written, or has no room.
    """
    weights, tokenizer = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not (hasattr(weights, "save_pretrained") and hasattr(weights, "state_dict")):
        raise UsageError(f"the model is {type(weights).__name__}", hint=HINT)
    cache = cache_folder() / "memory"
    with explain_os_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        folder = scratch / _name(weights)
        save_model(weights, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return open_checkpoint(folder)


def _name(model: Any) -> str:
    """The last part of the name that it was loaded by, else its class."""
    name = re.sub(r"[^\w.-]", "_", Path(str(getattr(model, "name_or_path", ""))).name).lstrip(".")
    return name or type(model).__name__
