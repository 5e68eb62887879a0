# SPDX-License-Identifier: Apache-2.0
"""Tables as text and Markdown: nothing is cut off, and no cell is taken for markup."""

from __future__ import annotations

import pytest
from qompose.console import Table, as_markdown, as_text, on_terminal

LONG = "encoder.layers.11.attention.self.query.projection.with.a.name.that.is.very.long.indeed"
TABLE = Table(
    ("module", "reason", "operators"),
    (("float",), (LONG, "int8 [bold] [-128, 127] a|b", 12), ("x", "<unknown>\nnext", 1234)),
)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_text_keeps_to_its_width_and_loses_nothing(width: int) -> None:
    text = as_text(["a line of words " * 12, TABLE], width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)
    squeezed = "".join(text.split())
    for part in ("alineofwords" * 12, "1,234", "int8", "[bold]", "<unknown>"):
        assert part in squeezed
    cells = "".join(line[1 : 1 + len(LONG)].split("  ")[0].strip() for line in lines)
    assert LONG in cells or width == 120


def test_words_are_whole_where_they_can_be() -> None:
    long = ("a.name.of.many.parts", "a reason that goes on and on for longer than there is room", 3)
    lines = as_text([Table(("operator", "reason", "operators"), (long,))], 60).splitlines()
    assert any(long[0] in line for line in lines) and max(map(len, lines)) <= 60
    assert {*"\n".join(lines).split()} >= {*long[1].split()}


def test_control_characters_of_names_are_written_out() -> None:
    assert "\\x1b[2J" in as_text(["\x1b[2J", Table(("a",), (("\x1b[2J",),))], 80)


def test_markdown_escapes_what_would_end_a_cell() -> None:
    lines = as_markdown(["first", TABLE, "last"]).splitlines()
    assert lines[0] == "first"
    assert lines[-1] == "last"
    assert lines[2] == "| module | reason | operators |"
    assert lines[3] == "|---|---|---:|"
    assert lines[4] == "| float |  |  |"
    assert lines[5] == f"| {LONG} | int8 [bold] [-128, 127] a\\|b | 12 |"
    assert lines[6] == "| x | \\<unknown><br>next | 1,234 |"


def test_no_colours_are_written_where_a_terminal_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in as_text([TABLE], 80)


@pytest.mark.parametrize("stderr", [None, object()], ids=["none", "an object"])
def test_a_program_may_have_no_stderr(monkeypatch: pytest.MonkeyPatch, stderr: object) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    assert not on_terminal(None)
    assert on_terminal(True)


NARROW = Table(
    ("value", "state", "SQNR", "range used"),
    (("encoder.layers.0.attention", "simulated", "32.1", "99%"), ("x", "int8", "inf", "")),
)


@pytest.mark.parametrize("width", [20, 30, 40, 44, 60])
def test_words_are_whole_however_narrow_the_terminal(width: int) -> None:
    """But for those that are longer than a line, or that a table breaks to have space for the others."""
    text = as_text([NARROW], width)
    assert max(map(len, text.splitlines())) <= width
    words = {"simulated", "int8", "32.1", "inf", "99%", "SQNR", "used"}
    assert words <= set(text.split())
