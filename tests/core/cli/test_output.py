# SPDX-License-Identifier: Apache-2.0
"""Results on standard output, all else on standard error, and readers that go away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from qompose.cli import main
from qompose.cli.command import Results, printable, say

from tests.core.cli.test_cli import Capture, Patch, doing

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
    done = subprocess.run(source(body), capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == {"a": 1}
    for words in ("from python", "from C", "from a child", "at exit"):
        assert words in done.stderr


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_closed_streams(closed: str) -> None:
    descriptors = " ".join(f"{number}>&-" for number in closed.split())
    done = subprocess.run(
        ["sh", "-c", f'"$0" "$1" "$2" {descriptors}', *source("print('x'); results.text('y')")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert done.stdout == ("" if "1" in closed else "y\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = source("for _ in range(3): results.text('x' * 100_000)")
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_said_once() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qompose", "backends"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    (said,) = done.stderr.strip().splitlines()
    assert "No space left on device" in said


def test_text_that_the_terminal_cannot_show_is_replaced() -> None:
    done = subprocess.run(
        source("results.text('a \\u2500 b')"), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.stdout == "a ? b\n"


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
