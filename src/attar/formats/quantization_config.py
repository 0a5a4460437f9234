"""A word of quantization configs that several layouts share."""

from __future__ import annotations

CONV1D = ("gpt2", "openai-gpt", "imagegpt")  # families whose projections are Conv1D modules
