"""Which stored tensor belongs to which parameter of a model.

Mostly the names are equal. Checkpoints saved from the bare model lack the prefix of the model with a head
("model.", "transformer.", "bert."), and the other way round; a tied parameter is stored once, under one of
its names.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from attar.errors import CheckpointError


def stored_names(model: nn.Module, checkpoint: Any, *, strict: bool = True) -> dict[str, str]:
    """Parameter name to stored tensor name, for every parameter (tied ones under each of their names that the
    module tree shows).

    Raises:
        CheckpointError: a parameter has no stored tensor, and ``strict``.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, str] = {}
    missing = []
    for name, _ in model.named_parameters(remove_duplicate=True):
        candidates = (name, name.removeprefix(prefix), prefix + name)
        stored = next((candidate for candidate in candidates if candidate in checkpoint.tensors), None)
        if stored is not None:
            found[name] = stored
        else:
            missing.append(name)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    absent = [name for name in missing if name not in tied]
    if absent and strict:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: no tensor for {absent[0]}{more}",
            hint="the checkpoint is incomplete or of another architecture",
        )
    return found
