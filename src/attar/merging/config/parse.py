"""mergekit's YAML read into :class:`~attar.merging.config.schema.MergeConfig`; errors name file and line.

Stricter than mergekit: an unknown key (but one at the top with an anchor), a parameter of no method, a
parameter at a level where it is never looked up and a value of the wrong kind are errors.
"""

from __future__ import annotations

from dataclasses import replace

from attar.errors import RecipeError, did_you_mean
from attar.merging.config.fields import MappingReader, model_of, parse_reference, parse_setting
from attar.merging.config.schema import (
    SEARCHED,
    LayerSlice,
    MergeConfig,
    MergeModule,
    MergeSource,
    ModelReference,
    ModelToken,
    ParameterSetting,
    ParameterSettings,
    TokenChoice,
    TokenizerChoice,
)
from attar.merging.methods import METHODS
from attar.merging.methods.method import MergeMethod
from attar.merging.planning.parameters import check_kind, method_of
from attar.yaml import Located, scalar

DTYPES = ("bfloat16", "float16", "float32")

_PARTS = ("models", "slices", "modules")
_KEYS = (
    *("merge_method", *_PARTS, "base_model", "parameters", "dtype", "out_dtype"),
    *("tokenizer", "tokenizer_source", "chat_template", "name"),
)
_DOCUMENT_HINTS = {
    "random_seed": "the seed is a setting of the command: --seed",
    "out_path": "give the document a name; later documents use it in place of a model",
    **dict.fromkeys(("experts", "gate_mode"), "a mixture of experts has no merge_method: leave it out"),
}
_MODEL_HINTS = {
    "layer_range": "models are merged whole; for some of their layers write 'slices' with 'sources'",
    **dict.fromkeys(("weight", "density", "t", "lambda", "scale"), "write it under the key 'parameters'"),
}
_SLICE_HINTS = {
    "residual_weight": "the reference reads residual_weight and never uses it; leave it out",
    "model": "list the models of a slice under 'sources'",
    "layer_range": "write the layers next to each model, under 'sources'",
}
_TOKENIZER_SOURCES = ("union", "base")
_TOKEN_KINDS = ("zero", "model_token")
_OF_ANY_METHOD = {
    parameter.name for method in METHODS.values() for parameter in (*method.shared, *method.per_model)
}
"""Allowed for every method, also where the method does not use it, as in mergekit."""


def parse_document(located: Located) -> MergeConfig:
    """One document.

    Raises:
        RecipeError: names file and line.
    """
    fields = MappingReader(located, "a merge", _KEYS, _DOCUMENT_HINTS, anchors=True)
    method = _method(fields)
    base = _base_model(fields)
    if method.base == "required" and base is None:
        raise RecipeError(
            f"{fields.where_of('merge_method')}: {method.name} needs a base_model",
            hint="base_model: the model that the others were fine-tuned from"
            if method.models[1] != 1
            else "base_model: one of the two models",
        )
    return MergeConfig(
        name=fields.text("name"),
        method=method.name,
        base=base,
        modules=_modules(fields, method),
        parameters=_parameters(fields, method),
        dtype=_dtype(fields, "dtype"),
        out_dtype=_dtype(fields, "out_dtype"),
        tokenizer=_tokenizer(fields),
        chat_template=fields.text("chat_template"),
        where=located.where,
    )


def _method(fields: MappingReader) -> MergeMethod:
    name = fields.text("merge_method")
    if name is None:
        raise RecipeError(f"{fields.where}: a merge needs the key 'merge_method'")
    known = (*METHODS, *SEARCHED)
    if name not in known:
        where = fields.where_of("merge_method")
        raise RecipeError(f"{where}: unknown merge_method {name!r}{did_you_mean(name, known)}")
    return method_of(name)


def _base_model(fields: MappingReader) -> ModelReference | None:
    located = fields.get("base_model")
    return parse_reference(located) if located else None


def _dtype(fields: MappingReader, key: str) -> str | None:
    name = fields.text(key)
    if name is None or name.removeprefix("torch.") in DTYPES:
        return name and name.removeprefix("torch.")
    raise RecipeError(f"{fields.where_of(key)}: {key} is {name!r}, but must be {', '.join(DTYPES)}")


def _modules(fields: MappingReader, method: MergeMethod) -> tuple[MergeModule, ...]:
    """The modules; one without a name for ``models`` and ``slices``."""
    if _which_key(fields, _PARTS) != "modules":
        return (MergeModule(None, _slices(fields, method), {}, fields.where),)
    located = fields.need("modules")
    if not isinstance(located.value, dict) or not located.value:
        raise RecipeError(
            f"{fields.where_of('modules')}: modules must be a mapping of names to slices or models"
        )
    modules = []
    for name, entry in located.value.items():
        inner = MappingReader(entry.value, f"module {name!r}", ("models", "slices", "parameters"))
        _which_key(inner, ("models", "slices"))
        settings = _parameters(inner, method)
        modules.append(MergeModule(name, _slices(inner, method), settings, entry.where))
    return tuple(modules)


def _which_key(fields: MappingReader, keys: tuple[str, ...]) -> str:
    """The one of these keys that is given."""
    given = [key for key in keys if key in fields.entries]
    if len(given) > 1:
        raise RecipeError(
            f"{fields.where_of(given[1])}: {given[1]!r} next to {given[0]!r};"
            f" {fields.what} has one of {', '.join(keys)}"
        )
    if not given:
        raise RecipeError(f"{fields.where}: {fields.what} needs one of the keys {', '.join(keys)}")
    return given[0]


def _slices(fields: MappingReader, method: MergeMethod) -> tuple[LayerSlice, ...]:
    """``slices``, or ``models`` as one slice."""
    if "models" not in fields.entries:
        return tuple(_slice(item, method) for item in fields.items("slices"))
    keys = ("model", "revision", "parameters")
    readers = [MappingReader(item, "a model", keys, _MODEL_HINTS) for item in fields.items("models")]
    sources = tuple(_source(reader, None, method) for reader in readers)
    return (_checked(LayerSlice(sources, None, {}, fields.where_of("models"))),)


def _slice(located: Located, method: MergeMethod) -> LayerSlice:
    fields = MappingReader(located, "a slice", ("sources", "base_model", "parameters"), _SLICE_HINTS)
    keys = ("model", "revision", "layer_range", "parameters")
    readers = [MappingReader(item, "a source", keys) for item in fields.items("sources")]
    sources = tuple(_source(reader, _layers(reader), method) for reader in readers)
    return _checked(LayerSlice(sources, _base_model(fields), _parameters(fields, method), located.where))


def _source(fields: MappingReader, layers: tuple[int, int] | None, method: MergeMethod) -> MergeSource:
    model = model_of(fields)
    return MergeSource(model, layers, _parameters(fields, method, of_model=True), fields.where)


def _layers(fields: MappingReader) -> tuple[int, int]:
    """``layer_range``: first layer, and the one after the last."""
    located = fields.need("layer_range")
    plain = located.plain()
    if isinstance(plain, list):  # "0", which mergekit takes for a number too
        plain = [scalar(number) if isinstance(number, str) else number for number in plain]
    integers = isinstance(plain, list) and len(plain) == 2 and all(type(number) is int for number in plain)
    if not integers or not 0 <= plain[0] < plain[1]:
        raise RecipeError(
            f"{located.where}: layer_range is {plain!r}, but must be [first, last + 1],"
            " with 0 <= first <= last"
        )
    return plain[0], plain[1]


def _checked(part: LayerSlice) -> LayerSlice:
    """The slice, unless its sources have different numbers of layers. Of a model that is given twice the
    last one counts, in the place of the first, as in mergekit."""
    last = {source.model: source for source in part.sources}
    again = tuple(source for source in part.sources if last[source.model] is not source)
    part = replace(part, sources=tuple(last.values()), again=again)
    lengths = [source.layers[1] - source.layers[0] for source in part.sources if source.layers]
    for source, length in zip(part.sources, lengths, strict=False):
        if length != lengths[0]:
            raise RecipeError(
                f"{source.where}: {length} layers of {source.model}, but {lengths[0]} layers of"
                f" {part.sources[0].model}; the sources of a slice have the same number of layers"
            )
    return part


def _parameters(fields: MappingReader, method: MergeMethod, *, of_model: bool = False) -> ParameterSettings:
    """``parameters`` of a level; a model's level takes only parameters of each model.

    A parameter that only other methods have is kept and never looked up; the merge's notes name it.
    """
    located = fields.get("parameters")
    if located is None:
        return {}
    each_model = {parameter.name: parameter for parameter in method.per_model}
    shared = {parameter.name: parameter for parameter in method.shared}
    known = each_model if of_model else {**shared, **each_model}
    if not isinstance(located.value, dict):
        raise RecipeError(f"{located.where}: parameters must be a mapping of names to values")
    settings: dict[str, ParameterSetting] = {}
    for name, entry in located.value.items():
        if name in shared and name not in known:
            raise RecipeError(
                f"{entry.where}: {name} is one for all models; at a single model it is never looked up",
                hint="move it to the parameters of the slice or of the merge",
            )
        if name not in known and name not in _OF_ANY_METHOD:
            tail = did_you_mean(name, list(known))
            raise RecipeError(f"{entry.where}: unknown parameter {name!r} of {method.name}{tail}")
        settings[name] = parse_setting(name, Located(entry.value.value, entry.where))
        if name in known:
            check_kind(known[name], settings[name])
    return settings


def _tokenizer(fields: MappingReader) -> TokenizerChoice | None:
    """``tokenizer``, a mapping, or ``tokenizer_source``, a source."""
    mapping, source = fields.get("tokenizer"), fields.get("tokenizer_source")
    if mapping and source:
        raise RecipeError(
            f"{fields.where_of('tokenizer_source')}: tokenizer and tokenizer_source say the same; keep one"
        )
    if source:
        return TokenizerChoice(_tokenizer_source(source), {}, None, source.where)
    return _tokenizer_mapping(mapping) if mapping else None


def _tokenizer_mapping(located: Located) -> TokenizerChoice:
    fields = MappingReader(located, "tokenizer", ("source", "tokens", "pad_to_multiple_of"))
    source, tokens = fields.get("source"), fields.get("tokens")
    if tokens is not None and not isinstance(tokens.value, dict):
        raise RecipeError(f"{tokens.where}: tokens must be a mapping of tokens to where they come from")
    entries = tokens.value.items() if tokens else ()
    choices = {text: _token(text, entry.value) for text, entry in entries}
    padding = fields.integer("pad_to_multiple_of", 1)
    return TokenizerChoice(_tokenizer_source(source) if source else "union", choices, padding, located.where)


def _tokenizer_source(located: Located) -> str | ModelReference:
    """``union``, ``base``, a model, or ``model:PATH`` as old configurations write it."""
    if not isinstance(located.value, str):
        return parse_reference(located)
    if located.value in _TOKENIZER_SOURCES:
        return located.value
    return parse_reference(Located(located.value.removeprefix("model:"), located.where))


def _token(text: str, located: Located) -> TokenChoice:
    """The source of one token's embedding."""
    if located.value is None:
        return TokenChoice(None, False, located.where)
    fields = MappingReader(located, f"token {text!r}", ("source", "force"))
    source, force = fields.get("source"), fields.flag("force", False)
    if source is None and force:
        raise RecipeError(f"{fields.where}: token {text!r} is forced, but has no source")
    return TokenChoice(_token_source(text, source) if source else None, force, located.where)


def _token_source(text: str, located: Located) -> ModelReference | ModelToken | str:
    if not isinstance(located.value, dict) or "kind" not in located.value:
        return parse_reference(located)
    fields = MappingReader(located, f"the source of token {text!r}", ("kind", "model", "token", "token_id"))
    kind = fields.text("kind")
    if kind not in _TOKEN_KINDS:
        raise RecipeError(
            f"{fields.where_of('kind')}: kind is {kind!r}, but must be {' or '.join(_TOKEN_KINDS)}"
        )
    if kind == "zero":
        if len(fields.entries) > 1:
            raise RecipeError(f"{fields.where}: a source of kind zero has no other key")
        return "zero"
    model = parse_reference(fields.need("model"))
    token, token_id = fields.text("token"), fields.integer("token_id", 0)
    if (token is None) == (token_id is None):
        raise RecipeError(f"{fields.where}: a model_token needs either 'token' or 'token_id'")
    return ModelToken(model, token, token_id)
