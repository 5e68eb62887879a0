# SPDX-License-Identifier: Apache-2.0
"""Entry points from metadata as it is found, and why a plugin could not be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from qompose.backend.discovery import (
    damaged_packages,
    describe_error,
    entry_points,
    import_fault,
    metadata_field,
)

GROUP = "qompose.test"
Package = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """`package("dist", "name = module")` in a folder on sys.path; the folder asked for last comes first."""

    def add(
        name: str, *lines: str, version: str = "1.0", site: str = "site", folder: str = "",
        metadata: str | None = None, text: str | None = None,
    ) -> Path:  # fmt: skip
        info = tmp_path / site / (folder or f"{name}-{version}.dist-info")
        info.mkdir(parents=True)
        if metadata is None:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        content = text if text is not None else "\n".join([f"[{GROUP}]", *lines])
        (info / "entry_points.txt").write_text(content)
        monkeypatch.syspath_prepend(info.parent)
        return info

    return add


def offered() -> dict[str, tuple[str, str, str]]:
    return {
        p.name: (p.value, metadata_field(p.dist, "name"), metadata_field(p.dist, "version"))
        for p in entry_points(GROUP)
    }


def test_name_and_module_with_their_package(package: Package) -> None:
    package("one", "a = module_a", "b=module_b:thing")
    package("two", "c = module_c", version="2.1")
    assert offered() == {
        "a": ("module_a", "one", "1.0"),
        "b": ("module_b:thing", "one", "1.0"),
        "c": ("module_c", "two", "2.1"),
    }


def test_other_groups_comments_and_blank_lines_are_passed_over(package: Package) -> None:
    text = f"# a comment\n[other]\nx = y\n\n  [{GROUP}]  \n# c = d\n\n  a = b  \n[last]\nz = z\n"
    package("one", text=text)
    assert offered() == {"a": ("b", "one", "1.0")}


@pytest.mark.parametrize(
    "content",
    [
        b"[console_scripts]\nno equals sign\n",
        b"[qompose.test]\nnothing but words\n",
        b"[x]\na = \xff\n",
    ],
    ids=["another group", "the group", "no text"],
)
def test_a_damaged_package_hides_nothing_of_another_and_is_listed(
    package: Package, content: bytes
) -> None:
    """importlib.metadata raises TypeError for all of them."""
    info = package("bad")
    (info / "entry_points.txt").write_bytes(content)
    package("good", "a = module_a")
    assert offered() == {"a": ("module_a", "good", "1.0")}
    assert str(info) in damaged_packages()


@pytest.mark.parametrize("text", ["", "# a comment\n\n", "# a comment\n [group]\n a = b\n"])
def test_a_sound_package_is_not_listed_as_damaged(package: Package, text: str) -> None:
    assert str(package("odd", text=text)) not in damaged_packages()


@pytest.mark.parametrize("has_it", [True, False])
def test_of_two_versions_the_one_that_is_imported_counts(package: Package, has_it: bool) -> None:
    """Whether it has the entry point or not."""
    package("dist", "old = module", version="1.0", site="behind")
    text = None if has_it else "[other]\na = b\n"
    package("dist", "new = module", version="2.0", site="before", text=text)
    assert offered() == ({"new": ("module", "dist", "2.0")} if has_it else {})


def test_what_an_interrupted_removal_left_is_not_a_rival(package: Package) -> None:
    package("dist", "a = module", version="2.0")
    package(
        "dist", "a = module", folder="~ist-1.0.dist-info", metadata="Name: dist\nVersion: 1.0\n"
    )
    assert {point.dist.version for point in entry_points(GROUP)} == {"2.0"}


@pytest.mark.parametrize(
    ("metadata", "name", "version"),
    [
        ("Name: dist\n", "dist", "unknown"),
        ("Version: 1.0\n", "unknown", "1.0"),
        ("", "unknown", "unknown"),
        (None, "unknown", "unknown"),
    ],
    ids=["no version", "no name", "empty", "missing"],
)
def test_metadata_may_lack_facts(
    package: Package, metadata: str | None, name: str, version: str
) -> None:
    info = package("dist", "a = module", metadata=metadata)
    if metadata is None:
        (info / "METADATA").unlink()
    assert offered() == {"a": ("module", name, version)}


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
