# SPDX-License-Identifier: Apache-2.0
"""A reader who does what a page says, and compares what is printed with what the page shows.

Blocks of `python` run one after the other. Where a block of `text` follows one, it is what the code
prints, and a line `...` in it stands for any lines; an error ends the code, and prints what Python
prints last of it. A block with a path behind its language is a file, `path#part` a part of one: a
part that the file has already is replaced, a new one comes last, or, with `path#part<other`, before
another.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import platform
import re
import sys
import traceback
import warnings
from pathlib import Path

import pytest
from qompose.backend import discovery

from tests.pages import ROOT, Block, blocks, fenced, text

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this
    import tomli as tomllib

SEVEN_BITS = ",weights[-64,63]"
"""What `bare` leaves of it in the name of a configuration for other processors."""
X86 = platform.machine().lower() in ("x86_64", "amd64")


class Files:
    """What the blocks of a page that are files say, as far as one has read."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, str]] = {}

    def add(self, block: Block) -> str:
        """Take a block and return the path of its file."""
        path, _, part = block.info.partition("#")
        name, _, other = part.partition("<")
        known = self.parts.setdefault(path, {})
        if not part:
            known.clear()
        if other and name not in known:
            assert other in known, f"line {block.line}: {path} has no part {other}"
            moved = {key: known.pop(key) for key in [*known][[*known].index(other) :]}
            known.update({name: block.text, **moved})
        known[name] = block.text
        return path

    def text(self, path: str) -> str:
        """A file as it is now."""
        result = ""
        for part in self.parts[path].values():
            gap = gap_between(result, part) if result and path.endswith(".py") else 0
            result += "\n" * gap + part
        return result


def gap_between(before: str, after: str) -> int:
    """The number of empty lines that belong between two pieces of a module."""
    last, first = ast.parse(before).body[-1], ast.parse(after).body[0]
    if any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in (last, first)):
        return 2
    return int(isinstance(last, (ast.Import, ast.ImportFrom)))


def written(page: str) -> dict[str, str]:
    """The files that a page has its reader write, as they are at its end."""
    files = Files()
    paths = [files.add(block) for block in blocks(page) if block.info]
    return {path: files.text(path) for path in paths}


class Reader:
    """Follows a page in the current, empty folder; for `rewrite` it notes what is printed, compared else."""

    def __init__(self, page: str, regen: bool) -> None:
        self.page, self.files, self.regen = page, Files(), regen
        self.namespace: dict[str, object] = {"__name__": "page"}
        self.printed: list[tuple[Block, str]] = []

    def read(self) -> None:
        """Do what the page says from top to bottom."""
        found = blocks(self.page)
        for block, following in zip(found, [*found[1:], None][: len(found)], strict=True):
            if block.info:
                self._write(block)
            elif block.language == "python":
                shown = following if following and following.language == "text" else None
                self._run(block, shown)

    def _write(self, block: Block) -> None:
        path = Path(self.files.add(block))
        assert not path.is_absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.files.text(path.as_posix()), "utf-8")
        if path.name == "pyproject.toml":
            install(path)
        start_anew(Path.cwd())

    def _run(self, block: Block, shown: Block | None) -> None:
        place = f"{self.page}, line {block.line}"
        printed = io.StringIO()
        raised = None
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch's strict export, by which ExecuTorch's quantizer finds patterns, of torch's own trees
            warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec", FutureWarning)
            try:
                exec(compile(block.text, place, "exec", dont_inherit=True), self.namespace)
            except Exception as error:
                raised = error
        if raised is not None:
            if shown is None:
                raise raised
            printed.write("".join(traceback.format_exception_only(raised)))
        if shown is None:
            return
        if self.regen and "...\n" not in shown.text:
            self.printed.append((shown, trimmed(printed.getvalue()) + "\n"))
        else:
            assert matches(shown.text, printed.getvalue()), f"{place} prints\n{printed.getvalue()}"

    def rewrite(self) -> None:
        """Put what was printed into the page."""
        result = text(self.page)
        for block, printed in reversed(self.printed):
            result = result[: block.start] + printed + result[block.start + len(block.text) :]
        (ROOT / self.page).write_text(result, "utf-8")


def matches(shown: str, printed: str) -> bool:
    """Tell whether a page shows what is printed, on a processor with VNNI: others have other defaults."""
    if SEVEN_BITS in bare(printed) and SEVEN_BITS not in bare(shown):
        parts = re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)
        wanted = ".*".join(re.escape(bare(part)) for part in parts)
        return re.fullmatch(wanted, bare(printed).replace(SEVEN_BITS, "")) is not None
    lines = trimmed(shown).split("\n")
    wanted = "\n".join(r"(?:.*\n)*?.*" if line == "..." else re.escape(line) for line in lines)
    return re.fullmatch(wanted, trimmed(printed)) is not None


def bare(printed: str) -> str:
    """Text without blanks and lines of tables, whose columns are as wide as what is in them."""
    return re.sub("[\\s─]+", "", printed)


def trimmed(printed: str) -> str:
    """Text without blanks at the ends of lines, and without empty lines around it."""
    return "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())


def install(project: Path) -> None:
    """Write beside a project what an editable install of it would leave for importlib.metadata."""
    facts = tomllib.loads(project.read_text("utf-8"))["project"]
    folder = project.parent / f"{facts['name'].replace('-', '_')}-{facts['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {facts['name']}\nVersion: {facts['version']}\n"
    (folder / "METADATA").write_text(metadata, "utf-8")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in facts.get("entry-points", {}).items()
    ]
    (folder / "entry_points.txt").write_text("".join(groups), "utf-8")


def start_anew(folder: Path) -> None:
    """Forget the modules of a folder, as a new process would have.

    By their files, since a name says too little: a page may have a package `tests` as we have.
    """
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(folder):
            del sys.modules[name]
    importlib.invalidate_caches()
    discovery._load.cache_clear()


def follow(page: str, regen: bool = False) -> None:
    """Do what a page says in the current folder, whose packages can be imported, and forget them after."""
    if "x86" in "".join(fenced(page, "python")) and not X86:
        pytest.skip("x86_inductor needs x86")
    reader = Reader(page, regen)
    try:
        reader.read()
        if regen:
            reader.rewrite()
    finally:
        start_anew(Path.cwd())
