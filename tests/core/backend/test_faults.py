# SPDX-License-Identifier: Apache-2.0
"""Why a plugin could not be imported: what, where, and what to do."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from qompose.backend.discovery import describe_error, import_fault


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with a distribution in it that requires two others."""
    info = tmp_path / "wanting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Name: wanting\nVersion: 1.0\nRequires-Dist: Not-There>=2 ; python_version > '3'\n"
        "Requires-Dist: another[extra]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def fault(site: Path, source: str, module: str = "wanting_module") -> str:
    (site / "wanting_module.py").write_text(source)
    with pytest.raises(BaseException) as caught:
        importlib.import_module(module)
    return import_fault(caught.value, module, "wanting")


CASES = {
    "a module of a requirement": (
        "import not_there.inner", ["'not_there'", "HERE, line 1", 'pip install "Not-There>=2"']
    ),
    "a requirement with an extra": ("import another", ['pip install "another[extra]"']),
    "a module of nothing that is required": ("\nimport elsewhere_only", ["'elsewhere_only'"]),
    "syntax": ("def (:", ["SyntaxError", "HERE, line 1"]),
    "any error": ("\n\nraise OSError('gone')", ["OSError: gone", "HERE, line 3"]),
    "an exit": ("raise SystemExit(3)", ["SystemExit: 3", "HERE, line 1"]),
    "a name": ("from json import not_a_name", ["ImportError", "'not_a_name'"]),
    "an error that cannot be told": (
        "class E(Exception):\n  def __str__(self): 1 / 0\nraise E()", ["E: "]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "named"), CASES.values(), ids=CASES)
def test_error_place_and_remedy(site: Path, source: str, named: list[str]) -> None:
    told = fault(site, source)
    for name in named:
        assert name.replace("HERE", f"{site.name}/wanting_module.py") in told


@pytest.mark.parametrize("module", ["never_was_there", "wanting_module.inner"])
def test_a_module_that_its_own_package_lacks(site: Path, module: str) -> None:
    told = fault(site, "", module)
    assert repr(module) in told and "uninstall wanting" in told


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert describe_error(ValueError("x")) == "ValueError: x"
