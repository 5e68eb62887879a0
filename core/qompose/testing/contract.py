# SPDX-License-Identifier: Apache-2.0
"""BackendContract, whose tests pytest generates from the rule table of a backend."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Parameter, Signature
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
    matches_reference,
    matches_reference_for_integers,
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

Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = Callable[[Suite], Iterable[Row]]
"""Returns the arguments of a test, a tuple for each time that it is run."""
_ON = "case target"


def _each(rows: Callable[[Suite], Sequence[Case]]) -> Rows:
    return lambda suite: [(case,) for case in rows(suite)]


def _on_targets(rows: Callable[[Suite], Sequence[Case]]) -> Rows:
    return lambda suite: [
        (case, target) for case in rows(suite) for target in sorted(suite.rule(case.rule).kernels)
    ]


def _static(suite: Suite) -> list[Case]:
    return [c for c in suite.modes() if suite.backend.configs[c.config].mode == STATIC]


def _feeding(suite: Suite) -> Iterable[Row]:
    """Yield runtimes other than the process only for rows whose output is not integers anyway."""
    for case, target in _on_targets(_static)(suite):
        rule = suite.rule(case.rule)
        if target == TORCH_TARGET.name or not (rule.output or rule.shares):
            yield case, target


def _emitted(suite: Suite) -> Iterable[Row]:
    return [
        (case, target)
        for case, target in _on_targets(Suite.modes)(suite)
        if suite.rule(case.rule).kernels[target].emit is not None
    ]


def _in_process(suite: Suite) -> Iterable[Row]:
    return [(case, target) for case, target in _emitted(suite) if target == TORCH_TARGET.name]


def _one_mode(suite: Suite) -> Iterable[Row]:
    seen: set[str] = set()
    for case, target in _in_process(suite):
        if case.rule not in seen:
            seen.add(case.rule)
            yield case, target


def _sharing(suite: Suite) -> list[Case]:
    return [case for case in suite.cases() if suite.rule(case.rule).shares]


def _edges(suite: Suite) -> Iterable[Row]:
    for case in suite.modes():
        for limit in accepted_limits(suite, case):
            for target in sorted(suite.rule(case.rule).kernels):
                yield case, limit, target


def _half(suite: Suite) -> Iterable[Row]:
    return [(case, dtype) for case in suite.modes() for dtype in (torch.float16, torch.bfloat16)]


def _partners(suite: Suite) -> Iterable[Row]:
    """Each configuration with the backend itself, the default one with every other backend too."""
    for number, config in enumerate(suite.configs):
        others = [suite.backend.name, *(suite.installed if number == 0 else ())]
        for partner in others:
            yield from ((config, partner, first) for first in (True, False))


def _of_trial(check: Callable[..., None], names: str, rows: Rows, **facts: Any) -> Any:
    """Return the test of a check of a row's trial; `facts` are of `Terms`, and so are further arguments."""

    def run(suite: Suite, *given: Any) -> None:
        more = dict(zip(names.split(), given, strict=True))
        case, target = more.pop("case"), [more.pop("target")] if "target" in more else []
        suite.judge(check, suite.trial(case, **more, **facts), *target)

    return _test(check, run, names, rows)


def _of_backend(check: Callable[..., None], names: str = "", rows: Rows | None = None) -> Any:
    """Return the test of a check that takes the suite itself."""
    return _test(check, check, names, rows)


def _test(
    check: Callable[..., None], run: Callable[..., None], names: str, rows: Rows | None
) -> Any:
    """Return a method that is called and described as the check; it is skipped where nothing can be run."""
    taken = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names.split())]
    signature = Signature(taken)

    def test(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        suite: Suite = given.pop("self").suite()
        try:
            suite.backend  # noqa: B018
        except ContractError:
            pytest.skip("test_loads fails: fix that first")
        reason = suite.why_not(given["target"]) if "target" in given else None
        if reason is not None:
            pytest.skip(f"target {given['target']!r}: {reason}")
        _report(lambda: run(suite, *given.values()))

    made: Any = test
    made.__signature__, made.rows = signature, rows
    made.__name__, made.__doc__ = f"test_{check.__name__}", check.__doc__
    return made


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

    test_annotates = _of_trial(annotates, "case", _each(Suite.cases))
    test_converts = _of_trial(converts, "case", _each(Suite.covering))
    test_lowers = _of_trial(lowers, _ON, _on_targets(Suite.covering))
    test_keeps_parameters = _of_trial(keeps_parameters, _ON, _on_targets(Suite.covering))
    test_matches_reference = _of_trial(matches_reference, _ON, _on_targets(Suite.covering))
    test_matches_reference_for_integers = _of_trial(
        matches_reference_for_integers, _ON, _feeding, feeds=True
    )
    test_behaves = _of_trial(behaves, _ON, _on_targets(Suite.rows))
    test_leaves_inputs_alone = _of_trial(leaves_inputs_alone, _ON, _emitted, witness=True)
    test_takes_any_batch = _of_trial(takes_any_batch, _ON, _on_targets(Suite.modes), any_batch=True)
    test_takes_other_shapes = _of_trial(takes_other_shapes, _ON, _in_process)
    test_takes_other_literals = _of_trial(takes_other_literals, _ON, _one_mode)
    test_shares = _of_trial(shares, "case", _each(_sharing))
    test_trains = _of_trial(trains, "case", _each(Suite.modes))
    test_accepts = _of_backend(accepts, "case limit target", _edges)
    test_refuses = _of_backend(refuses, "case", _each(Suite.modes))
    test_half_precision = _of_trial(half_precision, "case dtype", _half, any_size=True)
    test_is_listed = _of_backend(is_listed, "case", _each(Suite.rows))

    # Of the backend.

    def test_loads(self) -> None:
        """The backend loads by its name, with the current version of the interface."""
        _report(lambda: loads(self.suite()))

    test_says_availability = _of_backend(says_availability)
    test_has_rules = _of_backend(has_rules)
    test_has_configs = _of_backend(has_configs)
    test_imports_public_names = _of_backend(imports_public_names)
    test_imports_cleanly = _of_backend(imports_cleanly)
    test_works_cleanly = _of_backend(works_cleanly)
    test_saves = _of_backend(saves, "config", lambda suite: [(c,) for c in suite.configs])
    test_composes = _of_backend(composes, "config partner first", _partners)
    test_most_specific_wins = _of_backend(most_specific_wins, "lower higher", lambda suite: PAIRS)

    def test_contract_is_whole(self) -> None:
        """No test of the contract is overridden or deleted without a reason."""
        tests = [name for name in vars(BackendContract) if name.startswith("test_")]
        changed = [name for name in tests if not _kept(type(self), name)]
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
    method: Any = getattr(BackendContract, test, None)
    make: Rows | None = getattr(method, "rows", None)
    if make is None:
        return None
    names = tuple(method.__signature__.parameters)[1:]
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
