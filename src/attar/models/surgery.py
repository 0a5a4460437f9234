"""Surgery: a smaller model that computes what the larger one does with the removed parts zeroed.

Heads are removed in whole KV groups (the KV head and all query heads that read it), neurons and layers one
by one. Rows, biases and columns are cut, the config is changed, and an empty model is built from that
config, as ``from_pretrained`` will build it, and compared with the cut tensors name by name and shape by
shape. So no table lists what a family's config can express: transformers' own code decides. The given model
is not changed and shares no memory with the new one. Models on the meta device can be cut too, for their
sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.models.anatomy import NEURONS, discover, text_config
from attar.models.configs import parse_config, quiet
from attar.models.load import empty_model
from attar.models.parts import Anatomy, Projection


class RowColumnCut:
    """Rows and columns to remove, by module."""

    def __init__(self) -> None:
        self.rows: dict[str, set[int]] = {}
        self.columns: dict[str, set[int]] = {}
        self.kinds: dict[str, str] = {}

    def remove_rows(self, part: Projection, rows: Iterable[int]) -> None:
        """Remove stored output rows of a projection (of the whole fused weight, where it is fused)."""
        self.kinds[part.name] = part.kind
        self.rows.setdefault(part.name, set()).update(rows)

    def remove_columns(self, part: Projection, columns: Iterable[int]) -> None:
        """Remove input columns of a projection."""
        self.kinds[part.name] = part.kind
        self.columns.setdefault(part.name, set()).update(columns)

    def apply(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict without them; every tensor is a copy."""
        result = {name: tensor.detach().clone() for name, tensor in state.items()}
        for name, kind in self.kinds.items():
            row_dim = 1 if kind == "conv1d" else 0
            weight, bias = f"{name}.weight", f"{name}.bias"
            rows, columns = self.rows.get(name, set()), self.columns.get(name, set())
            result[weight] = without(without(result[weight], row_dim, rows), 1 - row_dim, columns)
            if bias in result:
                result[bias] = without(result[bias], 0, rows)
        return result


def without(tensor: Tensor, dim: int, removed: set[int]) -> Tensor:
    """A copy of ``tensor`` without the indices ``removed`` along ``dim``; the others keep their order."""
    kept = [index for index in range(tensor.shape[dim]) if index not in removed]
    return tensor.index_select(dim, torch.tensor(kept, device=tensor.device))


def keep_heads(model: Any, keep: Sequence[Sequence[int]]) -> Any:
    """Remove attention heads, whole KV groups at a time.

    Args:
        model: a transformers model; not changed.
        keep: for each block the KV groups that stay, ascending; as many in every block, for a config has one
            number for all.

    Returns:
        A new model. It is of the same class, except that a Llama whose width is not a multiple of the new
        number of heads becomes a Mistral, because Llama's config refuses that number.

    Raises:
        ModelError: ``keep`` is not of this form, or the family's config cannot express the result.
    """
    anatomy = discover(model)
    count = _check_keep(keep, [block.attention.kv_heads for block in anatomy.blocks], "KV head groups")
    state = _without_heads(model.state_dict(), anatomy, keep)
    try:
        return rebuild(model, state, _head_changes(model, anatomy, count))
    except ModelError as error:
        raise _heads_error(model, anatomy, count, error) from error


def keep_neurons(model: Any, keep: Sequence[Sequence[int]]) -> Any:
    """Remove MLP neurons: rows of up and gate with their biases, columns of down. Returns a new model of the
    same class.

    Args:
        model: a transformers model; not changed.
        keep: for each block the neurons that stay, ascending; as many in every block.

    Raises:
        ModelError: ``keep`` is not of this form, or the family's config cannot express the result.
    """
    anatomy = discover(model)
    before = [block.mlp.neurons for block in anatomy.blocks]
    count = _check_keep(keep, before, "neurons")
    cut = RowColumnCut()
    for block, kept in zip(anatomy.blocks, keep, strict=True):
        mlp, stays = block.mlp, set(kept)
        removed = [index for index in range(mlp.neurons) if index not in stays]
        cut.remove_columns(mlp.down, removed)
        for part in (mlp.up, mlp.gate):
            if part is not None:
                stored = part.stored_rows()
                cut.remove_rows(part, [stored[index] for index in removed])
    changes = {neurons_key(text_config(model), before[0]): count}
    return rebuild(model, cut.apply(model.state_dict()), changes)


def keep_layers(model: Any, keep: Sequence[int]) -> Any:
    """Remove whole blocks.

    Args:
        model: a transformers model; not changed.
        keep: the blocks that stay, ascending.

    Returns:
        A new model of the same class; its blocks, their cache indices and the config's per-layer lists are
        renumbered.

    Raises:
        ModelError: ``keep`` is not of this form, or the attention of a block depends on its position.
    """
    config = text_config(model)
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise ModelError(
            f"{config.model_type}: its attention is scaled by the layer's index, so layers cannot move",
            hint="use method neurons",
        )
    return _keep_layers(model, keep)


def head_counts(model: Any) -> list[int]:
    """Numbers of KV groups that :func:`keep_heads` can leave, ascending (all of them: heads must stay)."""
    thin = _keep_layers(
        empty_model(named_config(model)), [0]
    )  # one block without weights is enough, and fast
    anatomy = discover(thin)
    counts = []
    for count in range(1, anatomy.blocks[0].attention.kv_heads + 1):
        state = _without_heads(thin.state_dict(), anatomy, [list(range(count))])
        try:
            fitting_model(thin, state, _head_changes(thin, anatomy, count))
        except ModelError:
            continue
        counts.append(count)
    return counts


def _keep_layers(model: Any, keep: Sequence[int]) -> Any:
    anatomy = discover(model)
    total = len(anatomy.blocks)
    _check_keep([keep], [total], "layers")
    lists = {
        key: [value[index] for index in keep]
        for key, value in text_config(model).to_dict().items()
        if isinstance(value, (list, tuple)) and len(value) == total and "layer" in key
    }
    renamed = {
        f"{anatomy.blocks_name}.{old}.": f"{anatomy.blocks_name}.{new}." for new, old in enumerate(keep)
    }
    state = {}
    for name, tensor in model.state_dict().items():
        old = next((block.name + "." for block in anatomy.blocks if name.startswith(block.name + ".")), "")
        if old == "" or old in renamed:
            state[renamed.get(old, "") + name.removeprefix(old)] = tensor.detach().clone()
    return rebuild(model, state, {"num_hidden_layers": len(keep), **lists})


def _without_heads(
    state: Mapping[str, Tensor], anatomy: Anatomy, keep: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """A copy of a state dict that has only the KV groups ``keep`` of each block."""
    cut = RowColumnCut()
    for block, kept in zip(anatomy.blocks, keep, strict=True):
        attention = block.attention
        for index, group in enumerate(attention.groups()):
            if index not in kept:
                cut.remove_rows(attention.q, group.q_rows)
                cut.remove_rows(attention.k, group.k_rows)
                cut.remove_rows(attention.v, group.v_rows)
                cut.remove_columns(attention.o, group.o_columns)
    return cut.apply(state)


def _heads_error(model: Any, anatomy: Anatomy, count: int, error: ModelError) -> ModelError:
    """Why heads cannot be removed, and what can be done."""
    attention = anatomy.blocks[0].attention
    counts = head_counts(model)
    if counts == [attention.kv_heads]:
        heads = attention.heads // attention.kv_heads * count
        return ModelError(
            f"{anatomy.family}: heads cannot be removed: no transformers config of this family means {heads} "
            f"heads of {attention.head_dim} in a width of {anatomy.hidden_size}",
            hint="use method neurons",
        )
    return ModelError(
        error.message, hint=f"of {attention.kv_heads} KV groups it can keep {', '.join(map(str, counts))}"
    )


def _head_changes(model: Any, anatomy: Anatomy, count: int) -> dict[str, Any]:
    """Config entries for ``count`` KV groups; the head width too, whose default depends on them."""
    attention, config = anatomy.blocks[0].attention, text_config(model)
    changes = {"num_attention_heads": attention.heads // attention.kv_heads * count}
    if getattr(config, "head_dim", None) != attention.head_dim:
        changes["head_dim"] = attention.head_dim
    if hasattr(config, "num_key_value_heads"):
        changes["num_key_value_heads"] = count
    return changes


def neurons_key(config: Any, neurons: int) -> str:
    """Name under which a config keeps its MLP width (None there means 4 hidden sizes, as in GPT-2)."""
    sizes = {key: getattr(config, key) for key in NEURONS if hasattr(config, key)}
    for key, value in sizes.items():
        if value == neurons or (value is None and neurons == 4 * config.hidden_size):
            return key
    raise ModelError(
        f"{config.model_type}: no entry of the config says {neurons} neurons; looked at {', '.join(NEURONS)}"
    )


def _check_keep(keep: Sequence[Sequence[int]], limits: Sequence[int], what: str) -> int:
    """How many are kept in each block; raises where ``keep`` is not ascending, within limits and even."""
    if len(keep) != len(limits):
        raise ModelError(f"kept {what} are given for {len(keep)} blocks, but the model has {len(limits)}")
    for index, (kept, limit) in enumerate(zip(keep, limits, strict=True)):
        if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= limit:
            raise ModelError(
                f"kept {what} of block {index} must be ascending numbers from 0 to {limit - 1}, at least "
                f"one; they are {list(kept)[:8]}"
            )
    counts = sorted({len(kept) for kept in keep})
    if len(counts) > 1:
        raise ModelError(
            f"kept {what} differ from block to block ({counts[0]} to {counts[-1]})",
            hint="a config has one number for all layers; keep as many in each",
        )
    return counts[0]


# Llama's config wants hidden_size to be a multiple of the number of heads although head_dim is free.
# Mistral's does not, and without a sliding window it is the same network with the same tensor names.
SIBLINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("mistral", "Mistral", {"sliding_window": None}),
}


def rebuild(model: Any, state: dict[str, Tensor], changes: dict[str, Any]) -> Any:
    """A model of the changed config that holds ``state``."""
    new = fitting_model(model, state, changes)
    new.load_state_dict(state, strict=True, assign=True)
    new.tie_weights()
    device = next(model.parameters()).device
    if device.type != "meta":
        new.to(device)
    if model.can_generate():
        new.generation_config = copy.deepcopy(model.generation_config)
    return new.train(model.training)


def fitting_model(model: Any, state: Mapping[str, Tensor], changes: dict[str, Any]) -> Any:
    """An empty model of the changed config whose tensors have the names and shapes of ``state``."""
    family, refusal = text_config(model).model_type, ""
    for config in _configs(model, changes):
        try:
            new = empty_model(parse_config(config))
        except ModelError as error:
            refusal = refusal or error.message
            continue
        wrong = _misfit(new.state_dict(), state)
        if wrong is None:
            with quiet():
                new.set_attn_implementation(model.config._attn_implementation)
            return new
        refusal = refusal or f"it builds {wrong}"
    requested = ", ".join(f"{key} {value}" for key, value in changes.items() if isinstance(value, int))
    raise ModelError(f"{family}: its config cannot express {requested}: {refusal}")


def _configs(model: Any, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The changed config of the model's own family, then that of a sibling family."""
    config = named_config(model)
    for key, value in changes.items():
        try:
            setattr(config.get_text_config(), key, value)
        except Exception as error:  # a property without a setter, or a validator of the config class
            raise ModelError(f"{config.model_type}: its config's {key} cannot be {value}: {error}") from error
    own = config.to_dict()
    if config.model_type not in SIBLINGS:
        return [own]
    kind, prefix, extra = SIBLINGS[config.model_type]
    ours, theirs = type(config)().to_dict(), parse_config({"model_type": kind}).to_dict()
    shared = {key: value for key, value in own.items() if key in theirs or key not in ours}
    name = prefix + type(model).__name__.removeprefix(type(config).__name__.removesuffix("Config"))
    return [own, {**shared, **extra, "model_type": kind, "architectures": [name]}]


def named_config(model: Any) -> Any:
    """A copy of the model's config that names the model's class."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    return config


def _misfit(built: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str | None:
    """The first tensor that differs in name or shape, in words; None when all fit."""
    for name in sorted(built.keys() | state.keys()):
        have = list(built[name].shape) if name in built else "nothing"
        want = list(state[name].shape) if name in state else "nothing"
        if have != want:
            return f"{name} {have} where the cut needs {want}"
    return None
