"""GET /: a page for people: chat, and what attar alone can show (proposers of tokens, blocks, two models).

One HTML file, joined from the files of this folder when the server starts. Its content security policy allows
its own script and style by their hashes, calls to this server, and nothing else: no other address, no inline
handlers, and, where browsers know trusted types, no text that is read as HTML.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

SCRIPTS = ("dom", "store", "api", "markdown", "tokens", "engine", "compare", "chat", "main")


def add_page(router: APIRouter, key_required: bool) -> None:
    """The path. The page itself needs no key; its calls do, and it asks for one."""
    content, headers = page_html(key_required).encode(), page_headers()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type="text/html; charset=utf-8", headers=headers)


def page_html(key_required: bool = False) -> str:
    """The page."""
    html = _read("page.html").replace("/*STYLE*/", _style()).replace("/*SCRIPT*/", _script())
    return html.replace("<body>", "<body data-key>") if key_required else html


def page_headers() -> dict[str, str]:
    """Its headers."""
    policy = {
        "default-src": "'none'",
        "script-src": _hash(_script()),
        "style-src": _hash(_style()),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _script() -> str:
    """All scripts in one scope of their own."""
    return "\n".join(['\n"use strict";\n{', *(_read(f"{name}.js") for name in SCRIPTS), "}\n"])


def _style() -> str:
    return "\n" + _read("page.css")


def _hash(text: str) -> str:
    """The source of a policy that allows an inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
