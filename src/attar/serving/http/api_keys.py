"""API keys and their limits: a YAML or JSON file.

    keys:
      - name: web                  # in messages and in the log
        key: a-long-random-text
        priority: -1               # of its requests; smaller runs first, default 0
        set_priority: true         # its requests may have a priority of their own
        adapters: true             # it may load and unload the LoRA adapters of all callers
        max_texts: 32              # completions that run or wait at the same time
        tokens_per_minute: 60000   # of prompts and completions

Without keys every address is a caller.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from attar.errors import DataError, SettingsError
from attar.serving.http.settings import is_key
from attar.yaml import safe_values


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A caller.

    Args:
        key: empty: the caller sends none.
        priority: of its requests; smaller runs first.
        set_priority: its requests may have a priority of their own.
        adapters: it may load and unload LoRA adapters, which every caller uses by name.
        max_texts: completions that run or wait at the same time; 0: its share of the server
            (``client_share``).
        tokens_per_minute: of prompts and completions; 0: any number.
    """

    name: str
    key: str = field(default="", repr=False)
    priority: int = 0
    set_priority: bool = False
    adapters: bool = False
    max_texts: int = 0
    tokens_per_minute: int = 0

    def __post_init__(self) -> None:
        if self.key and not is_key(self.key):
            raise SettingsError("key", "(not shown)", "8 or more printable ASCII characters, no blanks")
        for name, least in (("priority", -(2**31)), ("max_texts", 0), ("tokens_per_minute", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**31:
                raise SettingsError(name, value, f"a whole number from {least}")
        for name in ("set_priority", "adapters"):
            if type(getattr(self, name)) is not bool:
                raise SettingsError(name, getattr(self, name), "true or false")

    @property
    def salt(self) -> str:
        """The tenant: cached prefixes are shared only within it."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:16] if self.key else ""


def make_api_keys(plain: Sequence[str], file: str) -> tuple[ApiKey, ...]:
    """The keys of a file (empty: none), and plain keys, which have no limits of their own. Where there is
    one key alone, and a plain one, it may load adapters.

    Raises:
        DataError: the file, or a field of it, is wrong.
    """
    listed = read_api_keys(Path(file)) if file else ()
    known = {entry.key for entry in listed}
    others = [key for key in dict.fromkeys(plain) if key not in known]
    alone = len(others) == 1 and not listed
    named = [ApiKey(name=f"key-{number}", key=key, adapters=alone) for number, key in enumerate(others, 1)]
    if twice := {entry.name for entry in listed} & {entry.name for entry in named}:
        message = f"{file}: the name {min(twice)!r} is that of a key of --api-key"
        raise DataError(message, hint="call it something else: limits and counts go by the name")
    return (*listed, *named)


def read_api_keys(file: Path) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises:
        DataError: names the file and the field.
    """
    try:
        content = safe_values(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise DataError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError:
        raise DataError(f"{file}: is not YAML", hint="see docs/serve.md#keys") from None  # may quote a key
    listed = content.get("keys") if isinstance(content, dict) and set(content) == {"keys"} else None
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{file}: has no list called keys", hint="see docs/serve.md#keys")
    keys = tuple(_parse_key(f"{file}: keys[{index}]", entry) for index, entry in enumerate(listed))
    for name in ("name", "key"):
        if len({getattr(key, name) for key in keys}) < len(keys):
            raise DataError(f"{file}: two keys have the same {name}")
    return keys


def client_address(client: Sequence[Any] | None) -> str:
    """A client's address; for IPv6 its /64 network, because one host has all its addresses."""
    host = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host.removeprefix("::ffff:")


def _parse_key(where: str, entry: Any) -> ApiKey:
    names = [field.name for field in fields(ApiKey)]
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not is_key(entry.get("key")):
        hint = "a key has 8 or more printable ASCII characters, no blanks"
        raise DataError(f"{where}: needs a name and a key, both texts", hint=hint)
    if unknown := [name for name in entry if name not in names]:
        raise DataError(f"{where}: unknown field {unknown[0]!r}", hint=f"one of {', '.join(names)}")
    try:
        return ApiKey(**entry)
    except SettingsError as error:
        raise DataError(f"{where}: {error.message}") from None
