# SPDX-License-Identifier: Apache-2.0
"""The command that prints every table of benchmarks/, with scripts that measure nothing."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPT = """
import json, pathlib, sys
count = pathlib.Path(__file__).with_suffix(".count")
count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))
print("| engine | ms |\\n|---|---|\\n| ours | 3 |")
if "--json" in sys.argv:
    pathlib.Path(sys.argv[-1]).write_text(json.dumps({"rows": sys.argv[1:-2]}))
sys.exit(int(pathlib.Path(__file__).with_suffix(".status").exists()))
"""


class Bench:
    """The command on two scripts in a folder of their own, on a machine that is as busy as a test says."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.syspath_prepend(FOLDER)
        self.command, self.machine = import_module("all"), import_module("machine")
        self.folder, self.out, self.patch = folder, folder / "out", patch
        (folder / "one.py").write_text(SCRIPT)
        (folder / "two.py").write_text(SCRIPT)
        make = self.command.Benchmark
        scripts = (
            make("one", "How fast?", ("torch",), ("--rounds", "2"), ("--state", "{out}/state")),
            make("two", "How small?", ("torch",), (), figures=False),
            make("absent", "Whether it is there?", (), ()),
        )
        patch.setattr(self.command, "BENCHMARKS", scripts)
        patch.setattr(self.command, "HERE", folder)
        self.busy(0.0)

    def busy(self, part: float | None) -> None:
        self.patch.setattr(self.machine, "busy", lambda: part)

    def __call__(self, *arguments: str) -> int:
        self.patch.setattr(sys, "argv", ["all.py", "--out", str(self.out), *arguments])
        status: int = self.command.main()
        return status

    def runs(self, name: str) -> int:
        count = self.folder / f"{name}.count"
        return int(count.read_text()) if count.exists() else 0

    def read(self, name: str) -> Any:
        return json.loads((self.out / f"{name}.json").read_text())

    @property
    def page(self) -> str:
        return (self.out / "README.md").read_text()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_tables_figures_and_the_machine(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench() == 0
    assert capfd.readouterr().out.count("| ours | 3 |") == 2
    assert bench.page.count("| ours | 3 |") == 2
    assert "How fast?" in bench.page and "Whether it is there?" not in bench.page
    result = bench.read("one")
    assert result["command"] == ["--state", f"{bench.out}/state"]
    assert result["figures"] == {"rows": result["command"]}
    assert bench.read("two")["figures"] is None
    facts = result["machine"]
    assert facts["versions"] == {"torch": import_module("torch").__version__}
    for fact in (facts["processor"], facts["commit"], facts["torch_uses"]):
        assert fact and fact in bench.page
    assert "**" not in bench.page


def test_what_is_through_is_kept(bench: Bench) -> None:
    assert bench("--only", "one") == 0
    assert bench() == 0
    assert (bench.runs("one"), bench.runs("two")) == (1, 1)
    assert bench("--again", "--only", "one") == 0
    assert bench("--quick") == 0, "a look has other arguments"
    assert (bench.runs("one"), bench.runs("two")) == (3, 1)
    assert bench.page.count("figures mean nothing") == 1


def test_another_commit_is_measured_anew(bench: Bench) -> None:
    assert bench() == 0
    bench.patch.setattr(bench.machine, "_commit", lambda: "another")
    assert bench("--only", "one") == 0
    assert (bench.runs("one"), bench.runs("two")) == (2, 1)
    assert "commit another" in bench.page
    assert bench.page.count("Measured with other versions, or on another machine") == 1


def test_a_script_that_fails_is_told_and_run_again(bench: Bench) -> None:
    (bench.folder / "one.status").touch()
    assert bench() == 1
    assert "The script failed, with 1" in bench.page
    (bench.folder / "one.status").unlink()
    assert bench() == 0
    assert (bench.runs("one"), bench.runs("two")) == (2, 1)
    assert "failed" not in bench.page


def test_a_busy_machine_measures_nothing(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.busy(0.5)
    assert bench() == 2
    assert (
        "one: refused, because other processes use 50% of this machine's cores"
        in capsys.readouterr().err
    )
    assert bench.runs("one") == 0 and not (bench.out / "one.json").exists()


@pytest.mark.parametrize("option", ["--busy", "--quick"])
def test_or_says_so(bench: Bench, option: str) -> None:
    bench.busy(0.5)
    assert bench(option) == 0
    assert bench.page.count("Other processes used 50% of the cores") == 2


def test_a_machine_that_does_not_tell(bench: Bench) -> None:
    bench.busy(None)
    assert bench() == 0
    assert bench.page.count("Whether other processes were at work is not known here") == 2


def test_a_missing_peer_is_named(bench: Bench) -> None:
    lacking = bench.command.Benchmark("one", "How fast?", ("torch", "no-such-engine"), ())
    bench.patch.setattr(bench.command, "BENCHMARKS", (lacking,))
    assert bench() == 1
    assert bench.runs("one") == 0
    assert "not run: no-such-engine not installed" in bench.page


def test_every_script_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    known = {benchmark.name for benchmark in import_module("all").BENCHMARKS}
    scripts = {f.stem for f in FOLDER.glob("*.py") if "__main__" in f.read_text("utf-8")}
    assert scripts - {"all"} == known
