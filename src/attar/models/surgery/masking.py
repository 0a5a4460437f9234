"""A model that computes what its cut would compute, without cutting it: the removed units are masked.

    heads, neurons   their columns of the next projection's input are zero
    layers           a removed block returns its input
    hidden           the removed channels are zero after embeddings and after all that adds to the residual
                     stream, and a norm sees the kept channels alone: its mean and its mean square are over
                     them, as in a model of that width

Where a family scales its embedding by the root of the width (Gemma), the masked model has the scale of the
kept width, because the cut one will. Masks are hooks and replaced ``forward`` functions; weights are not
touched, so nothing is lost when the context ends. Runs without a KV cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Anatomy
from attar.models.anatomy.roles import is_linear, is_norm
from attar.models.surgery.cut_plan import CutPlan


@contextmanager
def masked_units(model: Any, plan: CutPlan) -> Iterator[None]:
    """The model computes what ``cut_model(model, plan)`` does, for the length of the context.

    Raises:
        ModelError: the plan does not fit the model.
    """
    anatomy = discover(model)
    plan.check(anatomy)
    numbers = plan.blocks(anatomy)
    with ExitStack() as stack:
        for block in anatomy.blocks:
            if block.index not in numbers:
                stack.enter_context(skipped(block.module))
                continue
            if plan.heads is not None:
                attention = block.attention
                kept = [
                    column for head in plan.heads[block.index] for column in attention.query_columns(head)
                ]
                _mask_input(stack, model, attention.o.name, attention.o.in_features, kept)
            if plan.neurons is not None:
                _mask_input(stack, model, block.mlp.down.name, block.mlp.neurons, plan.neurons[block.index])
        if plan.hidden is not None:
            _mask_stream(stack, model, anatomy, plan.hidden)
        yield


def stream_norms(model: nn.Module, anatomy: Anatomy) -> list[str]:
    """Names of the norms over the residual stream, in the order of the modules; not those of single heads."""
    single = {name for block in anatomy.blocks for name in block.attention.norms}
    return [
        str(name)
        for name, module in model.named_modules()
        if is_norm(module)
        and name not in single
        and any(parameter.shape == (anatomy.hidden_size,) for parameter in module.parameters())
    ]


def stream_writers(model: nn.Module, anatomy: Anatomy) -> list[str]:
    """Names of the modules whose outputs are channels of the residual stream: embeddings, the
    projections that end attention and MLP, and Linears of that width around the blocks."""
    names = [name for block in anatomy.blocks for name in (block.attention.o.name, block.mlp.down.name)]
    for name, module in model.named_modules():
        outside = not str(name).startswith(f"{anatomy.blocks_name}.") and name != anatomy.head
        embedding = isinstance(module, nn.Embedding) and module.embedding_dim == anatomy.hidden_size
        linear = is_linear(module) and _outputs(module) == anatomy.hidden_size
        if outside and (embedding or linear):
            names.append(str(name))
    return names


@contextmanager
def skipped(block: Any) -> Iterator[None]:
    """The block returns its input, inside the context."""
    original = block.forward
    extra: list[int | None] = []  # further entries of the tuple that the block returns

    def identity(*args: Any, **kwargs: Any) -> Any:
        if not extra:
            output = original(*args, **kwargs)
            extra.append(None if isinstance(output, Tensor) else len(output) - 1)
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if extra[0] is None else (hidden, *[None] * extra[0])

    with replaced_forward(block, identity):
        yield


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """The module has another ``forward``, inside the context."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _mask_input(stack: ExitStack, model: nn.Module, name: str, features: int, kept: Sequence[int]) -> None:
    """Zero all columns of a module's input but ``kept``."""
    module = model.get_submodule(name)
    mask = _mask(features, kept, module)
    hook = module.register_forward_pre_hook(lambda _, args: (args[0] * mask.to(args[0].dtype), *args[1:]))
    stack.callback(hook.remove)


def _mask_stream(stack: ExitStack, model: nn.Module, anatomy: Anatomy, kept: Sequence[int]) -> None:
    for name in stream_writers(model, anatomy):
        module = model.get_submodule(name)
        mask = _mask(anatomy.hidden_size, kept, module)
        hook = module.register_forward_hook(lambda _, args, output, mask=mask: output * mask.to(output.dtype))
        stack.callback(hook.remove)
    for name in stream_norms(model, anatomy):
        norm = model.get_submodule(name)
        stack.enter_context(replaced_forward(norm, _narrow_norm(norm, kept)))
    embedding: Any = model.get_submodule(anatomy.embedding)
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(scale, Tensor):
        embedding.embed_scale = scale * (len(kept) / anatomy.hidden_size) ** 0.5
        stack.callback(setattr, embedding, "embed_scale", scale)


def _narrow_norm(norm: nn.Module, kept: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """The norm over the kept channels alone; the others are zero."""
    device = next(norm.parameters()).device
    channels = torch.tensor(kept, device=device)
    narrow: Any = copy.deepcopy(norm)
    for leaf, parameter in list(narrow.named_parameters(recurse=False)):
        setattr(narrow, leaf, nn.Parameter(parameter.detach()[channels], requires_grad=False))
    if hasattr(narrow, "normalized_shape"):
        narrow.normalized_shape = (len(kept),)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = type(narrow).forward(narrow, x[..., channels])
        return y.new_zeros(x.shape).index_copy(-1, channels, y)

    return forward


def _mask(features: int, kept: Sequence[int], module: nn.Module) -> Tensor:
    mask = torch.zeros(features, device=next(module.parameters()).device)
    mask[torch.tensor(kept, device=mask.device)] = 1.0
    return mask


def _outputs(module: nn.Module) -> int:
    """Outputs of a Linear or Conv1D."""
    weight: Any = module.weight
    return int(weight.shape[0] if isinstance(module, nn.Linear) else weight.shape[1])
