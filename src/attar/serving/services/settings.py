"""Settings of services; free of torch and of gRPC."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attar.errors import SettingsError, UsageError
from attar.options import setting

KEY_VARIABLE = "ATTAR_SERVICE_KEY"
ROLES = ("draft", "target", "coordinator")
_ENDPOINT = re.compile(r"(https?://|grpcs?://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})/?")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Draft, target and coordinator as processes of their own."""

    role: str | None = setting(
        None,
        "draft: MODEL drafts for others; target: MODEL runs for a coordinator, and answers requests itself; "
        "coordinator: joins the two, with the tokenizer of MODEL; none: an ordinary server",
        choices=ROLES,
    )
    target_endpoint: str | None = setting(None, "HOST:PORT of the target, for a coordinator")
    draft_endpoint: tuple[str, ...] = setting(
        (), "HOST:PORT of a service that drafts, for a coordinator or an ordinary server"
    )
    grpc_port: int = setting(9000, "port for other services, of a draft or a target; 0: any that is free")
    service_ca: str = setting(
        "", "certificates (PEM) that a target or draft must have; none: no TLS between services"
    )

    def __post_init__(self) -> None:
        endpoints = [("draft_endpoint", endpoint) for endpoint in self.draft_endpoint]
        if self.target_endpoint is not None:
            endpoints.append(("target_endpoint", self.target_endpoint))
        for name, endpoint in endpoints:
            match = _ENDPOINT.fullmatch(endpoint)
            if match is None or not 0 < int(match[3]) < 65536:
                raise SettingsError(name, endpoint, "HOST:PORT")
        if not 0 <= self.grpc_port <= 65535:
            raise SettingsError("grpc_port", self.grpc_port, "from 0 to 65535")
        if (self.role == "coordinator") != (self.target_endpoint is not None):
            raise UsageError(
                "a target_endpoint goes together with the role coordinator",
                hint="attar serve MODEL --role coordinator --target-endpoint HOST:PORT",
            )
        if self.role in ("draft", "target") and self.draft_endpoint:
            raise UsageError(
                f"the role {self.role} takes no draft_endpoint",
                hint="it is the coordinator's, or an ordinary server's",
            )
        if len(set(self.draft_endpoint)) < len(self.draft_endpoint):
            raise SettingsError("draft_endpoint", self.draft_endpoint, "each given once")

    def __bool__(self) -> bool:
        """Whether other processes take part."""
        return self.role is not None or bool(self.draft_endpoint)

    def check_with(self, engine: Mapping[str, Any], compare: str = "", pooling: str | None = None) -> None:
        """Refuse what does not go together with other options, before a model is loaded.

        Args:
            engine: the engine's options.
            compare: a second model of the server.
            pooling: what embeddings are made of; None: none are.

        Raises:
            UsageError: names both.
        """
        if compare and self.role in ("draft", "coordinator"):
            raise UsageError(
                f"compare does not go together with the role {self.role}", hint="it runs no model of its own"
            )
        if pooling and self.role == "draft":
            raise UsageError("pooling does not go together with the role draft", hint="it only drafts")
        given = [name for name in ("speculate", "draft") if engine.get(name) is not None]
        if self.draft_endpoint and given:
            raise UsageError(
                f"{given[0]} and draft_endpoint do not go together", hint="drafts come from one side"
            )
        if self.role == "draft" and (engine.get("draft") or engine.get("speculate") in ("lookahead", "self")):
            raise UsageError(
                f"{given[-1]} does not go together with the role draft", hint="MODEL itself drafts for others"
            )
        if self.role == "draft" and engine.get("eviction") is not None:
            raise UsageError("eviction does not go together with the role draft")

    @property
    def key(self) -> str:
        """The key between services, of the environment."""
        return os.environ.get(KEY_VARIABLE, "")
