"""A draft head as it is stored, before its modules are made: from our folder or from a published layout."""

from __future__ import annotations

from torch import Tensor

from attar.checkpoint.draft_head import published_layout
from attar.checkpoint.geometry import geometry
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.parts import part_of
from attar.errors import CheckpointError, ModelError
from attar.formats.draft_heads.content import HeadContent, HeadTarget
from attar.formats.draft_heads.table import HEAD_LAYOUTS
from attar.formats.readers import reader
from attar.models.draft_heads.kind import MODEL_TYPE


def head_content(checkpoint: Checkpoint, target: HeadTarget | None = None) -> HeadContent:
    """A head's config, tensors and target.

    Args:
        target: what is known of the target besides what the folder says.

    Raises:
        CheckpointError: the folder is no draft head, or is damaged; names it.
        ModelError: a part that attar's heads do not have, or something of the target that has to be known.
    """
    known = target or HeadTarget("")
    tensors = {name: checkpoint.load(name) for name in checkpoint.tensors}
    if checkpoint.config.get("model_type") == MODEL_TYPE:
        values, stated = checkpoint.config.get("head"), checkpoint.config.get("target")
        if not isinstance(values, dict):
            raise CheckpointError(f"{checkpoint.path / 'config.json'}: head is {values!r}, not a draft head")
        return HeadContent(values, tensors, known.stated({"name": stated}))
    layout = published_layout(checkpoint.config, checkpoint.tensors)
    if not layout:
        raise CheckpointError(f"{checkpoint.path} is no draft head")
    try:
        return HEAD_LAYOUTS[layout].decode(checkpoint.config, tensors, known)
    except (CheckpointError, ModelError) as error:
        raise type(error)(f"{checkpoint.path}: {error.message}", hint=error.hint) from error


def head_target(checkpoint: Checkpoint) -> HeadTarget:
    """What layouts say of a model that a head drafts for."""
    shape = geometry(checkpoint.config, "bfloat16")

    def embedding() -> Tensor:
        read = reader(checkpoint)
        for name, info in checkpoint.tensors.items():
            if part_of(name) == "embedding" and info.weight_shape == (shape.vocabulary, shape.hidden):
                table = read.decode(name)
                assert table is not None, name
                return table
        raise ModelError(f"{checkpoint.name}: no embedding of {shape.vocabulary} tokens is found in it")

    return HeadTarget(
        name=checkpoint.name,
        architectures=tuple(checkpoint.config["architectures"]),
        layers=shape.layers or 0,
        context=shape.context or 0,
        embedding=embedding,
    )
