# SPDX-License-Identifier: Apache-2.0
"""BackendContract, whose tests pytest generates from the rule table of a backend."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import pytest
import torch

from qompose.backend.rule import STATIC
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.testing.checks_backend import (
    PAIRS,
    composes,
    has_configs,
    has_rules,
    imports_public_names,
    is_listed,
    loads,
    most_specific_wins,
    saves,
    says_availability,
)
from qompose.testing.checks_behavior import (
    behaves,
    imports_cleanly,
    leaves_inputs_alone,
    takes_any_batch,
    trains,
    works_cleanly,
)
from qompose.testing.checks_kernel import (
    accepted_limits,
    accepts,
    half_precision,
    matches_for_integers,
    matches_reference,
    refuses,
    takes_other_literals,
    takes_other_shapes,
)
from qompose.testing.checks_rule import (
    annotates,
    converts,
    keeps_parameters,
    lowers,
    shares,
)
from qompose.testing.fixtures import ContractError, NotApplicable
from qompose.testing.suite import BackendSource, Case, Suite
from qompose.testing.variations import Limit


class BackendContract:
    """The promises of every backend. Subclass it, and name the backend.

    A test that cannot pass is overridden with a reason, `pytest.mark.xfail(reason=...)`; to override or
    delete one without is a failure.

    Attributes:
        backend: the name of the backend's entry point; or, if it is not installed, a Backend or a function
            that returns one.
        min_sqnr: least signal to quantization noise ratio of a row against the float model, in decibels;
            for weights of few bits, what they allow if that is less.
        max_float_error: how far the float outputs of a kernel may be off, as a part of the largest value.
    """

    backend: ClassVar[BackendSource] = ""
    min_sqnr: ClassVar[float] = 20.0
    max_float_error: ClassVar[float] = 1e-4

    @classmethod
    def suite(cls) -> Suite:
        """Return the suite of the backend, made once for each class."""
        if "_suite" not in cls.__dict__:
            found: Any = inspect.getattr_static(cls, "backend")  # a function must not be bound
            bound = isinstance(found, (staticmethod, classmethod))
            source: Any = found.__func__ if bound else found
            made: Any = Suite(source, cls.min_sqnr, cls.max_float_error)
            cls._suite = made  # type: ignore[attr-defined]
        suite: Suite = cls._suite  # type: ignore[attr-defined]
        return suite

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test for each case of a check."""
        found = parameters(type(self).suite(), metafunc.function.__name__)
        if found is not None:
            names, values, ids = found
            metafunc.parametrize(names, values, ids=ids)

    @pytest.fixture(autouse=True)
    def _without_traces(self) -> Iterator[None]:
        """Keep torch from logging each export at length, which pytest would show with every failure."""
        logger = logging.getLogger("torch")
        before = {each: each.level for each in (logger, logging.getLogger("torch.__trace"))}
        for each in before:
            each.setLevel(logging.WARNING)
        yield
        for each, level in before.items():
            each.setLevel(level)

    # Of each row of the capability table.

    def test_annotates(self, case: Case) -> None:
        """The rule claims the operators of its own pattern."""
        self._check(annotates, case)

    def test_converts(self, case: Case) -> None:
        """The Q/DQ model is close to the float model (`min_sqnr`)."""
        self._check(converts, case)

    def test_lowers(self, case: Case, target: str) -> None:
        """The region becomes the kernel that the rule names, without a warning."""
        self._check(lowers, case, target)

    def test_keeps_parameters(self, case: Case, target: str) -> None:
        """The lowered model leaves its parameters as they are."""
        self._check(keeps_parameters, case, target)

    def test_matches_reference(self, case: Case, target: str) -> None:
        """The kernel agrees with the integer reference to one step."""
        self._check(matches_reference, case, target)

    def test_matches_reference_for_integers(self, case: Case, target: str) -> None:
        """The same, where a consumer of the row reads integers."""
        self._check(matches_for_integers, case, target, feeds=True)

    def test_behaves(self, case: Case, target: str) -> None:
        """The lowered model is reproducible, can be copied, and knows shapes without computing."""
        self._check(behaves, case, target)

    def test_leaves_inputs_alone(self, case: Case, target: str) -> None:
        """The kernel writes to none of its inputs, floats or integers."""
        self._check(leaves_inputs_alone, case, target, witness=True)

    def test_takes_any_batch(self, case: Case, target: str) -> None:
        """A program for batches of any size stays one."""
        self._check(takes_any_batch, case, target, any_batch=True)

    def test_takes_other_shapes(self, case: Case, target: str) -> None:
        """What the rule claims besides its example, of other batches, ranks and depths, is right."""
        self._check(takes_other_shapes, case, target)

    def test_takes_other_literals(self, case: Case, target: str) -> None:
        """What the rule claims besides its example, with other literal arguments, is right."""
        self._check(takes_other_literals, case, target)

    def test_shares(self, case: Case) -> None:
        """If the rule shares, inputs and output have one scale."""
        self._check(shares, case)

    def test_trains(self, case: Case) -> None:
        """The row passes gradients on, and is deployed as it was trained."""
        self._check(trains, case)

    def test_accepts(self, case: Case, limit: Limit, target: str) -> None:
        """What the constraints accept at their edges works."""
        self._on(target)
        _report(lambda: accepts(self.suite(), case, limit, target))

    def test_refuses(self, case: Case) -> None:
        """What the constraints exclude is refused, with a reason."""
        _report(lambda: refuses(self.suite(), case))

    def test_half_precision(self, case: Case, dtype: torch.dtype) -> None:
        """A float16 or bfloat16 model is refused with a reason, or quantized with the right type."""
        self._check(half_precision, case, dtype=dtype, any_size=True)

    def test_is_listed(self, case: Case) -> None:
        """The capability table has the row."""
        _report(lambda: is_listed(self.suite(), case))

    # Of the backend.

    def test_loads(self) -> None:
        """The backend loads by its name, with the current version of the interface."""
        _report(lambda: loads(self.suite()))

    def test_says_availability(self) -> None:
        """`availability` returns None, or a reason."""
        self._whole(says_availability)

    def test_has_rules(self) -> None:
        """Rules have unique names."""
        self._whole(has_rules)

    def test_has_configs(self) -> None:
        """Every named configuration fits a rule; the first is the default."""
        self._whole(has_configs)

    def test_imports_public_names(self) -> None:
        """The backend's source uses only public names of qompose."""
        self._whole(imports_public_names)

    def test_imports_cleanly(self) -> None:
        """Importing the backend changes nothing else in the process."""
        if not isinstance(self.suite().source, str):
            pytest.skip("the backend is not installed: it has no entry point")
        self._whole(imports_cleanly)

    def test_works_cleanly(self) -> None:
        """Using the backend changes nothing else in the process."""
        self._whole(works_cleanly)

    def test_saves(self, config: str) -> None:
        """A converted model of all rows is saved, loaded and lowered again."""
        self._whole(saves, config)

    def test_composes(self, config: str, partner: str, first: bool) -> None:
        """All rows stay right beside another backend's quantizer."""
        self._whole(composes, config, partner, first)

    def test_most_specific_wins(self, lower: str, higher: str) -> None:
        """Selectors of all levels work, and the more specific one decides."""
        self._whole(most_specific_wins, lower, higher)

    def test_contract_is_whole(self) -> None:
        """No test of the contract is overridden or deleted without a reason."""
        changed = [name for name in _tests(BackendContract) if not _kept(type(self), name)]
        if changed:
            pytest.fail(
                f"{type(self).__qualname__} overrides or deletes {', '.join(changed)}\n"
                "  expected: every test of qompose.testing.BackendContract as it is\n"
                "  remedy:   mark an override with pytest.mark.xfail(reason=...), and call super()",
                pytrace=False,
            )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "test_contract_is_whole" in vars(cls):
            raise TypeError(
                f"{cls.__qualname__} overrides test_contract_is_whole, which watches the other tests"
            )

    def _whole(self, check: Callable[..., None], *rest: Any) -> None:
        """Run a check of the backend; skip it if there is none, which test_loads reports."""
        try:
            self.suite().backend  # noqa: B018
        except ContractError:
            pytest.skip("test_loads fails: fix that first")
        _report(lambda: check(self.suite(), *rest))

    def _check(self, check: Callable[..., None], case: Case, *rest: Any, **facts: Any) -> None:
        for target in rest:
            self._on(target)
        suite = self.suite()
        _report(lambda: suite.judge(check, suite.trial(case, **facts), *rest))

    def _on(self, target: str) -> None:
        reason = self.suite().why_not(target)
        if reason is not None:
            pytest.skip(f"target {target!r}: {reason}")


def _tests(cls: type) -> list[str]:
    return [name for name in vars(cls) if name.startswith("test_")]


def _kept(cls: type, name: str) -> bool:
    """Tell whether a class has a test of the contract, or an override with a reason."""
    own = getattr(cls, name, None)
    marks = getattr(own, "pytestmark", [])
    reasons = [mark.kwargs.get("reason", "") for mark in marks if mark.name == "xfail"]
    return own is getattr(BackendContract, name) or any(reasons)


def _report(check: Callable[[], None]) -> None:
    """Run a check. A failure is shown without the suite's own frames."""
    message = None
    try:
        check()
    except NotApplicable as reason:
        pytest.skip(str(reason))
    except ContractError as failure:
        message = str(failure)
    if message is not None:
        pytest.fail(message, pytrace=False)


Found: TypeAlias = "tuple[tuple[str, ...], list[tuple[Any, ...]], list[str]]"
"""Names of arguments, a tuple of values for each test, and what the tests are called."""


def parameters(suite: Suite, test: str) -> Found | None:
    """Return the arguments of a test, None if it has none."""
    if test not in _TABLE:
        return None
    names, make = _TABLE[test]
    try:
        suite.backend  # noqa: B018 - test_loads reports it
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
    """Yield runtimes other than the process only for rows whose output is not integers anyway."""
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
"""By test, the names of its arguments and the function that returns their values."""
