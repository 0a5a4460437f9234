"""A real model through every verb, with its peers in the same run: SmolLM2-135M-Instruct.

    python benchmarks/real.py --parts quality gguf tasks pipeline table  what small files keep
    python benchmarks/real.py --parts speed serving kv speculation       speed and memory

Each part prints its table in Markdown. What ``--help`` does not show belongs to a part: options that this
command does not know are handed on to every part that is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from attar.errors import AttarError

sys.path.insert(0, str(Path(__file__).parent))

PARTS = {
    "quality": "real_quality:quality",
    "gguf": "real_quality:gguf",
    "tasks": "real_table:tasks",
    "pipeline": "real_quality:pipeline",
    "table": "real_table:table",
    "speed": "real_serving:speed",
    "serving": "real_serving:serving",
    "kv": "real_serving:kv",
    "speculation": "real_serving:speculation",
}


def part(name: str) -> Callable[[list[str]], str]:
    """The function of a part: it takes the rest of the command line and returns Markdown."""
    module, _, function = PARTS[name].partition(":")
    part: Callable[[list[str]], str] = getattr(importlib.import_module(module), function)
    return part


def main() -> None:
    """Run the parts, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["quality", "gguf", "tasks"])
    args, rest = parser.parse_known_args()
    for name in args.parts:
        try:
            print(part(name)(rest), end="\n\n", flush=True)
        except AttarError as error:
            raise SystemExit(f"{name}: {error}") from None


if __name__ == "__main__":
    main()
