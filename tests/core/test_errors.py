# SPDX-License-Identifier: Apache-2.0
"""Errors say what, where, who and what to do; user errors and internal faults are different classes."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
from qompose import errors
from qompose.errors import (
    AnnotationConflictError,
    BackendNotFoundError,
    BatchError,
    InputError,
    NotExportedError,
    PluginError,
    QomposeError,
    StateError,
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
        (BackendNotFoundError, LookupError), (AnnotationConflictError, RuntimeError),
        (errors.SelectorError, ValueError), (errors.ConfigError, ValueError), (NotExportedError, TypeError),
    ],
)  # fmt: skip
def test_they_are_caught_as_pythons_own_too(kind: Any, builtin: Any) -> None:
    assert issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (
            BackendNotFoundError("x86_inductr", ["x86_inductor", "xnnpack"]),
            {"name": "x86_inductr", "installed": ("x86_inductor", "xnnpack")},
        ),
        (
            PluginError("bad", "dist 1.0", "it raises"),
            {"name": "bad", "source": "dist 1.0", "reason": "it raises"},
        ),
        (
            AnnotationConflictError("first", "second", "conv2d", "removed"),
            {"earlier": "first", "later": "second", "node": "conv2d", "change": "removed"},
        ),
        (
            UncalibratedError(["x -> linear in head", "output of linear"]),
            {"tensors": ("x -> linear in head", "output of linear")},
        ),
        (BatchError(3, "it raises", "input"), {"number": 3, "reason": "it raises", "what": "input"}),
        (InputError("x", "int", "float"), {"name": "x"}),
        (
            StateError("head: lowered, converted", "head", ("lowered", "converted")),
            {"path": "head", "stages": ("lowered", "converted")},
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_attributes_are_in_the_message(error: Exception, facts: dict[str, Any]) -> None:
    assert {name: getattr(error, name) for name in facts} == facts
    for fact in facts.values():
        for word in fact if isinstance(fact, tuple) else (fact,):
            assert str(word) in str(error)
    for other in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("linaer", ["linear", "conv"], {"linear"}),
        ("conv", ["conv1", "conv2"], {"conv1", "conv2"}),
        ("q", ["linear"], set()),
        ("x", [], set()),
    ],
)
def test_near_names(name: str, known: list[str], near: set[str]) -> None:
    told = near_names(name, known)
    assert {word for word in known if repr(word) in told} == near
    assert bool(told) == bool(near)
