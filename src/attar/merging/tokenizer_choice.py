"""``tokenizer`` and ``tokenizer_source`` of a merge's YAML."""

from __future__ import annotations

from attar.errors import RecipeError
from attar.merging.config.fields import Fields
from attar.merging.config.schema import ModelToken, TokenChoice, TokenizerChoice
from attar.merging.reference import ModelReference, parse_reference
from attar.yaml import Located

_SOURCES = ("union", "base")
_KINDS = ("zero", "model_token")


def parse_tokenizer(located: Located, key: str) -> TokenizerChoice:
    """Read either key.

    Args:
        located: its value.
        key: ``"tokenizer"`` (a mapping) or ``"tokenizer_source"`` (a source).

    Raises:
        RecipeError: names file and line.
    """
    if key == "tokenizer_source":
        return TokenizerChoice(_source(located), {}, None, located.where)
    fields = Fields(located, "tokenizer", ("source", "tokens", "pad_to_multiple_of"))
    source = fields.get("source")
    tokens = fields.get("tokens")
    if tokens is not None and not isinstance(tokens.value, dict):
        raise RecipeError(f"{tokens.where}: tokens must be a mapping of tokens to where they come from")
    choices = {} if tokens is None else {text: _token(text, e.value) for text, e in tokens.value.items()}
    padding = fields.number("pad_to_multiple_of", 1)
    return TokenizerChoice(_source(source) if source else "union", choices, padding, located.where)


def _source(located: Located) -> str | ModelReference:
    """``union``, ``base``, a model, or ``model:PATH`` as old configs have it."""
    if isinstance(located.value, str):
        if located.value in _SOURCES:
            return located.value
        return parse_reference(Located(located.value.removeprefix("model:"), located.where))
    return parse_reference(located)


def _token(text: str, located: Located) -> TokenChoice:
    """Where one token's embedding comes from."""
    if located.value is None:
        return TokenChoice(None, False, located.where)
    fields = Fields(located, f"token {text!r}", ("source", "force"))
    source = fields.get("source")
    force = fields.flag("force", False)
    if source is None:
        if force:
            raise RecipeError(f"{fields.where}: token {text!r} is forced, but has no source")
        return TokenChoice(None, False, located.where)
    return TokenChoice(_token_source(text, source), force, located.where)


def _token_source(text: str, located: Located) -> ModelReference | ModelToken | str:
    if not isinstance(located.value, dict) or "kind" not in located.value:
        return parse_reference(located)
    fields = Fields(located, f"the source of token {text!r}", ("kind", "model", "token", "token_id"))
    kind = fields.text("kind")
    if kind not in _KINDS:
        raise RecipeError(f"{fields.place('kind')}: kind is {kind!r}, but must be {' or '.join(_KINDS)}")
    if kind == "zero":
        if len(fields.entries) > 1:
            raise RecipeError(f"{fields.where}: a source of kind zero has no other key")
        return "zero"
    model, token, number = (
        parse_reference(fields.need("model")),
        fields.text("token"),
        fields.number("token_id", 0),
    )
    if (token is None) == (number is None):
        raise RecipeError(f"{fields.where}: a model_token needs either 'token' or 'token_id'")
    return ModelToken(model, token, number)
