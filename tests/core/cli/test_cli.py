# SPDX-License-Identifier: Apache-2.0
"""The command line, with plugins that exist only here: usage, exit codes, and what is printed where."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qompose
from qompose.backend import discovery
from qompose.backend.discovery import BackendInfo, Health
from qompose.cli import inspection, main
from qompose.cli.command import Results, say
from qompose.console import printable

from tests.core.backend.test_offers import Package, package
from tests.core.backend.test_plugins import Install, backend, install, point
from tests.core.cli.conftest import Command

__all__ = ["install", "package"]  # fixtures

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
KEPT = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
ALONE = {"QOMPOSE_PLUGINS": "", **KEPT}
MODULE = (sys.executable, "-m", "qompose")
USABLE, WITHOUT_TARGET = Health("usable"), Health("usable", None, {"there": "install it"})


@pytest.fixture
def installed(install: Install) -> None:
    install(point("broken", "no_such_module"), alpha=backend("alpha"), beta=backend("beta"))


def check_finds(monkeypatch: Patch, healths: list[Health]) -> list[float]:
    """Let checks find backends in the given health, and return the limits of time that they get."""
    limits = []

    def check(found: list[BackendInfo], timeout: float) -> list[Health]:
        assert len(found) == len(healths)
        limits.append(timeout)
        return healths

    monkeypatch.setattr(inspection, "check_apart", check)
    return limits


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; what it prints is kept unless it is to go elsewhere."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, text=True, check=False, **options)


def doing(monkeypatch: Patch, run: Callable[[Namespace, Any], int]) -> None:
    """Let `qompose backends` do something else."""
    monkeypatch.setitem(main.COMMANDS, "backends", replace(main.COMMANDS["backends"], run=run))


class TestUsage:
    """Exit code 2, help, and names that are nearly right."""

    @pytest.mark.parametrize(
        ("line", "named"),
        [
            ("", "COMMAND"), ("--traceback", "COMMAND"), ("bakends", "'bakends'"),
            ("backends --chekc", "--chekc"), ("--what backends", "--what"), ("backends extra", "extra"),
            ("backends --js", "--js"), ("report", "FILE"), ("report f --json --markdown", "--json"),
            ("quantize m.pt2", "--backend --config"), ("quantize m.pt2 --backend a --config b", "--backend"),
            ("quantize m --backend a --batches 0", "'0'"), ("quantize m --backend a --on-conflict x", "'x'"),
            ("capabilities --mode fast", "'fast'"), ("backends --timeout 0", "'0'"),
            ("backends --timeout=-1", "'-1'"), ("backends --timeout inf", "'inf'"),
            ("backends --timeout nan", "'nan'"), ("backends --timeout soon", "'soon'"),
        ],
    )  # fmt: skip
    def test_wrong(self, line: str, named: str, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as caught:
            main.main(line.split())
        printed = capsys.readouterr()
        assert (caught.value.code, printed.out) == (2, "")
        assert "usage: qompose" in printed.err
        assert named in printed.err

    @pytest.mark.parametrize("name", [None, *main.COMMANDS])
    def test_help(self, name: str | None, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as caught:
            main.main([name, "--help"] if name else ["--help"])
        printed = capsys.readouterr()
        assert (caught.value.code, printed.err) == (0, "")
        if name is None:
            assert set(main.COMMANDS) <= set(printed.out.split())
        else:
            assert f"examples:\n  qompose {name}" in printed.out

    @pytest.mark.parametrize("command", main.COMMANDS)
    def test_examples_are_right(self, command: str) -> None:
        """Every example can be parsed."""
        for line in main.COMMANDS[command].examples.splitlines():
            words = shlex.split(line.partition(" > ")[0])
            _, *arguments = words[words.index("qompose") :]
            assert main._parser().parse_args(arguments).command is main.COMMANDS[command]

    def test_version(self, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as caught:
            main.main(["--version"])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"qompose {qompose.__version__}\n"


class TestProcess:
    """`python -m qompose`, as a shell sees it."""

    def test_the_module_is_the_command(self) -> None:
        done = run(*MODULE, "backends", "--json", env=ALONE)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout) == {"schema": 1, "backends": []}
        assert run(*MODULE, env=ALONE).stderr.startswith("usage: qompose ")

    @pytest.mark.parametrize(
        "line",
        [
            "backends --json", "backends", "new-backend my_chip",
            pytest.param("--help", marks=pytest.mark.full),
        ],
    )  # fmt: skip
    def test_what_needs_no_torch_imports_little(self, line: str, tmp_path: Path) -> None:
        """Rather than a time: what takes time is importing."""
        code = (
            "import sys; before = {*sys.modules}; from qompose.cli import main as cli\n"
            "try: cli.main(sys.argv[1:])\n"
            "except SystemExit: pass\n"
            "print(*set(sys.modules) - before, file=sys.stderr)"
        )
        done = run(sys.executable, "-c", code, *line.split(), env=KEPT, cwd=tmp_path)
        assert done.returncode == 0
        names = done.stderr.split()
        heavy = {"torch", "numpy", "safetensors", "sympy"}
        heavy |= set() if line == "backends" else {"rich"}  # which makes tables
        assert not heavy & {name.partition(".")[0] for name in names}
        assert not [name for name in names if name.startswith("qompose_")]
        assert len(names) < 300


class TestInterrupts:
    """No traceback, whenever the interrupt comes."""

    START = "import runpy, signal, sys; sys.argv[1:] = ['backends']\n"
    RUN = "runpy.run_module('qompose', run_name='__main__')\n"

    def end(self, code: str) -> tuple[int, str]:
        done = run(sys.executable, "-c", self.START + code, env=ALONE)
        return done.returncode, done.stderr

    def test_while_the_command_line_is_imported(self) -> None:
        code = (
            "class Finder:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name == 'qompose.cli.main': signal.raise_signal(signal.SIGINT)\n"
            "sys.meta_path.insert(0, Finder())\n"
        )
        assert self.end(code + self.RUN) == (130, "qompose: interrupted\n")

    @pytest.mark.parametrize("moment", ["arguments", "command"])
    def test_while_something_runs(self, moment: str, monkeypatch: Patch, command: Command) -> None:
        def interrupt(*_: object) -> Any:
            raise KeyboardInterrupt

        if moment == "arguments":
            monkeypatch.setattr(main, "_parser", interrupt)
        else:
            doing(monkeypatch, interrupt)
        assert command("backends", code=130) == ("", "qompose: interrupted\n")

    def test_while_the_process_ends(self) -> None:
        """By then all results are printed: the signal ends the process, as it ends others."""
        code = "import atexit; atexit.register(signal.raise_signal, signal.SIGINT)\n"
        assert self.end(code + self.RUN) == (-2, "")


class TestProblems:
    """Exit code 1 and one line on standard error."""

    def fail(self, monkeypatch: Patch, error: BaseException) -> None:
        def run(options: Namespace, out: object) -> int:
            raise error

        doing(monkeypatch, run)

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (qompose.UserError("it is so"), "it is so"),
            (FileNotFoundError(2, "No such file", "a.pt"), "a.pt: No such file"),
            (OSError("safetensors says no"), "safetensors says no"),
            (qompose.QomposeWarning("as an error"), "as an error"),
            (qompose.errors.InternalError("broke"), "internal error: broke"),
            (ZeroDivisionError("oh"), "internal error: ZeroDivisionError: oh"),
            (SystemExit("left"), "internal error: SystemExit: left"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
    )
    def test_one_line(
        self, error: BaseException, said: str, monkeypatch: Patch, command: Command
    ) -> None:
        self.fail(monkeypatch, error)
        printed = command("backends", code=1)
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith(f"qompose: {said}")
        assert ("--traceback shows where" in line) == said.startswith("internal")

    @pytest.mark.parametrize("how", ["before", "after", "variable"])
    def test_a_traceback_where_it_is_asked_for(
        self, how: str, monkeypatch: Patch, command: Command
    ) -> None:
        self.fail(monkeypatch, ZeroDivisionError("oh"))
        if how == "variable":
            monkeypatch.setenv("QOMPOSE_TRACE", "1")
        arguments = {"before": ["--traceback", "backends"], "after": ["backends", "--traceback"]}
        said = command(*arguments.get(how, ["backends"]), code=1).err
        assert "Traceback (most recent call last)" in said

    def test_warnings_of_qompose_are_messages(self, monkeypatch: Patch, command: Command) -> None:
        others: list[object] = []

        def run(options: Namespace, out: object) -> int:
            warnings.simplefilter("always")
            warnings.warn("two operators", qompose.QomposeWarning, stacklevel=1)
            warnings.warn("from elsewhere", UserWarning, stacklevel=1)
            return 0

        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(message))
        doing(monkeypatch, run)
        assert command("backends").err == "qompose: warning: two operators\n"
        assert [str(message) for message in others] == ["from elsewhere"]


@pytest.mark.usefixtures("installed")
class TestBackends:
    """`qompose backends`."""

    def test_json(self, command: Command) -> None:
        rows = json.loads(command("backends", "--json").out)["backends"]
        assert [row["name"] for row in rows] == ["alpha", "beta", "broken"]
        assert rows[0]["distribution"] == "dist-alpha"
        assert rows[0]["problem"] is None

    def test_text(self, command: Command) -> None:
        text = command("backends").out
        assert all(word in text for word in ("alpha", "dist-beta", "1.0", "no_such_module"))
        assert "problem" not in text

    def test_a_problem_in_the_metadata_needs_no_check(
        self, install: Install, command: Command
    ) -> None:
        install(point("alpha", "fake_alpha", "rival"))
        assert "rival 1.0" in command("backends", code=1).out

    @pytest.mark.parametrize("columns", ["", "80"], ids=["piped", "80 columns"])
    def test_a_problem_is_never_cut_off(
        self, columns: str, monkeypatch: Patch, command: Command
    ) -> None:
        words = [f"word{number}" for number in range(40)]
        unavailable = Health("unavailable here", " ".join(words))
        check_finds(monkeypatch, [USABLE, unavailable, Health("broken", "x" * 200)])
        monkeypatch.setenv("COLUMNS", columns)
        text = command("backends", "--check", code=1).out
        assert set(words) <= set(text.split())
        assert sum(line.count("x") for line in text.splitlines()) >= 200
        widest = max(map(len, text.splitlines()))
        assert widest <= 80 if columns else len(text.splitlines()) == 5

    def test_a_check_as_json(self, monkeypatch: Patch, command: Command) -> None:
        seen = check_finds(monkeypatch, [WITHOUT_TARGET, USABLE, Health("broken", "why")])
        printed = command("backends", "--check", "--json", "--timeout", "7", code=1)
        rows = json.loads(printed.out)["backends"]
        found = [(row["status"], row["problem"]) for row in rows]
        assert found == [("usable", None), ("usable", None), ("broken", "why")]
        assert rows[0]["targets"] == {"there": "install it"}
        assert seen == [7.0]

    def test_a_target_that_cannot_be_used_is_said_and_is_no_problem(
        self, monkeypatch: Patch, command: Command
    ) -> None:
        check_finds(monkeypatch, [WITHOUT_TARGET, USABLE, USABLE])
        text = command("backends", "--check").out
        assert "there" in text and "install it" in text

    def test_a_target_that_nobody_brings_is_said(
        self, monkeypatch: Patch, command: Command
    ) -> None:
        mine = Health("usable", None, {"there": None}, ("torch", "there", "elsewhere"))
        check_finds(monkeypatch, [mine, USABLE, USABLE])
        (line,) = (
            line for line in command("backends", "--check").out.splitlines() if "provides" in line
        )
        assert "alpha" in line and line.endswith("elsewhere")

    def test_names_in_the_variable_that_nobody_offers(
        self, monkeypatch: Patch, command: Command
    ) -> None:
        monkeypatch.setenv("QOMPOSE_PLUGINS", "alpha,alhpa")
        printed = command("backends", "--json")
        assert [row["name"] for row in json.loads(printed.out)["backends"]] == ["alpha"]
        assert "'alhpa'" in printed.err

    def test_an_empty_variable_hides_all_and_is_told(
        self, monkeypatch: Patch, command: Command
    ) -> None:
        monkeypatch.setenv("QOMPOSE_PLUGINS", "")
        assert "QOMPOSE_PLUGINS=''" in command("backends").out
        assert "alpha, beta, broken" in command("capabilities").err

    def test_no_backend_is_installed(self, monkeypatch: Patch, command: Command) -> None:
        monkeypatch.setattr(discovery, "entry_points", lambda group: [])
        assert command("backends").out.strip()

    def test_a_damaged_package_is_named(self, package: Package, command: Command) -> None:
        info = package("odd", text="[group]\nthis is no entry point\n")
        assert command("backends").err.startswith(f"qompose: {info}: ")


@pytest.mark.usefixtures("installed")
class TestCapabilities:
    """`qompose capabilities`."""

    def test_json(self, command: Command) -> None:
        data = json.loads(command("capabilities", "alpha", "--json").out)
        assert data["schema"] == 1
        rows = data["rows"]
        assert {row["backend"] for row in rows} == {"alpha"}
        linear = [row for row in rows if row["pattern"] == "linear"]
        assert [row["config"] for row in linear] == ["static", "dynamic", "weight-only"]
        assert linear[0]["mode"] == "static"

    @pytest.mark.parametrize(
        ("arguments", "keep"),
        [
            (["--mode", "dynamic"], lambda row: row["mode"] == "dynamic"),
            (["--config", "static"], lambda row: row["config"] == "static"),
            (["--rule", "linear_relu"], lambda row: row["pattern"] == "linear_relu"),
            (["--operator", "nn.ReLU"], lambda row: any("relu" in "".join(o) for o in row["operators"])),
            (["--target", "torch"], lambda row: bool(row["kernels"])),
            (["--target", "torch", "--mode", "static"],
             lambda row: bool(row["kernels"]) and row["mode"] == "static"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )  # fmt: skip
    def test_choice(
        self, arguments: list[str], keep: Callable[[dict[str, Any]], bool], command: Command
    ) -> None:
        every = json.loads(command("capabilities", "alpha", "--json").out)["rows"]
        wanted = [row for row in every if keep(row)]
        assert 0 < len(wanted) < len(every)
        chosen = json.loads(command("capabilities", "alpha", *arguments, "--json").out)
        assert chosen == {"schema": 1, "rows": wanted}

    @pytest.mark.parametrize(
        ("line", "near"),
        [
            ("alpha --target tocrh", "torch"),
            ("alpha --config sttaic", "static"),
            ("alpha --rule linaer", "linear"),
            ("alpha --operator linaer", "linear"),
            ("alpho", "alpha"),
        ],
    )
    def test_a_choice_that_nothing_has(self, line: str, near: str, command: Command) -> None:
        words = line.split()
        printed = command("capabilities", *words, code=1)
        assert printed.out == ""
        assert f"'{words[-1]}'" in printed.err and f"'{near}'" in printed.err

    def test_text_and_markdown(self, command: Command) -> None:
        text = command("capabilities", "alpha", "beta").out
        assert all(
            word in text for word in ("alpha", "beta", "linear", "toy linear", "weight-only")
        )
        assert command("capabilities", "alpha", "--markdown").out.count("|") > 20

    def test_one_operator_fits_a_screen(self, command: Command) -> None:
        lines = command("capabilities", "alpha", "--operator", "linear").out.splitlines()
        assert len(lines) < 30
        assert lines[0].startswith("alpha: ")
        assert any("linear_relu" in line for line in lines)
        assert not any("sigmoid" in line for line in lines)

    def test_an_operator_that_no_rule_has(self, command: Command) -> None:
        printed = command("capabilities", "alpha", "--operator", "nn.Softmax").out
        assert printed.startswith("alpha: no: ")

    def test_a_broken_plugin_harms_nobody_else(self, command: Command) -> None:
        """The others' rows are printed, and the fault is named."""
        printed = command("capabilities", "--json", code=1)
        assert {row["backend"] for row in json.loads(printed.out)["rows"]} == {"alpha", "beta"}
        assert "'broken' (dist-broken 1.0" in printed.err


class TestNewBackend:
    """`qompose new-backend`; what it writes is tested with the scaffolding."""

    def test_prints_where_the_project_is(self, tmp_path: Path, command: Command) -> None:
        arguments = ["new-backend", "my_chip", "--directory", str(tmp_path)]
        printed = command(*arguments)
        assert printed.err == ""
        assert list(tmp_path.iterdir()) == [Path(printed.out.strip())]
        assert (Path(printed.out.strip()) / "pyproject.toml").exists()
        assert command(*arguments, code=1).err.startswith("qompose: "), "it is there already"


START = """
import sys
from dataclasses import replace
from qompose.cli import main
def run(options, results):
{body}
    return 5
main.COMMANDS["backends"] = replace(main.COMMANDS["backends"], run=run)
sys.argv[1:] = ["backends"]
sys.exit(main.main())
"""


def source(body: str) -> list[str]:
    """Return a process in which `qompose backends` does something else."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return [sys.executable, "-c", START.format(body=lines)]


def test_what_others_print_goes_to_standard_error(monkeypatch: Patch, capsys: Capture) -> None:
    def run(options: Namespace, results: Results) -> int:
        print("noise")
        results.json({"a": 1})
        return 0

    doing(monkeypatch, run)
    assert main.main(["backends"]) == 0
    print("afterwards")
    assert capsys.readouterr() == ('{\n  "a": 1\n}\nafterwards\n', "noise\n")


def test_in_a_process_that_goes_for_c_and_for_what_is_printed_at_its_end_too() -> None:
    body = (
        "import atexit, os\n"
        "atexit.register(print, 'at exit')\n"
        "print('from python')\n"
        "os.write(1, b'from C')\n"
        "os.system('echo from a child')\n"
        "results.json({'a': 1})"
    )
    done = run(*source(body))
    assert json.loads(done.stdout) == {"a": 1}
    for words in ("from python", "from C", "from a child", "at exit"):
        assert words in done.stderr


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_closed_streams(closed: str) -> None:
    descriptors = " ".join(f"{number}>&-" for number in closed.split())
    words = f'"$0" "$1" "$2" {descriptors}'
    done = run("sh", "-c", words, *source("print('x'); results.text('y')"))
    assert done.returncode == 5, done.stderr
    assert done.stdout == ("" if "1" in closed else "y\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*source("for _ in range(3): results.text('x' * 100_000)"), stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_said_once() -> None:
    with Path("/dev/full").open("w") as full:
        done = run(*MODULE, "backends", stdout=full)
    assert done.returncode == 1
    (said,) = done.stderr.strip().splitlines()
    assert "No space left on device" in said


def test_text_that_the_terminal_cannot_show_is_replaced() -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert run(*source("results.text('a \\u2500 b')"), env=ascii_only).stdout == "a ? b\n"


@pytest.mark.parametrize(("columns", "expected"), [("40", 40), ("", 100_000), ("no", 100_000)])
def test_width(monkeypatch: Patch, columns: str, expected: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "__stdout__", None)  # as where nobody looks on
    assert Results(None).width == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n\tb \u2500 \u00fc", "a\n\tb \u2500 \u00fc"),
        ("a\x1b[31mb\x07", "a\\x1b[31mb\\x07"),
        ("a\rb\x9b2J", "a\\rb\\x9b2J"),
        ("a\u202eb", "a\\u202eb"),
    ],
    ids=["text", "escape", "return", "right to left"],
)
def test_what_a_terminal_would_obey_is_written_out(
    text: str, expected: str, capsys: Capture
) -> None:
    assert printable(text) == expected
    Results(sys.stdout).text(text)
    say(text)
    assert capsys.readouterr() == (f"{expected}\n", f"qompose: {expected}\n")
