"""``options`` of a request, and the sampling parameters that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from attar.runtime.sampling.params import MAX_STOPS
from attar.serving.http.body_model import StrictModel
from attar.serving.http.protocol import StopString

DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's, where neither the request nor the model's generation_config.json says anything."""


def _integral(value: Any) -> Any:
    """JSON of many clients writes whole numbers as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_integral)]


class OllamaOptions(StrictModel):
    """Those with an effect here; the others are noted."""

    model_config = ConfigDict(extra="allow")

    num_predict: WholeNumber | None = None
    num_ctx: Annotated[WholeNumber, Field(ge=0)] | None = None
    temperature: float | None = Field(None, ge=0, le=1e6)
    top_k: Annotated[WholeNumber, Field(ge=-1, le=2**31)] | None = None
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    seed: Annotated[WholeNumber, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None

    def chat_fields(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a request to /v1/chat/completions.

        Args:
            defaults: of sampling parameters, of the model.
        """
        given = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop": self.stop,
            "seed": self.seed if self.seed is not None and self.seed >= 0 else None,
            "max_completion_tokens": self.num_predict if self.num_predict and self.num_predict > 0 else None,
        }
        missing = {name: value for name, value in DEFAULTS.items() if name not in defaults}
        return missing | {name: value for name, value in given.items() if value is not None}
