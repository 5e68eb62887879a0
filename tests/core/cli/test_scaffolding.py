# SPDX-License-Identifier: Apache-2.0
"""What `new_backend` writes, what it refuses, and that the example of the repository is what it writes."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import qompose
from qompose.cli import new_backend as scaffold
from qompose.cli.new_backend import new_backend
from qompose.errors import ProjectError

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "toy_backend"
HEADER = "# SPDX-License-Identifier: Apache-2.0\n"
# (name given, backend, folder, package, class)
NAMES = (
    ("npu", "npu", "qompose-npu", "qompose_npu", "NpuBackend"),
    ("my-npu", "my_npu", "qompose-my-npu", "qompose_my_npu", "MyNpuBackend"),
    ("my_npu", "my_npu", "qompose-my-npu", "qompose_my_npu", "MyNpuBackend"),
    ("dsp2-v10", "dsp2_v10", "qompose-dsp2-v10", "qompose_dsp2_v10", "Dsp2V10Backend"),
    ("toy_backend", "toy_backend", "qompose-toy-backend", "qompose_toy_backend", "ToyBackend"),
)

REFUSED = (
    "", "NPU", "2npu", "-npu", "npu-", "my--npu", "my__npu", "my npu", "my.npu", "../npu", "npu\n",
    "naïve", "class", "qompose", "qompose-npu",
)  # fmt: skip


def content(folder: Path) -> dict[str, str]:
    """The text of every file of a project that its author keeps."""
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8").removeprefix(HEADER)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & {*path.parts}
        if ".egg-info" not in str(path)
    }


class TestWritten:
    """The project."""

    @pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
    def test_names(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        given, name, folder, package, kind = names
        written = new_backend(given, tmp_path)
        assert written == tmp_path / folder
        texts = content(written)
        module, contract = f"{package}/__init__.py", "tests/test_contract.py"
        assert {*texts} == {"pyproject.toml", "README.md", ".gitignore", module, contract}
        assert f'name = "{folder}"' in texts["pyproject.toml"]
        assert f'[project.entry-points.qompose]\n{name} = "{package}"' in texts["pyproject.toml"]
        assert f'backend = "{name}"' in texts[contract]
        classes = [n for n in ast.parse(texts[module]).body if isinstance(n, ast.ClassDef)]
        assert [found.name for found in classes] == [kind]
        assert f'"{package}::linear"' in texts[module]
        assert not [path for path, text in texts.items() if "$" in text]

    def test_versions_are_those_of_this_release(self, tmp_path: Path) -> None:
        texts = content(new_backend("npu", tmp_path))
        major, minor = qompose.__version__.split(".")[:2]
        assert f'"qompose>={major}.{minor},<{major}.{int(minor) + 1}"' in texts["pyproject.toml"]
        assert f"api_version = {qompose.backend.API_VERSION}\n" in texts["qompose_npu/__init__.py"]

    def test_nothing_else_is_left(self, tmp_path: Path) -> None:
        written = new_backend("npu", tmp_path)
        assert [*tmp_path.iterdir()] == [written]
        assert written.stat().st_mode == tmp_path.joinpath("qompose-npu/tests").stat().st_mode


class TestRefused:
    """Nothing is written."""

    @pytest.mark.parametrize("name", REFUSED, ids=repr)
    def test_name(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ProjectError):
            new_backend(name, tmp_path)
        assert not [*tmp_path.iterdir()]

    @pytest.mark.parametrize("name", ["acme-npu", "acme_npu"])
    @pytest.mark.parametrize("offered", ["acme-npu", "acme_npu"])
    def test_name_of_an_installed_backend(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, offered: str
    ) -> None:
        """Also of one that QOMPOSE_PLUGINS hides."""
        info = tmp_path / "site" / "acme-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[qompose]\n{offered} = acme\n")
        monkeypatch.syspath_prepend(info.parent)
        monkeypatch.setenv("QOMPOSE_PLUGINS", "")
        with pytest.raises(ProjectError, match=f"'{offered}'.* acme"):
            new_backend(name, tmp_path)

    @pytest.mark.parametrize("kind", ["folder", "file", "link that leads nowhere"])
    def test_what_is_there(self, tmp_path: Path, kind: str) -> None:
        place = tmp_path / "qompose-npu"
        if kind == "folder":
            place.mkdir()
            (place / "mine.txt").write_text("mine")
        elif kind == "file":
            place.write_text("mine")
        else:
            place.symlink_to(tmp_path / "gone")
        before = [*tmp_path.rglob("*")]
        with pytest.raises(ProjectError, match="qompose-npu"):
            new_backend("npu", tmp_path)
        assert [*tmp_path.rglob("*")] == before

    def test_no_folder_to_write_into(self, tmp_path: Path) -> None:
        with pytest.raises(ProjectError, match="gone"):
            new_backend("npu", tmp_path / "gone")

    @pytest.mark.parametrize("number", [0, 4])
    def test_disk_that_is_full(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Whichever file cannot be written."""
        (tmp_path / "qompose-npu").mkdir()
        write, written = Path.write_text, []

        def failing(path: Path, *args: Any, **options: Any) -> int:
            if len(written) == number:
                raise OSError(28, os.strerror(28))
            written.append(path)
            return write(path, *args, **options)

        monkeypatch.setattr(Path, "write_text", failing)
        with pytest.raises(ProjectError, match="No space left"):
            new_backend("npu", tmp_path)
        assert [*tmp_path.rglob("*")] == [tmp_path / "qompose-npu"]


class TestExample:
    """`examples/toy_backend` is what `new_backend` writes, with the licence line of this repository."""

    def test_is_what_is_written(self, tmp_path: Path, regen: bool) -> None:
        if regen:
            for path, text in scaffold._rendered(scaffold._facts("toy_backend")).items():
                header = HEADER if path.endswith(".py") else ""
                EXAMPLE.joinpath(path).parent.mkdir(parents=True, exist_ok=True)
                EXAMPLE.joinpath(path).write_text(header + text, "utf-8")
        assert content(EXAMPLE) == content(new_backend("toy_backend", tmp_path))

    def test_uses_public_names(self) -> None:
        """What `qompose` and its public submodules list, and `qompose.testing`."""
        public = {name: getattr(qompose, name) for name in qompose._submodules}
        listed = [f"qompose.{name}" for name in public]
        for path in EXAMPLE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qompose"):
                    assert node.module in ("qompose", "qompose.testing", *listed)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) in public:
                    assert node.attr in public[ast.unparse(node.value)].__all__
