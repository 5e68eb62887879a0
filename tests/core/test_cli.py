# SPDX-License-Identifier: Apache-2.0
"""The command line, with plugins that exist only here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from qompose import cli, plugins

from tests.core.test_plugins import backend, install, point

__all__ = ["install"]  # a fixture


@pytest.fixture
def installed(install) -> None:  # type: ignore[no-untyped-def]
    install(point("broken", "no_such_module"), alpha=backend("alpha"), beta=backend("beta"))


@pytest.mark.usefixtures("installed")
def test_backends_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["alpha", "beta", "broken"]
    assert rows[0]["distribution"] == "dist-alpha"
    assert rows[0]["problem"] is None
    assert cli.main(["backends"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("alpha", "dist-beta", "1.0", "no_such_module"))
    assert "problem" not in text


@pytest.mark.usefixtures("installed")
def test_a_check_says_what_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check runs in a process of its own, which cannot see the plugins of this one."""
    monkeypatch.setattr(cli, "_check", lambda info: plugins.check_backend(info))
    assert cli.main(["backends", "--check", "--json"]) == 1
    problems = {row["name"]: row["problem"] for row in json.loads(capsys.readouterr().out)}
    assert problems["alpha"] is problems["beta"] is None
    assert "no_such_module" in problems["broken"]


def test_a_check_survives_a_plugin_that_ends_its_process() -> None:
    info = plugins.BackendInfo("nowhere", "nowhere", "nowhere", "1")
    problem = cli._check(info)
    assert problem
    assert "ended the process with code 1" in problem


@pytest.mark.usefixtures("installed")
def test_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capabilities", "alpha", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["backend"] for row in rows} == {"alpha"}
    linear = [row for row in rows if row["pattern"] == "linear"]
    assert [row["config"] for row in linear] == ["static", "dynamic", "weight-only"]
    assert linear[0]["kernels"] == {"torch": "toy linear"}
    assert linear[0]["weight"]["dtype"] == "int8"
    assert cli.main(["capabilities", "alpha", "beta"]) == 0
    assert "linear" in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_a_user_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capabilities", "alpho"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("qompose: No backend named 'alpho'")
    assert "did you mean 'alpha'" in printed.err


@pytest.mark.usefixtures("installed")
def test_all_capabilities_in_spite_of_a_broken_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    """It harms nobody else: the others' rows are printed, and the fault is named."""
    cli.main(["capabilities", "--json"])
    printed = capsys.readouterr()
    assert {row["backend"] for row in json.loads(printed.out)} == {"alpha", "beta"}
    assert "broken" in printed.err


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["backends", "--what"]], ids=str)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: qompose" in capsys.readouterr().err


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qompose", "backends", "--json"],
        capture_output=True, text=True, check=True, env={"QOMPOSE_PLUGINS": "", "PATH": ""},
    )  # fmt: skip
    assert json.loads(done.stdout) == []
