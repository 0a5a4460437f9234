"""EAGLE and EAGLE-3 written out with loops over heads and positions, from the tensors of a head: what an
entry makes after the entries before it. No module of the head is called."""

from __future__ import annotations

import math

import torch


def normed(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turned(x, position, theta):
    """A head (d,): channel i turns with channel i + d / 2."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


class SlowEagle:
    """Of a head in float64."""

    def __init__(self, head):
        self.config, self.shape = head.config, head.config.shape
        self.tensors = {**dict(head.named_parameters()), **dict(head.named_buffers())}

    def weight(self, name):
        return self.tensors[f"{name}.weight"]

    def project(self, states):
        """g (H,) of the states (m, H) of one position."""
        if self.config.kind == "eagle":
            return states[0]
        if self.config.fc_norm:
            states = [normed(x, self.weight(f"fc_norm.{i}"), self.shape.eps) for i, x in enumerate(states)]
        flat = torch.cat(list(states))
        if self.config.norm_before_fc:
            flat = normed(flat, self.weight("input_norm"), self.shape.eps)
        return self.weight("fc") @ flat

    def fed_back(self, a):
        return self.read(a) if getattr(self.config, "norm_output", False) else a

    def read(self, a):
        """What the head's matrix reads."""
        return a if self.config.kind == "eagle" else normed(a, self.weight("norm"), self.shape.eps)

    def inputs(self, e, g):
        if self.config.kind == "eagle":
            bias = self.tensors.get("fc.bias", 0.0)
            x = self.weight("fc") @ torch.cat([e, g]) + bias
            return x, x
        eps = self.shape.eps
        e = normed(e, self.weight("layers.0.input_layernorm"), eps)
        h = normed(g, self.weight("layers.0.hidden_norm"), eps)
        return torch.cat([e, h]), h if self.config.norm_before_residual else g

    def head_of(self, layer, x, name, index):
        d, prefix = self.shape.head_dim, f"layers.{layer}.self_attn.{name}_proj"
        out = self.weight(prefix)[index * d : (index + 1) * d] @ x
        return out + self.tensors[f"{prefix}.bias"][index * d : (index + 1) * d] if self.shape.bias else out

    def last(self, entries):
        """What the last of some entries makes (H,): each is (position, e, g), and sees those before it."""
        positions = [position for position, _, _ in entries]
        pairs = [self.inputs(e, g) for _, e, g in entries]
        for layer in range(self.shape.depth):
            first = len(entries) - 1 if layer == self.shape.depth - 1 else 0
            made = [
                self.layer(layer, positions[: i + 1], [x for x, _ in pairs[: i + 1]], pairs[i][1])
                for i in range(first, len(entries))
            ]
            if layer < self.shape.depth - 1:
                norm = self.weight(f"layers.{layer + 1}.input_layernorm")
                pairs = [(normed(h, norm, self.shape.eps), h) for h in made]
        return made[-1]

    def layer(self, layer, positions, inputs, residual):
        """What a layer makes of its last input (H,)."""
        shape, theta, heads = self.shape, self.shape.rope_theta, []
        for head in range(shape.heads):
            kv = head // (shape.heads // shape.kv_heads)
            q = turned(self.head_of(layer, inputs[-1], "q", head), positions[-1], theta)
            scores = [
                q @ turned(self.head_of(layer, y, "k", kv), position, theta) / math.sqrt(shape.head_dim)
                for position, y in zip(positions, inputs, strict=True)
            ]
            p = torch.stack(scores).softmax(0)
            values = [self.head_of(layer, y, "v", kv) for y in inputs]
            heads.append(sum(weight * value for weight, value in zip(p, values, strict=True)))
        h = residual + self.weight(f"layers.{layer}.self_attn.o_proj") @ torch.cat(heads)
        y = normed(h, self.weight(f"layers.{layer}.post_attention_layernorm"), shape.eps)
        gate = self.weight(f"layers.{layer}.mlp.gate_proj") @ y
        up = self.weight(f"layers.{layer}.mlp.up_proj") @ y
        return h + self.weight(f"layers.{layer}.mlp.down_proj") @ (gate * torch.sigmoid(gate) * up)

    def chain(self, embedded, states, i, steps):
        """What the drafts after column i make: (H,) of each step, with the text's own tokens.

        Args:
            embedded: (S, H) of the tokens of a row.
            states: (S, m, H) of its positions.
        """
        entries = [(n, embedded[n + 1], self.project(states[n])) for n in range(i + 1)]
        out = [self.last(entries)]
        for j in range(1, steps):
            entries.append((i + j, embedded[i + 1 + j], self.fed_back(out[-1])))
            out.append(self.last(entries))
        return out
