"""Prompts in the textbook manner: a topic, a reader, a kind of text.

Phi-1 and Phi-1.5 (Gunasekar et al. 2023, "Textbooks Are All You Need", arXiv 2306.11644; Li et al. 2023,
"Textbooks Are All You Need II", arXiv 2309.05463) learn from text that a larger model writes. Left alone, a
model writes the same few texts again and again; the papers get variety from outside, by constraints in the
prompt: the topic and the audience, drawn at random.

Differs from the papers: they do not publish their prompts. These are attar's own, and the combinations are
drawn without replacement: each topic equally often, never the same combination twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from attar.collection.settings import PromptSettings
from attar.errors import SettingsError

AUDIENCES = (
    "a curious child of ten",
    "a pupil in the middle of secondary school",
    "a first-year student of the subject",
    "a student of another subject who needs the basics",
    "a professional who learned this long ago and has forgotten it",
    "a teacher who prepares a lesson",
)
GENRES = {
    "section": "Write a section of a textbook on {topic} for {audience}. Define each term where it first "
    "appears, and build from simple to difficult.",
    "example": "Work through one complete example about {topic} for {audience}. Show each step, and say why "
    "it is taken.",
    "exercises": "Write three exercises about {topic} for {audience}, each followed by its full solution.",
    "questions": "Write a dialogue in which {audience} asks about {topic}, and an expert answers precisely.",
    "mistakes": "Explain to {audience} the mistakes that are common with {topic}: what goes wrong, why it is "
    "tempting, and what is right.",
    "story": "Write a short story that teaches {audience} one idea of {topic}. The idea must be correct.",
    "comparison": "Compare two ideas or methods within {topic} for {audience}: what they share, where they "
    "differ, and when to use which.",
    "summary": "Summarize what {audience} should remember about {topic}, and how the parts hang together.",
}


def textbook_prompts(topics: Sequence[str], settings: PromptSettings, seed: int) -> list[str]:
    """Prompts made from topics: ``topic_prompts`` of them, or one for each combination.

    Rounds over the topics; in each, a topic takes the next pair of its own shuffled (audience, genre) pairs.
    More prompts, or further topics at the end, keep those of a smaller number.

    Args:
        settings: audiences and genres; a genre is a name of :data:`GENRES`, or words such as "a poem".

    Raises:
        SettingsError: there are fewer combinations than prompts.
    """
    topics = list(dict.fromkeys(topics))
    audiences, genres = settings.audiences or AUDIENCES, settings.genres or tuple(GENRES)
    pairs = list(dict.fromkeys(product(audiences, genres)))
    count = settings.topic_prompts or len(topics) * len(pairs)
    if count > len(topics) * len(pairs):
        raise SettingsError(
            "topic_prompts", count, f"at most {len(topics) * len(pairs)}: topics x audiences x genres"
        )
    orders = {topic: random.Random(f"{seed}:{topic}").sample(pairs, len(pairs)) for topic in topics}
    rounds = ((topic, *orders[topic][number]) for number in range(len(pairs)) for topic in topics)
    return [_text(*combination) for combination, _ in zip(rounds, range(count), strict=False)]


def _text(topic: str, audience: str, genre: str) -> str:
    words = GENRES.get(genre, f"Write {genre} about {{topic}} for {{audience}}.")
    return words.replace("{topic}", topic).replace("{audience}", audience)
