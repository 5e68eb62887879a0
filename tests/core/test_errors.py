# SPDX-License-Identifier: Apache-2.0
"""Errors say what, where, who and what to do; user errors and internal faults are different classes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from qompose import errors
from qompose.errors import (
    AnnotationConflictError,
    BackendNotFoundError,
    NotExportedError,
    PluginError,
    QomposeError,
    UncalibratedError,
    UserError,
    near_names,
)

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_family(kind: Any) -> None:
    if issubclass(kind, Warning):
        assert issubclass(kind, UserWarning)
        return
    assert issubclass(kind, QomposeError)
    assert (kind in (QomposeError, errors.InternalError)) is not issubclass(kind, UserError)
    assert inspect.getdoc(kind)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (BackendNotFoundError, LookupError),
        (AnnotationConflictError, RuntimeError),
        (errors.SelectorError, ValueError),
        (errors.ConfigError, ValueError),
        (NotExportedError, TypeError),
    ],
)
def test_they_are_caught_as_pythons_own_too(kind: Any, builtin: Any) -> None:
    assert issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("error", "facts", "words"),
    [
        pytest.param(
            BackendNotFoundError("x86_inductr", ["x86_inductor", "xnnpack"]),
            {"name": "x86_inductr", "installed": ("x86_inductor", "xnnpack")},
            ["did you mean 'x86_inductor'", "Installed: x86_inductor, xnnpack"],
            id="backend",
        ),
        pytest.param(
            PluginError("bad", "dist 1.0", "it raises"),
            {"name": "bad", "source": "dist 1.0", "reason": "it raises"},
            ["'bad' (dist 1.0)", "it raises"],
            id="plugin",
        ),
        pytest.param(
            AnnotationConflictError("first", "second", "conv2d", "removed"),
            {"earlier": "first", "later": "second", "node": "conv2d"},
            ["'second' removed", "'first'", "'conv2d'", 'on_conflict="first"'],
            id="conflict",
        ),
        pytest.param(
            UncalibratedError(["x -> linear in head", "output of linear"]),
            {"tensors": ("x -> linear in head", "output of linear")},
            ["2 observed tensors", "- x -> linear in head", "calibrate(", "allow_uncalibrated=True"],
            id="uncalibrated",
        ),
        pytest.param(
            NotExportedError(3, "prepare_pt2e"), {}, ["prepare_pt2e", "builtins.int", "export("],
            id="not exported",
        ),
    ],
)  # fmt: skip
def test_messages_and_attributes(error: Exception, facts: dict[str, Any], words: list[str]) -> None:
    assert {name: getattr(error, name) for name in facts} == facts
    assert all(word in str(error) for word in words), str(error)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("linaer", ["linear", "conv"], " (did you mean 'linear'?)"),
        ("conv", ["conv1", "conv2"], " (did you mean 'conv2' or 'conv1'?)"),
        ("q", ["linear"], ""),
        ("x", [], ""),
    ],
)
def test_near_names(name: str, known: list[str], expected: str) -> None:
    assert near_names(name, known) in (
        expected,
        expected.replace("'conv2' or 'conv1'", "'conv1' or 'conv2'"),
    )
