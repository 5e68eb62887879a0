# SPDX-License-Identifier: Apache-2.0
"""The road of an author: a project is written, installed, tested by its own suite, listed, and removed.

The environments are new and see, behind what is installed into them, the one that runs the tests; so
nothing is downloaded, and nothing of the projects stays.
"""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.pages import ROOT, fenced
from tests.processes import Environment, checked, run

pytest.importorskip("setuptools")

TUTORIAL = "docs/write-a-backend.md"
EXAMPLE = ROOT / "examples" / "toy_backend"
NAME, BACKEND = "my-dsp2", "my_dsp2"
"""A backend by the name that its author types, and by its own."""
OTHERS = ("acme_vector_unit_v10", "toy_backend")
STRICT = ("-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning")
"""Warnings are errors, but the one with which torch says that NumPy, which nothing here needs, is missing."""


@dataclass(frozen=True)
class Place(Environment):
    """An environment, and a folder with the projects in it."""

    folder: Path

    def project(self, backend: str) -> Path:
        return self.folder / f"qompose-{backend.replace('_', '-')}"

    def run(self, *arguments: object, cwd: Path | None = None) -> CompletedProcess[str]:
        return run([self.python, *arguments], cwd=cwd or self.folder)

    def checked(self, *arguments: object) -> str:
        return checked([self.python, *arguments], cwd=self.folder)

    def install(self, *projects: object) -> None:
        self.pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", *projects)

    def backends(self, *options: str) -> dict[str, str | None]:
        """What is wrong with each installed backend, by name."""
        rows = json.loads(self.checked("-m", "qompose", "backends", *options, "--json"))["backends"]
        return {row["name"]: row["problem"] for row in rows}

    def suite(self, backend: str, *options: str) -> tuple[int, dict[str, int], str]:
        """Run a project's tests: the exit code, how many passed and so on, and what was printed."""
        usual = ("-q", *STRICT, "-p", "no:cacheprovider")
        done = self.run("-m", "pytest", *usual, *options, cwd=self.project(backend))
        last = (done.stdout.strip().splitlines() or [""])[-1]
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
        return done.returncode, counts, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make() -> Place:
        place = Place(tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("projects"))
        seen = sysconfig.get_paths()["purelib"]
        (place.packages / "behind.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
        return place

    return make


@pytest.fixture(scope="module")
def place(make_place: Any) -> Place:
    """With one project. Tests leave it as it is."""
    found: Place = make_place()
    found.checked("-m", "qompose", "new-backend", NAME)
    found.install("--editable", found.project(BACKEND))
    return found


@pytest.fixture(scope="module")
def full_place(place: Place) -> Place:
    """With a project of another name, and the example, too."""
    place.checked("-m", "qompose", "new-backend", OTHERS[0])
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".pytest_cache")
    shutil.copytree(EXAMPLE, place.project(OTHERS[1]), ignore=ignored)
    place.install(*map(place.project, OTHERS))
    return place


def assert_suite_passes(place: Place, backend: str, *options: str, passed: int = 10) -> None:
    """With warnings as errors; a check or two may have nothing to try."""
    code, counts, printed = place.suite(backend, *options)
    assert code == 0, printed
    assert counts["passed"] > counts.get("skipped", 0) + passed, printed


def test_suite_passes_unedited(place: Place) -> None:
    """What its rules claim and compute; the other checks of the suite run in full."""
    named = "annotates or converts or lowers or matches_reference"
    assert_suite_passes(place, BACKEND, "-k", named, passed=3)


@pytest.mark.full
def test_the_whole_suite_passes_unedited(place: Place) -> None:
    assert_suite_passes(place, BACKEND)


@pytest.mark.full
@pytest.mark.parametrize("backend", OTHERS)
def test_other_suites_pass_unedited(full_place: Place, backend: str) -> None:
    assert_suite_passes(full_place, backend)


@pytest.mark.full
def test_all_are_listed_and_sound(full_place: Place) -> None:
    problems, ours = full_place.backends("--check"), (BACKEND, *OTHERS)
    assert {name: problems[name] for name in ours} == dict.fromkeys(ours)


def test_readme_of_the_project_holds(place: Place) -> None:
    """Its Python block quantizes a model with the backend, and asserts that all of it runs on integers."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```$",
        (place.project(BACKEND) / "README.md").read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert "int8" in place.checked(*STRICT, "-c", code)


# (what a hasty author might write, in place of what, the check that names the fault)
FAULTS = (
    ("x.long()", "x.long() - x_zero", "test_matches_reference"),  # that of the tutorial
    ("w_scales[0] * x_scale", "w_scales * x_scale", "test_matches_reference"),
    (".to(torch.int8)", ".clamp(low, high).to(torch.int8)", "test_matches_reference"),
)


@pytest.mark.full
@pytest.mark.parametrize(("wrong", "instead_of", "check"), FAULTS)
def test_a_wrong_kernel_fails(place: Place, wrong: str, instead_of: str, check: str) -> None:
    """The suite of a project is no formality; the tutorial shows what it says, but for the numbers."""
    module = place.project(BACKEND) / f"qompose_{BACKEND}" / "__init__.py"
    right = module.read_text("utf-8")
    assert right.count(instead_of) == 1
    module.write_text(right.replace(instead_of, wrong), "utf-8")
    code, _, printed = place.suite(BACKEND, "-k", check)
    module.write_text(right, "utf-8")
    assert code == 1, printed
    assert check in printed
    if (wrong, instead_of, check) == FAULTS[0]:
        (shown,) = fenced(TUTORIAL, "console")
        report = printed.replace(BACKEND, "toy_backend")
        for line in shown.splitlines():
            assert line.startswith("  found:") or line in report


@pytest.mark.full
def test_uninstalled_without_a_trace(make_place: Any) -> None:
    place: Place = make_place()
    before = place.backends()
    place.checked("-m", "qompose", "new-backend", "fleeting")
    place.install(place.project("fleeting"))
    assert place.backends() == {**before, "fleeting": None}
    again = place.run("-m", "qompose", "new-backend", "fleeting")
    assert again.returncode != 0
    assert "is installed" in again.stderr
    place.pip("uninstall", "--quiet", "--yes", "qompose-fleeting")
    assert place.backends() == before
