# SPDX-License-Identifier: Apache-2.0
"""HTML as text: elements whose content is escaped unless it is markup already."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

_VOID = {"br", "input", "meta"}


class Markup(str):
    """Text that is HTML already; any other is escaped where it becomes a part of some."""

    __slots__ = ()


def element(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element. `class_` stands for `class`, `data_row` for `data-row`; None leaves one out."""
    given = (
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    start = f"<{name}{''.join(given)}>"
    return Markup(start if name in _VOID else f"{start}{joined(content)}</{name}>")


def joined(content: Iterable[object], between: str = "") -> Markup:
    """Return content one behind the other."""
    parts = (c if isinstance(c, Markup) else html.escape(str(c)) for c in content)
    return Markup(between.join(parts))


def breakable(text: str) -> Markup:
    """Return a name that may go on in the next line behind a dot, a slash or an underscore."""
    return joined(re.split(r"(?<=[./_])(?=.)", text), "<wbr>")


def table(header: Sequence[object], rows: Iterable[Sequence[object]], caption: str) -> Markup:
    """Return a table; cells of numbers align right."""
    head = element("tr", *(element("th", title, scope="col") for title in header))
    body = (element("tr", *map(_cell, row)) for row in rows)
    return element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", joined(body, "\n")),
    )


def _cell(content: object) -> Markup:
    if isinstance(content, Markup) and content.startswith(("<td", "<th")):
        return content
    numeric = isinstance(content, int)
    return element("td", f"{content:,}" if numeric else content, class_="n" if numeric else None)


def embedded(data: Any) -> Markup:
    """Return data as JSON that may stand in a script element: nothing in it ends that element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
