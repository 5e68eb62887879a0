# SPDX-License-Identifier: Apache-2.0
"""Which checks of the contract every run makes of our own backends; the rest is for `full` and `long`.

Authors of backends run all of them. Of our own three, every run has the first form of each rule under one
configuration, each configuration on one rule, and the broader checks on one rule of each kind of kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
from qompose.backend import Kernel, Rule
from qompose.testing.suite import Case

EVERY_FORM = ("test_annotates", "test_is_listed", "test_refuses")
"""Checks that lower nothing: a rule may be right in one form and wrong in another."""
EVERY_RULE = ("test_converts", "test_lowers", "test_matches_reference")

AGAIN = ("test_accepts", "test_leaves_inputs_alone")
"""Checks that lower the same operators as `test_lowers`, with other numbers: seconds on a runtime."""
WIDER = "static_per-tensor-executorch"
"""Products of a scale per channel are lowered each time; those of one scale differ in their constants."""
TWINS = ("static_per-tensor", "static,_activations_[0,_127]")
"""Configurations that differ from the default one in numbers alone: what claims and lowers them counts."""
TWINS_SHOW = ("test_annotates", "test_lowers", "test_matches_reference")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what differs from other cases in numbers alone `long`, and what is more of the same `full`."""
    seen: set[tuple[Any, ...]] = set()
    for item in items:
        if _is_long(item):
            item.add_marker(pytest.mark.long)
        elif not _is_first(item, seen):
            item.add_marker(pytest.mark.full)


def _is_long(item: pytest.Item) -> bool:
    check = getattr(item, "originalname", "")
    again = check in AGAIN and item.name.endswith("-executorch]")
    twin = check not in TWINS_SHOW and any(name in item.name for name in TWINS)
    other_half = check == "test_half_precision" and "float16" in item.name.replace("bfloat16", "")
    return again or twin or other_half or WIDER in item.name


def _is_first(item: pytest.Item, seen: set[tuple[Any, ...]]) -> bool:
    """Tell whether an item is the first to show what it shows, and remember it."""
    check = getattr(item, "originalname", "")
    values = getattr(getattr(item, "callspec", None), "params", {})
    case = values.get("case")
    if not isinstance(case, Case) or check in EVERY_FORM:
        return True
    cls: Any = getattr(item, "cls", None)
    place = (cls, check, values.get("target"))
    kind = case.rule if check in EVERY_RULE else _kind(cls.suite().rule(case.rule))
    new = {(*place, kind), (*place, "configuration", case.config)} - seen
    seen |= new
    return bool(new)


def _kind(rule: Rule) -> tuple[object, ...]:
    """Return what rules that are lowered by the same code have in common."""
    return (rule.shares, *sorted((name, _code(kernel)) for name, kernel in rule.kernels.items()))


def _code(kernel: Kernel) -> str:
    emit = kernel.emit
    return getattr(emit, "__qualname__", type(emit).__qualname__)
