"""The config that the compiled step reads: without transformers where that gives the same."""

from __future__ import annotations

from typing import Any

from attar.models.plain_config import plain_config


def step_config(checkpoint: Any) -> Any:
    """A :class:`attar.models.plain_config.PlainConfig`, else a config of transformers.

    Args:
        checkpoint: open.

    Raises:
        ModelError: transformers does not know the family.
        CheckpointError: transformers refuses the config.
    """
    plain = plain_config(checkpoint.config)
    if plain is not None:
        return plain
    from attar.models.configs import load_config

    return load_config(checkpoint.path, checkpoint.config)
