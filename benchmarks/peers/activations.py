"""Measure a dense checkpoint whose Linears also round their inputs: the same code for every tool.

``activations.json`` next to the weights says, by name of a Linear, how its input x is rounded:

    int, b bits     x ~ s (clamp(round(x / s) + z, -2^(b-1), 2^(b-1) - 1) - z)
    float, 8 bits   x ~ s e4m3(clamp(x / s, -448, 448))

s is given (with z) where the rounding is static. Where it is dynamic, one s for each token (or for the whole
batch): 2 max|x| / (2^b - 1), or max|x| / 448, and asymmetric (max(x, 0) - min(x, 0)) / (2^b - 1), as
compressed-tensors has it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.measure.evaluate import Quality, measure_quality
from attar.measure.reference import Reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject
from peers.job import ACTIVATIONS

LARGEST = 448.0  # of e4m3fn


def measure(folder: Path, settings: EvaluateSettings, reference: Reference) -> Quality:
    """KL to the reference, top-1 agreement and perplexity of what a runner left in ``folder``."""
    subject = load_subject(folder)
    file = folder / ACTIVATIONS
    if file.is_file():
        round_inputs(subject.model, json.loads(file.read_text()))
    return measure_quality(subject, settings, reference)


def round_inputs(model: nn.Module, how: dict[str, dict[str, Any]]) -> None:
    """Make the named Linears round what they are given, from now on."""
    for name, given in how.items():

        def hook(
            _: nn.Module, inputs: tuple[Tensor, ...], given: dict[str, Any] = given
        ) -> tuple[Tensor, ...]:
            return (rounded(inputs[0], given), *inputs[1:])

        model.get_submodule(name).register_forward_pre_hook(hook)


def rounded(x: Tensor, given: dict[str, Any]) -> Tensor:
    """x (..., K) as its codes decode; not modified."""
    scale, zero = _parameters(x.float(), given)
    if given["type"] == "float":
        codes = (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
        return (codes * scale).to(x.dtype)
    half = 2 ** (given["bits"] - 1)
    codes = ((x.float() / scale).round() + zero).clamp(-half, half - 1)
    return ((codes - zero) * scale).to(x.dtype)


def _parameters(x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(scale, zero) of an input, broadcastable to it."""
    if not given["dynamic"]:
        return torch.tensor(given["scale"]), torch.tensor(given["zero"])
    if given["strategy"] not in ("token", "tensor"):
        raise SystemExit(f"inputs rounded per {given['strategy']} are not known here")
    over = (-1,) if given["strategy"] == "token" else tuple(range(x.dim()))
    tiny = torch.finfo(torch.float32).eps
    steps = 2.0 ** given["bits"] - 1
    if given["type"] == "float" or given["symmetric"]:
        most = x.abs().amax(over, keepdim=True)
        scale = most / LARGEST if given["type"] == "float" else 2.0 * most / steps
        return scale.clamp(min=tiny), torch.zeros(())
    low, high = x.amin(over, keepdim=True).clamp(max=0.0), x.amax(over, keepdim=True).clamp(min=0.0)
    scale = ((high - low) / steps).clamp(min=tiny)
    return scale, (-(2 ** (given["bits"] - 1)) - low / scale).round()
