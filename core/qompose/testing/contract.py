# SPDX-License-Identifier: Apache-2.0
"""A contract: a class whose tests pytest generates from what is under test; an author subclasses it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter, Signature
from typing import Any, ClassVar, TypeAlias

import pytest

from qompose.testing.fixtures import ContractError, NotApplicable

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
