# SPDX-License-Identifier: Apache-2.0
"""`qompose env`: what a bug report needs, of any set of plugins."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from qompose.cli import inspection

from tests.core.cli.conftest import Command
from tests.core.offering import offered_by_a_package
from tests.core.toy import LINEAR, toy


def printed(command: Command) -> Any:
    return json.loads(command("env", "--json").out)


def test_versions_are_those_of_what_runs(command: Command) -> None:
    found = printed(command)
    assert found["packages"]["torch"] == torch.__version__
    assert found["processor"]
    assert f"{torch.get_num_threads()} thread" in found["torch_uses"]


def test_a_plugin_is_listed_with_its_package(command: Command) -> None:
    with offered_by_a_package(lambda: toy(LINEAR).backend):
        assert "toy-package 1.2" in printed(command)["plugins"]["toy"]


def test_settings_are_those_that_change_what_runs(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("QOMPOSE_TRACE", "0")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = printed(command)["settings"]
    assert found["QOMPOSE_TRACE"] == "0"
    assert "SECRET_TOKEN" not in found


def test_text_has_every_fact(command: Command) -> None:
    text = command("env").out
    assert all(name in text for name in inspection.facts())
