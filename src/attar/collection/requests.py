"""Requests: what a teacher is asked, each with a hash that names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.collection.prompts import ChatPrompt, Message
from attar.collection.settings import CollectSettings

_ID = 32  # hexadecimal digits: 128 bits
_BYTES_A_TOKEN = 4  # of usual text, for estimates
_TOKENS_A_MESSAGE = 16  # of a chat template around a message, at most


@dataclass(frozen=True)
class TeacherRequest:
    """One answer that is wanted.

    Args:
        id: hash of the teacher, the messages, the options and the number of the sample.
        options: of the sampling, with the names of OpenAI's API.
        seed: for the sampling, another one for each request.
    """

    id: str
    messages: tuple[Message, ...]
    options: dict[str, Any]
    seed: int
    where: str

    @property
    def prompt_bytes(self) -> int:
        return sum(len(canonical_json(message.get("content")).encode()) for message in self.messages)

    @property
    def prompt_tokens(self) -> int:
        """About as many tokens as the prompt has; only the teacher knows the number."""
        return self.prompt_bytes // _BYTES_A_TOKEN + _TOKENS_A_MESSAGE * len(self.messages) // 2

    @property
    def most_prompt_tokens(self) -> int:
        """A bound: a token has a byte at least."""
        return self.prompt_bytes + _TOKENS_A_MESSAGE * len(self.messages)


def make_requests(
    prompts: Sequence[ChatPrompt], settings: CollectSettings, teacher: str, *, seeded: bool
) -> list[TeacherRequest]:
    """Every sample of every prompt, in order.

    Args:
        teacher: what identifies it: another teacher makes other requests.
        seeded: whether the teacher gets a seed, so that another seed asks anew.
    """
    return list(_requests(prompts, settings, teacher, seeded))


def _requests(
    prompts: Sequence[ChatPrompt], settings: CollectSettings, teacher: str, seeded: bool
) -> Iterator[TeacherRequest]:
    options = request_options(settings)
    for prompt in prompts:
        for sample in range(settings.prompts.samples):
            content = {
                "teacher": teacher,
                "messages": list(prompt.messages),
                "options": options,
                "sample": sample,
                "seed": settings.seed if seeded else None,
            }
            id = sha256_text(canonical_json(content))[:_ID]
            yield TeacherRequest(id, prompt.messages, options, int(id[:7], 16), prompt.where)


def request_options(settings: CollectSettings) -> dict[str, Any]:
    """The options of a request; what the endpoint decides is left out."""
    answers = settings.answers
    given = {"temperature": answers.temperature, "top_p": answers.top_p, "stop": list(answers.stop) or None}
    options = {name: value for name, value in given.items() if value is not None}
    return {answers.limit_name: answers.max_tokens, **options, **answers.extra_fields()}
