"""Rows of the routers, made from prompts as mergekit-moe makes them.

    r_e = h(positive_e) - h(negative_e) ,  row_e = r_e / |r_e|         a row for each layer and expert
    h(prompts) = mean over prompts of the hidden state that enters the layer, at the last token   hidden
                 mean over prompts and tokens of it                                               hidden_avg
                 sum of all prompts' embeddings, of length 1, the same for every layer            cheap_embed
    row_e ~ N(0, 1)                                                                               random
    row_e ~ U(-1/sqrt(D), 1/sqrt(D))                                                      uniform_random

A prompt begins with the tokenizer's BOS token, if it has one; it gets no chat template and no other special
token. Hidden states are the residual stream before the layer's norm, computed in float32 one block at a time,
each prompt alone (mergekit: in bfloat16, prompts padded on the left, whose padding ``hidden_avg`` counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.merging.adapters.apply import tokenizer_folder
from attar.merging.mixture.config import ExpertSource
from attar.models.loading.device import pick_device
from attar.models.loading.load import load_tokenizer
from attar.walks.offloaded_model import HiddenStates, OffloadedModel

SMALLEST = 1e-8
MEMORY = 1_000_000_000  # bytes of hidden states that are not spilled to disk


def gate_rows(
    view: Any, experts: Sequence[ExpertSource], mode: str, *, seed: int, device: str, work: Path
) -> Tensor:
    """The routers' rows, float32 (layers, experts, D).

    Args:
        view: the base model.
        mode: one of :data:`~attar.merging.mixture.config.GATE_MODES`.
        work: folder for hidden states.

    Raises:
        ModelError: a prompt has no tokens.
    """
    layers, width = view.config["num_hidden_layers"], view.config["hidden_size"]
    if mode == "random":
        return torch.randn(layers, len(experts), width, generator=_generator(seed))
    if mode == "uniform_random":
        spread = 2 * torch.rand(layers, len(experts), width, generator=_generator(seed)) - 1
        return spread / width**0.5
    prompts = [_tokens(view, [*expert.positive, *expert.negative]) for expert in experts]
    if mode == "cheap_embed":
        embedding = view.load("model.embed_tokens.weight").float()
        states = [torch.stack([embedding[row[0]].sum(0) for row in rows]) for rows in prompts]
        pooled = [_pooled_embeddings(rows, expert) for rows, expert in zip(states, experts, strict=True)]
        return unit(torch.stack(pooled)).expand(layers, -1, -1).contiguous()
    states = _hidden_states(view, prompts, mode == "hidden_avg", device, work)
    pooled = [_pooled(rows, expert) for rows, expert in zip(states, experts, strict=True)]
    return unit(torch.stack(pooled, dim=1))


def unit(rows: Tensor) -> Tensor:
    """Rows (..., D) of length 1."""
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=SMALLEST)


def alike(rows: Tensor, threshold: float = 5.0) -> list[int]:
    """Layers whose routers (layers, E, D) tell their experts badly apart: condition number above
    ``threshold``, as mergekit-moe warns of."""
    return [layer for layer, matrix in enumerate(rows) if torch.linalg.cond(matrix) > threshold]


def _pooled(states: Tensor, expert: ExpertSource) -> Tensor:
    """Mean states (layers, D) of the positive prompts less the mean states of the negative prompts."""
    split = len(expert.positive)
    positive = states[:split].mean(0)
    return positive - states[split:].mean(0) if expert.negative else positive


def _pooled_embeddings(sums: Tensor, expert: ExpertSource) -> Tensor:
    """The same of sums of embeddings (prompts, D), each side of length 1."""
    split = len(expert.positive)
    positive = unit(sums[:split].sum(0))
    return positive - unit(sums[split:].sum(0)) if expert.negative else positive


def _tokens(view: Any, prompts: Sequence[str]) -> list[Tensor]:
    """Token ids (1, S) of each prompt."""
    tokenizer = load_tokenizer(tokenizer_folder(view))
    start = tokenizer.bos_token or ""
    rows = []
    for prompt in prompts:
        ids = tokenizer(start + prompt, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ModelError(f"{view.name}: its tokenizer makes no token of the prompt {prompt!r}")
        rows.append(torch.tensor([ids], dtype=torch.int64))
    return rows


@torch.no_grad()  # type: ignore[untyped-decorator]
def _hidden_states(
    view: Any, prompts: Sequence[Sequence[Tensor]], average: bool, device: str, work: Path
) -> list[Tensor]:
    """For each expert, what enters each layer for each of its prompts: (prompts, layers, D)."""
    where = pick_device(device)
    offloaded = OffloadedModel(view, where)
    rows = [row for expert in prompts for row in expert]
    store = HiddenStates(work, MEMORY)
    calls = offloaded.trace(rows, store)
    entering = torch.empty(len(rows), len(offloaded.blocks), store[0].shape[-1])
    for layer, block in enumerate(offloaded.blocks):
        with offloaded.loaded(block):
            for number, row in enumerate(rows):
                hidden = store[number]
                entering[number, layer] = hidden[0].mean(0) if average else hidden[0, -1]
                output = calls[tuple(row.shape)][layer](block.module, hidden.to(where))
                store[number] = (output if isinstance(output, Tensor) else output[0]).float()
    store.clear()
    return list(entering.split([len(expert) for expert in prompts]))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
