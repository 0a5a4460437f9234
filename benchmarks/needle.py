"""A needle that a small model can find: a name with a word, stated three times in foreign code.

``self.<name>_<word>`` stands in the first 60 % of the prompt; at the end ``self.<name>_`` is given. The
answer is one of ten words, drawn alike: a model that has not seen it is right in a tenth of the cases.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
RIVALS = 10  # words to choose from, the right one among them


@dataclass(frozen=True)
class Case:
    """A prompt, and tokens that are given one by one after it.

    Args:
        words: for a needle, the tokens to choose from at the end, the right one first.
    """

    prompt: list[int]
    given: list[int]
    words: tuple[int, ...] = ()


def hidden(
    encode: Callable[[str], list[int]],
    vocabulary: Mapping[str, int],
    stream: Sequence[int],
    length: int,
    seed: int,
) -> Case:
    """A name with one of ten words, three times in the first 60 % of foreign code, and the question."""
    draw = random.Random(seed)
    name = "".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(3))
    known = sorted((text, token) for text, token in vocabulary.items() if _word(text))
    words = draw.sample(known, RIVALS)
    stated = encode(f"\n    self.{name}_{words[0][0]} = 0\n")
    question = encode(f"\n        self.{name}_")
    start = draw.randrange(len(stream) - length)
    code = stream[start : start + length - 3 * len(stated) - len(question)]
    offsets = sorted(int(len(code) * draw.uniform(0.05, 0.6)) for _ in range(3))
    prompt: list[int] = []
    for before, after in zip([0, *offsets], [*offsets, len(code)], strict=True):
        prompt += [*code[before:after], *(stated if after < len(code) else [])]
    return Case([*prompt, *question[:-2]], question[-2:], tuple(token for _, token in words))


def _word(text: str) -> bool:
    return re.fullmatch("[a-z]{4,}", text) is not None
