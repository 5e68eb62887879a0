# SPDX-License-Identifier: Apache-2.0
"""Pages and READMEs keep their promises: code runs, what they name is there, the example is the tutorial."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

import pytest
import qompose

from tests import pages, reader
from tests.pages import PLUGINS, ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
READMES = ["README.md", *(f"plugins/{name}/README.md" for name in PLUGINS)]
OTHERS = [*READMES, "CONTRIBUTING.md", "CHANGELOG.md"]
INDEX = "docs/index.md"
TUTORIAL = "docs/write-a-backend.md"
EXAMPLE = ROOT / "examples" / "toy_backend"
MOST_WORDS = 25_000
HEADER = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize("page", [*pages.by_branch(PAGES), *READMES])
def test_code_runs_and_prints_what_it_says(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, regen: bool
) -> None:
    """As for a reader who follows the page in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    reader.follow(page, regen)


@pytest.mark.parametrize("page", [*PAGES, "README.md", "CONTRIBUTING.md"])
def test_named_files_exist(page: str) -> None:
    assert pages.missing_files(page) == []


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_public_names_exist(page: str) -> None:
    assert pages.unknown_names(page) == []


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_named_commands_exist(page: str) -> None:
    assert pages.unknown_commands(page) == []


def test_index_leads_to_every_page() -> None:
    linked = {f"docs/{target}" for target in re.findall(r"\]\(([\w/-]+\.md)\)", pages.text(INDEX))}
    assert linked == {*PAGES} - {INDEX}


def test_docs_are_short() -> None:
    """As `wc -w` counts; CONTRIBUTING.md says why and how."""
    assert sum(len(pages.text(page).split()) for page in PAGES) <= MOST_WORDS


def test_readme_leads_to_the_index() -> None:
    assert f"]({INDEX})" in pages.text("README.md")


def test_readmes_have_code_and_name_every_plugin() -> None:
    assert all(pages.fenced(page, "python") for page in READMES)
    assert sorted(set(re.findall(r"\./plugins/(\w+)", pages.text("README.md")))) == PLUGINS


def test_commands_are_those_of_tox() -> None:
    """The two commands, and the environments that they name."""
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    assert "python -m tox\n" in pages.fenced("README.md", "sh")
    named = pages.text("README.md") + pages.text("CONTRIBUTING.md")
    for name in re.findall(r"tox run -e (\w+)", named):
        assert tox.has_section(f"testenv:{name}")
    for name in tox["tox"]["env_list"].split(","):
        assert tox.get(f"testenv:{name.strip()}", "description")
    assert "python -m tox" in pages.text(".ci/run")


def test_tutorial_ends_in_the_example() -> None:
    """File by file, but for the licence line of this repository."""
    written = reader.written(TUTORIAL)
    for path, text in written.items():
        assert EXAMPLE.joinpath(path).read_text("utf-8").removeprefix(HEADER) == text
    code = {path.relative_to(EXAMPLE).as_posix() for path in EXAMPLE.rglob("*.py")}
    assert {*written} >= code | {"pyproject.toml"}


def test_messages_of_troubleshooting_are_in_the_sources() -> None:
    """Each message that the page explains is a part of one text in the code, and its class an error."""
    sources = [*ROOT.glob("core/qompose/**/*.py")]
    trees = [ast.parse(path.read_text("utf-8")) for path in sources]
    texts = {
        "".join(str(part.value) for part in getattr(node, "values", [node]) if _is_text(part))
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) or _is_text(node)
    }
    table = pages.text("docs/troubleshooting.md").partition("## Without an error")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", table, re.MULTILINE)
    assert len(rows) == 20
    assert [message for message, _ in rows if not any(message in text for text in texts)] == []
    named = {name for _, classes in rows for name in re.findall(r"^`(\w+)`", classes)}
    assert [name for name in named if not hasattr(qompose.errors, name)] == []


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
