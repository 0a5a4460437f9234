"""The parts of one block: how its tokens see each other, and its MLP or mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from attar.models.anatomy.mixtures import find_experts, read_mixture
from attar.models.anatomy.parts import (
    Attention,
    Block,
    LatentAttention,
    Mixture,
    Mlp,
    NonAttentionMixer,
    Projection,
)
from attar.models.anatomy.roles import in_attention, is_linear, is_norm
from attar.models.anatomy.sublayers import Sublayer, read_attention, read_mlp


def read_block(config: Any, index: int, name: str, block: nn.Module) -> Block:
    """The parts of the block at path ``name``.

    Raises:
        ModelError: a part was not layout, or shapes and config contradict each other.
    """
    if getattr(config, "is_heterogeneous", False):  # its numbers are not those of all blocks
        config = config.per_layer_config[index]
    layout = find_experts(block)
    others = other_mixers(block)
    left = {path: module for path, module in block.named_modules() if is_linear(module)}
    linears_of: dict[str, dict[str, nn.Module]] = {"attention": {}, "experts": {}, "MLP": {}, "other": {}}
    for path, module in left.items():
        inside = any(path.startswith(f"{other}.") for other in others)
        expert = layout is not None and path.startswith(f"{layout.holder}.")
        kind = "other" if inside else "attention" if in_attention(path) else "experts" if expert else "MLP"
        linears_of[kind][f"{name}.{path}"] = module
    family = config.model_type
    mixer = read_mixer(config, index, name, block, linears_of["attention"], others)
    sublayer = Sublayer(family, f"the MLP of {name}", linears_of["MLP"])
    feed_forward: Mlp | Mixture | None
    if layout is not None:
        feed_forward = read_mixture(config, name, block, layout, sublayer)
    else:
        bare = isinstance(mixer, NonAttentionMixer) and not sublayer.linears
        feed_forward = None if bare else read_mlp(config, sublayer)
    single = () if isinstance(mixer, NonAttentionMixer) else mixer.norms
    norms = [f"{name}.{path}" for path, module in block.named_modules() if is_norm(module)]
    dense = feed_forward.dense if isinstance(feed_forward, Mixture) else ()
    order = [*in_order(mixer, feed_forward), *(f"{name}.{path}" for path in left)]
    return Block(
        index=index,
        name=name,
        module=block,
        mixer=mixer,
        feed_forward=feed_forward,
        norms=tuple(norm for norm in norms if norm not in single),
        linears=tuple(path for path in dict.fromkeys(order) if path not in dense),
    )


def in_order(
    mixer: Attention | LatentAttention | NonAttentionMixer, feed_forward: Mlp | Mixture | None
) -> list[str]:
    """Linears of a block in forward order, as far as the parts tell."""
    parts: list[Projection | None] = []
    names = list(mixer.linears) if isinstance(mixer, NonAttentionMixer) else []
    if isinstance(mixer, Attention):
        parts += [mixer.q, mixer.k, mixer.v, mixer.o]
    elif isinstance(mixer, LatentAttention):
        parts += [*mixer.q, mixer.kv_a, mixer.kv_b, mixer.o]
    mlps = (
        [feed_forward]
        if isinstance(feed_forward, Mlp)
        else [*feed_forward.experts, feed_forward.shared]
        if feed_forward is not None
        else []
    )
    parts += [part for mlp in mlps if mlp is not None for part in (mlp.gate, mlp.up, mlp.down)]
    return names + [part.name for part in parts if part is not None]


def other_mixers(block: nn.Module) -> dict[str, str]:
    """Children of a block that mix tokens without attention, and their kind."""
    kinds = {}
    alone = [is_norm(child) for child in block.children()] in ([True, False], [False, True])
    for name, child in block.named_children():
        parameters = [path.rpartition(".")[2] for path, _ in child.named_parameters()]
        if "A_log" in parameters:
            kinds[name] = "state space" if "D" in parameters else "linear attention"
        elif any(isinstance(module, nn.Conv1d) for module in child.children()):
            kinds[name] = "convolution"
        elif alone and "Attention" in type(child).__name__:  # a norm and it (Nemotron-H)
            kinds[name] = "attention and no MLP"
    return kinds


def read_mixer(
    config: Any,
    index: int,
    name: str,
    block: nn.Module,
    linears: dict[str, nn.Module],
    others: dict[str, str],
) -> Attention | LatentAttention | NonAttentionMixer:
    """How the tokens of a block see each other."""
    sublayer = Sublayer(config.model_type, f"the attention of {name}", linears)
    inside = tuple(
        f"{name}.{path}"
        for path, module in block.named_modules()
        if is_linear(module) and any(path.startswith(f"{other}.") for other in others)
    )
    kinds = list(dict.fromkeys(others.values()))
    if others and not sublayer.paths("o"):
        return NonAttentionMixer(" and ".join(kinds), f"{name}.{next(iter(others))}", inside)
    if sublayer.paths("o_b"):  # DeepSeek V4: outputs of groups of heads, keys compressed
        holder = sublayer.only("o_b").name.rpartition(".")[0]
        return NonAttentionMixer("attention to compressed keys", holder, (*inside, *linears))
    types = getattr(config, "layer_types", None) or []
    if index < len(types) and types[index] in ("mlp", "moe"):
        return NonAttentionMixer("nothing", name, ())
    queries = () if sublayer.paths("kv_a") else sublayer.paths("q")  # behind latents they have other widths
    if index < len(types) and "linear" in str(types[index]):
        kinds.append("linear attention")
    elif queries and sublayer.only("q").out_features == 2 * sublayer.only("o").in_features:
        kinds.append("gated attention")  # queries and a gate for each of their channels share a projection
    elif queries and not (sublayer.paths("k") and sublayer.paths("v")):
        kinds.append("attention without its own keys and values")
    elif others:
        kinds.append("attention")
    if kinds:
        holder = sublayer.only("o").name.rpartition(".")[0]
        return NonAttentionMixer(" and ".join(kinds), holder, (*inside, *linears))
    if sublayer.paths("kv_a"):
        return read_latent_attention(name, block, sublayer)
    return read_attention(config, name, block, sublayer)


def read_latent_attention(name: str, block: nn.Module, sublayer: Sublayer) -> LatentAttention:
    """The projections of MLA, and the number of heads of its module."""
    o, kv_a, kv_b = sublayer.only("o"), sublayer.only("kv_a"), sublayer.only("kv_b")
    q = (sublayer.only("q"),) if sublayer.paths("q") else (sublayer.only("q_a"), sublayer.only("q_b"))
    holder = o.name.rpartition(".")[0]
    heads = getattr(block.get_submodule(holder.removeprefix(f"{name}.")), "num_heads", 0)
    if not heads or q[-1].out_features % heads or kv_b.out_features % heads or o.in_features % heads:
        raise sublayer.error(f"{sublayer.where} does not add up with {heads} heads")
    norms = tuple(
        f"{name}.{path}"
        for path, module in block.named_modules()
        if is_norm(module) and path.rpartition(".")[2].startswith(("q_", "kv_"))
    )
    return LatentAttention(holder, q, kv_a, kv_b, o, heads, norms)
