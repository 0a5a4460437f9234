"""Patterns of module names in a quantization_config.

The regular expressions in it come from strangers, so none may be long and no match may take long: some
patterns need time exponential in the length of a name.
"""

from __future__ import annotations

import regex

from attar.errors import CheckpointError

CONV1D = ("gpt2", "openai-gpt", "imagegpt")  # families whose projections are Conv1D modules
LONGEST = 4096  # characters of a pattern
SECONDS = 1.0  # of one match


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
