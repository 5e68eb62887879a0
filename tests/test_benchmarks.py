# SPDX-License-Identifier: Apache-2.0
"""The command that prints every table of benchmarks/ knows every script there."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_every_script_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    known = {benchmark.name for benchmark in import_module("all").BENCHMARKS}
    scripts = {f.stem for f in FOLDER.glob("*.py") if "__main__" in f.read_text("utf-8")}
    assert scripts - {"all"} == known
