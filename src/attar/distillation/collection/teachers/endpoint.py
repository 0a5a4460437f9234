"""A teacher behind an endpoint that speaks OpenAI's chat API, through the ``openai`` client.

The client's own retries are off: limits, retries and cost are counted in one place (``crew.py``). The key
comes from an environment variable, and leaves this file only in the header of a request: whatever the
endpoint sends back is redacted, and exceptions of the client, which hold the request with its headers, are
turned into :class:`TeacherFailure`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any
from urllib.parse import urlsplit

from attar.checkpoint.card import Parent
from attar.checkpoint.licences import identify_service
from attar.distillation.collection.redact import Redactor
from attar.distillation.collection.requests import TeacherRequest
from attar.distillation.collection.retry import TeacherFailure, effect_of, retry_after
from attar.distillation.collection.settings import CollectSettings
from attar.distillation.collection.teachers import TeacherAnswer
from attar.errors import MissingExtraError, SettingsError, UsageError

_PATH = "/chat/completions"
_NOT_SENT = (
    "ConnectError",
    "ConnectTimeout",
    "PoolTimeout",
    "UnsupportedProtocol",
)  # of httpx: nothing was sent


def is_url(teacher: str) -> bool:
    """Whether a teacher is an endpoint."""
    return teacher.lower().startswith(("http://", "https://"))


def base_url(teacher: str) -> str:
    """The endpoint's address as the client takes it.

    Raises:
        UsageError: not an address, or one with credentials in it, which would end up in files.
    """
    try:
        parts = urlsplit(teacher)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host:
        raise UsageError("--teacher is no address of a host", hint="such as https://api.openai.com/v1")
    if "@" in teacher or parts.query or parts.fragment:
        raise UsageError(
            "--teacher: the address has more than host and path in it",
            hint="put a key into an environment variable, and name it with --key-env",
        )
    return teacher.rstrip("/").removesuffix(_PATH).rstrip("/")


class EndpointTeacher:
    """A model at an endpoint.

    Args:
        url: its address up to and including ``/v1``.

    Raises:
        UsageError: see :func:`base_url`.
        SettingsError: no model is named.
        MissingExtraError: the package ``openai`` is not installed.
    """

    def __init__(self, url: str, settings: CollectSettings) -> None:
        if not settings.endpoint.model:
            raise SettingsError("model", "", "the name of a model at the endpoint")
        self.url, self.name = base_url(url), settings.endpoint.model
        self.identity, self.seeded = f"{self.url} {self.name}", settings.answers.send_seed
        variable = settings.endpoint.key_env
        self._variable = variable
        self._key = "" if variable == "none" else os.environ.get(variable, "").strip()
        self._redactor = Redactor(self._key)
        self._timeout = settings.endpoint.timeout_s
        self._client: Any = None

    @property
    def host(self) -> str:
        """Name of the machine."""
        return urlsplit(self.url).hostname or ""

    @property
    def exposed_key(self) -> bool:
        """Whether the key would cross a network unencrypted."""
        local = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return bool(self._key) and not local and urlsplit(self.url).scheme == "http"

    def prepare(self) -> None:
        """Make the client."""
        client_class = _client_class()
        self._client = client_class(
            base_url=self.url, api_key=self._key or "none", max_retries=0, timeout=self._timeout
        )
        self._client.organization = self._client.project = None  # variables for another host

    async def ask(self, request: TeacherRequest) -> TeacherAnswer | TeacherFailure:
        """See :class:`attar.distillation.collection.teachers.Teacher`."""
        import openai

        body: dict[str, Any] = {**request.options, **({"seed": request.seed} if self.seeded else {})}
        headers = {} if self._key else {"Authorization": openai.Omit()}
        messages: Any = list(request.messages)
        try:
            async with asyncio.timeout(self._timeout):
                completion = await self._client.chat.completions.create(
                    model=self.name, messages=messages, extra_body=body, extra_headers=headers
                )
            return self._answer(completion)
        except openai.APIStatusError as error:
            return self._status_failure(error)
        except (TimeoutError, openai.APITimeoutError):
            return TeacherFailure(f"no answer within {self._timeout:g} s", "retry", charged=True)
        except openai.APIConnectionError as error:
            cause = type(error.__cause__).__name__
            message = self._redactor.error(f"connection failed: {error.__cause__ or error}")
            return TeacherFailure(message, "retry", charged=cause not in _NOT_SENT)
        except (openai.OpenAIError, ValueError) as error:  # half an answer is no JSON
            message = self._redactor.error(f"not an answer: {type(error).__name__}: {error}")
            return TeacherFailure(message, "retry", charged=True)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    def lineage(self) -> Parent:
        """Host and model; the terms of the host hold for what it answers."""
        return Parent(
            role="signal",
            name=f"{self.name} at {self.host}",
            stage="original",
            settings={"url": self.url, "model": self.name},
            licence=identify_service(self.url, self.name),
        )

    def _answer(self, completion: Any) -> TeacherAnswer | TeacherFailure:
        """The first choice; whatever lacks one is half an answer."""
        try:
            content = completion.to_dict()
            choice = content["choices"][0]
            message = choice["message"]
            text, reason = message.get("content") or "", choice.get("finish_reason") or "stop"
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            usage = content.get("usage") or {}
            answer = TeacherAnswer(
                content=self._text(text),
                finish_reason=self._text(reason),
                reasoning=self._text(reasoning),
                prompt_tokens=_count(usage.get("prompt_tokens")),
                completion_tokens=_count(usage.get("completion_tokens")),
                created=_count(content.get("created")),
            )
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            message = self._redactor.error(f"not a chat completion: {type(error).__name__}: {error}")
            return TeacherFailure(message, "retry", charged=True)
        return answer

    def _text(self, value: Any) -> str:
        """Text without the key, and without halves of surrogate pairs."""
        if not isinstance(value, str):
            raise TypeError(f"{type(value).__name__} where text was expected")
        whole = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._redactor.answer(whole)

    def _status_failure(self, error: Any) -> TeacherFailure:
        status: int = error.status_code
        hint = None
        if status in (401, 403):
            have = (
                f"{self._variable} is not set" if not self._key else f"the key in {self._variable} is refused"
            )
            hint = f"{have}; --key-env names another variable"
        elif status == 404:
            hint = "is the address right (up to /v1), and does it have this --model?"
        return TeacherFailure(
            self._redactor.error(f"{status}: {_reason(error)}"),
            effect_of(status, error.code),
            retry_after=retry_after(error.response.headers),
            limited=status == 429,
            charged=status >= 500,
            hint=hint,
        )


def _client_class() -> Any:
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise MissingExtraError("openai", "collect") from None
    return AsyncOpenAI


def _reason(error: Any) -> str:
    """What the endpoint says about an error."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return str(message or error.message)


def _count(value: Any) -> int | None:
    """A whole number; None where the endpoint sends something else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
