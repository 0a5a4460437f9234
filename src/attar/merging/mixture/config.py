"""``mergekit-moe``'s YAML read into :class:`MixtureConfig`; errors name file and line.

    base_model: org/base            attention, norms, embedding and head of the result
    gate_mode: hidden               how the routers' rows are made: see :data:`GATE_MODES`
    experts_per_token: 2
    experts:
      - source_model: org/code      its MLPs are expert 0 of every layer
        positive_prompts: ["def main("]
        negative_prompts: ["Dear"]
    shared_experts:                 at most one, for every token
      - {source_model: org/base, residual_scale: 0.1}

Stricter than mergekit-moe: an unknown key and an unknown gate mode are errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from attar.errors import RecipeError, did_you_mean
from attar.merging.config.fields import MappingReader, parse_reference
from attar.merging.config.schema import ModelReference
from attar.yaml import Located

HIDDEN_MODES = ("hidden", "hidden_last", "hidden_avg")
RANDOM_MODES = ("random", "uniform_random")
GATE_MODES = (*HIDDEN_MODES, "cheap_embed", *RANDOM_MODES)
"""Hidden states of the prompts at their last token (``hidden``, ``hidden_last``) or their mean over tokens
(``hidden_avg``); the sum of the prompts' embeddings; normal numbers; uniform ones, as in a new Linear."""

DTYPES = ("bfloat16", "float16", "float32")
_KEYS = (
    *("base_model", "experts", "shared_experts", "gate_mode", "experts_per_token"),
    *("architecture", "dtype"),
)
_EXPERT_KEYS = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale")


@dataclass(frozen=True)
class ExpertSource:
    """A dense model whose MLPs become one expert of every layer.

    Attributes:
        positive: prompts that should go to this expert.
        negative: prompts that should not.
        noise: standard deviation of normal noise that is added to its weights; None: none.
        residual: factor of its output, that is of its down projections; None: 1.
    """

    model: ModelReference
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    noise: float | None = None
    residual: float | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class MixtureConfig:
    """A document of ``mergekit-moe``.

    Attributes:
        active: experts of a token.
        architecture: the beginning of the output architecture's name; None: the first that fits.
        dtype: torch's name of the type that is written; None: the base model's.
        name: always None: the result is the last of the file.
    """

    base: ModelReference
    experts: tuple[ExpertSource, ...]
    shared: tuple[ExpertSource, ...] = ()
    gate_mode: str = "hidden"
    active: int = 2
    architecture: str | None = None
    dtype: str | None = None
    name: str | None = None
    where: str = field(default="", compare=False)

    def models(self) -> tuple[ModelReference, ...]:
        """Every model, once: the base first."""
        sources = (source.model for source in (*self.experts, *self.shared))
        return tuple(dict.fromkeys((self.base, *sources)))


def is_mixture(located: Located) -> bool:
    """Whether a document is one of ``mergekit-moe``."""
    content = located.value
    return isinstance(content, dict) and "merge_method" not in content and "experts" in content


def parse_mixture(located: Located) -> MixtureConfig:
    """One document.

    Raises:
        RecipeError: names file and line.
    """
    fields = MappingReader(located, "a mixture of experts", _KEYS, anchors=True)
    mode = fields.text("gate_mode") or "hidden"
    _check_choice(fields, "gate_mode", mode, GATE_MODES)
    dtype = fields.text("dtype")
    dtype = dtype and dtype.removeprefix("torch.")
    _check_choice(fields, "dtype", dtype, DTYPES)
    experts = tuple(_expert(item, mode) for item in fields.items("experts"))
    shared = fields.get("shared_experts") and fields.items("shared_experts")
    if shared and len(shared) > 1:
        raise RecipeError(f"{shared[1].where}: no architecture here has more than one shared expert")
    config = MixtureConfig(
        base=parse_reference(fields.need("base_model")),
        experts=experts,
        shared=tuple(_expert(item, "shared") for item in shared or ()),
        gate_mode=mode,
        active=fields.integer("experts_per_token", 1) or 2,
        architecture=fields.text("architecture"),
        dtype=dtype,
        where=located.where,
    )
    if config.active > len(experts):
        where = fields.where_of("experts_per_token")
        raise RecipeError(f"{where}: {config.active} experts per token of {len(experts)}")
    prompts = {(expert.positive, expert.negative) for expert in experts}
    if mode not in RANDOM_MODES and len(experts) > 1 and len(prompts) == 1:
        raise RecipeError(
            f"{fields.where_of('experts')}: all experts have the same prompts, and so the same router rows",
            hint="give each expert prompts of what should go to it, or gate_mode: random, and train it",
        )
    return config


def _expert(located: Located, mode: str) -> ExpertSource:
    fields = MappingReader(located, "an expert", _EXPERT_KEYS)
    positive, negative = _prompts(fields, "positive_prompts"), _prompts(fields, "negative_prompts")
    if mode in (*HIDDEN_MODES, "cheap_embed") and not positive:
        raise RecipeError(
            f"{fields.where}: gate_mode {mode} needs positive_prompts for every expert",
            hint="list prompts of what should go to this expert, or write gate_mode: random",
        )
    if negative and not positive:
        raise RecipeError(f"{fields.where_of('negative_prompts')}: negative_prompts without positive_prompts")
    return ExpertSource(
        parse_reference(fields.need("source_model")),
        positive,
        negative,
        _number(fields, "noise_scale"),
        _number(fields, "residual_scale"),
        fields.where,
    )


def _prompts(fields: MappingReader, name: str) -> tuple[str, ...]:
    if fields.get(name) is None:
        return ()
    items = fields.items(name)
    for item in items:
        if not isinstance(item.value, str) or not item.value:
            raise RecipeError(f"{item.where}: {item.plain()!r} is no prompt; {name} are texts")
    return tuple(item.value for item in items)


def _number(fields: MappingReader, name: str) -> float | None:
    located = fields.get(name)
    if located is None:
        return None
    number = located.value
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise RecipeError(f"{located.where}: {name} is {located.plain()!r}, but must be a finite number")
    if name == "noise_scale" and number < 0:
        raise RecipeError(f"{located.where}: {name} is {number}, but must be at least 0")
    return float(number)


def _check_choice(fields: MappingReader, name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise RecipeError(f"{fields.where_of(name)}: unknown {name} {value!r}{did_you_mean(value, known)}")
