"""``options`` of a request, and the sampling parameters that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from attar.serving.http.llama_options import LlamaOptions, WholeNumber

DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's, where neither the request nor the model's generation_config.json says anything."""


class OllamaOptions(LlamaOptions):
    """Those with an effect here; the others are noted."""

    num_predict: WholeNumber | None = None
    num_ctx: Annotated[WholeNumber, Field(ge=0)] | None = None

    def chat_fields(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a request to /v1/chat/completions.

        Args:
            defaults: of sampling parameters, of the model.
        """
        missing = {name: value for name, value in DEFAULTS.items() if name not in defaults}
        limit = {"max_completion_tokens": self.num_predict} if (self.num_predict or 0) > 0 else {}
        return missing | self.sampling_fields() | limit
