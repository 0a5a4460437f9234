"""Which stored tensor belongs to which parameter of a model.

Mostly the names are equal. Checkpoints saved from the bare model lack the prefix of the model with a head
("model.", "transformer.", "bert."), and the other way round; a tied parameter is stored once, under one of
its names. A head that the family's checkpoints have under an older name (GPT-NeoX: ``embed_out``) is the one
stored tensor of its shape that belongs to nothing else; of any other parameter a missing tensor is an error.
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
    for name in [name for name in missing if name in tied]:
        renamed = _renamed(tuple(model.get_parameter(name).shape), found, checkpoint)
        if renamed is not None:
            found[name] = renamed
    absent = [name for name in missing if name not in tied]
    if absent and strict:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: no tensor for {absent[0]}{more}",
            hint="the checkpoint is incomplete or of another architecture",
        )
    return found


def _renamed(shape: tuple[int, ...], found: dict[str, str], checkpoint: Any) -> str | None:
    """The one stored tensor of a shape that belongs to no parameter yet; None where there is no or no single
    one."""
    known = frozenset(found.values())
    spare = [
        stored
        for stored, info in checkpoint.tensors.items()
        if stored not in known and tuple(info.shape) == shape
    ]
    return spare[0] if len(spare) == 1 else None
