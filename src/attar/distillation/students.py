"""The student before its first step: some of the teacher's blocks, or a narrower model with fresh weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from attar.distillation.layer_map import layer_map
from attar.distillation.settings import StudentSettings
from attar.errors import ModelError, SettingsError
from attar.models.anatomy import discover, text_config
from attar.models.configs import first_line, model_class, parse_config, quiet
from attar.models.load import empty_model
from attar.models.rebuild import named_config
from attar.models.surgery import keep_layers, neurons_key


def make_student(teacher: Any, settings: StudentSettings, seed: int = 0) -> tuple[list[int], Any]:
    """The student before its first step.

    Args:
        seed: of the weights that start afresh.

    Returns:
        the teacher's layers that it starts from (or, where it is narrower, whose kinds its layers have), and
        the model.

    Raises:
        SettingsError: more layers than the teacher has, or a width that it cannot have.
    """
    depth = len(discover(teacher).blocks)
    layers = layer_map(settings.layer_map, depth, settings.layers, settings.keep_layers)
    if settings.width:
        return layers, fresh_student(teacher, layers, settings.width, seed).requires_grad_(True)
    return layers, keep_layers(teacher, layers).requires_grad_(True)


def fresh_student(model: Any, layers: Sequence[int], width: int, seed: int) -> Any:
    """A narrower student of the same family and vocabulary, with the weights its family begins with. Returns
    a float32 model in evaluation mode on the teacher's device.

    Heads keep their width, so there are fewer of them, and as many query heads read a KV head as in the
    teacher; the MLP narrows in proportion.

    Args:
        model: the teacher; not changed.
        layers: the teacher's blocks whose kinds (sliding or full attention) the student's have, ascending.

    Raises:
        SettingsError: the width is not below the teacher's, or leaves no head or a part of one.
        ModelError: the family's config cannot say it.
    """
    thin = keep_layers(empty_model(named_config(model)), layers)
    config = parse_config(_narrowed(thin, width).to_dict())
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        try:
            student = model_class(config)._from_config(config, dtype=torch.float32)
        except Exception as error:  # whatever a family's code raises at sizes that do not fit
            raise ModelError(f"{config.model_type}: cannot be {width} wide: {first_line(error)}") from error
        student.set_attn_implementation(model.config._attn_implementation)
    if model.can_generate():
        student.generation_config = copy.deepcopy(model.generation_config)
    return student.eval().to(next(model.parameters()).device)


def _narrowed(thin: Any, width: int) -> Any:
    """The config of ``thin`` at another width."""
    anatomy = discover(thin)
    attention, hidden = anatomy.blocks[0].attention, anatomy.hidden_size
    neurons = anatomy.blocks[0].mlp.neurons
    if width >= hidden or attention.kv_heads * width % hidden:
        step = hidden // attention.kv_heads
        raise SettingsError("width", width, f"a multiple of {step} below the teacher's {hidden}")
    kv_heads = attention.kv_heads * width // hidden
    config = named_config(thin)
    text = config.get_text_config()
    changes: dict[str, Any] = {
        neurons_key(text_config(thin), neurons): max(neurons * width // hidden, 1),
        "hidden_size": width,
        "num_attention_heads": attention.heads // attention.kv_heads * kv_heads,
    }
    if hasattr(text, "num_key_value_heads"):
        changes["num_key_value_heads"] = kv_heads
    if getattr(text, "head_dim", None) is not None:
        changes["head_dim"] = attention.head_dim
    if getattr(text, "word_embed_proj_dim", None) == hidden:  # OPT says its width twice
        changes["word_embed_proj_dim"] = width
    for key, value in changes.items():
        setattr(text, key, value)
    return config
