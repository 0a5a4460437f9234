"""The description of an architecture of GGUF, the sizes that a config states, and modules that families
share.

A :class:`ModuleMapping` is a weight with its bias; ``{}`` in its names is the block. Names of sizes:
``hidden``, ``ff`` (MLP width), ``gate_up`` (twice that), ``q`` and ``kv`` (all heads together), ``qkv``,
``head`` (one head), ``vocabulary``, ``context``.

A missing key of a config has transformers' default. A null one follows from others: the head's width is
hidden / heads, KV heads are as many as heads, the MLP is four times as wide as the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attar.errors import ModelError

SILU = ("silu", "swish")
GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu", "gelu_fast")
"""llama.cpp's only GELU is the tanh approximation; "gelu" is the exact one, which it approximates."""

LLAMA_ROPES = ("default", "linear", "yarn", "llama3", "longrope")
ROPES = ("default", "linear", "yarn")


@dataclass(frozen=True)
class ModuleMapping:
    """A weight and its bias.

    Attributes:
        gguf: name in the file, without ``.weight``.
        stored: name in the checkpoint, without the model's prefix and ``.weight``.
        shape: names of the sizes in the file, rows first.
        bias: True, False, or the config's key that states whether there is one.
        order: ``q`` or ``k``: paired rows; ``groups``: fused rows of KV groups to be sorted; ``delta`` and
            ``tiled..``: heads of linear attention.
        plus: added to the weight.
        transposed: stored as (in, out).
        matrix: may be quantized.
        leaves: endings of the weight's names, in the file and in the checkpoint.
        blocks: ``dense``: in the leading blocks without experts alone; ``experts``: in the others alone.
        needs: a size that must not be 0; lacks: one that must be 0; flag: a key of the config that must be
            true. Elsewhere the module is left out.
        experts: one for each expert; ``{}`` in ``stored`` is its number, behind the block's.
        stacked: the checkpoint stacks the experts too; then the expert's name in a model whose experts are
            modules (models/loading/experts.py), ``{}`` as in ``stored``.
        mixer: ``attention``: in blocks with attention alone; ``state``: in the others alone, whose state is
            that of a convolution or of a recurrence.
        form: the stored shape, where the file has the same numbers in another one.
        negative_exp: the file has -exp of the stored numbers.
        scales: keys of the config whose numbers the file has multiplied in, in this order; ``KEY.1``: the
            second number of a list.
        part: the part of a stored tensor: the ``first`` or ``second`` half of the rows, the ``even`` or
            ``odd`` rows, the ``keys`` or ``values`` of MLA, the ``qkv`` or ``gate`` of linear attention.
        optional: of blocks that predict further tokens: present where it is stored.
        columns: as ``order``, of the inputs.
        rows: the size of the stored rows, where the file has zeros behind them.
        unused: llama.cpp loads it and does not use it: zeros where it is not stored, and it is not read.
        count: the size that says how many ``experts`` there are.
    """

    gguf: str
    stored: str
    shape: tuple[str, ...]
    bias: bool | str = False
    order: str = ""
    plus: float = 0.0
    transposed: bool = False
    matrix: bool = True
    leaves: tuple[str, str] = (".weight", ".weight")
    blocks: str = ""
    needs: str = ""
    lacks: str = ""
    flag: str = ""
    experts: bool = False
    stacked: str = ""
    part: str = ""
    mixer: str = ""
    form: tuple[str, ...] = ()
    negative_exp: bool = False
    scales: tuple[str, ...] = ()
    optional: bool = False
    columns: str = ""
    rows: str = ""
    unused: bool = False
    count: str = "experts"


@dataclass(frozen=True)
class NextnBlocks:
    """The blocks behind the last one that predict further tokens.

    Attributes:
        modules: what such a block has besides a block's own; ``{}`` is the block, or the only head.
        stored: the block's name in the checkpoint, ``{}`` its number among them; empty: the name of a block.
        key: of the config for their number, where a config is made from a file.
    """

    modules: tuple[ModuleMapping, ...]
    stored: str = ""
    key: str = "num_nextn_predict_layers"


@dataclass(frozen=True)
class ConfigCount:
    """A whole number of the config: a size, and a key of the file.

    Attributes:
        size: its name in :class:`Sizes`.
        gguf: key of the file; empty: it is not written.
        keys: keys of the config, the usual one first.
        default: of transformers; 0: it must be stated.
        zero: it may be 0 or null, and is 0 in the file then.
    """

    size: str
    gguf: str
    keys: tuple[str, ...]
    default: int = 0
    zero: bool = False


@dataclass(frozen=True)
class ConfigRule:
    """A key of the config, and the values that llama.cpp's code agrees with.

    Attributes:
        allowed: None: any number.
        default: of transformers; a config made from a file states it, where it is ``stated``.
    """

    key: str
    allowed: tuple[Any, ...] | None
    default: Any
    stated: bool = True


SILU_RULE = ConfigRule("hidden_act", SILU, "silu")
NO_BIAS = ConfigRule("attention_bias", (False,), False)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A family of models.

    Attributes:
        family: its ``model_type``.
        arch: ``general.architecture``.
        prefix: of all stored names but the head's.
        outer: modules outside the blocks; blocks: modules of a block.
        head: ``output.weight`` is ``optional`` (left out where it is the embedding), ``needed`` or ``never``.
        head_names: names of the stored head, the usual one first.
        layer_norm: LayerNorm, not RMSNorm.
        keys: the config's keys where they are not the usual ones.
        defaults: of transformers, for missing keys.
        rules: values that the config must have.
        extras: further (key of the file, key of the config) that are copied.
        counts: further sizes; a mixture has ``experts`` among them.
        fixed: further (key of the file, value).
        grouped: its config has a number of KV heads.
        square: heads times their width must be the hidden size.
        equal_heads: there must be as many KV heads as heads.
        ropes: kinds of rotary embedding; none: there is no rotary embedding.
        window: ``all``: every block has the sliding window; ``marked``: the blocks that the config marks; a
            number n: every block but each n-th, where the config marks none; None: no block has a window.
        window_applied: llama.cpp applies it; window_needed: and needs a block that has it.
        scale_by_layers: blocks at which llama.cpp divides queries by the root of hidden / heads, not of the
            head's width; 0: the config has no such number (Gemma's ``query_pre_attn_scalar``).
        no_rope_interval: each n-th block has no rotary embedding; 0: all have it.
        layer_types: the config's names of blocks with attention and of blocks with a state in its place;
            none: every block has attention.
        attention_free: no block has attention.
        stated: further keys of a config that is made from a file.
        head_scale: key of the config by which logits are multiplied, which the file has in the head.
        misfit: what of a config llama.cpp computes otherwise, in words; empty: nothing.
        more_keys: further keys of the file.
        nextn: its blocks that predict further tokens; None: llama.cpp's converter knows none.
        attention_interval: each n-th block has attention where the config has no ``layer_types``; the file
            marks the others by ``attention.recurrent_layers``. 0: by 0 KV heads.
        more_config: further keys of a config, from the value of (key of the file, default), the sizes and the
            names of the file's tensors.
        plain_config: the config with one number, where older or newer ones have a list of them.
        plain_keys: keys of the file that replace those with a number for each block, from the value of (key,
            default).
        in_block: the sizes of a block, from the config, the sizes of all, its number and the names of the
            checkpoint's or the file's tensors.
        differences: how llama.cpp computes otherwise with the file, in sentences.
        local_rope: blocks with a sliding window have their own base of rotary frequencies.
        sections: the file's sections of rotary dimensions where the config has none; none: no such key.
    """

    family: str
    arch: str
    model_class: str
    prefix: str = "model."
    outer: tuple[ModuleMapping, ...]
    blocks: tuple[ModuleMapping, ...]
    head: str = "optional"
    head_bias: bool = False
    head_names: tuple[str, ...] = ("lm_head",)
    layer_norm: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[ConfigRule, ...] = ()
    extras: tuple[tuple[str, str], ...] = ()
    counts: tuple[ConfigCount, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()
    grouped: bool = True
    square: bool = False
    equal_heads: bool = False
    ropes: tuple[str, ...] = ROPES
    window: str | int | None = None
    window_applied: bool = False
    window_needed: bool = False
    scale_by_layers: int = 0
    no_rope_interval: int = 0
    layer_types: tuple[str, ...] = ()
    attention_free: bool = False
    stated: Mapping[str, Any] = field(default_factory=dict)
    head_scale: str = ""
    nextn: NextnBlocks | None = None
    attention_interval: int = 0
    misfit: Callable[[Mapping[str, Any], Sizes], str] = lambda config, sizes: ""
    more_keys: Callable[[Mapping[str, Any], Sizes], Mapping[str, Any]] = lambda config, sizes: {}
    more_config: Callable[[Callable[[str, Any], Any], Sizes, Collection[str]], Mapping[str, Any]] = (
        lambda get, sizes, names: {}
    )
    plain_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    plain_keys: Callable[[Callable[[str, Any], Any]], Mapping[str, Any]] = lambda get: {}
    in_block: Callable[[Mapping[str, Any], Sizes, int, Collection[str]], Sizes] = (
        lambda config, sizes, index, names: sizes
    )
    differences: Callable[[Mapping[str, Any], Sizes], list[str]] = lambda config, sizes: []
    local_rope: bool = False
    sections: tuple[int, ...] = ()

    @property
    def mixture(self) -> bool:
        """Whether it has experts."""
        return any(count.size == "experts" for count in self.counts)

    @property
    def maybe_mixture(self) -> bool:
        """Whether it may have no experts."""
        return any(count.size == "experts" and count.zero for count in self.counts)

    @property
    def latent(self) -> bool:
        """Whether its attention has latent keys and values (MLA)."""
        return any(count.size == "kv_rank" for count in self.counts)

    @property
    def recurrent(self) -> bool:
        """Whether blocks have a state space (Mamba 2)."""
        return any(count.size == "ssm_heads" for count in self.counts)

    @property
    def activation(self) -> str:
        """The config's key of the activation."""
        return next(rule.key for rule in self.rules if rule.allowed in (SILU, GELU))


AUTO_WIDTH = "block_auto_adjust_ff_dim"
"""LFM2's key that says whether the width of an MLP follows from another one."""
NEXTN = "nextn_predict_layers"
"""A file's key for the number of blocks behind the last one that predict further tokens; they count as
blocks."""
UNBOUNDED = 1 << 20
"""Tokens of a file's context where the config has no number; llama.cpp's converter writes it too."""
USUAL = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head": "head_dim",
    "ff": "intermediate_size",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "epsilon": "rms_norm_eps",
}
"""The config's usual keys."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, in elements; context in tokens.

    Attributes:
        more: counts of :class:`ConfigCount` by name: ``experts``, ``expert_ff`` (neurons of an expert),
            ``shared_ff`` or ``shared`` (how many experts all tokens share), ``dense`` (leading blocks without
            experts); of MLA ``q_rank``, ``kv_rank``, ``nope`` and ``rope`` (of a head's keys), ``value``; of
            a state space ``ssm_heads``, ``ssm_head`` (width of one), ``ssm_state``, ``ssm_groups``; of linear
            attention ``delta_heads`` (of values), ``delta_groups`` (heads of keys), ``delta_state`` (width);
            of Gemma ``per_layer`` (width of the embeddings for blocks), ``shared_kv`` (blocks without keys).
        nextn: blocks behind the last one that predict further tokens.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocabulary: int
    context: int
    more: Mapping[str, int] = field(default_factory=dict)
    nextn: int = 0

    def of(self, name: str) -> int:
        """A size by its name in :class:`ModuleMapping`; 0 where the family has none."""
        if name in ("q", "kv", "qkv"):
            counts = {"q": self.heads, "kv": self.kv_heads, "qkv": self.heads + 2 * self.kv_heads}
            return counts[name] * self.head
        if name == "gate_up":
            return 2 * self.ff
        if name == "kv_latent":
            return self.more["kv_rank"] + self.more["rope"]
        if name == "values":
            return self.heads * self.more["value"]
        if name == "one":
            return 1
        if name == "per_layers":
            return self.layers * self.of("per_layer")
        if name.startswith("altup_"):
            return self.of("altup") ** 2 if name == "altup_squared" else self.of("altup") - 1
        if name == "expert_gate_up":
            return 2 * self.of("expert_ff")
        if name in ("q_gated", "joined"):
            return 2 * (self.of("q") if name == "q_gated" else self.hidden)
        if name.startswith("delta_") and name not in self.more:
            keys, values = (self.of(f"delta_{of}") * self.of("delta_state") for of in ("groups", "heads"))
            widths = {"qkv": 2 * keys + values, "qkvz": 2 * (keys + values), "values": values}
            return {**widths, "betas": 2 * self.of("delta_heads")}[name.removeprefix("delta_")]
        if name == "conv_projected":
            return 3 * self.hidden
        if name.startswith("ssm_") and name not in self.more:
            return self._of_state_space(name)
        if name == "shared_ff" and "shared" in self.more:
            return self.more["shared"] * self.more["expert_ff"]
        return self.more.get(name, 0) if name not in USUAL else int(getattr(self, name))

    @property
    def ssm_rows(self) -> tuple[int, ...]:
        """Rows of a state space's projection that are z, x, B, C and the time steps."""
        if "ssm_heads" not in self.more:
            return ()
        inner, group = self.of("ssm_inner"), self.of("ssm_groups") * self.of("ssm_state")
        return inner, inner, group, group, self.of("ssm_heads")

    def _of_state_space(self, name: str) -> int:
        """Widths that follow from others: of all heads, of a group, of what is convolved (x, B and C), and of
        the projection into it (z, x, B, C and the time steps)."""
        inner = self.of("ssm_heads") * self.of("ssm_head")
        if name == "ssm_inner":
            return inner
        rows = self.ssm_rows
        return {
            "ssm_group": inner // self.of("ssm_groups"),
            "ssm_convolved": sum(rows[1:4]),
            "ssm_projected": sum(rows),
        }[name]


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding-window attention: in marked blocks a token attends to itself and the ``tokens`` - 1 before
    it."""

    tokens: int
    blocks: tuple[bool, ...]


def key_of(architecture: Architecture, name: str) -> str:
    """A family's key of a number in its config."""
    return architecture.keys.get(name, USUAL.get(name, name))


def number(config: Mapping[str, Any], architecture: Architecture, name: str) -> Any:
    """The config's number of a name, or transformers' default."""
    key = key_of(architecture, name)
    return config[key] if key in config else architecture.defaults.get(name)


def sizes(config: Mapping[str, Any], architecture: Architecture) -> Sizes:
    """The sizes of a config.

    Raises:
        ModelError: one is missing or no whole number, or they do not fit together.
    """
    config = architecture.plain_config(config)
    hidden = _positive_integer(config, architecture, "hidden")
    if architecture.attention_free:
        return _without_attention(config, architecture, hidden)
    heads = _positive_integer(config, architecture, "heads")
    measured = Sizes(
        layers=_positive_integer(config, architecture, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_positive_integer(config, architecture, "kv_heads", heads),
        head=_positive_integer(config, architecture, "head", hidden // heads),
        ff=_feed_forward(config, architecture, hidden),
        vocabulary=_positive_integer(config, architecture, "vocabulary"),
        context=_positive_integer(config, architecture, "context"),
        more=_counts(config, architecture),
    )
    if architecture.latent:
        measured = replace(measured, head=measured.of("nope") + measured.of("rope"))
    _check_sizes(measured, architecture)
    return measured


def _feed_forward(config: Mapping[str, Any], architecture: Architecture, hidden: int) -> int:
    """Neurons of an MLP; LFM2's config states three halves of them, in older files by another key."""
    if AUTO_WIDTH not in architecture.stated:
        return _positive_integer(
            config, architecture, "ff", 4 * hidden if architecture.family == "gpt2" else None
        )
    older = config.get("block_ff_dim")
    width = _positive_integer({**config, "intermediate_size": older} if older else config, architecture, "ff")
    if not config.get(AUTO_WIDTH, True):
        return width
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
    if factor is None:
        return 2 * width // 3
    return int(multiple * -(-int(factor * int(2 * width / 3)) // multiple))


def _without_attention(config: Mapping[str, Any], architecture: Architecture, hidden: int) -> Sizes:
    """Sizes of a model of states alone."""
    layers, vocabulary = (_positive_integer(config, architecture, name) for name in ("layers", "vocabulary"))
    more = _counts(config, architecture)
    return Sizes(layers, hidden, 0, 0, 0, 0, vocabulary, UNBOUNDED, more)


def _counts(config: Mapping[str, Any], architecture: Architecture) -> dict[str, int]:
    """The numbers of :attr:`Architecture.counts` by name."""
    counts = {}
    for count in architecture.counts:
        value = next((config[key] for key in count.keys if key in config), count.default or None)
        if value is None and count.zero:
            value = 0
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if count.zero else 1):
            raise ModelError(
                f"config of {architecture.family}: {count.keys[0]} is {value!r}, but must be a whole number",
                hint="GGUF has one such number for all blocks; check config.json",
            )
        counts[count.size] = value
    if architecture.recurrent:
        _check_state_space(config, architecture, counts)
    return counts


def _check_state_space(
    config: Mapping[str, Any], architecture: Architecture, counts: Mapping[str, int]
) -> None:
    """llama.cpp's state space has whole groups of heads; it is twice as wide as the model, or as wide as the
    config says."""
    inner = counts["ssm_heads"] * counts["ssm_head"]
    wanted = counts.get("ssm_inner", 2 * _positive_integer(config, architecture, "hidden"))
    if inner != wanted or counts["ssm_heads"] % counts["ssm_groups"]:
        raise ModelError(
            f"config of {architecture.family}: {counts['ssm_heads']} heads of {counts['ssm_head']} in "
            f"{counts['ssm_groups']} groups, but llama.cpp needs whole groups, {wanted} wide together",
            hint="export to another format",
        )


def _positive_integer(
    config: Mapping[str, Any], architecture: Architecture, name: str, default: int | None = None
) -> int:
    value = number(config, architecture, name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config of {architecture.family}: {key_of(architecture, name)} is {value!r}, but must be a "
            "whole number above 0",
            hint="GGUF has one such number for all blocks; check config.json",
        )
    return value


def _check_sizes(measured: Sizes, architecture: Architecture) -> None:
    family = architecture.family
    if measured.heads % measured.kv_heads:
        raise ModelError(
            f"config of {family}: {measured.heads} heads are no multiple of {measured.kv_heads} KV heads"
        )
    if architecture.equal_heads and measured.heads != measured.kv_heads:
        raise ModelError(
            f"{family}: llama.cpp's {architecture.arch} needs as many KV heads as heads, not "
            f"{measured.kv_heads} for {measured.heads}",
            hint="export to another format",
        )
    if architecture.ropes and measured.head % 2:
        raise ModelError(
            f"config of {family}: a head's width of {measured.head} is odd; rotary needs an even one"
        )
    if architecture.square and measured.heads * measured.head != measured.hidden:
        raise ModelError(
            f"{family}: GGUF's {architecture.arch} has no separate width of a head, so {measured.heads} "
            f"heads of {measured.head} in a width of {measured.hidden} cannot be written",
            hint="such a model comes from removing heads; remove neurons or layers instead",
        )


def window(config: Mapping[str, Any], architecture: Architecture, layers: int) -> SlidingWindow | None:
    """The sliding window; None where no block has one."""
    scope = architecture.window
    tokens = number(config, architecture, "sliding_window")
    if scope is None or not tokens or (scope == "marked" and not config.get("use_sliding_window")):
        return None
    marked = config.get("layer_types")
    if scope == "all":
        blocks = (True,) * layers
    elif isinstance(marked, list):
        blocks = tuple(kind == "sliding_attention" for kind in marked)
    else:
        blocks = tuple(_default_blocks(config, scope, layers))
    if len(blocks) != layers:
        raise ModelError(
            f"config of {architecture.family}: layer_types names {len(blocks)} blocks, the model has {layers}"
        )
    return SlidingWindow(int(tokens), blocks) if any(blocks) else None


def _default_blocks(config: Mapping[str, Any], scope: str | int, layers: int) -> list[bool]:
    """The blocks with the window where the config marks none."""
    if scope == "marked":
        first = config.get("max_window_layers", 28)
        return [index >= first for index in range(layers)]
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or scope
    return usual_pattern(int(every), layers)


def attends(config: Mapping[str, Any], architecture: Architecture, layers: int) -> tuple[bool, ...]:
    """For each block, whether it has attention.

    Raises:
        ModelError: the config marks other blocks than there are, or all or none of them.
    """
    if not architecture.layer_types:
        return (not architecture.attention_free,) * layers
    marked, indices = config.get("layer_types"), config.get("full_attn_idxs")
    if marked is None and architecture.attention_interval:
        every = config.get("full_attention_interval", architecture.attention_interval)
        if type(every) is not int or every < 1:
            raise ModelError(f"config of {architecture.family}: full_attention_interval is {every!r}")
        marks = tuple(not (index + 1) % every for index in range(layers))
    elif isinstance(marked, list):
        marks = tuple(kind in ("attention", "full_attention") for kind in marked)
    else:
        marks = tuple(index in indices for index in range(layers)) if isinstance(indices, list) else ()
    if len(marks) != layers or all(marks) or not any(marks):
        raise ModelError(
            f"config of {architecture.family}: layer_types is {marked!r}, but llama.cpp's "
            f"{architecture.arch} needs one for each of {layers} blocks, some with attention, some without",
            hint="export to another format",
        )
    return marks


def usual_pattern(every: int, layers: int) -> list[bool]:
    """Every block has the window but each ``every``-th."""
    return [bool((index + 1) % every) for index in range(layers)]


def shortest(value: float) -> float:
    """The shortest decimal number of a float32 value: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
