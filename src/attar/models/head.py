"""The head of a language model: from hidden states to logits, written out with its gradient, so that a loss
can go through it a chunk of tokens at a time.

    z = c tanh(s (h W^T + b) / c),   or s (h W^T + b) without a cap
    dz' = s (1 - (z / c)^2) dz ;   dh = dz' W ;   dW = dz'^T h ;   db = sum of dz'

What a family does after its last Linear (Cohere multiplies, Granite divides, Gemma-2 caps) is read from the
function itself: :func:`head_of` runs the model on two tokens, gives it fixed numbers for the Linear's output,
and looks at what becomes of them. A family that does anything else has no such head (None), and its logits
are taken as they come.

Letters: h (n, H) hidden states; W (V, H), b (V,) weight and bias; z (n, V) logits; s scale; c soft cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

SMALL, LARGE = 2.0**-20, 2.0**100  # tanh is the identity at the one and 1 at the other
PROBES = 64  # logits between them that must come out as the formula says
TOLERANCE = 1e-5  # of float32


@dataclass(frozen=True)
class Head:
    """A Linear, a scale and a soft cap.

    Attributes:
        weight: W (V, H), the model's own.
        bias: b (V,), or None.
        scale: s.
        softcap: c; 0: none.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0

    def of(self, model: Any) -> Head:
        """The same with the weight and bias that the model has now: where processes divide it, they are whole
        only from its forward pass to its backward one."""
        linear = output_linear(model)
        return self if linear is None else replace(self, weight=linear.weight, bias=linear.bias)

    def to(self, dtype: torch.dtype) -> Head:
        """The same, detached, with its numbers in a type."""
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        return replace(self, weight=self.weight.detach().to(dtype), bias=bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """z (n, V) of hidden states (n, H), in the type of the product."""
        return self.finish(nn.functional.linear(hidden, self.weight, self.bias))

    def finish(self, z: Tensor) -> Tensor:
        """Scale and cap the output of the Linear, which is overwritten."""
        if self.scale != 1.0:
            z = z.mul_(self.scale)
        return z.div_(self.softcap).tanh_() * self.softcap if self.softcap else z

    def backward(self, z: Tensor, dz: Tensor) -> Tensor:
        """From gradients by the logits (n, V) to gradients by the Linear's output, in place.

        Args:
            z: the logits that :meth:`finish` gave; read where there is a soft cap.
        """
        if self.softcap:
            dz = dz.addcmul_(dz, (z / self.softcap).square_(), value=-1.0)
        return dz.mul_(self.scale) if self.scale != 1.0 else dz


def product_type(x: Tensor) -> torch.dtype:
    """The type of a product with x: autocast's, where that is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def head_of(model: Any) -> Head | None:
    """The head of a language model; None where it is not one Linear with a scale and a cap, or something else
    happens in it (an adapter, a quantizer, a hook).

    Args:
        model: of transformers, or a wrapper (peft, DDP) of one; runs once on two tokens.
    """
    linear = output_linear(model)
    return None if linear is None else _probed(unwrapped(model), linear)


def output_linear(model: Any) -> nn.Linear | None:
    """The module that makes the logits, where it is a plain Linear without hooks."""
    model = unwrapped(model)
    linear = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if linear is None or type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
        return None
    return None if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else linear


def unwrapped(model: Any) -> Any:
    """The model in a wrapper that keeps it as ``module`` (DDP)."""
    while not hasattr(model, "get_output_embeddings") and isinstance(
        getattr(model, "module", None), nn.Module
    ):
        model = model.module
    return model


@contextmanager
def without_logits(model: Any) -> Iterator[list[Tensor]]:
    """Within it, a run of the model makes no logits: its head reads no position. The list gets the hidden
    states (B, S, H) that the head would have read, one tensor a run.

    Args:
        model: one with a head (:func:`head_of`).
    """
    linear, states = output_linear(model), list[Tensor]()
    assert linear is not None, "the model has no plain head"

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        states.append(inputs[0])
        return (inputs[0][:, :0],)

    handle = linear.register_forward_pre_hook(hook)
    try:
        yield states
    finally:
        handle.remove()


def hidden_states(model: Any, tokens: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
    """The states (B, S, H) that the head reads, without any logits, differentiable.

    Args:
        model: one with a head; called as it is, so that wrappers do their work.
        tokens: int64 (B, S).
        inputs: further arguments of the model.
    """
    with without_logits(model) as states:
        model(input_ids=tokens, attention_mask=attention_mask, **inputs)
    return states[-1]


@torch.no_grad()  # type: ignore[untyped-decorator]
def _probed(model: Any, linear: nn.Linear) -> Head | None:
    """The head, if the model does to the Linear's output what a :class:`Head` does."""
    V, device = linear.weight.shape[0], linear.weight.device
    middle = torch.linspace(-80.0, 80.0, PROBES, dtype=torch.float64, device=device)
    values = torch.cat([middle.new_tensor([SMALL, LARGE]), middle]).repeat(V // PROBES + 1)[:V]
    shapes = list[torch.Size]()

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> Tensor:
        shapes.append(inputs[0].shape[:-1])
        return values.expand(*shapes[-1], V).clone()

    tokens = torch.arange(3, 5, device=device)[None] % V
    handle = linear.register_forward_hook(hook)
    try:
        with evaluating(model):
            logits = model(input_ids=tokens).logits.double()
    finally:
        handle.remove()
    if shapes != [tokens.shape] or logits.shape != (*tokens.shape, V):
        return None
    scale, limit = float(logits[0, 0, 0] / SMALL), float(logits[0, 0, 1])
    head = Head(linear.weight, linear.bias, scale, limit if limit < scale * LARGE / 2 else 0.0)
    wanted = head.finish(values.clone()).expand_as(logits)
    return head if torch.allclose(logits, wanted, rtol=TOLERANCE, atol=TOLERANCE) else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while, without drawing a random number; every module returns to its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
