"""Sampling options by the names that llama.cpp and Ollama share; those without an effect here are noted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from attar.runtime.sampling.params import MAX_STOPS
from attar.serving.http.body_model import StrictModel
from attar.serving.http.protocol import StopString

_HEADER_NAME = re.compile(r"[\w.-]{1,40}", re.ASCII)
_MOST_NOTED = 20
_MIN_TOP_P = 1e-9  # top_p 0 keeps the likeliest token, as elsewhere


def _integral(value: Any) -> Any:
    """JSON of many clients writes whole numbers as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_integral)]


class LlamaOptions(StrictModel):
    """Of one request. A negative temperature takes the likeliest token, a negative seed is a random one."""

    model_config = ConfigDict(extra="allow")

    temperature: float | None = Field(None, le=1e6)
    top_k: Annotated[WholeNumber, Field(le=2**31)] | None = None
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    seed: Annotated[WholeNumber, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The given ones as sampling parameters."""
        fields = {
            "temperature": None if self.temperature is None else max(self.temperature, 0.0),
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "top_p": None if self.top_p is None else max(self.top_p, _MIN_TOP_P),
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed if self.seed is not None and self.seed >= 0 else None,
            "stop": self.stop,
        }
        return {name: value for name, value in fields.items() if value is not None}


def llama_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by the names of llama.cpp and Ollama."""
    return {"repeat_penalty" if name == "repetition_penalty" else name: fields[name] for name in fields}


def noted_fields(fields: Mapping[str, Any] | None) -> list[str]:
    """Names of fields without an effect that a header can have; not all of very many."""
    names = [name for name, value in (fields or {}).items() if value is not None]
    return [name for name in names if _HEADER_NAME.fullmatch(name)][:_MOST_NOTED]
