"""HTML and SVG as nested calls; every text is escaped unless it is markup already.

el("p", "size: ", el("b", "5 < 6"), class_="note")   ->   <p class="note">size: <b>5 &lt; 6</b></p>
"""

from __future__ import annotations

import html
from collections.abc import Iterable

VOID = ("br", "hr", "img", "link", "meta")
LEAF = ("circle", "line", "path", "polygon", "polyline", "rect")  # of SVG: closed in place


class Markup(str):
    """Text that is HTML or SVG already, and is therefore not escaped again."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]
Attribute = str | int | float | None


def el(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """An element.

    Args:
        children: text (escaped), markup (as it is), None (nothing), or lists of these.
        attributes: ``class_`` stands for ``class``, ``font_size`` for ``font-size``; None leaves one out;
            floats are rounded to hundredths, which is finer than a pixel.
    """
    head = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{head}>")
    body = join(children)
    return Markup(f"<{head}/>") if name in LEAF and not body else Markup(f"<{head}>{body}</{name}>")


def join(*children: Child) -> Markup:
    """Children one after the other, escaped where they are plain text."""
    return Markup("".join(_child(child) for child in children))


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (str, int)):
        return html.escape(str(child), quote=False)
    return "".join(map(_child, child))


def _attribute(value: str | int | float | None) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
