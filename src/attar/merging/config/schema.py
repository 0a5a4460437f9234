"""The content of a merge's YAML as frozen dataclasses; :mod:`attar.merging.config.parse` makes them.

    merge_method: ties                       MergeConfig.method
    base_model: org/base                     MergeConfig.base
    parameters: {normalize: true}            MergeConfig.parameters
    dtype: bfloat16                          MergeConfig.dtype
    models:                                  one MergeModule with one LayerSlice, whose sources have no layers
      - model: org/one                       MergeSource.model
        parameters: {weight: 0.5}            MergeSource.parameters
    slices:                                  one MergeModule with one LayerSlice for each entry
      - sources:
          - {model: org/one, layer_range: [0, 16]}          MergeSource.layers

``where`` is ``file:line``, for errors that are only detected when the checkpoints are open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

SEARCHED = ("greedy_soup",)
"""attar's own methods that compare several merges on held-out text; configured like ``linear``, without
``normalize``."""

Scalar = float | int | bool | str


@dataclass(frozen=True)
class ModelReference:
    """One model of a merge. References to the same model are equal, wherever they are written.

    Attributes:
        model: folder, hub id (with ``@revision``), or name of an earlier document.
        lora: folder or hub id of an adapter that is added to the model, or None.
    """

    model: str
    lora: str | None = None
    where: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.model}+{self.lora}" if self.lora else self.model


@dataclass(frozen=True)
class FilteredValue:
    """One entry of a filtered parameter.

    Attributes:
        filter: part of a tensor's name; None and ``"*"`` match every tensor.
        value: a scalar, or the points of a gradient.
    """

    filter: str | None
    value: Scalar | tuple[Scalar, ...]
    where: str = field(default="", compare=False)

    def matches(self, tensor: str) -> bool:
        """Whether the entry applies to a tensor."""
        return self.filter is None or self.filter == "*" or self.filter in tensor


@dataclass(frozen=True)
class ParameterSetting:
    """A parameter as it is written in YAML.

    Attributes:
        value: a scalar; a tuple of scalars, a gradient over depth; or a tuple of :class:`FilteredValue`, of
            which the first that matches a tensor's name applies.
    """

    value: Scalar | tuple[Scalar, ...] | tuple[FilteredValue, ...]
    where: str = field(default="", compare=False)

    def filters(self) -> tuple[FilteredValue, ...]:
        """The entries of a filtered parameter; else empty."""
        entries = self.value if isinstance(self.value, tuple) else ()
        return tuple(entry for entry in entries if isinstance(entry, FilteredValue))

    def points(self) -> tuple[Scalar, ...]:
        """The points of a gradient, or the one scalar; empty for a filtered parameter."""
        entries = self.value if isinstance(self.value, tuple) else (self.value,)
        return tuple(entry for entry in entries if not isinstance(entry, FilteredValue))


ParameterSettings = Mapping[str, ParameterSetting]
"""Settings by the parameter's name in YAML."""


@dataclass(frozen=True)
class MergeSource:
    """A model, or some of its layers, that goes into a slice.

    Attributes:
        layers: first layer and the one after the last; None: all.
        parameters: settings for this model in this slice.
    """

    model: ModelReference
    layers: tuple[int, int] | None
    parameters: ParameterSettings
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class LayerSlice:
    """Consecutive layers of the output.

    Attributes:
        sources: what is merged, in the order of the file; each model once.
        base: base model of this slice, where it is not the merge's.
        again: sources whose model is given again later in the slice; they do not count.
    """

    sources: tuple[MergeSource, ...]
    base: ModelReference | None
    parameters: ParameterSettings
    where: str = field(default="", compare=False)
    again: tuple[MergeSource, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class MergeModule:
    """A part of the model that is merged separately; usually there is one, without a name.

    Attributes:
        name: key under ``modules``; None: the whole model.
        slices: in the order of the output's layers.
    """

    name: str | None
    slices: tuple[LayerSlice, ...]
    parameters: ParameterSettings
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class ModelToken:
    """A model's token whose embedding another token gets: by its text, or by its id."""

    model: ModelReference
    token: str | None = None
    token_id: int | None = None


@dataclass(frozen=True)
class TokenChoice:
    """The source of one token's embedding.

    Attributes:
        source: a model (its own embedding of that token), a token of a model, ``"zero"``, or None: by the
            rules for all tokens.
        force: use it for every model, also for models that have the token.
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
        pad_to_multiple_of: the embedding's rows are padded to a multiple of this.
    """

    source: str | ModelReference
    tokens: Mapping[str, TokenChoice]
    pad_to_multiple_of: int | None
    where: str = field(default="", compare=False)

    def models(self) -> Iterator[ModelReference]:
        """The models it names."""
        if isinstance(self.source, ModelReference):
            yield self.source
        for token in self.tokens.values():
            if isinstance(token.source, ModelReference):
                yield token.source
            elif isinstance(token.source, ModelToken):
                yield token.source.model


@dataclass(frozen=True)
class MergeConfig:
    """One document.

    Attributes:
        name: what later documents call the result; None: it is the final one.
        method: a key of :data:`attar.merging.methods.METHODS`, or one of :data:`SEARCHED`.
        base: ``base_model``.
        modules: one module without a name for ``models`` and ``slices``.
        dtype: torch's name of the type that the merge computes in; None: the base's own.
        out_dtype: torch's name of the type that is written; None: ``dtype``.
        tokenizer: None: the base model's tokenizer (else the first's), unchanged.
        chat_template: ``"auto"``, a built-in name, a Jinja text, or None.
    """

    name: str | None
    method: str
    base: ModelReference | None
    modules: tuple[MergeModule, ...]
    parameters: ParameterSettings
    dtype: str | None
    out_dtype: str | None
    tokenizer: TokenizerChoice | None
    chat_template: str | None
    where: str = field(default="", compare=False)

    def slices(self) -> list[LayerSlice]:
        """The slices of all modules."""
        return [part for module in self.modules for part in module.slices]

    def models(self) -> tuple[ModelReference, ...]:
        """Every model, once: sources in the order of the file, then base models, then models that only the
        tokenizer names."""
        slices = self.slices()
        names = [source.model for part in slices for source in part.sources]
        names += [part.base for part in slices if part.base]
        names += [self.base] if self.base else []
        names += self.tokenizer.models() if self.tokenizer else []
        return tuple(dict.fromkeys(names))

    def levels(self) -> list[ParameterSettings]:
        """The parameters of all levels: of the merge, of modules, of slices, of sources."""
        slices = self.slices()
        return [
            self.parameters,
            *(module.parameters for module in self.modules),
            *(part.parameters for part in slices),
            *(source.parameters for part in slices for source in part.sources),
        ]
