"""A dense student of a mixture teacher: each mixture becomes one MLP, all else is the teacher's.

    active   the k most used experts side by side, each down projection times its share of their gates
    mean     all experts' weights, averaged by the sum of their gates
    used     the expert that most tokens chose
    shared   the expert that every token goes through

Down projections are also multiplied by the mean of a token's gates together, which is 1 where they are
normalized; that of a shared expert stays. k is the number of experts that work on a token, so ``active`` has
as many active parameters as the teacher, but for its shared expert. How often experts are used, and with
which gates, is counted on calibration text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Mixture
from attar.models.loading.empty import empty_model
from attar.models.loading.experts import gate_and_up_rows, stack_of
from attar.models.surgery.rebuild import named_config

SIBLINGS = {
    "mixtral": ("mistral", "MistralForCausalLM"),
    "qwen2_moe": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_moe": ("qwen3", "Qwen3ForCausalLM"),
}
"""The dense family with the same attention, norms and names, and its class."""

Projections = tuple[Tensor, Tensor, Tensor]
"""Gate (I, H), up (I, H) and down (H, I) of an MLP."""


@dataclass
class ExpertUse:
    """Of one mixture: tokens that chose each expert (E,), the sum of their gates (E,), and all tokens."""

    chosen: Tensor
    gates: Tensor
    tokens: int = 0


def dense_student(teacher: Any, way: str, batches: Sequence[Tensor]) -> Any:
    """The student before its first step: float32, in evaluation mode, trainable, on the teacher's device.

    Args:
        teacher: not changed; its experts are stacked, as transformers has them.
        way: ``active``, ``mean``, ``used`` or ``shared``.
        batches: int64 (B, S) calibration tokens.

    Raises:
        ModelError: the teacher has no mixtures, not only mixtures, no shared expert, or no dense sibling.
    """
    mixtures = _mixtures(teacher, way)
    uses = expert_use(teacher, mixtures, batches) if way != "shared" else [None] * len(mixtures)
    state = {
        name: t.detach().float().clone() for name, t in teacher.state_dict().items() if ".mlp." not in name
    }
    for mixture, use in zip(mixtures, uses, strict=True):
        parts = (
            _shared(teacher, mixture)
            if use is None
            else joined(_experts(teacher, mixture), use, way, mixture.active)
        )
        for part, weight in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            state[f"{mixture.name}.{part}.weight"] = weight.clone()
    student = empty_model(_config(teacher, parts[0].shape[0]))
    student.load_state_dict(state, strict=not student.config.tie_word_embeddings, assign=True)
    student.tie_weights()
    return student.to(teacher.device).eval().requires_grad_(True)


@torch.no_grad()  # type: ignore[untyped-decorator]
def expert_use(teacher: Any, mixtures: Sequence[Mixture], batches: Sequence[Tensor]) -> list[ExpertUse]:
    """How each mixture's experts are used on batches of tokens."""
    uses = [ExpertUse(torch.zeros(m.count), torch.zeros(m.count)) for m in mixtures]

    def counter(use: ExpertUse) -> Any:
        def hook(_: Any, args: tuple[Any, ...]) -> None:
            _, index, gates = args
            index, gates = index.flatten().cpu(), gates.flatten().float().cpu()
            use.chosen += torch.bincount(index, minlength=len(use.chosen))
            use.gates.index_add_(0, index, gates)
            use.tokens += len(args[1])

        return hook

    hooks = [
        teacher.get_submodule(mixture.holder).register_forward_pre_hook(counter(use))
        for mixture, use in zip(mixtures, uses, strict=True)
    ]
    try:
        for batch in batches:
            teacher(input_ids=batch.to(teacher.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return uses


def joined(experts: Projections, use: ExpertUse, way: str, active: int) -> Projections:
    """One MLP out of experts (E, I, H), (E, I, H), (E, H, I)."""
    gate, up, down = experts
    scale = float(use.gates.sum() / max(use.tokens, 1))  # of a token's gates together
    if way == "mean":
        shares = (use.gates / use.gates.sum()).to(gate)[:, None, None]
        return (shares * gate).sum(0), (shares * up).sum(0), scale * (shares * down).sum(0)
    count = active if way == "active" else 1
    best = torch.argsort(use.chosen, descending=True, stable=True)[:count].sort().values
    shares = scale * use.gates[best] / use.gates[best].sum().clamp(min=1e-12)
    scaled = [share * down[expert] for share, expert in zip(shares.tolist(), best.tolist(), strict=True)]
    return gate[best].flatten(0, 1), up[best].flatten(0, 1), torch.cat(scaled, dim=1)


def _mixtures(teacher: Any, way: str) -> list[Mixture]:
    """The mixtures of all blocks."""
    anatomy = discover(teacher)
    mixtures = [block.mixture for block in anatomy.blocks]
    family = anatomy.family
    if not any(mixtures):
        raise ModelError(f"{family}: the teacher has no experts", hint="leave out dense")
    if family not in SIBLINGS:
        raise ModelError(
            f"{family}: has no dense sibling with the same attention",
            hint=f"known: {', '.join(SIBLINGS)}; or give a student of your own",
        )
    if not all(mixtures):
        raise ModelError(
            f"{family}: some of the teacher's layers are dense", hint="give a student of your own"
        )
    if way == "shared" and any(mixture is None or mixture.shared is None for mixture in mixtures):
        raise ModelError(f"{family}: has no shared expert", hint="--moe-to-dense active, mean or used")
    return [mixture for mixture in mixtures if mixture is not None]


def _experts(teacher: Any, mixture: Mixture) -> Projections:
    """Gate, up (E, I, H) and down (E, H, I) of a mixture, float32."""
    holder = teacher.get_submodule(mixture.holder)
    stack = stack_of(holder)
    assert stack is not None and stack.gated, "the families with a sibling stack gate and up"
    up, down = getattr(holder, stack.up).detach().float(), getattr(holder, stack.down).detach().float()
    if stack.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    gate_rows, up_rows = gate_and_up_rows(stack)
    return up[:, gate_rows], up[:, up_rows], down


def _shared(teacher: Any, mixture: Mixture) -> Projections:
    """The shared expert's projections, float32."""
    shared = mixture.shared
    assert shared is not None and shared.gate is not None, "_mixtures looked"
    names = (shared.gate.name, shared.up.name, shared.down.name)
    gate, up, down = (teacher.get_submodule(name).weight.detach().float() for name in names)
    return gate, up, down


def _config(teacher: Any, neurons: int) -> dict[str, Any]:
    """The dense sibling's config."""
    teacher_config = named_config(teacher).to_dict()
    kind, architecture = SIBLINGS[teacher_config["model_type"]]
    dense = CONFIG_MAPPING[kind]
    known = {*dense().to_dict(), "head_dim"} - {"architectures", "model_type", "layer_types"}
    fields = {key: value for key, value in teacher_config.items() if key in known}
    config: dict[str, Any] = dense(**{**fields, "intermediate_size": neurons}).to_dict()
    return {**config, "architectures": [architecture], "sliding_window": teacher_config.get("sliding_window")}
