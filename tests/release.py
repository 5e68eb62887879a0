# SPDX-License-Identifier: Apache-2.0
"""Build every distribution, try each in an environment of its own, and print what to upload.

    python -m tox run -e release                      # build and check what is there
    python -m tox run -e release -- --version 0.3.0   # set that version first

All distributions have the version of the core's `pyproject.toml`; `setup.py` of each plugin reads it there.
Files go to `dist/`. Nothing is uploaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.processes import Environment, checked, run  # noqa: E402

DIST = ROOT / "dist"
_VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)

SMOKE = """
import sys, torch, qompose
from qompose.spec import QuantizationAnnotation
from torch import nn

class Linears(qompose.Quantizer):
    def annotate(self, model):
        spec = qompose.QuantizationSpec(torch.int8, qompose.observers.MinMaxObserver, -127, 127,
                                        torch.per_tensor_symmetric)
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                inputs = {node.args[0]: spec, node.args[1]: spec}
                node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, _annotated=True)
        return model

for name in qompose.__all__:
    getattr(qompose, name)
found = [info.name for info in qompose.backends()]
if found != sys.argv[1:]:
    sys.exit(f"backends: {found}, expected {sys.argv[1:]}")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 8), nn.ReLU()).eval()
batches = [(torch.randint(40, (4, 6)),) for _ in range(2)]
program = torch.export.export(model, batches[0])
for backend in found or [Linears()]:
    prepared = qompose.prepare_pt2e(program, backend)
    converted = qompose.convert_pt2e(qompose.calibrate(prepared, batches, progress=False))
    error = (converted(*batches[0]) - model(*batches[0])).abs().max().item()
    if not 0 < error < 0.1:
        sys.exit(f"{backend}: the quantized model differs by {error} from the float one")
    print(f"   {backend if found else 'a quantizer by hand'}: error {error:.4f}")
    if found:
        rules = qompose.backend.load_backend(backend).rules
        targets = {target for rule in rules for target in rule.kernels}
        target = "torch" if "torch" in targets else "onnx"
        qompose.lower(converted, target, strict=target == "torch")  # ONNX Runtime fuses, and is an extra
"""
"""With the names of the backends that must be there; the core alone gets a quantizer written by hand."""


class ReleaseError(Exception):
    """What stands in the way of a release."""


@dataclass(frozen=True)
class Project:
    """A distribution: its folder, its name, and the backends that it brings."""

    folder: Path
    name: str
    backends: Sequence[str]

    def files(self, version: str) -> tuple[Path, Path]:
        """The wheel and the source distribution."""
        stem = f"{self.name.replace('-', '_')}-{version}"
        return DIST / f"{stem}-py3-none-any.whl", DIST / f"{stem}.tar.gz"


def projects() -> list[Project]:
    """All distributions, the core first."""
    folders = [ROOT, *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]
    return [_project(folder) for folder in folders]


def _project(folder: Path) -> Project:
    found = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    return Project(folder, found["name"], [*found.get("entry-points", {}).get("qompose", ())])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", help="set this version first")
    options = parser.parse_args(arguments)
    try:
        if options.version:
            set_version(options.version)
        version = checked_version()
        files = build(version)
        print(_call("twine", "check", "--strict", *files), end="")
        with tempfile.TemporaryDirectory() as folder:
            torch = with_torch(Path(folder) / "torch")
            for project in projects():
                try_alone(project, version, torch, Path(folder) / project.name)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"\nqompose {version} can be uploaded:\n\n    python -m twine upload \\")
    print(" \\\n".join(f"        {file.relative_to(ROOT)}" for file in files))
    return 0


def set_version(version: str) -> None:
    """Write the version to the one place that has it."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ReleaseError(f"--version must be like 0.3.0 or 0.3.0rc1, got {version!r}")
    file = ROOT / "pyproject.toml"
    text = file.read_text("utf-8")
    file.write_text(_VERSION.sub(f'version = "{version}"', text, count=1), "utf-8")


def checked_version() -> str:
    """Return the version of all distributions, and warn where the changelog starts with another."""
    found = _VERSION.search((ROOT / "pyproject.toml").read_text("utf-8"))
    if found is None:
        raise ReleaseError("pyproject.toml has no version")
    version = found[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    if newest is None or newest[1] != version:
        newer = newest[1] if newest else "no version"
        print(f"warning: CHANGELOG.md starts with {newer}, the version is {version}: use --version")
    return version


def build(version: str) -> list[Path]:
    """Build the wheel and the source distribution of each project, and return the files.

    Raises:
        ReleaseError: a build fails, or makes other files than those of this version.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    for project in projects():
        print(f"building {project.name}", flush=True)
        _call("build", "--outdir", DIST, project.folder)
    built, wanted = {*DIST.iterdir()}, [f for project in projects() for f in project.files(version)]
    if built != {*wanted}:
        names = ", ".join(sorted(file.name for file in built ^ {*wanted}))
        raise ReleaseError(
            f"dist/ must have the files of {version} alone; missing or too many: {names}"
        )
    return wanted


def with_torch(folder: Path) -> Environment:
    """Return an environment with torch alone, which takes a minute to unpack and compile."""
    site = Environment(folder)
    site.pip("install", "--quiet", "-c", ROOT / "constraints.txt", "torch")
    checked([site.python, "-c", "import torch"])
    return site


def try_alone(project: Project, version: str, torch: Environment, folder: Path) -> None:
    """Install a wheel in an environment that has torch and nothing else, and use it.

    Raises:
        ReleaseError: it does not work, or the source distribution makes another wheel.
    """
    wheel, sdist = project.files(version)
    print(f"trying {wheel.name}", flush=True)
    site = Environment(folder / "site")
    shutil.copytree(torch.packages, site.packages, copy_function=os.link, dirs_exist_ok=True)
    core = projects()[0].files(version)[0]
    site.pip("install", "--quiet", "-c", ROOT / "constraints.txt", *{core, wheel})
    print(smoke(site, project), end="", flush=True)
    _call("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sdist)
    if _contents(folder / wheel.name) != _contents(wheel):
        raise ReleaseError(f"{sdist.name} makes another wheel than {wheel.name}")


def _contents(wheel: Path) -> dict[str, int]:
    """Return the checksums of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


def smoke(site: Environment, project: Project) -> str:
    """Quantize a model in an environment with a distribution, and return what is printed.

    Raises:
        ReleaseError: a command fails, a backend is missing, or numbers are wrong.
    """
    printed = ""
    check = ["-m", "qompose", "backends", "--check", "--timeout", "600"]
    for command in (check, ["-c", SMOKE, *project.backends]):
        done = run([site.python, *command])
        printed += done.stdout
        if done.returncode:
            raise ReleaseError(f"{project.name} does not work:\n{done.stdout}{done.stderr}")
    return printed


def _call(module: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise ReleaseError(f"{module} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
