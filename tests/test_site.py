# SPDX-License-Identifier: Apache-2.0
"""What makes a site of the pages: its menu, links to files, and the check of what was built."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.building import api, check, navigation, sources

PAGE = """[code](../examples/demo.py), [a folder](../examples), [a page](other.md), [a part](#part),
[elsewhere](https://example.org/x.py), [a picture](figures/flow.svg), [nothing](../gone.py),
[outside](../../outside.py)

```text
[code](../examples/demo.py)
```

[again](../examples/demo.py)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A few files, as a repository may have them, and one beside it."""
    (tmp_path / "outside.py").write_text("x = 1\n", "utf-8")
    tmp_path = tmp_path / "repository"
    for path in ("docs/index.md", "docs/other.md", "docs/b.md", "docs/tutorials/a.md", "README.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("# A page\n", "utf-8")
    (tmp_path / "examples" / "inner").mkdir(parents=True)
    for path in ("examples/demo.py", "examples/inner/x.toml", "examples/data.bin", "docs/flow.svg"):
        (tmp_path / path).write_text("x = 1\n", "utf-8")
    return tmp_path


def test_links_to_files_lead_to_pages_that_show_them(repository: Path) -> None:
    """Only such links: pages, anchors, pictures, other sites and blocks of code stay as they are."""
    found: set[str] = set()
    text = sources.rewritten(PAGE, "docs/index", repository, found)
    assert found == {"examples/demo.py", "examples"}
    assert text.count("](source:../source/examples/demo.py.html)") == 2
    assert text.count("](source:../source/examples.html)") == 1
    untouched = ["](other.md)", "](#part)", "](https://example.org/x.py)", "](figures/flow.svg)"]
    untouched += ["](../gone.py)", "](../../outside.py)"]
    for link in [*untouched, "```text\n[code](../examples/demo.py)\n```"]:
        assert link in text


def test_a_linked_folder_is_shown_with_all_in_it(repository: Path) -> None:
    shown = sources.shown(repository, {"examples"})
    assert shown == [
        "examples", "examples/demo.py", "examples/inner", "examples/inner/x.toml"
    ]  # fmt: skip


def test_new_pages_are_in_the_menu_and_empty_sections_are_not(repository: Path) -> None:
    """Tutorials and guides of any name; what is named takes its own place."""
    menu = dict(navigation.sections(repository))
    assert menu == {
        "Start": ["README"],
        "Tutorials": ["docs/tutorials/a"],
        "Guides": ["docs/b", "docs/other"],
    }
    assert navigation.pages(repository)[0] == "docs/index"
    assert ":caption: Tutorials\n\n/docs/tutorials/a\n" in navigation.tables(repository)


def test_names_of_a_page() -> None:
    text = "# T\n\n```{api} qompose\nquantize\nsave\n```\n\n```text\nload\n```\n"
    assert api.listed(text) == ["qompose.quantize", "qompose.save"]
    kinds = {
        path: api.entry(f"qompose.{path}").kind
        for path in ("save", "reporting.Row", "UserError", "backend.Guard")
    }
    assert [*kinds.values()] == ["function", "class", "exception", "data"]


GOOD = '<h2 id="here"></h2><a href="#here"></a><a href="sub/b.html#there">b</a><img src="a.svg">'


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        (GOOD, []),
        ('<a href="gone.html">', ["a.html: gone.html leads nowhere"]),
        ('<a href="sub/b.html#gone">', ["a.html: sub/b.html#gone leads nowhere"]),
        ('<img src="gone.png">', ["a.html: gone.png leads nowhere"]),
        (
            '<script src="https://example.org/x.js"></script>',
            ["a.html loads https://example.org/x.js from elsewhere"],
        ),
        ('<a href="https://example.org">', []),
    ],
)
def test_a_built_site_is_checked(tmp_path: Path, page: str, wrong: list[str]) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<p id="there"></p><a href="../a.html">', "utf-8")
    (tmp_path / "a.svg").write_text("<svg/>", "utf-8")
    (tmp_path / "a.html").write_text(page, "utf-8")
    assert [*check.problems(tmp_path)] == wrong


def test_an_empty_folder_is_no_site(tmp_path: Path) -> None:
    assert [*check.problems(tmp_path)] == [f"{tmp_path} has no page"]
