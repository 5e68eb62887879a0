# SPDX-License-Identifier: Apache-2.0
"""Results apart from everything else, readers that go away, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from qompose.cli.output import printable, results_apart, say


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    source = f"import os, sys\nfrom qompose.cli.output import results_apart\n{code}"
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


def test_what_others_print_goes_to_standard_error() -> None:
    done = run(
        "with results_apart() as out:\n"
        "    print('from python')\n"
        "    os.write(1, b'from C\\n')\n"
        "    os.system('echo from a child')\n"
        "    out.json({'a': 1})\n"
        "print('afterwards')"
    )
    result, afterwards = done.stdout.split("\n}")
    assert json.loads(result + "}") == {"a": 1}
    assert afterwards.strip() == "afterwards"
    for words in ("from python", "from C", "from a child"):
        assert words in done.stderr


def test_what_is_printed_when_the_process_ends_is_no_result_either() -> None:
    done = run(
        "import atexit\n"
        "atexit.register(print, 'at exit')\n"
        "with results_apart(for_good=True) as out: out.text('result')\n"
        "print('afterwards')"
    )
    assert done.stdout == "result\n"
    assert done.stderr == "afterwards\nat exit\n"


def test_inside_another_program_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is an object there, without a file descriptor."""
    with results_apart() as out:
        print("noise")
        out.text("result")
    print("afterwards")
    assert capsys.readouterr() == ("result\nafterwards\n", "noise\n")


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_closed_streams(closed: str) -> None:
    descriptors = " ".join(f"{number}>&-" for number in closed.split())
    code = "from qompose.cli.output import results_apart\n"
    code += "with results_apart() as out: print('x'); out.text('y')"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {descriptors}', sys.executable, code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if "1" in closed else "y\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = (
        "with results_apart() as out:\n    for _ in range(3): out.text('x' * 100_000)\nsys.exit(5)"
    )
    source = f"import sys\nfrom qompose.cli.output import results_apart\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", source],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("argument", ["backends", "--help"])
def test_a_full_disk_is_an_error_and_said_once(argument: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qompose", argument],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "qompose: standard output cannot be written: No space left on device"
    ]


def test_text_that_the_terminal_cannot_show_is_replaced() -> None:
    done = run(
        "with results_apart() as out: out.text('a \\u2500 b')",
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout == "a ? b\n"


@pytest.mark.parametrize(("columns", "expected"), [("40", 40), ("", 100_000), ("no", 100_000)])
def test_width(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: str,
    expected: int,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with results_apart() as out:
        assert out.width == expected


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
    text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printable(text) == expected
    with results_apart() as out:
        out.text(text)
    say(text)
    assert capsys.readouterr() == (f"{expected}\n", f"qompose: {expected}\n")
