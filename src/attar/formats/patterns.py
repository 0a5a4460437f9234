"""Regular expressions that a checkpoint brings along. Nobody knows who wrote them, so none may be long and no
match may take long: some patterns need time exponential in the length of a name."""

from __future__ import annotations

import regex

from attar.errors import CheckpointError

LONGEST = 4096  # characters of a pattern
SECONDS = 1.0  # of one match


def matches_start(pattern: str, name: str) -> bool:
    """Whether a name begins with a match of the pattern, as ``re.match`` says it.

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
