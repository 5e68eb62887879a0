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
from pathlib import Path
from typing import Any

import pytest
import qompose
from qompose.backend import discovery
from qompose.backend.discovery import Health
from qompose.cli import backends, main

from tests.core.backend.test_plugins import Install, backend, install, point

__all__ = ["install"]  # a fixture

Capture = pytest.CaptureFixture[str]
KEPT = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
ALONE = {"QOMPOSE_PLUGINS": "", **KEPT}


@pytest.fixture
def installed(install: Install) -> None:
    install(point("broken", "no_such_module"), alpha=backend("alpha"), beta=backend("beta"))


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qompose", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=ALONE, **options
    )


class TestUsage:
    """Exit code 2, help, and names that are nearly right."""

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "usage: qompose"),
            (["--traceback"], "a command is missing"),
            (["bakends"], "there is no command 'bakends' (did you mean 'backends'"),
            (["backends", "--chekc"], "there is no argument '--chekc' (did you mean --check?)"),
            (["--what", "backends"], "there is no argument '--what'"),
            (["backends", "extra"], "there is no argument 'extra'"),
            (["backends", "--js"], "there is no argument '--js'"),
            (["report"], "the following arguments are required: FILE"),
            (["report", "f", "--json", "--markdown"], "not allowed with argument --json"),
            (["quantize", "m.pt2"], "one of the arguments --backend --config is required"),
            (["quantize", "m.pt2", "--backend", "a", "--config", "b"], "not allowed with argument"),
            (["quantize", "m", "--backend", "a", "--batches", "0"], "'0' is no positive number"),
            (["quantize", "m", "--backend", "a", "--on-conflict", "x"], "invalid choice: 'x'"),
            (["capabilities", "--mode", "fast"], "invalid choice: 'fast'"),
            (["backends", "--timeout", "0"], "'0' is no positive number of seconds"),
            (["backends", "--timeout=-1"], "'-1' is no positive number of seconds"),
            (["backends", "--timeout", "nan"], "'nan' is no positive number of seconds"),
            (["backends", "--timeout", "soon"], "'soon' is no positive number of seconds"),
        ],
        ids=lambda value: " ".join(value) or "none" if isinstance(value, list) else "",
    )
    def test_wrong(self, arguments: list[str], said: str, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as caught:
            main.main(arguments)
        printed = capsys.readouterr()
        assert (caught.value.code, printed.out) == (2, "")
        assert "usage: qompose" in printed.err
        assert said in printed.err

    @pytest.mark.parametrize("command", [None, *main.COMMANDS])
    def test_help(self, command: str | None, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as caught:
            main.main([command, "--help"] if command else ["--help"])
        printed = capsys.readouterr()
        assert (caught.value.code, printed.err) == (0, "")
        if command is None:
            assert set(main.COMMANDS) <= set(printed.out.split())
        else:
            assert f"examples:\n  qompose {command}" in printed.out

    @pytest.mark.parametrize("command", main.COMMANDS)
    def test_examples_are_right(self, command: str) -> None:
        """Every example can be parsed."""
        for line in main.COMMANDS[command].EXAMPLES.splitlines():
            words = shlex.split(line.partition(" > ")[0])
            _, *arguments = words[words.index("qompose") :]
            assert main._parse(arguments).command is main.COMMANDS[command]

    def test_help_tells_which_files_are_refused(self, capsys: Capture) -> None:
        with pytest.raises(SystemExit):
            main.main(["quantize", "--help"])
        assert (
            "could run code when it is read (pickles, custom objects, legacy files) is refused"
            in capsys.readouterr().out
        )

    def test_version(self, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as caught:
            main.main(["--version"])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"qompose {qompose.__version__}\n"


class TestProcess:
    """`python -m qompose`, as a shell sees it."""

    def test_the_module_is_the_command(self) -> None:
        done = run("backends", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout) == []
        assert run().stderr.startswith("usage: qompose ")

    def test_no_backends(self) -> None:
        """None are seen: whether none is installed or the variable hides them, both are told."""
        said = run("backends").stdout
        assert said.startswith(
            ("No backend is installed.", "QOMPOSE_PLUGINS='' hides all backends")
        )

    @pytest.mark.parametrize("arguments", [["--help"], ["backends"]], ids=" ".join)
    def test_a_reader_that_goes_away(self, arguments: list[str]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "qompose", *arguments],
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=ALONE,
        )  # fmt: skip
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize(
        "arguments", [["backends", "--json"], ["backends"], ["--help"]], ids=" ".join
    )
    def test_listing_imports_little(self, arguments: list[str]) -> None:
        """Rather than a time: what takes time is importing."""
        code = (
            "import sys; before = {*sys.modules}; from qompose.cli import main as cli\n"
            "try: cli.main(sys.argv[1:])\n"
            "except SystemExit: pass\n"
            "print(*set(sys.modules) - before, file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, text=True, check=True,
            env=KEPT,
        )  # fmt: skip
        names = done.stderr.split()
        heavy = {"torch", "numpy", "safetensors", "sympy"}
        heavy |= set() if arguments == ["backends"] else {"rich"}  # which makes tables
        assert not heavy & {name.partition(".")[0] for name in names}
        assert not [name for name in names if name.startswith("qompose_")]
        assert len(names) < 300


class TestInterrupts:
    """No traceback, whenever the interrupt comes."""

    START = "import runpy, signal, sys; sys.argv[1:] = ['backends']\n"
    RUN = "runpy.run_module('qompose', run_name='__main__')\n"

    def end(self, code: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-c", self.START + code],
            capture_output=True, text=True, check=False, env=ALONE,
        )  # fmt: skip
        return done.returncode, done.stderr

    def test_while_the_command_line_is_imported(self) -> None:
        code = (
            "class Finder:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name == 'qompose.cli.main': signal.raise_signal(signal.SIGINT)\n"
            "sys.meta_path.insert(0, Finder())\n"
        )
        assert self.end(code + self.RUN) == (130, "qompose: interrupted\n")

    def test_while_the_process_ends(self) -> None:
        """By then all results are printed: the signal ends the process, as it ends others."""
        code = "import atexit; atexit.register(signal.raise_signal, signal.SIGINT)\n"
        assert self.end(code + self.RUN) == (-2, "")

    def test_while_arguments_are_read(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        def interrupt(arguments: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(main, "_parse", interrupt)
        assert main.main(["backends"]) == 130
        assert capsys.readouterr() == ("", "qompose: interrupted\n")


class TestProblems:
    """Exit code 1 and one line on standard error."""

    def fail(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        def run(options: Namespace, out: object) -> int:
            raise error

        monkeypatch.setattr(main.COMMANDS["backends"], "run", run)

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
        self, error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        self.fail(monkeypatch, error)
        assert main.main(["backends"]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith(f"qompose: {said}")
        assert ("--traceback shows where" in line) == said.startswith("internal")

    @pytest.mark.parametrize("how", ["before", "after", "variable"])
    def test_a_traceback_where_it_is_asked_for(
        self, how: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        self.fail(monkeypatch, ZeroDivisionError("oh"))
        if how == "variable":
            monkeypatch.setenv("QOMPOSE_TRACE", "1")
        arguments = {"before": ["--traceback", "backends"], "after": ["backends", "--traceback"]}
        assert main.main(arguments.get(how, ["backends"])) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err

    def test_an_interrupt_is_130(self, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
        self.fail(monkeypatch, KeyboardInterrupt())
        assert main.main(["backends"]) == 130
        assert capsys.readouterr() == ("", "qompose: interrupted\n")

    def test_warnings_of_qompose_are_messages(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        others: list[object] = []

        def run(options: Namespace, out: object) -> int:
            warnings.simplefilter("always")
            warnings.warn("two operators", qompose.QomposeWarning, stacklevel=1)
            warnings.warn("from elsewhere", UserWarning, stacklevel=1)
            return 0

        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: others.append(message))
        monkeypatch.setattr(main.COMMANDS["backends"], "run", run)
        assert main.main(["backends"]) == 0
        assert capsys.readouterr().err == "qompose: warning: two operators\n"
        assert [str(message) for message in others] == ["from elsewhere"]


@pytest.mark.usefixtures("installed")
class TestBackends:
    """`qompose backends`."""

    def test_json(self, capsys: Capture) -> None:
        assert main.main(["backends", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["name"] for row in rows] == ["alpha", "beta", "broken"]
        assert rows[0]["distribution"] == "dist-alpha"
        assert rows[0]["problem"] is None

    def test_text(self, capsys: Capture) -> None:
        assert main.main(["backends"]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in ("alpha", "dist-beta", "1.0", "no_such_module"))
        assert "problem" not in text

    def test_a_problem_in_the_metadata_needs_no_check(
        self, install: Install, capsys: Capture
    ) -> None:
        install(point("alpha", "fake_alpha", "rival"))
        assert main.main(["backends"]) == 1
        assert "rival 1.0 offers the same name" in capsys.readouterr().out

    @pytest.mark.parametrize("columns", ["", "80"], ids=["piped", "80 columns"])
    def test_a_problem_is_never_cut_off(
        self, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        words = [f"word{number}" for number in range(40)]
        healths = [
            Health("usable"),
            Health("unavailable here", " ".join(words)),
            Health("broken", "x" * 200),
        ]
        monkeypatch.setattr(backends, "check_all", lambda found, timeout: healths)
        monkeypatch.setenv("COLUMNS", columns)
        assert main.main(["backends", "--check"]) == 1
        text = capsys.readouterr().out
        assert set(words) <= set(text.split())
        assert sum(line.count("x") for line in text.splitlines()) >= 200
        assert "unavailable here" in text.replace("\n", " ") or "unavailable" in text
        widest = max(map(len, text.splitlines()))
        assert widest <= 80 if columns else len(text.splitlines()) == 5

    def test_a_check_as_json(self, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
        healths = [
            Health("usable", None, {"there": "install it"}),
            Health("usable"),
            Health("broken", "why"),
        ]
        seen: list[float] = []
        monkeypatch.setattr(
            backends, "check_all", lambda found, timeout: seen.append(timeout) or healths
        )
        assert main.main(["backends", "--check", "--json", "--timeout", "7"]) == 1
        rows = json.loads(capsys.readouterr().out)
        assert [(row["status"], row["problem"]) for row in rows] == [
            ("usable", None),
            ("usable", None),
            ("broken", "why"),
        ]
        assert rows[0]["targets"] == {"there": "install it"}
        assert seen == [7.0]

    def test_a_target_that_cannot_be_used_is_said_and_is_no_problem(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        healths = [
            Health("usable", None, {"there": "install it"}),
            Health("usable"),
            Health("usable"),
        ]
        monkeypatch.setattr(backends, "check_all", lambda found, timeout: healths)
        assert main.main(["backends", "--check"]) == 0
        assert "alpha: target there cannot be used here: install it" in capsys.readouterr().out

    def test_names_in_the_variable_that_nobody_offers(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        monkeypatch.setenv("QOMPOSE_PLUGINS", "alpha,alhpa")
        assert main.main(["backends", "--json"]) == 0
        printed = capsys.readouterr()
        assert [row["name"] for row in json.loads(printed.out)] == ["alpha"]
        assert (
            printed.err
            == "qompose: QOMPOSE_PLUGINS names 'alhpa', which no installed package offers\n"
        )

    def test_an_empty_variable_hides_all_and_is_told(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        monkeypatch.setenv("QOMPOSE_PLUGINS", "")
        said = "QOMPOSE_PLUGINS='' hides all backends that are installed (alpha, beta, broken)"
        assert main.main(["backends"]) == 0
        assert capsys.readouterr().out.startswith(said)
        assert main.main(["capabilities"]) == 0
        printed = capsys.readouterr()
        assert printed.out == "No row.\n"
        assert printed.err.startswith(f"qompose: {said}")

    def test_no_backend_is_installed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        monkeypatch.setattr(discovery, "entry_points", lambda group: [])
        assert main.main(["backends"]) == 0
        assert capsys.readouterr().out.startswith("No backend is installed.")

    def test_a_damaged_package_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        info = tmp_path / "odd-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: odd\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("this is [not ini\n===\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert main.main(["backends"]) == 0
        said = capsys.readouterr().err
        assert said.startswith(f"qompose: {info}: its entry_points.txt is damaged")

    def test_what_a_terminal_would_obey_is_written_out(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        healths = [Health("usable"), Health("usable"), Health("broken", "a\x1b[31mred")]
        monkeypatch.setattr(backends, "check_all", lambda found, timeout: healths)
        assert main.main(["backends", "--check"]) == 1
        assert "a\\x1b[31mred" in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
class TestCapabilities:
    """`qompose capabilities`."""

    def rows(self, capsys: Capture, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        assert main.main(["capabilities", *arguments, "--json"]) == code
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    def test_json(self, capsys: Capture) -> None:
        rows = self.rows(capsys, "alpha")
        assert {row["backend"] for row in rows} == {"alpha"}
        linear = [row for row in rows if row["pattern"] == "linear"]
        assert [row["config"] for row in linear] == ["static", "dynamic", "weight-only"]
        assert linear[0]["mode"] == "static"

    @pytest.mark.parametrize(
        ("arguments", "keep"),
        [
            (["--mode", "dynamic"], lambda row: row["mode"] == "dynamic"),
            (["--config", "static"], lambda row: row["config"] == "static"),
            (["--target", "torch"], lambda row: bool(row["kernels"])),
            (["--target", "torch", "--mode", "static"],
             lambda row: bool(row["kernels"]) and row["mode"] == "static"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )  # fmt: skip
    def test_choice(
        self, arguments: list[str], keep: Callable[[dict[str, Any]], bool], capsys: Capture
    ) -> None:
        every = self.rows(capsys, "alpha")
        wanted = [row for row in every if keep(row)]
        assert 0 < len(wanted) < len(every)
        assert self.rows(capsys, "alpha", *arguments) == wanted

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--target", "tocrh"], "no row has the target 'tocrh' (did you mean 'torch'?)"),
            (["--config", "sttaic"], "no row has the config 'sttaic' (did you mean 'static'?)"),
        ],
        ids=["target", "config"],
    )
    def test_a_choice_that_nothing_has(
        self, arguments: list[str], said: str, capsys: Capture
    ) -> None:
        assert main.main(["capabilities", "alpha", *arguments]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert said in printed.err

    def test_text_and_markdown(self, capsys: Capture) -> None:
        assert main.main(["capabilities", "alpha", "beta"]) == 0
        text = capsys.readouterr().out
        assert all(
            word in text for word in ("alpha", "beta", "linear", "toy linear", "weight-only")
        )
        assert main.main(["capabilities", "alpha", "--markdown"]) == 0
        assert capsys.readouterr().out.count("|") > 20

    def test_an_unknown_name(self, capsys: Capture) -> None:
        assert main.main(["capabilities", "alpho"]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("qompose: No backend named 'alpho'")
        assert "did you mean 'alpha'" in printed.err

    def test_a_broken_plugin_harms_nobody_else(self, capsys: Capture) -> None:
        """The others' rows are printed, and the fault is named."""
        assert main.main(["capabilities", "--json"]) == 1
        printed = capsys.readouterr()
        assert {row["backend"] for row in json.loads(printed.out)} == {"alpha", "beta"}
        assert printed.err.startswith("qompose: Backend 'broken' (dist-broken 1.0")


class TestNewBackend:
    """`qompose new-backend`; what it writes is tested with the scaffolding."""

    def test_prints_where_the_project_is(self, tmp_path: Path) -> None:
        done = run("new-backend", "my_chip", "--directory", str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        assert list(tmp_path.iterdir()) == [Path(done.stdout.strip())]
        assert (Path(done.stdout.strip()) / "pyproject.toml").exists()

    def test_needs_no_torch(self, tmp_path: Path) -> None:
        code = (
            "import sys; from qompose.cli import main as cli\n"
            "cli.main(['new-backend', 'my_chip', '--directory', sys.argv[1]])\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)

    def test_a_folder_that_is_there_is_a_problem(self, tmp_path: Path) -> None:
        assert run("new-backend", "my_chip", "--directory", str(tmp_path)).returncode == 0
        done = run("new-backend", "my_chip", "--directory", str(tmp_path))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("qompose: ")
        assert len(done.stderr.splitlines()) == 1
