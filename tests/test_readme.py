# SPDX-License-Identifier: Apache-2.0
"""README.md and those of the plugins keep their promises: code runs, links lead somewhere."""

from __future__ import annotations

import configparser
import contextlib
import io
import platform
import re
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml"))
CODE = ["README.md", *(f"plugins/{name}/README.md" for name in PLUGINS)]
PAGES = [*CODE, "CONTRIBUTING.md", "CHANGELOG.md"]


def text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", CODE)
def test_code_runs_and_prints_what_it_says(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The blocks run one after the other, as a reader would run them."""
    blocks = fenced(page, "python")
    assert blocks
    monkeypatch.chdir(tmp_path)
    if "x86" in "".join(blocks) and platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("x86_inductor needs x86")
    monkeypatch.setenv("COLUMNS", "200")
    torch.manual_seed(0)
    printed = io.StringIO()
    namespace: dict[str, object] = {"__name__": "readme"}
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
    assert printed.getvalue().startswith("".join(fenced(page, "text")))


def test_commands_are_those_of_tox() -> None:
    """The two commands, and the environments that they name."""
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    assert "python -m tox\n" in fenced("README.md", "sh")
    for name in re.findall(r"tox run -e (\w+)", text("README.md") + text("CONTRIBUTING.md")):
        assert tox.has_section(f"testenv:{name}")
    for name in tox["tox"]["env_list"].split(","):
        assert tox.get(f"testenv:{name.strip()}", "description")
    assert "python -m tox" in text(".ci/run")


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text(page)):
        assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists()


def test_installation_names_every_plugin() -> None:
    assert sorted(set(re.findall(r"\./plugins/(\w+)", text("README.md")))) == PLUGINS


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_named_files_exist(page: str) -> None:
    for name in re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|ini|txt|toml|md))`", text(page)):
        if name != "utils.py":
            assert (ROOT / name).exists(), name
