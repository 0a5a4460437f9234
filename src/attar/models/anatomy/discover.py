"""Anatomy: which module is a block, a projection, a norm, the embedding, the head.

No model class is named here. The blocks are the longest list of modules of one class. Inside a block, module
names propose which projection is which (models/anatomy/roles.py); shapes and config must confirm it. What is
not found, or does not fit, is an error that names it: a wrong guess would only show as bad output later.
Works on models whose parameters are on the meta device.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from attar.errors import ModelError
from attar.models.anatomy.blocks import read_block
from attar.models.anatomy.parts import Anatomy, Block, NonAttentionMixer
from attar.models.anatomy.roles import HINT, agree, common_parent, is_linear, is_norm


def discover(model: Any) -> Anatomy:
    """Find the parts of a transformer.

    Args:
        model: a transformers model, causal or encoder, with or without a head; its weights may be on meta.

    Raises:
        ModelError: a part was not found or its shape contradicts the config; the message names the part,
            where it was looked for, and what is there.
    """
    config = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{config.model_type} is an encoder-decoder model", hint=HINT)
    stack_name, stack = _find_blocks(model, config)
    blocks = tuple(read_block(config, i, f"{stack_name}.{i}", block) for i, block in enumerate(stack))
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    outputs = [block.mixer.o for block in blocks if not isinstance(block.mixer, NonAttentionMixer)]
    hidden = outputs[0].out_features if outputs else int(config.hidden_size)
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
    outer = [  # not lists inside a block, of experts say
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
    name, stack = max(  # a vision tower's blocks are not near the text embedding
        outer, key=lambda item: (len(item[1]) == layers, len(common_parent(item[0], embedding)), len(item[1]))
    )
    agree(config, "num_hidden_layers", len(stack), f"{name} has {{}} blocks")
    return name, stack


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _is_causal(config: Any, block: Block) -> bool:
    """``is_causal`` of the attention modules; where they have none, the auto class that lists the config."""
    flags = [
        module.is_causal
        for module in block.module.modules()
        if isinstance(getattr(module, "is_causal", None), bool)
    ]
    if flags:
        return bool(flags[0])
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING


def _find_positions(model: nn.Module, embedding: nn.Module) -> str | None:
    """A second embedding, named after positions."""
    for name, module in model.named_modules():
        leaf = str(name).rpartition(".")[2]
        if isinstance(module, nn.Embedding) and module is not embedding and ("pos" in leaf or leaf == "wpe"):
            return str(name)
    return None


def _find_final_norm(model: nn.Module, stack_name: str) -> str | None:
    """The last norm next to the list of blocks, except an embedding's norm."""
    parent = stack_name.rpartition(".")[0]
    names = [
        str(name)
        for name, child in model.get_submodule(parent).named_children()
        if is_norm(child) and "embed" not in name.lower()
    ]
    return ".".join(filter(None, [parent, names[-1]])) if names else None
