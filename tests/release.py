# SPDX-License-Identifier: Apache-2.0
"""Build every distribution, try each in an empty environment, and print what to upload.

    python -m tox run -e release                      # build and check what is there
    python -m tox run -e release -- --version 0.3.0   # set that version first, in all distributions

The version in the core's `pyproject.toml` is that of all distributions; plugins require a core of the same
minor version. Files go to `dist/`. Nothing is uploaded.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.processes import Environment, run  # noqa: E402

DIST = ROOT / "dist"
_VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)
_CORE = re.compile(r'"qompose>=[\d.]+,<[\d.]+"')

SMOKE = """
import torch, qompose
from torch import nn
names = [info.name for info in qompose.backends()]
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 8), nn.ReLU()).eval()
batches = [(torch.randint(40, (4, 6)),) for _ in range(2)]
for name in names:
    result = qompose.quantize(model, batches[0], backends=[name], calibration=batches, progress=False)
    error = (result.converted(*batches[0]) - model(*batches[0])).abs().max()
    assert error < 0.1, (name, error)
    print("   quantized a model with", name)
"""


class ReleaseError(Exception):
    """What stands in the way of a release."""


def projects() -> list[Path]:
    """The folders of all distributions, the core first."""
    return [ROOT, *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", help="set this version in all distributions first")
    options = parser.parse_args(arguments)
    try:
        if options.version:
            set_version(options.version)
        version = checked_version()
        files = build()
        _call("twine", "check", "--strict", *files)
        for name in map(_name, projects()):
            try_alone(name, version)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"\nqompose {version} can be uploaded:\n\n    python -m twine upload \\")
    print(" \\\n".join(f"        {file.relative_to(ROOT)}" for file in files))
    return 0


def _name(project: Path) -> str:
    name: str = tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]
    return name


def set_version(version: str) -> None:
    """Write a version, and the core that plugins require, to all `pyproject.toml`; the texts else stay."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ReleaseError(f"--version must be like 0.3.0 or 0.3.0rc1, got {version!r}")
    major, minor = (int(part) for part in version.split(".")[:2])
    for project in projects():
        file = project / "pyproject.toml"
        text = _VERSION.sub(f'version = "{version}"', file.read_text(), count=1)
        file.write_text(_CORE.sub(f'"qompose>={major}.{minor},<{major}.{minor + 1}"', text))


def checked_version() -> str:
    """Return the version of all distributions.

    Raises:
        ReleaseError: they differ, or the changelog has no section for it.
    """
    found = {
        project: tomllib.loads((project / "pyproject.toml").read_text())["project"]["version"]
        for project in projects()
    }
    version: str = found[ROOT]
    for project, own in found.items():
        if own != version:
            raise ReleaseError(
                f"{project.relative_to(ROOT)} has version {own}, the core {version}: run with --version"
            )
    if f"\n## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        print(f"warning: CHANGELOG.md has no section for {version}")
    return version


def build() -> list[Path]:
    """Build the wheel and the sdist of each distribution, and return the files."""
    shutil.rmtree(DIST, ignore_errors=True)
    for project in projects():
        print(f"building {_name(project)}")
        _call("build", "--outdir", DIST, project)
    return sorted(DIST.iterdir())


def try_alone(name: str, version: str) -> None:
    """Install a distribution in an empty environment, and use it: from its wheel, then from its sdist."""
    with tempfile.TemporaryDirectory() as folder:
        site = Environment(Path(folder))
        install = ("install", "--quiet", "-c", ROOT / "constraints.txt", "--find-links", DIST)
        again = ("--force-reinstall", "--no-deps", "--no-binary", name)
        for kind, form in (("wheel", ("--only-binary", name)), ("sdist", again)):
            print(f"trying {name} {version} from its {kind}")
            site.pip(*install, *form, f"{name}=={version}")
            for command in (["-m", "qompose", "backends", "--check"], ["-c", SMOKE]):
                done = run([site.python, *command])
                print(done.stdout, end="")
                if done.returncode and name != _name(ROOT):  # the core alone has no backend
                    raise ReleaseError(f"{name} from its {kind}: {done.stdout}{done.stderr}")


def _call(module: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise ReleaseError(f"{module} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
