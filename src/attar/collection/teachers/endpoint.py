"""A teacher behind an endpoint that speaks OpenAI's chat API, through the ``openai`` client.

The client's own retries are off: limits, retries and cost are counted in one place (``crew.py``). The key
comes from an environment variable, and leaves this file only in the header of a request: whatever the
endpoint sends back is redacted, and exceptions of the client, which hold the request with its headers, are
turned into :class:`TeacherFailure`.

An endpoint is not trusted: the bytes of an answer are bounded by ``max_tokens`` (a compressed one, which was
not asked for, is none), its counts by what was sent, and prompts do not follow a redirect to another host.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from attar.checkpoint.card import Parent
from attar.checkpoint.licences import identify_service
from attar.collection.redact import Redactor
from attar.collection.requests import TeacherRequest
from attar.collection.retry import TeacherFailure, effect_of, retry_after
from attar.collection.settings import CollectSettings
from attar.collection.teachers import TeacherAnswer
from attar.errors import MissingExtraError, SettingsError, UsageError

_PATH = "/chat/completions"
_BYTES, _BYTES_A_TOKEN = 1 << 20, 512
"""Most bytes of an answer, for all of it and for each token that it may have."""
_LATEST = 1 << 40  # seconds since 1970: what is later is no time
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
        self._most_tokens = settings.answers.max_tokens
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
        client_class, http_client_class = _client_classes()
        self._client = client_class(
            base_url=self.url,
            api_key=self._key or "none",
            max_retries=0,
            timeout=self._timeout,
            default_headers={"Accept-Encoding": "identity"},
            http_client=http_client_class(event_hooks={"response": [self._check]}),
        )
        self._client.organization = self._client.project = None  # variables for another host

    async def ask(self, request: TeacherRequest) -> TeacherAnswer | TeacherFailure:
        """See :class:`attar.collection.teachers.Teacher`."""
        import openai

        body: dict[str, Any] = {**request.options, **({"seed": request.seed} if self.seeded else {})}
        headers = {} if self._key else {"Authorization": openai.Omit()}
        messages: Any = list(request.messages)
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.chat.completions.with_raw_response.create(
                    model=self.name, messages=messages, extra_body=body, extra_headers=headers
                )
            return self._answer(json.loads(response.http_response.content), request)
        except _Refused as error:
            return error.failure
        except openai.APIStatusError as error:
            return self._status_failure(error)
        except (TimeoutError, openai.APITimeoutError):
            return TeacherFailure(f"no answer within {self._timeout:g} s", "retry", charged=True)
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, _Refused):  # older clients wrap it
                return error.__cause__.failure
            cause = type(error.__cause__).__name__
            message = self._redactor.error(f"connection failed: {error.__cause__ or error}")
            return TeacherFailure(message, "retry", charged=cause not in _NOT_SENT)
        except (openai.OpenAIError, ValueError, RecursionError) as error:  # half an answer is no JSON
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

    async def _check(self, response: Any) -> None:
        """Look at a response before its body is read, and bound the body.

        Raises:
            _Refused: it is compressed, or a redirect to another host or port.
        """
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            message = self._redactor.error(f"not an answer: compressed ({encoding}), which was not asked for")
            raise _Refused(TeacherFailure(message, "retry", charged=True))
        if response.has_redirect_location:
            self._check_redirect(response.status_code, response.request.url, response.headers["location"])
        response.stream = _bounded(response.stream, _BYTES + _BYTES_A_TOKEN * self._most_tokens)

    def _check_redirect(self, status: int, address: Any, location: str) -> None:
        try:
            target = address.join(location)
            same = (target.scheme, target.host, target.port) == (address.scheme, address.host, address.port)
        except Exception:  # no address; what the client raises depends on its version
            same = False
        if not same:
            text = f"{status}: sends requests on to {location}; no prompt is sent there"
            hint = "give that address as --teacher, if it is the one you mean"
            raise _Refused(TeacherFailure(self._redactor.error(text), "stop", hint=hint))

    def _answer(self, content: Any, request: TeacherRequest) -> TeacherAnswer | TeacherFailure:
        """The first choice; whatever lacks one is half an answer."""
        try:
            choice = content["choices"][0]
            message = choice["message"]
            usage = content.get("usage")
            counts = usage if isinstance(usage, dict) else {}
            answer = TeacherAnswer(
                content=self._text(message.get("content") or ""),
                finish_reason=self._text_or(choice.get("finish_reason"), "stop"),
                reasoning=self._text_or(message.get("reasoning_content") or message.get("reasoning"), ""),
                prompt_tokens=_count(counts.get("prompt_tokens"), request.most_prompt_tokens),
                completion_tokens=_count(counts.get("completion_tokens"), self._most_tokens),
                created=_count(content.get("created"), _LATEST),
            )
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            message = self._redactor.error(f"not a chat completion: {type(error).__name__}: {error}")
            return TeacherFailure(message, "retry", charged=True)
        return answer

    def _text_or(self, value: Any, otherwise: str) -> str:
        """A text beside the answer, which is kept without it."""
        return self._text(value) if isinstance(value, str) and value else otherwise

    def _text(self, value: Any) -> str:
        """Text without the key, and without halves of surrogate pairs."""
        if not isinstance(value, str):
            raise TypeError(f"{type(value).__name__} where text was expected")
        decoded = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._redactor.answer(decoded)

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


def _client_classes() -> tuple[Any, Any]:
    """The client, and what it sends requests with."""
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError:
        raise MissingExtraError("openai", "collect") from None
    return AsyncOpenAI, DefaultAsyncHttpxClient


class _Refused(Exception):  # noqa: N818 (it carries the failure through the client)
    """A response that is not read."""

    def __init__(self, failure: TeacherFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _bounded(stream: Any, most: int) -> Any:
    """The stream of a response that ends with :class:`_Refused` after ``most`` bytes."""
    # of the client's own library, which has had two names
    base: Any = next(kind for kind in type(stream).__mro__ if kind.__name__ == "AsyncByteStream")

    class Bounded(base):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            read = 0
            async for part in stream:
                read += len(part)
                if read > most:
                    message = f"not an answer: more than {most:,} bytes, the most of --max-tokens"
                    raise _Refused(TeacherFailure(message, "retry", charged=True))
                yield part

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _reason(error: Any) -> str:
    """What the endpoint says about an error."""
    body = error.body
    message = body.get("message") if isinstance(body, dict) else None
    return str(message or error.message)


def _count(value: Any, most: int) -> int | None:
    """A whole number; None where the endpoint sends something else, or more than there can be."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None
