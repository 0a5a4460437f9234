"""Surgery: a smaller model that computes what the larger one does with the removed units masked
(:mod:`attar.models.surgery.masking` says what masked means).

Query heads are removed with their KV head where it has no other, neurons and layers one by one. Rows, biases
and columns are cut, the config is changed, and :mod:`attar.models.surgery.rebuild` makes the model. The
channels of the residual stream need no table of the tensors that have them: they are the dimensions that the
model of the changed config has shorter. The given model is not changed and shares no memory with the new one.
Models on the meta device can be cut too, for their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.models.anatomy.discover import discover, text_config
from attar.models.anatomy.parts import Anatomy, Attention, Block, Projection
from attar.models.anatomy.sublayers import NEURONS
from attar.models.loading.empty import empty_model
from attar.models.surgery.cut_plan import (
    CutPlan,
    groups_of_heads,
    heads_of_groups,
    same_count,
)
from attar.models.surgery.rebuild import fitting_model, named_config, rebuild

WIDTHS = ("hidden_size", "word_embed_proj_dim")  # config entries of the width of the residual stream


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

    def remove_heads(self, attention: Attention, kept: Sequence[int]) -> None:
        """Remove all query heads but ``kept``, and the KV heads that only removed ones read."""
        groups = groups_of_heads(attention, kept)
        for head in range(attention.heads):
            if head not in kept:
                self.remove_rows(attention.q, attention.query_rows(head))
                self.remove_columns(attention.o, attention.query_columns(head))
        for index, group in enumerate(attention.groups()):
            if index not in groups:
                self.remove_rows(attention.k, group.k_rows)
                self.remove_rows(attention.v, group.v_rows)

    def remove_neurons(self, block: Block, kept: Sequence[int]) -> None:
        """Remove all neurons of the MLP but ``kept``: rows of up and gate, columns of down."""
        mlp, stays = block.mlp, set(kept)
        removed = [index for index in range(mlp.neurons) if index not in stays]
        self.remove_columns(mlp.down, removed)
        for part in (mlp.up, mlp.gate):
            if part is not None:
                stored = part.stored_rows()
                self.remove_rows(part, [stored[index] for index in removed])

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


def cut_model(model: Any, plan: CutPlan) -> Any:
    """A new model that has only the units of the plan, all structures cut at once.

    It is of the same class, except that a Llama whose width is not a multiple of its number of heads becomes
    a Mistral, because Llama's config refuses that number.

    Args:
        model: a transformers model; not changed.
        plan: what stays.

    Raises:
        ModelError: the plan does not fit the model, or the family's config cannot express the result.
    """
    anatomy = discover(model)
    plan.check(anatomy)
    _check_layers(model, plan)
    numbers = plan.blocks(anatomy)
    blocks = [anatomy.blocks[number] for number in numbers]
    cut, changes = RowColumnCut(), dict[str, Any]()
    if plan.heads is not None:
        heads = [plan.heads[number] for number in numbers]
        changes |= _head_changes(model, anatomy, blocks, heads)
        for block, kept in zip(blocks, heads, strict=True):
            cut.remove_heads(block.attention, kept)
    if plan.neurons is not None:
        neurons = [plan.neurons[number] for number in numbers]
        changes |= _neuron_changes(model, anatomy, [len(kept) for kept in neurons])
        for block, kept in zip(blocks, neurons, strict=True):
            cut.remove_neurons(block, kept)
    state = cut.apply(_state_of(model, anatomy, numbers))
    if plan.layers is not None:
        changes = {**_per_layer_lists(model, anatomy, numbers), **changes, "num_hidden_layers": len(numbers)}
        state = _renumbered(state, anatomy, numbers)
    if plan.hidden is not None:
        changes = {**_hidden_changes(model, anatomy, len(plan.hidden)), **changes}
    try:
        new = rebuild(model, state, changes, plan.hidden)
        _check_head_width(new, anatomy)
    except ModelError as error:
        raise _refusal(model, anatomy, plan, error) from error
    return new


def keep_hidden(model: Any, keep: Sequence[int]) -> Any:
    """Remove channels of the residual stream: from embeddings, norms, head, and all that reads or writes it.

    Args:
        model: a transformers model; not changed.
        keep: the channels that stay, ascending.

    Raises:
        ModelError: ``keep`` is not of this form, or the family's config cannot express the result.
    """
    return cut_model(model, CutPlan(hidden=tuple(keep)))


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
    return cut_model(model, CutPlan(layers=tuple(keep)))


def head_counts(model: Any) -> list[int]:
    """Numbers of KV groups that a cut can leave, ascending (all of them: heads must stay)."""
    thin = one_block(model)
    anatomy = discover(thin)
    attention = anatomy.blocks[0].attention
    counts = []
    for count in range(1, attention.kv_heads + 1):
        heads = heads_of_groups(attention, range(count))
        cut = RowColumnCut()
        cut.remove_heads(attention, heads)
        changes = _head_changes(thin, anatomy, anatomy.blocks, [heads])
        try:
            fitting_model(thin, cut.apply(thin.state_dict()), changes)
        except ModelError:
            continue
        counts.append(count)
    return counts


def one_block(model: Any) -> Any:
    """The model with its first block alone and without weights: enough to see what a config can express, and
    fast."""
    empty = empty_model(named_config(model))
    anatomy = discover(empty)
    changes = {**_per_layer_lists(empty, anatomy, [0]), "num_hidden_layers": 1}
    return rebuild(empty, _renumbered(_state_of(empty, anatomy, [0]), anatomy, [0]), changes)


def _check_layers(model: Any, plan: CutPlan) -> None:
    config = text_config(model)
    if plan.layers is not None and getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise ModelError(
            f"{config.model_type}: its attention is scaled by the layer's index, so layers cannot move",
            hint="use method neurons",
        )


def _check_head_width(new: Any, anatomy: Anatomy) -> None:
    """Raise where the new config means heads of another width, in a narrower residual stream."""
    before, after = (blocks[0].attention.head_dim for blocks in (anatomy.blocks, discover(new).blocks))
    if before != after:
        raise ModelError(f"{anatomy.family}: its config means heads of {after} instead of {before}")


def _state_of(model: Any, anatomy: Anatomy, numbers: Sequence[int]) -> dict[str, Tensor]:
    """The state dict without the blocks that go."""
    gone = tuple(f"{block.name}." for block in anatomy.blocks if block.index not in numbers)
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(gone)}


def _renumbered(state: Mapping[str, Tensor], anatomy: Anatomy, numbers: Sequence[int]) -> dict[str, Tensor]:
    """The state dict with its blocks numbered from 0."""
    renamed = {
        f"{anatomy.blocks_name}.{old}.": f"{anatomy.blocks_name}.{new}." for new, old in enumerate(numbers)
    }
    result = {}
    for name, tensor in state.items():
        old = next((prefix for prefix in renamed if name.startswith(prefix)), "")
        result[renamed.get(old, "") + name.removeprefix(old)] = tensor
    return result


def _per_layer_lists(model: Any, anatomy: Anatomy, numbers: Sequence[int]) -> dict[str, Any]:
    """The config's lists of an entry for each layer, and its numbers of layers, for the layers that stay."""
    config = text_config(model)
    lists = {
        key: [value[number] for number in numbers]
        for key, value in config.to_dict().items()
        if isinstance(value, (list, tuple))
        and len(value) == len(anatomy.blocks)
        and ("layer" in key or key in NEURONS)
    }
    return lists | _layer_numbers(config, len(anatomy.blocks), numbers)


def _layer_numbers(config: Any, count: int, numbers: Sequence[int]) -> dict[str, Any]:
    """Config entries that say by number which layers are mixtures of experts, and which are dense."""
    changes: dict[str, Any] = {}
    dense, mixtures = getattr(config, "mlp_only_layers", None), getattr(config, "moe_layers", None)
    if dense is not None:
        step = getattr(config, "decoder_sparse_step", 1) or 1
        old = [number for number in range(count) if number in dense or (number + 1) % step]
        changes = {"mlp_only_layers": [new for new, number in enumerate(numbers) if number in old]}
        changes |= {"decoder_sparse_step": 1} if hasattr(config, "decoder_sparse_step") else {}
    if mixtures is not None:
        changes["moe_layers"] = [new for new, number in enumerate(numbers) if number in mixtures]
    first = getattr(config, "first_k_dense_replace", None)
    if isinstance(first, int):
        changes["first_k_dense_replace"] = sum(number < first for number in numbers)
    return changes


def _head_changes(
    model: Any, anatomy: Anatomy, blocks: Sequence[Block], heads: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Config entries for the heads that the blocks keep; the head width too: its default depends on them."""
    count = same_count(heads, "heads")
    pairs = zip(blocks, heads, strict=True)
    groups = same_count([groups_of_heads(block.attention, kept) for block, kept in pairs], "KV head groups")
    changes = {"num_attention_heads": count, **_head_width(model, anatomy)}
    if hasattr(text_config(model), "num_key_value_heads"):
        changes["num_key_value_heads"] = groups
    return changes


def _head_width(model: Any, anatomy: Anatomy) -> dict[str, Any]:
    """The config entry that makes the width of a head explicit, where it is not."""
    width = anatomy.blocks[0].attention.head_dim
    return {} if getattr(text_config(model), "head_dim", None) == width else {"head_dim": width}


def _neuron_changes(model: Any, anatomy: Anatomy, counts: Sequence[int]) -> dict[str, Any]:
    """The config entry for these numbers of neurons: one number where they are equal, else a list."""
    before = [block.mlp.neurons for block in anatomy.blocks]
    key = neurons_key(text_config(model), before[0])
    uniform = len(set(counts)) == 1 and not isinstance(getattr(text_config(model), key), (list, tuple))
    return {key: counts[0] if uniform else list(counts)}


def _hidden_changes(model: Any, anatomy: Anatomy, width: int) -> dict[str, Any]:
    """Config entries for a width of the residual stream; all whose defaults depend on it become explicit."""
    config = text_config(model)
    key = neurons_key(config, anatomy.blocks[0].mlp.neurons)
    explicit = {} if getattr(config, key) is not None else {key: anatomy.blocks[0].mlp.neurons}
    widths = {name: width for name in WIDTHS if getattr(config, name, None) == anatomy.hidden_size}
    return {**widths, **_head_width(model, anatomy), **explicit}


def _refusal(model: Any, anatomy: Anatomy, plan: CutPlan, error: ModelError) -> ModelError:
    """Why the plan cannot be cut, and what can be done."""
    counts = [len(plan.neurons[number]) for number in plan.blocks(anatomy)] if plan.neurons else [0]
    if min(counts) < max(counts):
        return ModelError(
            f"{anatomy.family}: kept neurons differ from block to block ({min(counts)} to {max(counts)}), "
            f"and its config has one number for all",
            hint=f"the nearest uniform plan keeps {round(sum(counts) / len(counts))} in each",
        )
    if plan.hidden is not None:
        return _hidden_error(anatomy, plan, error)
    return error if plan.heads is None else _heads_error(model, anatomy, plan, error)


def _hidden_error(anatomy: Anatomy, plan: CutPlan, error: ModelError) -> ModelError:
    attention, width = anatomy.blocks[0].attention, len(plan.hidden or ())
    heads = len(plan.heads[0]) if plan.heads is not None else attention.heads
    message = (
        f"{anatomy.family}: the residual stream cannot be {width} wide: no transformers config of this "
        f"family means {heads} heads of {attention.head_dim} in a width of {width}"
    )
    if attention.heads * attention.head_dim != anatomy.hidden_size:
        return ModelError(error.message, hint="use method neurons")
    return ModelError(
        message,
        hint=f"use method neurons, or remove heads with it, so that both are n x {attention.head_dim} wide",
    )


def _heads_error(model: Any, anatomy: Anatomy, plan: CutPlan, error: ModelError) -> ModelError:
    assert plan.heads is not None
    attention, heads = anatomy.blocks[0].attention, len(plan.heads[plan.blocks(anatomy)[0]])
    counts = head_counts(model)
    if counts == [attention.kv_heads]:
        return ModelError(
            f"{anatomy.family}: heads cannot be removed: no transformers config of this family means {heads} "
            f"heads of {attention.head_dim} in a width of {anatomy.hidden_size}",
            hint="use method neurons",
        )
    return ModelError(
        error.message, hint=f"of {attention.kv_heads} KV groups it can keep {', '.join(map(str, counts))}"
    )


def neurons_key(config: Any, neurons: int) -> str:
    """Name under which a config keeps its MLP width (None there means 4 hidden sizes, as in GPT-2; a list has
    a number for each layer)."""
    sizes = {key: getattr(config, key) for key in NEURONS if hasattr(config, key)}
    for key, value in sizes.items():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if first == neurons or (value is None and neurons == 4 * config.hidden_size):
            return key
    raise ModelError(
        f"{config.model_type}: no entry of the config says {neurons} neurons; looked at {', '.join(NEURONS)}"
    )
