# SPDX-License-Identifier: Apache-2.0
"""Which checks of the contract every run makes of our own backends; the rest is for `full` and `long`.

Authors of backends run all of them. Of our own four, every run has what each rule claims, and in process
one rule of each engine feature: the code that lowers, the operator, the fused function. On a runtime, where
a case takes seconds, and in broader checks it has one rule of each mode; `tests/xnnpack` and
`tests/embedding` run the operators of a runtime in a program together. What takes a model of all rows is
left to the smallest backend, or the example of docs/kit.md, and to `tests/composed`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from qompose.backend import Kernel, Rule
from qompose.testing.suite import Case

EVERY_RULE = ("test_annotates",)
FEATURES = (
    *("test_is_listed", "test_converts", "test_lowers", "test_keeps_parameters"),
    "test_matches_reference",
)
"""Checks of what code does that rules share; they share the trials of their cases as well."""
OF_ALL_ROWS = ("test_saves", "test_composes", "test_most_specific_wins")
OF_ALL_KERNELS = ("test_works_cleanly",)
OF_A_PROCESS = ("test_imports_cleanly",)
"""Checks in a process of their own, which imports torch; `test_imports` has all our backends in one."""

AGAIN = ("test_accepts", "test_leaves_inputs_alone")
"""Checks that lower the same operators as `test_lowers`, with other numbers: seconds on a runtime."""
WIDER = "static_per-tensor-executorch"
"""Products of a scale per channel are lowered each time; those of one scale differ in their constants."""
TWINS = ("static_per-tensor", "static,_activations_[0,_127]")
"""Configurations that differ from the default one in numbers alone: what claims and lowers them counts."""
OF_ONNX = ("static, int8 symmetric activations", "weight-only int4 groups of 32")
"""Configurations of the ONNX backend whose code differs from that of the first of their mode. What is for
accelerators, which nothing here runs, `tests/onnx` has in a program together."""
RUNTIMES = ("executorch", "onnx", "onnxruntime", "openvino")
ON_RUNTIMES = tuple(f"-{runtime}]" for runtime in RUNTIMES)
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
    again = check in AGAIN and item.name.endswith(ON_RUNTIMES)
    twin = check not in TWINS_SHOW and any(name in item.name for name in TWINS)
    other_half = check == "test_half_precision" and "float16" in item.name.replace("bfloat16", "")
    return again or twin or other_half or WIDER in item.name or _is_long_of_onnx(item)


def _is_long_of_onnx(item: pytest.Item) -> bool:
    """Tell whether an item of a runtime of ONNX differs in numbers from one that `full` has."""
    check, cls = getattr(item, "originalname", ""), getattr(item, "cls", None)
    case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
    if item.name.endswith("-onnx]"):  # the file that the target onnxruntime loads
        return bool(check != "test_lowers")
    if getattr(cls, "backend", "") != "onnx" or not isinstance(case, Case):
        return False
    configs = cls.suite().backend.configs
    first = next(n for n, config in configs.items() if config.mode == configs[case.config].mode)
    return bool(case.number or case.config not in (first, *OF_ONNX))


def _is_first(item: pytest.Item, seen: set[tuple[Any, ...]]) -> bool:
    """Tell whether an item is the first to show what it shows, and remember it."""
    check = getattr(item, "originalname", "")
    cls: Any = getattr(item, "cls", None)
    if check in (*OF_ALL_ROWS, *OF_A_PROCESS):
        return bool(cls.backend == "embedding")
    if check in OF_ALL_KERNELS:
        return bool(cls.__name__ == "TestKitExample")
    values = getattr(getattr(item, "callspec", None), "params", {})
    case, target = values.get("case"), values.get("target", "")
    if not isinstance(case, Case):
        return True
    suite = cls.suite()
    shown: set[tuple[object, ...]]
    if check in EVERY_RULE:
        shown = {("rule", case.rule), ("configuration", case.config)}
    elif cls.backend == "onnx":  # tests/onnx runs its operators in a program together
        shown = set()
    elif check in FEATURES and target not in RUNTIMES:
        shown = _features(suite.rule(case.rule), case.config)
    elif target in RUNTIMES and (check not in FEATURES or target != "executorch"):
        shown = set()
    else:
        shown = {("mode", suite.backend.configs[case.config].mode)}
    new = {(cls, check, target, *feature) for feature in shown} - seen
    seen |= new
    return bool(new)


BEHIND = re.compile(r"(.*?)((?:_(?:add|relu6?|hardtanh|hardswish|silu|gelu|leaky_relu|tanh))*)")


def _features(rule: Rule, config: str) -> set[tuple[object, ...]]:
    """Return what is lowered by code of its own: the operator, and the functions that are fused with it."""
    code = (rule.shares, *sorted((name, _code(kernel)) for name, kernel in rule.kernels.items()))
    match = BEHIND.fullmatch(rule.name)
    assert match is not None
    operator, behind = match.groups()
    named = operator if operator.startswith(("conv", "linear", "pad")) else ""
    behind_what = () if named else code
    return {("operator", code, named), ("behind", behind_what, behind), ("configuration", config)}


def _code(kernel: Kernel) -> str:
    emit = kernel.emit
    return getattr(emit, "__qualname__", type(emit).__qualname__)
