"""What a tokenizer.json says beside its vocabulary: the key ``attar.tokenizer.pipeline``.

A JSON object with ``normalizer``, ``pre_tokenizer``, ``post_processor`` and ``decoder`` as in tokenizer.json,
``model`` (the BPE's switches) and ``flags`` (of added tokens by id). A compiled normalization stands as null;
the file has it already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attar.errors import CheckpointError
from attar.formats.gguf.tokenizer_source import TokenizerFiles

PIPELINE = "attar.tokenizer.pipeline"
STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
SWITCHES = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
CHARSMAP = "precompiled_charsmap"


def pipeline(source: TokenizerFiles) -> dict[str, Any]:
    """What to keep of a tokenizer.json."""
    kept = {stage: source.tokenizer.get(stage) for stage in STAGES}
    kept["normalizer"] = with_charsmap(kept["normalizer"], None)
    kept["model"] = {name: source.model[name] for name in SWITCHES if name in source.model}
    kept["flags"] = {str(index): list(token.flags) for index, token in source.added.items() if token.flags}
    return kept


def read_pipeline(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept, empty where the file was written by another.

    Raises:
        CheckpointError: it is no JSON object.
    """
    try:
        kept = json.loads(metadata.get(PIPELINE, "{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{PIPELINE}: not JSON: {error}") from error
    if not isinstance(kept, dict):
        raise CheckpointError(f"{PIPELINE}: not a JSON object")
    return kept


def with_charsmap(tree: Any, charsmap: str | None) -> Any:
    """A normalizer with its compiled normalization replaced."""
    if not isinstance(tree, dict):
        return tree
    if "normalizers" in tree:
        return {**tree, "normalizers": [with_charsmap(step, charsmap) for step in tree["normalizers"]]}
    return {**tree, CHARSMAP: charsmap} if CHARSMAP in tree else tree
