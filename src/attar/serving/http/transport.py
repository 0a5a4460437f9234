"""Where the server listens besides a port, and who may call it from a web page: unix socket, TLS, CORS."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from attar.errors import OutputError, SettingsError
from attar.options import setting

if TYPE_CHECKING:
    from fastapi import FastAPI

BACKLOG = 1024  # connections that wait to be accepted; beyond, a client's kernel tries again after a second
EXPOSED = ("X-Request-Id", "X-Ignored-Fields", "Retry-After")  # headers that a page may read
PREFLIGHT_S = 600  # a browser remembers what is allowed


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """How clients reach the server."""

    tls_cert: str = setting("", "file of the TLS certificate and its chain, PEM")
    tls_key: str = setting("", "file of the certificate's private key, PEM")
    cors_origin: tuple[str, ...] = setting(
        (), "origin of web pages that may call the server, https://example.com; *: all"
    )

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            name = "tls_key" if self.tls_cert else "tls_cert"
            raise SettingsError(name, "", "given where the other of --tls-cert and --tls-key is")
        for name in ("tls_cert", "tls_key"):
            file = getattr(self, name)
            if file and not Path(file).is_file():
                raise SettingsError(name, file, "a file")
        self.ssl_context()
        for origin in self.cors_origin:
            if origin != "*" and not _is_origin(origin):
                raise SettingsError("cors_origin", origin, "an origin like https://example.com, or *")

    def ssl_context(self) -> ssl.SSLContext | None:
        """Of TLS; None: no TLS.

        Raises:
            SettingsError: the files are no certificate and its key.
        """
        if not self.tls_cert:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror or str(error)
            wanted = f"a certificate of the key in --tls-key, both PEM without a password ({reason})"
            raise SettingsError("tls_cert", self.tls_cert, wanted) from error
        return context


def add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Let web pages of some origins call the application; without credentials of the browser's own."""
    if not origins:
        return
    from starlette.middleware.cors import CORSMiddleware

    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=list(EXPOSED),
        max_age=PREFLIGHT_S,
    )


def listen_on_unix(path: str) -> socket.socket:
    """The open unix socket, of this user alone; one that a dead server left is replaced.

    Raises:
        OutputError: the path is in use, or cannot be written.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        _remove_dead_socket(path)
        listening.bind(path)
        os.chmod(path, 0o600)  # noqa: PTH101
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        raise OutputError(
            f"cannot listen on {path}: {reason}", hint="choose another --host unix:PATH"
        ) from error
    return listening


def _remove_dead_socket(path: str) -> None:
    """Remove a socket on which nobody listens.

    Raises:
        OSError: somebody listens.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and text == text.lower().rstrip("/")
    except ValueError:
        return False
