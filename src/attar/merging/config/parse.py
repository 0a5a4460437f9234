"""mergekit's YAML read into :class:`~attar.merging.config.schema.MergeConfig`; errors name file and line.

Stricter than the reference: an unknown key, a parameter of no method, a model given twice, a parameter where
it is never looked up and a value of the wrong kind are errors, and not passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attar.errors import RecipeError, did_you_mean
from attar.merging.config.fields import Fields, parse_setting
from attar.merging.config.schema import (
    SEARCHED,
    MergeConfig,
    Module,
    Parameters,
    Setting,
    Slice,
    Source,
    TokenizerChoice,
)
from attar.merging.documents import in_order
from attar.merging.methods import METHODS
from attar.merging.methods.method import Method
from attar.merging.planning.parameters import check_kind, method_of
from attar.merging.reference import ModelReference, parse_reference
from attar.merging.tokenizer_choice import parse_tokenizer
from attar.yaml import Located, parse_documents, read_documents

DTYPES = ("bfloat16", "float16", "float32")

_TOP = (
    "merge_method",
    "models",
    "slices",
    "modules",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer",
    "tokenizer_source",
    "chat_template",
    "name",
)
_TOP_INSTEAD = {
    "random_seed": "the seed is a setting of the command: --seed",
    "out_path": "give the document a name; later documents use it in place of a model",
    "experts": "mixtures of experts are not made here",
    "gate_mode": "mixtures of experts are not made here",
}
_MODEL_INSTEAD = {
    "layer_range": "models are merged whole; for some of their layers write 'slices' with 'sources'",
    **dict.fromkeys(("weight", "density", "t", "lambda", "scale"), "this stands under the key 'parameters'"),
}
_SLICE_INSTEAD = {
    "residual_weight": "the reference reads residual_weight and never uses it; leave it out",
    "model": "the models of a slice stand in a list under 'sources'",
    "layer_range": "the layers stand beside each model, under 'sources'",
}
_SHAPES = ("models", "slices", "modules")
_OF_SOME_METHOD = {
    parameter.name for method in METHODS.values() for parameter in (*method.shared, *method.each)
}
"""What a configuration may hold for a method that does not use it, as those of mergekit do."""


def load_configs(path: Path) -> tuple[MergeConfig, ...]:
    """Read a file of one document or several.

    Returns:
        The documents; each comes after those whose results it uses, and the one without a name last.

    Raises:
        RecipeError: one line with file and line.
    """
    return _configs(read_documents(path), str(path))


def parse_configs(text: str, name: str = "merge.yml") -> tuple[MergeConfig, ...]:
    """:func:`load_configs` of a text that is at hand.

    Args:
        text: the YAML.
        name: what to call it in errors.
    """
    return _configs(parse_documents(text, name), name)


def read_located(located: Located) -> tuple[MergeConfig, ...]:
    """:func:`load_configs` of one document that is part of another file, such as a recipe."""
    return _configs([located], located.where)


def _configs(documents: Sequence[Located], name: str) -> tuple[MergeConfig, ...]:
    if not documents:
        raise RecipeError(f"{name}: is empty; a merge needs at least merge_method and models")
    return in_order([_document(document) for document in documents])


def _document(located: Located) -> MergeConfig:
    fields = Fields(located, "a merge", _TOP, _TOP_INSTEAD)
    method = _method(fields)
    base = _reference(fields, "base_model")
    if method.base == "required" and base is None:
        raise RecipeError(
            f"{fields.place('merge_method')}: {method.name} needs a base_model",
            hint="base_model: the model that the others were fine-tuned from"
            if method.models[1] != 1
            else "base_model: one of the two models",
        )
    dtype = _dtype(fields, "dtype")
    return MergeConfig(
        name=fields.text("name"),
        method=method.name,
        base=base,
        modules=_modules(fields, method),
        parameters=_parameters(fields, method, "merge"),
        dtype=dtype,
        out_dtype=_dtype(fields, "out_dtype"),
        tokenizer=_tokenizer(fields),
        chat_template=fields.text("chat_template"),
        where=located.where,
    )


def _method(fields: Fields) -> Method:
    name = fields.text("merge_method")
    if name is None:
        raise RecipeError(f"{fields.where}: a merge needs the key 'merge_method'")
    known = (*METHODS, *SEARCHED)
    if name not in known:
        raise RecipeError(
            f"{fields.place('merge_method')}: unknown merge_method {name!r}{did_you_mean(name, known)}"
        )
    return method_of(name)


def _dtype(fields: Fields, key: str) -> str | None:
    name = fields.text(key)
    if name is None or name.removeprefix("torch.") in DTYPES:
        return name and name.removeprefix("torch.")
    raise RecipeError(f"{fields.place(key)}: {key} is {name!r}, but must be {', '.join(DTYPES)}")


def _tokenizer(fields: Fields) -> TokenizerChoice | None:
    if fields.get("tokenizer") and fields.get("tokenizer_source"):
        raise RecipeError(
            f"{fields.place('tokenizer_source')}: tokenizer and tokenizer_source say the same; keep one"
        )
    for key in ("tokenizer", "tokenizer_source"):
        located = fields.get(key)
        if located is not None:
            return parse_tokenizer(located, key)
    return None


def _modules(fields: Fields, method: Method) -> tuple[Module, ...]:
    """What is merged: one module without a name for ``models`` and ``slices``."""
    if _shape(fields, _SHAPES) != "modules":
        slices = _slices(fields, method)
        return (Module(None, slices, {}, fields.where),)
    located = fields.need("modules")
    if not isinstance(located.value, dict) or not located.value:
        raise RecipeError(
            f"{fields.place('modules')}: modules must be a mapping of names to slices or models"
        )
    modules = []
    for name, entry in located.value.items():
        inner = Fields(entry.value, f"module {name!r}", ("models", "slices", "parameters"))
        _shape(inner, ("models", "slices"))
        settings = _parameters(inner, method, "merge")
        modules.append(Module(name, _slices(inner, method), settings, entry.where))
    return tuple(modules)


def _shape(fields: Fields, shapes: tuple[str, ...]) -> str:
    """Which one of these keys is there."""
    given = [key for key in shapes if key in fields.entries]
    if len(given) > 1:
        raise RecipeError(
            f"{fields.place(given[1])}: {given[1]!r} beside {given[0]!r};"
            f" {fields.what} has one of {', '.join(shapes)}"
        )
    if not given:
        raise RecipeError(f"{fields.where}: {fields.what} needs one of the keys {', '.join(shapes)}")
    return given[0]


def _slices(fields: Fields, method: Method) -> tuple[Slice, ...]:
    """The slices, or the one slice that ``models`` are."""
    if "models" in fields.entries:
        items = fields.listed("models")
        known = ("model", "parameters")
        sources = tuple(
            _source(Fields(item, "a model", known, _MODEL_INSTEAD), method, False) for item in items
        )
        return (_checked(Slice(sources, None, {}, fields.place("models"))),)
    return tuple(_slice(item, method) for item in fields.listed("slices"))


def _slice(located: Located, method: Method) -> Slice:
    known = ("sources", "base_model", "parameters")
    fields = Fields(located, "a slice", known, _SLICE_INSTEAD)
    keys = ("model", "layer_range", "parameters")
    items = fields.listed("sources")
    sources = tuple(_source(Fields(item, "a source", keys, {}), method, True) for item in items)
    base, settings = _reference(fields, "base_model"), _parameters(fields, method, "merge")
    return _checked(Slice(sources, base, settings, located.where))


def _source(fields: Fields, method: Method, sliced: bool) -> Source:
    model = parse_reference(fields.need("model"))
    layers = _layers(fields) if sliced else None
    return Source(model, layers, _parameters(fields, method, "model"), fields.where)


def _layers(fields: Fields) -> tuple[int, int]:
    """``layer_range``: first layer, and the one after the last."""
    located = fields.need("layer_range")
    plain = located.plain()
    numbers = isinstance(plain, list) and len(plain) == 2 and all(type(each) is int for each in plain)
    if not numbers or not 0 <= plain[0] < plain[1]:
        raise RecipeError(
            f"{located.where}: layer_range is {plain!r}, but must be [first, last + 1],"
            " with 0 <= first <= last"
        )
    return plain[0], plain[1]


def _checked(made: Slice) -> Slice:
    """No model twice; as many layers of each."""
    first: dict[ModelReference, str] = {}
    for source in made.sources:
        if source.model in first:
            raise RecipeError(
                f"{source.where}: the model {str(source.model)!r} is given twice"
                f" (first at {first[source.model]})",
                hint="to weigh it more, raise its weight",
            )
        first[source.model] = source.where
    lengths = [source.layers[1] - source.layers[0] for source in made.sources if source.layers]
    for source, length in zip(made.sources, lengths, strict=False):
        if length != lengths[0]:
            raise RecipeError(
                f"{source.where}: {length} layers of {source.model} beside {lengths[0]} layers of"
                f" {made.sources[0].model}; the sources of a slice have the same number of layers"
            )
    return made


def _reference(fields: Fields, key: str) -> ModelReference | None:
    located = fields.get(key)
    return parse_reference(located) if located else None


def _parameters(fields: Fields, method: Method, level: str) -> Parameters:
    """``parameters`` of a level: ``"merge"`` knows all of the method's, ``"model"`` those of a model.

    One that only other methods have is kept and never looked up; :mod:`attar.merging.remarks` says so.
    """
    located = fields.get("parameters")
    if located is None:
        return {}
    each = {parameter.name: parameter for parameter in method.each}
    shared = {parameter.name: parameter for parameter in method.shared}
    known = each if level == "model" else {**shared, **each}
    if not isinstance(located.value, dict):
        raise RecipeError(f"{located.where}: parameters must be a mapping of names to values")
    settings: dict[str, Setting] = {}
    for name, entry in located.value.items():
        if name in shared and name not in known:
            raise RecipeError(
                f"{entry.where}: {name} is one for all models; beside one of them it is never looked up",
                hint="move it to the parameters of the slice or of the merge",
            )
        if name not in known and name not in _OF_SOME_METHOD:
            raise RecipeError(
                f"{entry.where}: unknown parameter {name!r} of {method.name}{_nearest(name, known)}"
            )
        settings[name] = parse_setting(name, Located(entry.value.value, entry.where))
        if name in known:
            check_kind(known[name], settings[name])
    return settings


def _nearest(name: str, known: Mapping[str, object]) -> str:
    return did_you_mean(name, list(known))
