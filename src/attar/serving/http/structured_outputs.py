"""Fields that hold an answer to a form: a JSON schema, a regular expression, a choice, a grammar."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, model_validator

from attar.runtime.sampling.params import MAX_STOP_CHARACTERS
from attar.serving.http.body_model import StrictModel

MAX_CHOICES = 256
Choice = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class JsonSchema(BaseModel):
    """``response_format.json_schema``."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with, and only with, type json_schema")
        return self

    def schema_text(self) -> str | None:
        """The JSON schema of the completion; None: free text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return '{"type": "object"}' if self.type == "json_object" else None


class StructuredOutputs(StrictModel):
    """vLLM's: what the completion must be; exactly one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        values = (self.json_, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in values) != 1:
            raise ValueError("give one of json, regex, choice and grammar")
        return self

    def guide(self) -> dict[str, str]:
        """The sampling parameter."""
        if self.choice is not None:
            return {"grammar": "start: " + " | ".join(json.dumps(text) for text in self.choice)}
        if self.regex is not None:
            return {"regex": self.regex}
        if self.grammar is not None:
            return {"grammar": self.grammar}
        return {"json_schema": self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)}
