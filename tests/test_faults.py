# SPDX-License-Identifier: Apache-2.0
"""Faults by kind, and a fault found again in another file."""

from __future__ import annotations

import textwrap

import pytest

from tests.faults import Fault, faults_in, find

SOURCE = """
    class Net:
        def run(self, x, other):
            if x.shape[0] < 2:
                raise ValueError("too short")
            try:
                return call(x, other) - x.sum(1)
            except KeyError as error:
                raise ValueError("é") from error

        @functools.cache
        def key(self):
            return (self.name, self.size)
"""


KEPT = "@(lambda f, kept=[]: lambda *a, **k: (kept or kept.append(f(*a, **k)) or kept)[0])"


def faults(text: str, file: str = "core/qompose/net.py") -> list[Fault]:
    return faults_in(file, textwrap.dedent(text))


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("sign", ["return call(x, other) + x.sum(1)"]),
        ("axis", ["if x.shape[-1] < 2:", "return call(x, other) - x.sum(0)"]),
        ("bound", ["if x.shape[0] <= 2:"]),
        ("check", ["if False:"]),
        ("order", ["return call(other, x) - x.sum(1)"]),
        ("error", ["pass"]),
        ("cache", [KEPT, "return (self.size, )", "return (self.name, )"]),
    ],
)
def test_kinds(kind: str, lines: list[str]) -> None:
    assert [f.after.strip() for f in faults(SOURCE) if f.kind == kind] == lines


def test_faults_are_python_and_of_one_line() -> None:
    rows = textwrap.dedent(SOURCE).split("\n")
    for fault in faults(SOURCE):
        assert rows[fault.line - 1] == fault.before != fault.after
        compile("\n".join([*rows[: fault.line - 1], fault.after, *rows[fault.line :]]), "", "exec")


def test_found_where_the_function_went() -> None:
    moved = faults("import math\n" + textwrap.dedent(SOURCE), "core/qompose/nets/run.py")
    for old in faults(SOURCE):
        new = find(old, moved)
        assert new is not None and (new.text, new.line) == (old.text, old.line + 1)
    assert find(faults(SOURCE)[0], faults("def run(x):\n    return x")) is None
