"""What config.json says of a checkpoint's quantization, and what it does not: the number type of its weights.

The regular expressions in it come from strangers, so none may be long and no match may take long: some
patterns need time exponential in the length of a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError

OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that older writers made in place of ``quantization_config``, and the method of those that name
none."""
CONV1D = ("gpt2", "openai-gpt", "imagegpt")  # families whose projections are Conv1D modules
LONGEST = 4096  # characters of a pattern
SECONDS = 1.0  # of one match


def read_quantization_config(checkpoint: Any) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a checkpoint with its ``quant_method``; None where it is dense.

    Raises:
        CheckpointError: an older writer's file is no JSON object.
    """
    config = checkpoint.config.get("quantization_config")
    if config:
        return config  # type: ignore[no-any-return]
    if not any(name.endswith(".qweight") for name in checkpoint.tensors):
        return None
    for name, method in OLD_FILES.items():
        if (checkpoint.path / name).is_file():
            return {"quant_method": method, **read_json(checkpoint.path / name)}
    return None


def matches_start(pattern: str, name: str) -> bool:
    """Whether a name starts with a match of the pattern, like ``re.match``.

    Raises:
        CheckpointError: the pattern is no regular expression, too long or too slow.
    """
    if len(pattern) > LONGEST:
        raise _refused(pattern, f"has {len(pattern)} characters, more than {LONGEST}")
    try:
        return regex.compile(pattern).match(name, timeout=SECONDS) is not None
    except regex.error as error:
        raise _refused(pattern, f"is no regular expression ({error})") from error
    except TimeoutError as error:
        raise _refused(pattern, f"takes more than {SECONDS:g} s for {name[:60]!r}") from error


def _refused(pattern: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: the pattern {pattern[:60]!r} {why}", hint="the file is damaged, or made to do harm"
    )
