"""Draft heads of every kind as they are stored: random tensors in the shapes that the modules have."""

import torch

from attar.formats.draft_heads.content import HeadContent, HeadTarget

H, V, L, K = 12, 40, 6, 3  # hidden, vocabulary, blocks of the target, drafts


def random(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


def table():
    """The target's embedding."""
    return torch.randn(V, H, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)


TARGET = HeadTarget("org/target", ("LlamaForCausalLM",), L, 512, table)


def vocabulary_of(count):
    """d2t int64 (count,) of some tokens, ascending."""
    chosen = torch.randperm(V)[:count].sort().values
    return chosen - torch.arange(count)


def medusa(layers=1, shared=False, tree=()):
    tensors = {}
    for k in range(K):
        for j in range(layers):
            tensors[f"blocks.{k}.{j}.linear.weight"] = random(H, H)
            tensors[f"blocks.{k}.{j}.linear.bias"] = random(H)
        if not (shared and k):
            tensors[f"heads.{k}.weight"] = random(V, H)
    values = {
        "kind": "medusa",
        "hidden": H,
        "vocabulary": V,
        "layers": [L],
        "drafts": K,
        "draft_vocabulary": 0,
    }
    more = {"residual_layers": layers, "shared": shared, "tree": [list(path) for path in tree]}
    return HeadContent({**values, **more}, tensors, TARGET)


def block(kind, markov="plain", rank=0, confidence=False, draft_vocabulary=0, mask=None, depth=2, bias=False):
    shape = shape_of(depth=depth, head_norms=True, bias=bias)
    v = draft_vocabulary or V
    tensors = {"fc.weight": random(H, 3 * H), "hidden_norm.weight": random(H), "norm.weight": random(H)}
    for i in range(depth):
        tensors |= layer(f"layers.{i}.", H, shape, norms=True, bias=bias)
        tensors[f"layers.{i}.input_layernorm.weight"] = random(H)
    tensors["mask_embedding"] = random(H) if mask is None else mask
    if rank:
        tensors["markov_head.markov_w1.weight"] = random(V, rank)
        tensors["markov_head.markov_w2.weight"] = random(v, rank)
        if markov == "gated":
            tensors["markov_head.gate_proj.weight"] = random(rank, H + rank)
            tensors["markov_head.gate_proj.bias"] = random(rank)
        if markov == "rnn":
            tensors["markov_head.joint_proj.weight"] = random(3 * rank, 2 * rank + H)
            tensors["markov_head.joint_proj.bias"] = random(3 * rank)
    if confidence:
        tensors["confidence_head.proj.weight"] = random(1, H + rank)
        tensors["confidence_head.proj.bias"] = random(1)
    if draft_vocabulary:
        tensors |= {"lm_head.weight": random(v, H), "d2t": vocabulary_of(v)}
    values = {"kind": kind, "hidden": H, "vocabulary": V, "layers": [1, 3, 5], "drafts": K}
    values |= {"draft_vocabulary": draft_vocabulary, "shape": shape, "markov_rank": rank, "markov": markov}
    return HeadContent({**values, "confidence": confidence, "temperatures": []}, tensors, TARGET)


def further(shape, **options):
    """Tensors of the layers of an EAGLE behind its first."""
    tensors = {}
    for i in range(1, shape["depth"]):
        tensors |= layer(f"layers.{i}.", H, shape, **options)
        tensors[f"layers.{i}.input_layernorm.weight"] = random(H)
    return tensors


def eagle(bias=True, depth=1):
    shape = shape_of(depth=depth)
    tensors = {"fc.weight": random(H, 2 * H), **layer("layers.0.", H, shape), **further(shape)}
    tensors |= {"fc.bias": random(H)} if bias else {}
    values = {
        "kind": "eagle",
        "hidden": H,
        "vocabulary": V,
        "layers": [L],
        "drafts": K,
        "draft_vocabulary": 0,
    }
    return HeadContent({**values, "shape": shape, "branches": 4, "bias": bias}, tensors, TARGET)


def eagle3(draft_vocabulary=16, layers=(1, 2, 4), norms=False, bias=False, depth=1, **switches):
    shape = shape_of(bias=bias, head_norms=norms, depth=depth)
    count, v = len(layers), draft_vocabulary or V
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    switches = {name: switches.get(name, False) for name in names}
    tensors = {"fc.weight": random(H, count * H), **layer("layers.0.", 2 * H, shape, norms=norms, bias=bias)}
    tensors |= further(shape, norms=norms, bias=bias)
    for name in ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = random(H)
    tensors["lm_head.weight"] = random(v, H)
    if switches["norm_before_fc"]:
        tensors["input_norm.weight"] = random(count * H)
    if switches["fc_norm"]:
        tensors |= {f"fc_norm.{i}.weight": random(H) for i in range(count)}
    if draft_vocabulary:
        tensors["d2t"] = vocabulary_of(v)
    values = {"kind": "eagle3", "hidden": H, "vocabulary": V, "layers": list(layers), "drafts": K}
    values |= {"draft_vocabulary": draft_vocabulary, "shape": shape, "branches": 1, **switches}
    return HeadContent(values, tensors, TARGET)


def shape_of(**more):
    shape = {"depth": 1, "heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 20, "eps": 1e-5}
    rope = {"rope_theta": 50000.0, "rope_scaling": {}}
    return {**shape, **rope, "bias": False, "head_norms": False, **more}


def layer(prefix, inputs, shape, norms=False, bias=False):
    """Tensors of a decoder layer but for its input norms."""
    q, kv, d = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"], shape["head_dim"]
    attention = f"{prefix}self_attn."
    tensors = {
        f"{attention}q_proj.weight": random(q, inputs),
        f"{attention}k_proj.weight": random(kv, inputs),
        f"{attention}v_proj.weight": random(kv, inputs),
        f"{attention}o_proj.weight": random(H, q),
        f"{prefix}post_attention_layernorm.weight": random(H),
        f"{prefix}mlp.gate_proj.weight": random(shape["intermediate"], H),
        f"{prefix}mlp.up_proj.weight": random(shape["intermediate"], H),
        f"{prefix}mlp.down_proj.weight": random(H, shape["intermediate"]),
    }
    if norms:
        tensors |= {f"{attention}{name}_norm.weight": random(d) for name in "qk"}
    if bias:
        tensors |= {f"{attention}{name}_proj.bias": random(q if name == "q" else kv) for name in "qkv"}
    return tensors
