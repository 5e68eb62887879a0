# SPDX-License-Identifier: Apache-2.0
"""What becomes a part of a page is escaped unless it is a part of one already."""

from __future__ import annotations

import json

import pytest
from qompose.reporting.html_page import Markup, breakable, element, embedded, table

from tests.core.diagnosis.parsed import parsed

EVIL = "</script><script>alert(1)</script><!-- ' \" & \u2028 ü"


def test_text_is_escaped_and_markup_is_not() -> None:
    assert (
        element("p", "a < b & 'c'", element("b", "d"))
        == "<p>a &lt; b &amp; &#x27;c&#x27;<b>d</b></p>"
    )


def test_attributes() -> None:
    made = element("p", class_="n", data_row=3, hidden=None, title='"<x>"')
    assert made == '<p class="n" data-row="3" title="&quot;&lt;x&gt;&quot;"></p>'
    assert element("input", type="search") == '<input type="search">'


@pytest.mark.parametrize("place", ["content", "attribute", "name"])
def test_nothing_ends_what_it_is_in(place: str) -> None:
    made = {
        "content": lambda: element("p", EVIL),
        "attribute": lambda: element("p", title=EVIL),
        "name": lambda: element("p", breakable(EVIL)),
    }[place]()
    (paragraph,) = parsed(made).all("p")
    assert EVIL in (paragraph.text, paragraph.attributes.get("title"))
    assert {inside.name for inside in paragraph.all()} <= {"wbr"}


def test_data_in_a_script() -> None:
    text = embedded({EVIL: [EVIL, 1.5, None]})
    assert not {"<", ">", "&", "\u2028"} & {*text}
    assert json.loads(text) == {EVIL: [EVIL, 1.5, None]}
    with pytest.raises(ValueError, match="Out of range"):
        embedded({"a": float("inf")})


def test_names_break_behind_their_parts() -> None:
    assert breakable("layer.0/conv_1") == "layer.<wbr>0/<wbr>conv_<wbr>1"
    assert breakable("end.") == "end."


def test_tables() -> None:
    root = parsed(table(("a", "b"), [("x", 12345), (Markup("<th>y</th>"), "z")], "what"))
    cells = [
        [cell.text for cell in row.all() if cell.name in ("td", "th")] for row in root.all("tr")
    ]
    assert cells == [["a", "b"], ["x", "12,345"], ["y", "z"]]
    assert root.one("td", class_="n").text == "12,345"
    assert root.one("caption").text == "what"
