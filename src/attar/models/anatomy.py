"""Anatomy: which module is a block, a projection, a norm, the embedding, the head.

Nothing here knows a model class. The blocks are the longest list of modules of one class; inside a block the
names of the linear layers propose what they are (:mod:`attar.models.roles`), and shapes and config must agree
(:mod:`attar.models.blocks`). What cannot be found, or does not fit, is an error that says so: a wrong guess
would only show as garbage later. Works on models whose parameters are on the meta device.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from attar.errors import ModelError
from attar.models.blocks import HINT, agree, common_parent, is_linear, is_norm, read_block
from attar.models.parts import Anatomy, Block


def discover(model: Any) -> Anatomy:
    """Find the parts of a transformer.

    Args:
        model: a transformers model, causal or encoder, with or without a head; its weights may be on meta.

    Raises:
        ModelError: a part was not found or its shape contradicts the config; says which part, where it was
            looked for, and what was seen there.
    """
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{config.model_type} is an encoder-decoder model", hint=HINT)
    stack_name, stack = _find_blocks(model, config)
    blocks = tuple(read_block(config, i, f"{stack_name}.{i}", block) for i, block in enumerate(stack))
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    hidden = blocks[0].attention.o.out_features
    agree(config, "hidden_size", hidden, "the attention output is {} wide")
    return Anatomy(
        family=config.model_type,
        causal=_is_causal(config, blocks[0]),
        blocks=blocks,
        blocks_name=stack_name,
        embedding=_path_of(model, embedding),
        positions=_find_positions(model, embedding),
        final_norm=_find_final_norm(model, stack_name),
        head=None if head is None else _path_of(model, head),
        tied=head is not None and head.weight is embedding.weight,
        hidden_size=hidden,
        vocab_size=embedding.weight.shape[0],
    )


def text_config(model: Any) -> Any:
    """The config of the language model (the model's own, or the text part of a multimodal one)."""
    return model.config.get_text_config()


def _find_blocks(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList]:
    """The longest list of same-class modules with linear layers; one of the config's length goes first."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len({type(child) for child in module}) == 1
        and any(is_linear(part) for part in module[0].modules())
    ]
    outer = [  # a list inside a block (of experts, say) is not the list of blocks
        (name, module)
        for name, module in lists
        if not any(name.startswith(other + ".") for other, _ in lists)
    ]
    if not outer:
        seen = ", ".join(name for name, _ in model.named_modules() if 1 <= name.count(".") + 1 <= 2 and name)
        raise ModelError(
            f"{config.model_type}: blocks were not found: no ModuleList in the model holds modules of one "
            f"class with linear layers; seen there: {seen}",
            hint=HINT,
        )
    layers = getattr(config, "num_hidden_layers", None)
    embedding = _path_of(model, model.get_input_embeddings())
    name, stack = max(  # the blocks of the text stand by its embedding, those of a vision tower do not
        outer, key=lambda item: (len(item[1]) == layers, len(common_parent(item[0], embedding)), len(item[1]))
    )
    agree(config, "num_hidden_layers", len(stack), f"{name} has {{}} blocks")
    return name, stack


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _is_causal(config: Any, block: Block) -> bool:
    """Attention modules say it themselves; where they do not, what the family is made for."""
    said = [
        module.is_causal
        for module in block.module.modules()
        if isinstance(getattr(module, "is_causal", None), bool)
    ]
    if said:
        return bool(said[0])
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING


def _find_positions(model: nn.Module, embedding: nn.Module) -> str | None:
    """A second embedding whose name speaks of positions."""
    for name, module in model.named_modules():
        leaf = str(name).rpartition(".")[2]
        if isinstance(module, nn.Embedding) and module is not embedding and ("pos" in leaf or leaf == "wpe"):
            return str(name)
    return None


def _find_final_norm(model: nn.Module, stack_name: str) -> str | None:
    """The last norm beside the list of blocks that is not the embedding's."""
    parent = stack_name.rpartition(".")[0]
    names = [
        str(name)
        for name, child in model.get_submodule(parent).named_children()
        if is_norm(child) and "embed" not in name.lower()
    ]
    return ".".join(filter(None, [parent, names[-1]])) if names else None
