"""Students with fresh weights: as wide as the teacher, or narrower."""

from __future__ import annotations

import copy
from typing import Any

import torch

from attar.errors import ModelError, SettingsError
from attar.models.anatomy.discover import discover, text_config
from attar.models.loading.configs import first_line, model_class, parse_config, quiet
from attar.models.surgery.cut_model import neurons_key
from attar.models.surgery.rebuild import named_config


def fresh_student(config: Any, teacher: Any, seed: int) -> Any:
    """A model of a config with the weights its family begins with: float32, in evaluation mode, on the
    teacher's device.

    Raises:
        ModelError: the family's code cannot build it.
    """
    config = parse_config(config.to_dict())
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        try:
            student = model_class(config)._from_config(config, dtype=torch.float32)
        except Exception as error:  # whatever a family's code raises at sizes that do not fit
            width = config.get_text_config().hidden_size
            raise ModelError(f"{config.model_type}: cannot be {width} wide: {first_line(error)}") from error
        student.set_attn_implementation(teacher.config._attn_implementation)
    if teacher.can_generate():
        student.generation_config = copy.deepcopy(teacher.generation_config)
    return student.eval().to(next(teacher.parameters()).device)


def narrower_config(thin: Any, width: int) -> Any:
    """The config of ``thin`` at another width, same family and vocabulary.

    Heads keep their width, so there are fewer of them, and as many query heads read a KV head as in the
    teacher; the MLP narrows in proportion.

    Raises:
        SettingsError: the width is not below the teacher's, or leaves no head or a part of one.
    """
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
