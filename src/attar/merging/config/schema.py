"""What a merge's YAML says, as frozen dataclasses. :mod:`attar.merging.config.parse` makes them.

    merge_method: ties                       MergeConfig.method
    base_model: org/base                     MergeConfig.base
    parameters: {normalize: true}            MergeConfig.parameters
    dtype: bfloat16                          MergeConfig.dtype
    models:                                  one Module with one Slice whose sources have no layers
      - model: org/one                       Source.model
        parameters: {weight: 0.5}            Source.parameters
    slices:                                  one Module with a Slice each
      - sources:
          - {model: org/one, layer_range: [0, 16]}          Source.layers

Every part knows its ``file:line``, so that an error found later, when the checkpoints are open, can name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from attar.merging.reference import ModelReference

__all__ = [
    "SEARCHED",
    "Filtered",
    "MergeConfig",
    "ModelReference",
    "ModelToken",
    "Module",
    "Parameters",
    "Scalar",
    "Setting",
    "Slice",
    "Source",
    "TokenChoice",
    "TokenizerChoice",
]

SEARCHED = ("greedy_soup",)
"""Methods of attar's own that try several merges against held-out text; configured like ``linear``, without
``normalize``."""

Scalar = float | int | bool | str


@dataclass(frozen=True)
class Filtered:
    """One entry of a filtered setting.

    Attributes:
        filter: part of a tensor's name; None and ``"*"`` fit every tensor.
        value: a scalar, or the points of a gradient.
        where: ``file:line``.
    """

    filter: str | None
    value: Scalar | tuple[Scalar, ...]
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Setting:
    """A parameter's value as written.

    Attributes:
        value: a scalar; a tuple of scalars (a gradient over depth); or a tuple of :class:`Filtered`, of which
            the first that fits a tensor's name counts.
        where: ``file:line``.
    """

    value: Scalar | tuple[Scalar, ...] | tuple[Filtered, ...]
    where: str = field(default="", compare=False)


Parameters = Mapping[str, Setting]
"""Settings by their YAML name."""


@dataclass(frozen=True)
class Source:
    """A model, or some layers of it, that goes into a slice.

    Attributes:
        model: which model.
        layers: first layer and the one after the last; None: all.
        parameters: settings of this model here.
    """

    model: ModelReference
    layers: tuple[int, int] | None
    parameters: Parameters
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Slice:
    """Consecutive layers of the output.

    Attributes:
        sources: what is merged, in the order of the file; each model once.
        base: base model of this slice, where it is not the merge's.
        parameters: settings of this slice.
    """

    sources: tuple[Source, ...]
    base: ModelReference | None
    parameters: Parameters
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Module:
    """A part of the model that is merged by itself; usually there is one, without a name.

    Attributes:
        name: key under ``modules``; None: the whole model.
        slices: in the order of the output's layers.
        parameters: settings of this module.
    """

    name: str | None
    slices: tuple[Slice, ...]
    parameters: Parameters
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class ModelToken:
    """Another model's token whose embedding a token takes.

    Attributes:
        model: which model.
        token: its text there; None where ``token_id`` is given.
        token_id: its number there.
    """

    model: ModelReference
    token: str | None = None
    token_id: int | None = None


@dataclass(frozen=True)
class TokenChoice:
    """Where the embedding of one token comes from.

    Attributes:
        source: a model (its own embedding of that token), a token of a model, ``"zero"``, or None: by the
            rules for all tokens.
        force: take it for every model, also for those that have the token.
    """

    source: ModelReference | ModelToken | str | None
    force: bool = False
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class TokenizerChoice:
    """``tokenizer`` or ``tokenizer_source``.

    Attributes:
        source: ``"union"``, ``"base"``, or a model.
        tokens: choices by the token's text.
        pad_to_multiple_of: rows of the embedding are padded up to a multiple of this.
    """

    source: str | ModelReference
    tokens: Mapping[str, TokenChoice]
    pad_to_multiple_of: int | None
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class MergeConfig:
    """One document.

    Attributes:
        name: what later documents call the result; None: it is the final one.
        method: a key of :data:`attar.merging.methods.METHODS`, or one of :data:`SEARCHED`.
        base: ``base_model``.
        modules: what is merged; one module without a name for ``models`` and ``slices``.
        parameters: settings for everything.
        dtype: torch's name of the type that the merge computes in; None: the base's own.
        out_dtype: torch's name of the type that is written; None: ``dtype``.
        tokenizer: None: the tokenizer of the base model (else of the first), as it is.
        chat_template: ``"auto"``, a built-in name, a Jinja text, or None.
    """

    name: str | None
    method: str
    base: ModelReference | None
    modules: tuple[Module, ...]
    parameters: Parameters
    dtype: str | None
    out_dtype: str | None
    tokenizer: TokenizerChoice | None
    chat_template: str | None
    where: str = field(default="", compare=False)

    def models(self) -> tuple[ModelReference, ...]:
        """Every model that is named, each once: sources in the order of the file, then base models, then
        models that only tokens name."""
        return tuple(dict.fromkeys(self._named()))

    def _named(self) -> Iterator[ModelReference]:
        slices = [each for module in self.modules for each in module.slices]
        for each in slices:
            yield from (source.model for source in each.sources)
        yield from (each.base for each in slices if each.base)
        if self.base:
            yield self.base
        if self.tokenizer:
            yield from _tokenizer_models(self.tokenizer)


def _tokenizer_models(choice: TokenizerChoice) -> Iterator[ModelReference]:
    """The models that a tokenizer's settings name."""
    if isinstance(choice.source, ModelReference):
        yield choice.source
    for token in choice.tokens.values():
        if isinstance(token.source, ModelReference):
            yield token.source
        elif isinstance(token.source, ModelToken):
            yield token.source.model
