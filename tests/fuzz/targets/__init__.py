"""What is fuzzed: name of the module -> how its inputs are mutated.

A target module has two functions:

    seeds(folder) -> list[bytes]                     accepted inputs to begin from; ``folder`` is scratch
    target(folder) -> Callable[[bytes], bool]        handles one input; raises only what a user may be shown
"""

from __future__ import annotations

TARGETS: dict[str, str] = {
    "gguf": "bytes",
    "imatrix": "bytes",
    "safetensors": "bytes",
    "checkpoint": "json",
    "card": "json",
    "recipe": "text",
    "merge": "text",
    "jsonl": "json",
    "body": "json",
    "grammar": "json",
}
