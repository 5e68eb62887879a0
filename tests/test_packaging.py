# SPDX-License-Identifier: Apache-2.0
"""The five distributions as users have them: wheels, installed outside the checkout, coming and going.

Each test environment is a new virtual environment. What the wheels depend on (torch, and what torch
depends on) is linked into it from the environment that runs the tests, and nothing else is, so pip
resolves the declared requirements without an index and a missing declaration fails here.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests import release
from tests.processes import Environment, checked, run

packaging_requirements = pytest.importorskip("packaging.requirements")
pytest.importorskip("setuptools")

ROOT = Path(__file__).parents[1]
BACKENDS = {
    "embedding": "qompose-embedding",
    "onnx": "qompose-onnx",
    "x86_inductor": "qompose-x86-inductor",
    "xnnpack": "qompose-xnnpack",
}
FOLDERS = {
    "qompose": (ROOT, "core/qompose"),
    "qompose-embedding": (ROOT / "plugins/embedding", "qompose_embedding"),
    "qompose-onnx": (ROOT / "plugins/onnx", "qompose_onnx"),
    "qompose-x86-inductor": (ROOT / "plugins/x86_inductor", "qompose_x86_inductor"),
    "qompose-xnnpack": (ROOT / "plugins/xnnpack", "qompose_xnnpack"),
}
CORE = release.projects()[0]
needs_x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="x86_inductor needs x86"
)

QUANTIZE = """
import json, sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch, where numpy is not installed
import torch, qompose
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(40, 16), torch.nn.Linear(16, 8), torch.nn.ReLU())
batches = [(torch.randint(40, (4, 6)),) for _ in range(2)]
result = qompose.quantize(model, batches[0], backends=sys.argv[1:], calibration=batches, progress=False)
with torch.no_grad():
    error = result.model(*batches[0]) - model(*batches[0])
assert error.abs().max() < 0.05, error.abs().max()
print(json.dumps(sorted({claim.owner for claim in result.model.meta["qompose"].plan.claims})))
"""


@dataclass(frozen=True)
class Site(Environment):
    """An environment, and the folder with the wheels."""

    wheels: Path

    def install(self, *names: object) -> None:
        self.pip("install", "--quiet", "--no-index", "--find-links", self.wheels, *names)

    def qompose(self, *arguments: str, **variables: str) -> Any:
        """Run the installed command and return the JSON that it prints."""
        done = run([self.path / "bin" / "qompose", *arguments, "--json"], **variables)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def script(self, code: str, *arguments: str) -> str:
        return checked([self.python, "-c", code, *arguments]).strip()


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, built from a copy of the tree: setuptools would reuse an old build/."""
    folder, tree, copies = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("tree"), []
    for source, package in FOLDERS.values():
        copies.append(copy := tree / source.relative_to(ROOT))
        copy.mkdir(parents=True, exist_ok=True)
        for file in ("pyproject.toml", "README.md", "LICENSE", *(["setup.py"] * (source != ROOT))):
            shutil.copy(source / file, copy)
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(source / package, copy / package, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    checked([*pip, "--wheel-dir", folder, *copies])
    found = {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in FOLDERS}
    assert len(list(folder.iterdir())) == len(found)
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


Wanted = tuple[str, frozenset[str]]
"""A distribution's name and the extras of it that are wanted."""


def requirements(listed: Sequence[str], extras: frozenset[str] = frozenset()) -> Iterator[Wanted]:
    """Yield what is required here and now; a CUDA build of torch requires extras of others."""
    for text in listed:
        requirement = packaging_requirements.Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in {"", *extras}):
            yield requirement.name, frozenset(requirement.extras)


@pytest.fixture(scope="session")
def dependencies(wheels: dict[str, Path]) -> dict[str, Path]:
    """What the wheels need, directly or not: each entry of site-packages by name."""
    waiting = [
        wanted
        for wheel in wheels.values()
        for wanted in requirements(metadata(wheel).get_all("Requires-Dist", []))
        if wanted[0] not in FOLDERS
    ]
    seen: set[Wanted] = set()
    entries: dict[str, Path] = {}
    while waiting:
        wanted = waiting.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        installed = distribution(wanted[0])
        waiting.extend(requirements(installed.requires or [], wanted[1]))
        tops = {file.parts[0] for file in installed.files or () if len(file.parts) > 1}
        tops |= {file.name for file in installed.files or () if len(file.parts) == 1}
        for top in tops - {"..", "__pycache__"}:
            entries[top] = Path(str(installed.locate_file(top)))
    assert "torch" in entries
    assert not [top for top in entries if top.startswith(("qompose", "executorch"))]
    return entries


@pytest.fixture(scope="session")
def make_site(
    tmp_path_factory: pytest.TempPathFactory,
    wheels: dict[str, Path],
    dependencies: dict[str, Path],
) -> Any:
    """Make an environment with some of the five distributions."""

    def make(*names: str) -> Site:
        site = Site(tmp_path_factory.mktemp("site"), wheels["qompose"].parent)
        for top, path in dependencies.items():
            (site.packages / top).symlink_to(path)
        site.install(*names)
        return site

    return make


@pytest.fixture(scope="module")
def full(make_site: Any) -> Site:
    """Core and the three plugins. Tests leave it as it is."""
    site: Site = make_site(*FOLDERS)
    return site


class TestWheels:
    """What is in them."""

    @pytest.mark.parametrize("name", FOLDERS)
    def test_files(self, wheels: dict[str, Path], name: str) -> None:
        source, package = FOLDERS[name]
        folder = source / package
        wanted = {
            f"{folder.name}/{path.relative_to(folder).as_posix()}"
            for path in folder.rglob("*")
            if path.suffix in (".py", ".pyi", ".typed", ".template", ".html", ".css", ".js", ".h")
        }
        with zipfile.ZipFile(wheels[name]) as archive:
            packed = {n for n in archive.namelist() if ".dist-info/" not in n}
            licences = [n for n in archive.namelist() if n.endswith("licenses/LICENSE")]
            texts = [archive.read(n) for n in licences]
        assert packed == wanted
        assert f"{folder.name}/py.typed" in packed
        assert texts == [(ROOT / "LICENSE").read_bytes()]

    @pytest.mark.parametrize("name", FOLDERS)
    def test_metadata(self, wheels: dict[str, Path], name: str) -> None:
        facts = metadata(wheels[name])
        assert facts["Version"] == metadata(wheels["qompose"])["Version"]
        assert facts["License-Expression"] == "Apache-2.0"
        assert facts["Requires-Python"] == ">=3.10"
        assert facts.get_payload(), "the README is the long description"
        if name != "qompose":
            wanted = facts.get_all("Requires-Dist", [])
            assert f"qompose~={facts['Version']}" in wanted
            assert "torch" in {name for name, _ in requirements(wanted)}


class TestInstalled:
    """All four."""

    def test_comes_from_the_environment(self, full: Site, wheels: dict[str, Path]) -> None:
        modules = ["qompose", *(name.replace("-", "_") for name in BACKENDS.values())]
        code = "import importlib, sys\nfor n in sys.argv[1:]: print(importlib.import_module(n).__file__)"
        version, *files = full.script(
            f"import qompose; print(qompose.__version__)\n{code}", *modules
        ).splitlines()
        assert version == metadata(wheels["qompose"])["Version"]
        assert all(Path(file).is_relative_to(full.path) for file in files)

    def test_listed(self, full: Site) -> None:
        rows = full.qompose("backends")["backends"]
        assert {row["name"]: row["distribution"] for row in rows} == BACKENDS
        assert [row["problem"] for row in rows] == [None] * len(BACKENDS)

    @pytest.mark.full
    @needs_x86
    def test_checked(self, full: Site) -> None:
        rows = full.qompose("backends", "--check")["backends"]
        assert [row["problem"] for row in rows] == [None] * len(BACKENDS)

    @pytest.mark.full
    @pytest.mark.parametrize(
        "names",
        [
            ("embedding", "xnnpack"),
            pytest.param(("embedding", "x86_inductor"), marks=needs_x86),
        ],
        ids="+".join,
    )
    def test_work_together(self, full: Site, names: tuple[str, ...]) -> None:
        assert json.loads(full.script(QUANTIZE, *names)) == sorted(names)

    @pytest.mark.full
    def test_missing_runtime_names_its_extra(self, full: Site) -> None:
        """executorch is an extra, and is not installed here."""
        code = QUANTIZE.replace("progress=False)", "progress=False, target='executorch')")
        done = run([full.python, "-c", code, "xnnpack"])
        assert done.returncode == 1
        assert "TargetError" in done.stderr
        assert "qompose-xnnpack[executorch]" in done.stderr


@pytest.mark.full
class TestComingAndGoing:
    """Plugins are installed and uninstalled one by one."""

    def test_core_alone_and_with_others_for_a_while(self, make_site: Any) -> None:
        site = make_site("qompose")
        assert site.qompose("backends")["backends"] == []
        assert_missing(site)
        site.install(*BACKENDS.values())
        assert [row["name"] for row in site.qompose("backends")["backends"]] == [*BACKENDS]
        site.pip("uninstall", "--quiet", "--yes", "qompose-xnnpack")
        left = [name for name in BACKENDS if name != "xnnpack"]
        assert [row["name"] for row in site.qompose("backends")["backends"]] == left
        assert json.loads(site.script(QUANTIZE, "embedding")) == ["embedding"]
        site.script("import qompose; qompose.backend.load_backend('x86_inductor')")
        assert_missing(site)
        assert "No broken requirements" in site.pip("check")

    @pytest.mark.parametrize("name", BACKENDS)
    def test_each_plugin_alone(self, make_site: Any, name: str) -> None:
        """It brings core, and needs no other plugin."""
        site = make_site(BACKENDS[name])
        (row,) = site.qompose("backends")["backends"]
        assert row["name"] == name
        site.script("import sys, qompose; qompose.backend.load_backend(sys.argv[1])", name)


class TestRelease:
    """The smoke test of `release.py`, and how a version is set."""

    @pytest.mark.full
    def test_core_that_works(self, make_site: Any) -> None:
        site = make_site("qompose")
        assert "a quantizer by hand" in release.smoke(site, CORE)
        (site.packages / "qompose" / "conversion" / "convert.py").write_text("import missing")
        with pytest.raises(release.ReleaseError, match="qompose does not work"):
            release.smoke(site, CORE)

    @pytest.mark.full
    def test_backend_that_is_not_found(self, make_site: Any) -> None:
        project = release.Project(ROOT / "plugins/embedding", "qompose-embedding", ["embedding"])
        site = make_site(project.name)
        assert "embedding: error" in release.smoke(site, project)
        next(site.packages.glob("qompose_embedding-*.dist-info/entry_points.txt")).unlink()
        with pytest.raises(release.ReleaseError, match=r"backends: \[\], expected \['embedding'\]"):
            release.smoke(site, project)

    def test_version_is_in_one_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        for file in ("pyproject.toml", "CHANGELOG.md"):
            shutil.copy(ROOT / file, tmp_path)
        monkeypatch.setattr(release, "ROOT", tmp_path)
        release.set_version("7.8.9rc1")
        assert release.checked_version() == "7.8.9rc1"
        assert "CHANGELOG.md" in capsys.readouterr().out
        with pytest.raises(release.ReleaseError):
            release.set_version("7.8")


def assert_missing(site: Site) -> None:
    """Who asks for XNNPACK is told what to install."""
    done = run([site.python, "-c", QUANTIZE, "xnnpack"])
    assert "BackendNotFoundError" in done.stderr
    assert "xnnpack" in done.stderr
