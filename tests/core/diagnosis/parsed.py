# SPDX-License-Identifier: Apache-2.0
"""HTML as a tree of elements, for tests of pages; what is not well formed is an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"br", "input", "meta", "wbr"}


@dataclass
class Element:
    """An element, with texts and elements inside it."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def all(self, name: str = "", **attributes: str) -> Iterator[Element]:
        """The elements inside with a name and attributes (`class_` is one of several)."""
        for child in self.children:
            if isinstance(child, Element):
                if name in ("", child.name) and all(
                    value in child.attributes.get(key.rstrip("_"), "").split()
                    for key, value in attributes.items()
                ):
                    yield child
                yield from child.all(name, **attributes)

    def one(self, name: str = "", **attributes: str) -> Element:
        (found,) = self.all(name, **attributes)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice: {names}"
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(text: str) -> Element:
    """The root of a page."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    (root,) = parser.open
    ids = [element.attributes["id"] for element in root.all() if "id" in element.attributes]
    assert len(ids) == len(set(ids)), "an id twice"
    return root
