# SPDX-License-Identifier: Apache-2.0
"""Which tests a check becomes: by row, configuration and target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from qompose.lowering import TORCH_TARGET
from qompose.rules import STATIC
from qompose.testing.accepting import accepted_limits
from qompose.testing.failures import ContractError
from qompose.testing.precedence import PAIRS
from qompose.testing.suite import Case, Suite

Found: TypeAlias = "tuple[tuple[str, ...], list[tuple[Any, ...]], list[str]]"
"""Names of arguments, a tuple of values for each test, and what the tests are called."""


def parameters(suite: Suite, test: str) -> Found | None:
    """Return the arguments of a test, None where it has none."""
    if test not in _TABLE:
        return None
    names, make = _TABLE[test]
    try:
        suite.backend  # noqa: B018 - test_loads says what is wrong
        values = list(make(suite))
    except ContractError:
        values = []
    return names, values, ["-".join(map(_called, row)) for row in values]


def _called(value: object) -> str:
    if isinstance(value, bool):
        return "first" if value else "second"
    return str(value).removeprefix("torch.").replace(" ", "_")


def _of_rows(rows: Callable[[Suite], Sequence[Case]]) -> Callable[[Suite], Iterable[Any]]:
    return lambda suite: [(case,) for case in rows(suite)]


def _on_targets(rows: Callable[[Suite], Sequence[Case]]) -> Callable[[Suite], Iterable[Any]]:
    return lambda suite: [
        (case, target) for case in rows(suite) for target in sorted(suite.rule(case.rule).kernels)
    ]


def _static(suite: Suite) -> list[Case]:
    return [c for c in suite.modes() if suite.backend.configs[c.config].mode == STATIC]


def _feeding(suite: Suite) -> Iterable[tuple[Any, ...]]:
    """Other runtimes than the process are tried where the row has no integers of its own to give."""
    for case, target in _on_targets(_static)(suite):
        rule = suite.rule(case.rule)
        if target == TORCH_TARGET.name or not (rule.output or rule.shares):
            yield case, target


def _emitted(suite: Suite) -> Iterable[tuple[Any, ...]]:
    return [
        (case, target)
        for case, target in _on_targets(Suite.modes)(suite)
        if suite.rule(case.rule).kernels[target].emit is not None
    ]


def _in_process(suite: Suite) -> Iterable[tuple[Any, ...]]:
    return [(case, target) for case, target in _emitted(suite) if target == TORCH_TARGET.name]


def _one_mode(suite: Suite) -> Iterable[tuple[Any, ...]]:
    seen: set[str] = set()
    for case, target in _in_process(suite):
        if case.rule not in seen:
            seen.add(case.rule)
            yield case, target


def _sharing(suite: Suite) -> list[Case]:
    return [case for case in suite.cases() if suite.rule(case.rule).shares]


def _edges(suite: Suite) -> Iterable[tuple[Any, ...]]:
    for case in suite.modes():
        for limit in accepted_limits(suite, case):
            for target in sorted(suite.rule(case.rule).kernels):
                yield case, limit, target


def _half(suite: Suite) -> Iterable[tuple[Any, ...]]:
    return [(case, dtype) for case in suite.modes() for dtype in (torch.float16, torch.bfloat16)]


def _partners(suite: Suite) -> Iterable[tuple[Any, ...]]:
    """Each configuration with the backend itself, the default one with every other backend too."""
    for number, config in enumerate(suite.backend.configs):
        others = [suite.backend.name, *(suite.installed if number == 0 else ())]
        for partner in others:
            yield from ((config, partner, first) for first in (True, False))


_CASE, _ON = ("case",), ("case", "target")
_TABLE: dict[str, tuple[tuple[str, ...], Callable[[Suite], Iterable[tuple[Any, ...]]]]] = {
    "test_annotates": (_CASE, _of_rows(Suite.cases)),
    "test_converts": (_CASE, _of_rows(Suite.covering)),
    "test_lowers": (_ON, _on_targets(Suite.covering)),
    "test_keeps_parameters": (_ON, _on_targets(Suite.covering)),
    "test_matches_reference": (_ON, _on_targets(Suite.covering)),
    "test_matches_reference_for_integers": (_ON, _feeding),
    "test_behaves": (_ON, _on_targets(Suite.rows)),
    "test_leaves_inputs_alone": (_ON, _emitted),
    "test_takes_any_batch": (_ON, _on_targets(Suite.modes)),
    "test_takes_other_shapes": (_ON, _in_process),
    "test_takes_other_literals": (_ON, _one_mode),
    "test_shares": (_CASE, _of_rows(_sharing)),
    "test_trains": (_CASE, _of_rows(Suite.modes)),
    "test_accepts": (("case", "limit", "target"), _edges),
    "test_refuses": (_CASE, _of_rows(Suite.modes)),
    "test_half_precision": (("case", "dtype"), _half),
    "test_is_listed": (_CASE, _of_rows(Suite.rows)),
    "test_saves": (("config",), lambda suite: [(name,) for name in suite.backend.configs]),
    "test_composes": (("config", "partner", "first"), _partners),
    "test_most_specific_wins": (("lower", "higher"), lambda suite: PAIRS),
}
"""By test: the names of its arguments, and what makes their values."""
