"""A multi-token prediction head as a module: transformers' own block of the family between the joint of state
and embedding and the norm before the model's head (:mod:`attar.checkpoint.mtp`).

    x_i  = joint([norm_e(e(t_(i+1))); norm_h(h_i)])          MiMo: the state first
    h'_i = block(x_1..i)                                     in the place of h_(i+1) for the next token
    q(t_(i+2)) = softmax(head(norm(h'_i)))

DeepSeek-V3 (arXiv:2412.19437, 2.2), vLLM's *_mtp.py. Where DeepSeek, GLM and Ernie go on with h' itself, Qwen
and MiMo do with norm(h').

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.mtp import JOINTS
from attar.checkpoint.open import Checkpoint
from attar.errors import ModelError
from attar.formats.readers import Decoded
from attar.models.anatomy.discover import discover
from attar.models.fake_quant import CACHES, cache_argument
from attar.models.hidden_states import recording_states
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model
from attar.models.loading.stored import stored_names

_LAYER = re.compile(r"^(.*?\.|)layers\.(\d+)\.")
_BLOCK = re.compile(r"(.*)\binput_layernorm\.weight")
_NORM = re.compile(r"(.*\.|)(shared_head\.norm|final_layernorm|mtp\.norm)\.weight")
STATE_FIRST, FEEDS_NORMED = ("input_proj",), ("fc", "input_proj")


class MtpHead(nn.Module):  # type: ignore[misc]
    """The first layer of a head.

    Attributes:
        joint: from (2 H) to H.
        norms: of the embedding and of the state.
        block: the family's base model with one layer, and no norm behind it.
        norm: before the model's head.
        state_first: how the inputs of the joint are ordered.
        feeds_normed: what goes on is behind the norm.
        linears: of the block, by stored name.
    """

    def __init__(
        self,
        joint: nn.Linear,
        norms: tuple[nn.Module, nn.Module],
        block: Any,
        norm: nn.Module,
        *,
        state_first: bool,
        feeds_normed: bool,
        linears: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.linears = dict(linears)
        self.joint, self.norms, self.block, self.norm = joint, nn.ModuleList(norms), block, norm
        self.state_first, self.feeds_normed = state_first, feeds_normed
        self._cache = cache_argument(block) or CACHES[0]

    def forward(self, e: Tensor, h: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """h' (T, H) of embeddings and states (T, H) behind the entries of a cache, which grows; None: behind
        none."""
        inputs = [self.norms[0](e), self.norms[1](h)]
        x = self.joint(torch.cat(inputs[::-1] if self.state_first else inputs, -1))
        given = {self._cache: cache, "position_ids": positions[None], "use_cache": cache is not None}
        out: Tensor = self.block(inputs_embeds=x[None], **given).last_hidden_state[0]
        return out

    def fed_back(self, h: Tensor) -> Tensor:
        """What is in the place of the next state."""
        out: Tensor = self.norm(h) if self.feeds_normed else h
        return out


class ModelWithHead(nn.Module):  # type: ignore[misc]
    """A model whose head runs on its states, row by row, whenever it runs."""

    def __init__(self, model: Any, head: MtpHead) -> None:
        super().__init__()
        self.model, self.head = model, head.to(model.device)
        self.device = model.device

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> None:
        """Token ids (B, S) through both; nothing comes of it but what hooks see."""
        last = len(discover(self.model).blocks)
        with recording_states(self.model, [last]) as states:
            self.model(input_ids=input_ids, use_cache=use_cache)
        embeddings = self.model.get_input_embeddings()(input_ids[:, 1:])
        positions = torch.arange(input_ids.shape[1] - 1, device=self.device)
        for e, h in zip(embeddings, states[0], strict=True):
            self.head(e, h[:-1], positions, None)


def load_mtp_head(checkpoint: Checkpoint, *, apart: bool = False) -> MtpHead:
    """The head of a checkpoint in float32, in evaluation mode.

    Args:
        apart: its experts are modules, each with its Linears.

    Raises:
        ModelError: the checkpoint has none, or one of another form.
    """
    view = checkpoint if isinstance(checkpoint, Decoded) else Decoded(checkpoint)
    if not view.mtp:
        raise ModelError(
            f"{checkpoint.name} has no multi-token prediction head",
            hint="--speculate suffix; or train a head: attar train-head",
        )
    stored = {step: name for name in view.mtp for step in name.split(".")}
    known = next((joint for joint in JOINTS if all(part in stored for part in joint)), None)
    prefix = next((block[1] for name in view.mtp if (block := _BLOCK.fullmatch(name))), None)
    if known is None or prefix is None:
        raise ModelError(f"{checkpoint.name}: its multi-token prediction head is of a form unknown here")
    around = frozenset(stored[part] for part in known)
    single, inside = _one_layer(view, prefix, around)
    model = load_model(single, dtype=torch.float32)
    model = unstack(model) if apart else model
    block = model.get_decoder()
    modules = dict(model.named_modules())
    linears = {
        prefix + stored.removeprefix(inside): module
        for name, stored in stored_names(model, single, strict=False).items()
        if stored.startswith(inside)
        and isinstance(module := modules.get(name.removesuffix(".weight")), nn.Linear)
    }

    def norm_of(name: str) -> nn.Module:
        norm = copy.deepcopy(block.norm)
        norm.weight.data = view.load(name).float()
        return norm

    width = block.config.hidden_size
    wanted = {stored[part]: (width, 2 * width) if part == known[0] else (width,) for part in known}
    wanted |= {name: (width,) for name in view.mtp if _NORM.fullmatch(name)}
    for name, shape in wanted.items():
        if tuple(view.mtp[name].shape) != shape:
            raise ModelError(
                f"{checkpoint.name}: tensor {name} is {list(view.mtp[name].shape)}, but must be {list(shape)}"
            )
    weight = view.load(stored[known[0]]).float()
    joint = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joint.weight = nn.Parameter(weight)
    norms = norm_of(stored[known[1]]), norm_of(stored[known[2]])
    last = next((name for name in view.mtp if _NORM.fullmatch(name)), None)
    norm = nn.Identity() if last is None else norm_of(last)
    block.norm, block.embed_tokens = nn.Identity(), None
    head = MtpHead(
        joint,
        norms,
        block,
        norm,
        state_first=known[0] in STATE_FIRST,
        feeds_normed=known[0] in FEEDS_NORMED,
        linears=linears,
    )
    head.eval().requires_grad_(False)
    return head


def _one_layer(view: Decoded, prefix: str, around: frozenset[str]) -> tuple[Any, str]:
    """The checkpoint with the head's block as its one layer, of the kind of the last layer of the model that
    has the same modules; and how its names begin."""
    layers = {name: match for name in view.tensors if (match := _LAYER.match(name))}
    stack = next(iter(layers.values()))[1]
    block = {
        name.removeprefix(prefix): info
        for name, info in view.mtp.items()
        if name.startswith(prefix) and name not in around and not _NORM.fullmatch(name)
    }
    of_layers: dict[int, set[str]] = {}
    for name, match in layers.items():
        if match[1] == stack:
            of_layers.setdefault(int(match[2]), set()).add(_module(name[match.end() :]))
    modules = {_module(name) for name in block} - {"embed_tokens", "shared_head.head"}
    like = max((layer for layer, parts in of_layers.items() if parts == modules), default=None)
    if like is None:
        raise ModelError(f"{view.name}: the block of its multi-token prediction head is of no layer's kind")
    tensors = {name: info for name, info in view.tensors.items() if name not in layers}
    for name, info in block.items():
        if _module(name) in modules:
            renamed = f"{stack}layers.0.{name}"
            tensors[renamed] = replace(info, name=renamed)
    config = _config_of_one(view.config, like, len(of_layers))
    return view.renamed(config, tensors), f"{stack}layers.0."


def _module(local_name: str) -> str:
    return local_name.rpartition(".")[0]


def _config_of_one(config: Mapping[str, Any], like: int, layers: int) -> dict[str, Any]:
    """The config of a model of one layer, which is like one of the model's."""
    changed = {
        key: [value[like]] if isinstance(value, list) and len(value) == layers else value
        for key, value in config.items()
    }
    text = changed.get("text_config")
    if isinstance(text, Mapping):
        return {**changed, "text_config": _config_of_one(text, like, layers)}
    for key in ("first_k_dense_replace", "moe_layer_start_index"):  # layers before it are dense
        if isinstance(first := changed.get(key), int):
            changed[key] = int(like < first)
    return {**changed, "num_hidden_layers": 1}
