# SPDX-License-Identifier: Apache-2.0
"""Contracts: classes whose tests pytest generates from what is under test; an author subclasses one.

Those of a backend come from its rule table, those of an algorithm from the weights of installed backends.
"""

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
from qompose.testing.algorithm_suite import AlgorithmSource, AlgorithmSuite
from qompose.testing.checks_algorithm import (
    equals_its_copy,
    is_saved,
    leaves_the_program_alone,
    loses_little,
    reaches_kernels,
    repeats,
    says_what_it_did,
    takes_data_in_parts,
    takes_odd_data,
)
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
Rows: TypeAlias = Callable[[Any], Iterable[Row]]
"""Returns the arguments of a test for a suite, a tuple for each time that it is run.

A suite is what is under test. It has `load()`, which raises `ContractError`, and, for tests with a target,
`why_not(target)`.
"""


def test_of(
    check: Callable[..., None],
    names: str = "",
    rows: Rows | None = None,
    run: Callable[..., None] | None = None,
) -> Any:
    """Return a method that is called and described as the check; it is skipped where nothing can be run.

    Args:
        names: of its arguments beside the suite, of which `rows` has a tuple for each time.
        run: what is called in place of the check, with the same arguments.
    """
    taken = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names.split())]
    signature = Signature(taken)

    def test(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        suite = given.pop("self").suite()
        try:
            suite.load()
        except ContractError:
            pytest.skip("test_loads fails; fix it first")
        reason = suite.why_not(given["target"]) if "target" in given else None
        if reason is not None:
            pytest.skip(f"target {given['target']!r}: {reason}")
        report(lambda: (run or check)(suite, *given.values()))

    made: Any = test
    made.__signature__, made.rows = signature, rows
    made.__name__, made.__doc__ = f"test_{check.__name__}", check.__doc__
    return made


class Contract:
    """Tests that are generated from what is under test.

    A test that cannot pass is overridden with a reason, `pytest.mark.xfail(reason=...)`; to override or
    delete one without is a failure.
    """

    _whole: ClassVar[type]
    """The contract with all its tests, which authors subclass."""

    @classmethod
    def _make(cls) -> Any:
        raise NotImplementedError

    @classmethod
    def suite(cls) -> Any:
        """Return what is under test, made once for each class."""
        if "_suite" not in cls.__dict__:
            cls._suite = cls._make()  # type: ignore[attr-defined]
        return cls._suite  # type: ignore[attr-defined]

    @classmethod
    def _source(cls, name: str) -> Any:
        """Return an attribute of the class; a function is not bound."""
        found: Any = inspect.getattr_static(cls, name)
        return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test for each case of a check."""
        found = parameters(type(self), metafunc.function.__name__)
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

    def test_contract_is_whole(self) -> None:
        """No test of the contract is overridden or deleted without a reason."""
        whole = self._whole
        changed = [name for name in names_of_tests(whole) if not _kept(type(self), whole, name)]
        if changed:
            pytest.fail(
                f"{type(self).__qualname__} overrides or deletes {', '.join(changed)}\n"
                f"  expected: every test of qompose.testing.{whole.__name__} unchanged\n"
                "  remedy:   mark an override with pytest.mark.xfail(reason=...), and call "
                "super()",
                pytrace=False,
            )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Contract in cls.__bases__:
            cls._whole = cls
        if "test_contract_is_whole" in vars(cls):
            raise TypeError(
                f"{cls.__qualname__} must not override test_contract_is_whole, which checks "
                "the other tests"
            )


def names_of_tests(contract: type) -> list[str]:
    """Return the names of the tests of a class, in the order in which they are written."""
    names = (name for kind in reversed(contract.__mro__) for name in vars(kind))
    return [name for name in dict.fromkeys(names) if name.startswith("test_")]


def _kept(cls: type, whole: type, name: str) -> bool:
    """Tell whether a class has a test of the contract, or an override with a reason."""
    own = getattr(cls, name, None)
    marks = getattr(own, "pytestmark", [])
    reasons = [mark.kwargs.get("reason", "") for mark in marks if mark.name == "xfail"]
    return own is getattr(whole, name) or any(reasons)


def report(check: Callable[[], None]) -> None:
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


def parameters(contract: type[Contract], test: str) -> Found | None:
    """Return the arguments of a test, None if it has none."""
    method: Any = getattr(contract._whole, test, None)
    make: Rows | None = getattr(method, "rows", None)
    if make is None:
        return None
    names = tuple(method.__signature__.parameters)[1:]
    try:
        contract.suite().load()  # test_loads reports it
        values = list(make(contract.suite()))
    except ContractError:
        values = []
    return names, values, ["-".join(map(_called, row)) for row in values]


def _called(value: object) -> str:
    if isinstance(value, bool):
        return "first" if value else "second"
    return str(value).removeprefix("torch.").replace(" ", "_")


_ON = "case target"


def _each(rows: Callable[[Suite], Sequence[Case]]) -> Rows:
    return lambda suite: [(case,) for case in rows(suite)]


def _on_targets(rows: Callable[[Suite], Sequence[Case]]) -> Rows:
    return lambda suite: [
        (case, target) for case in rows(suite) for target in sorted(suite.rule(case.rule).kernels)
    ]


def _feeding(suite: Suite) -> Iterable[Row]:
    """Yield runtimes other than the process only for static rows whose output is not integers anyway."""
    for case, target in _on_targets(Suite.modes)(suite):
        rule, mode = suite.rule(case.rule), suite.backend.configs[case.config].mode
        if target == TORCH_TARGET.name or (mode == STATIC and not (rule.output or rule.shares)):
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

    return test_of(check, names, rows, run)


class BackendContract(Contract):
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
    def _make(cls) -> Suite:
        return Suite(cls._source("backend"), cls.min_sqnr, cls.max_float_error)

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
    test_accepts = test_of(accepts, "case limit target", _edges)
    test_refuses = test_of(refuses, "case", _each(Suite.modes))
    test_half_precision = _of_trial(half_precision, "case dtype", _half, any_size=True)
    test_is_listed = test_of(is_listed, "case", _each(Suite.rows))

    # Of the backend.

    def test_loads(self) -> None:
        """The backend loads by its name, with the current version of the interface."""
        report(lambda: loads(self.suite()))

    test_says_availability = test_of(says_availability)
    test_has_rules = test_of(has_rules)
    test_has_configs = test_of(has_configs)
    test_imports_public_names = test_of(imports_public_names)
    test_imports_cleanly = test_of(imports_cleanly)
    test_works_cleanly = test_of(works_cleanly)
    test_saves = test_of(saves, "config", lambda suite: [(c,) for c in suite.configs])
    test_composes = test_of(composes, "config partner first", _partners)
    test_most_specific_wins = test_of(most_specific_wins, "lower higher", lambda suite: PAIRS)


def _places(suite: AlgorithmSuite) -> list[Row]:
    return [(place,) for place in suite.places]


class AlgorithmContract(Contract):
    """The promises of every algorithm. Subclass it, and name the algorithm.

    Each test runs for the weights of every backend that is installed and can be used here, one operator
    and mode at a time. A test that cannot pass is overridden with a reason, `pytest.mark.xfail(reason=...)`;
    overriding or deleting one without a reason fails.

    Attributes:
        algorithm: the word of its entry point; or, if it is not installed or has options, an Algorithm or a
            function that returns one.
        backends: the backends to test with, as names or Backends; by default every installed one.
        most_lost: how many dB a product may lose, on data like the calibration data, to rounding to nearest.
    """

    algorithm: ClassVar[AlgorithmSource] = ""
    backends: ClassVar[Sequence[BackendSource]] = ()
    most_lost: ClassVar[float] = 3.0

    @classmethod
    def _make(cls) -> AlgorithmSuite:
        return AlgorithmSuite(cls._source("algorithm"), cls.backends, cls.most_lost)

    def test_loads(self) -> None:
        """The algorithm loads by its word, and there are weights that it may change."""
        report(self.suite().load)

    test_says_what_it_did = test_of(says_what_it_did, "place", _places)
    test_repeats = test_of(repeats, "place", _places)
    test_leaves_the_program_alone = test_of(leaves_the_program_alone, "place", _places)
    test_takes_data_in_parts = test_of(takes_data_in_parts, "place", _places)
    test_loses_little = test_of(loses_little, "place", _places)
    test_takes_odd_data = test_of(takes_odd_data, "place", _places)
    test_reaches_kernels = test_of(reaches_kernels, "place", _places)
    test_is_saved = test_of(is_saved, "place", _places)
    test_equals_its_copy = test_of(equals_its_copy)
