# SPDX-License-Identifier: Apache-2.0
"""README.md and those of the plugins keep their promises: code runs, links lead somewhere."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
import torch

from tests import reader
from tests.pages import PLUGINS, ROOT, fenced, text

CODE = ["README.md", *(f"plugins/{name}/README.md" for name in PLUGINS)]


@pytest.mark.parametrize("page", CODE)
def test_code_runs_and_prints_what_it_says(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, regen: bool
) -> None:
    """The blocks run one after the other, as a reader would run them."""
    assert fenced(page, "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    torch.manual_seed(0)
    reader.follow(page, regen)


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


def test_installation_names_every_plugin() -> None:
    assert sorted(set(re.findall(r"\./plugins/(\w+)", text("README.md")))) == PLUGINS
