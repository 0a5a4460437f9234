"""mergekit's YAML, up to the checked configuration and its text again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attar.errors import AttarError
from attar.merging.config.documents import parse_configs

SEEDS = (
    b"""merge_method: ties
base_model: org/base
models:
  - model: org/a
    parameters: {weight: [0, 0.5, 1], density: 0.5}
  - model: org/b+org/lora
    parameters: {weight: [{filter: mlp, value: 0.5}, {value: 1}], density: 0.3}
parameters: {normalize: true, int8_mask: true}
dtype: bfloat16
tokenizer: {source: union, tokens: {"<a>": {source: org/a, force: true}, "<b>": {source: {kind: zero}}}}
chat_template: chatml
""",
    b"""merge_method: slerp
slices:
  - sources:
      - {model: a, layer_range: [0, 4]}
      - {model: b, layer_range: [0, 4]}
parameters:
  t: [{filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}, {value: 0.5}]
base_model: a
dtype: float16
out_dtype: float32
tokenizer_source: base
""",
    b"""name: first
merge_method: dare_ties
base_model: x@main
models: [{model: y, parameters: {weight: 0.5, density: 0.5}}, {model: z}]
---
merge_method: passthrough
modules:
  default:
    slices: [{sources: [{model: first, layer_range: [0, 2], parameters: {scale: 0.5}}]}]
""",
)


def seeds(folder: Path) -> list[bytes]:
    """Documents of each shape."""
    return list(SEEDS)


def target(folder: Path) -> Callable[[bytes], bool]:
    """Parses the text."""

    def handle(data: bytes) -> bool:
        try:
            parse_configs(data.decode("utf-8", "replace"))
            return True
        except AttarError:
            return False

    return handle
