# SPDX-License-Identifier: Apache-2.0
"""The contract suite: a sound backend passes it, and each wrong one fails the check that names the fault."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qompose.backend import (
    Backend,
    Finished,
    OperatorPattern,
    Rule,
    RuleUse,
    Target,
    TensorConstraint,
)
from qompose.backend.discovery import RESTRICT_VARIABLE
from qompose.errors import RequirementWarning
from qompose.testing.checks_behavior import imports_cleanly
from qompose.testing.checks_kernel import accepts, matches_reference
from qompose.testing.checks_rule import converts
from qompose.testing.contracts import (
    AlgorithmContract,
    BackendContract,
    Contract,
    names_of_tests,
    parameters,
)
from qompose.testing.fixtures import (
    Blocked,
    ContractError,
    NotApplicable,
    difference,
    expecting,
    parameter,
    rounding_fault,
    sizes,
)
from qompose.testing.suite import Suite
from qompose.testing.trial import Example, _off_ties_of, examples_of
from qompose.testing.variations import _ranges, limits
from torch import Tensor, nn
from torch.fx import Graph

from tests.core.offering import offered_by_a_package
from tests.core.sound_backend import LINEAR, MOVES, SoundBackend, weighted
from tests.core.sound_products import conv, matmul
from tests.core.toy import INT8, PER_TENSOR, STATIC
from tests.core.wrong_backends import (
    FEW,
    NEVER,
    WRONG,
    Wrong,
    crash,
    emitting,
    linear,
    sound,
    static,
)
from tests.sampling import at_once

pytest_plugins = ["pytester"]
aten, quantized = torch.ops.aten, torch.ops.quantized_decomposed


class TestSound(BackendContract):
    """A backend that keeps the contract, made for these tests."""

    backend = staticmethod(lambda: SoundBackend([LINEAR, MOVES, matmul(), conv()]))


TESTS = names_of_tests(BackendContract)


def contract_of(make: Callable[[], Backend]) -> type[BackendContract]:
    return type("Contract", (BackendContract,), {"backend": staticmethod(make)})


def failures(
    contract: type[Contract], tests: Sequence[str] = TESTS, enough: str | None = None
) -> dict[str, list[str]]:
    """Test -> the messages of its failures, as pytest would call it, up to one with `enough` in it."""
    found = defaultdict(list)
    for test in tests:
        names, rows, _ = parameters(contract, test) or ((), [()], [""])
        for row in rows:
            try:
                getattr(contract(), test)(**dict(zip(names, row, strict=True)))
            except pytest.skip.Exception:
                continue
            except pytest.fail.Exception as failure:
                found[test].append(str(failure))
                if enough is not None and enough in str(failure):
                    break
    return dict(found)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed beside, these tests are about one backend."""
    monkeypatch.setenv(RESTRICT_VARIABLE, "")


@pytest.fixture
def settings() -> Iterator[None]:
    """Put back what a wrong backend set."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


def test_a_check_is_blocked_by_one_that_it_depends_on() -> None:
    def fails(suite: Suite, trial: Any) -> None:
        raise ContractError("a row", expected="eight", found="nine", remedy="count again")

    suite, trial = Suite(SoundBackend(), 20.0, 1e-3), Example
    with pytest.raises(Blocked, match="test_fails") as blocked:
        suite.require(fails, trial)  # type: ignore[arg-type]
    assert isinstance(blocked.value.__cause__, ContractError)


def test_what_is_no_backend_is_named() -> None:
    with pytest.raises(ContractError) as failure:
        Suite(lambda: 3).backend  # type: ignore[arg-type, return-value]  # noqa: B018
    assert failure.value.found == "3"


def test_options_are_tried_with_their_rules_alone() -> None:
    slow, alone = (
        replace(STATIC, options=("slow",), name="slow"),
        replace(PER_TENSOR, options=("slow",)),
    )
    optional = replace(LINEAR, name="optional", option="slow")
    configs = {"static": STATIC, "slow": slow, "per tensor": alone}
    suite = Suite(SoundBackend([LINEAR, optional], configs=configs))
    assert suite.fitting(LINEAR) == ["static", "per tensor"]
    assert suite.fitting(optional) == ["slow", "per tensor"]


def test_a_process_that_ends_early_blocks_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(Blocked, match="test_loads"):
        imports_cleanly(Suite("sound"))


def test_what_becomes_of_a_conversion() -> None:
    """One that fails at an edge blocks the check of kernels there; one of another type is named."""
    suite = Suite(SoundBackend([LINEAR], configs={"static": STATIC}))
    (case, *_), limit = suite.rows(), next(iter(limits(LINEAR, STATIC)))
    edge, trial = suite.trial(case, name=str(limit), config=limit.config), suite.trial(case)
    with pytest.raises(ZeroDivisionError):
        edge.keep("converted", crash)
    with pytest.raises(Blocked, match="test_converts"):
        accepts(suite, case, limit, "torch")
    other = Suite(SoundBackend([LINEAR], configs={"static": STATIC})).trial(case)
    other.keep("converted", lambda: lambda *x: [y.double() for y in trial.model(*x)])
    with pytest.raises(ContractError, match="float64"):
        converts(suite, other)


def test_each_check_is_judged_once_on_each_trial_and_target() -> None:
    ran: list[tuple[Any, ...]] = []

    def one(suite: Suite, *asked: Any) -> None:
        ran.append((one, *asked))

    def other(suite: Suite, *asked: Any) -> None:
        ran.append((other, *asked))

    suite, first, second = Suite(SoundBackend()), object(), object()
    calls = [
        *((check, *asked) for check in (one, other) for asked in ((first,), (second,))),
        *((one, first, target) for target in ("torch", "device")),
    ]
    for call in (*calls, *calls):
        suite.judge(*call)
    assert ran == calls


def test_what_is_installed_beside_is_each_suite_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Suite(SoundBackend())
    assert (alone.installed, [*alone.known_targets]) == ({}, ["torch"])
    monkeypatch.setenv(RESTRICT_VARIABLE, "xnnpack")
    beside = Suite(SoundBackend())
    assert [*beside.installed] == ["xnnpack"]
    assert [*beside.known_targets] == ["torch", "executorch"]


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_backend_fails_the_check_that_names_the_fault(wrong: Wrong) -> None:
    found = failures(contract_of(wrong.make), wrong.failing, wrong.message)
    assert tuple(found) == wrong.failing
    for messages in found.values():
        assert any(wrong.message in message for message in messages), messages
        for message in messages:
            assert message.startswith("backend ")
            assert "\nexpected: " in message.replace("\n  ", "\n")
            assert "\n  found:    " in message and "\n  remedy:   " in message


UNCLAIMED = ("a guard that raises", "a guard that refuses its own example")
CORRECTED = {"static": replace(STATIC, algorithms=("bias_correction",))}
BLOCKED = [
    (
        linear(guard=lambda match: "not today"),
        "test_annotates",
        ("converts", "lowers", "trains", "most_specific_wins"),
    ),
    (static(NEVER), "test_annotates", ("shares",)),
    (
        linear(kernels=emitting(crash)),
        "test_lowers",
        (
            *("keeps_parameters", "matches_reference", "behaves", "leaves_inputs_alone"),
            *("takes_any_batch", "takes_other_shapes", "accepts"),
        ),
    ),
    (linear(kernels=emitting(crash)), "no row", ("works_cleanly",)),
    (static(replace(conv(), kernels=emitting(crash))), "test_lowers", ("takes_other_literals",)),
    (linear("two steps"), "test_matches_reference", ("matches_reference_for_integers",)),
    (linear("no zero point"), "no row", ("composes",)),
    (sound(LINEAR, configs=FEW), "no row", ("composes",)),
    (sound(LINEAR, configs=CORRECTED), "algorithms", ("trains",)),
]


@pytest.mark.parametrize(("make", "reason", "tests"), BLOCKED)
def test_what_needs_a_check_that_fails_is_skipped(
    make: Callable[[], Backend], reason: str, tests: Sequence[str]
) -> None:
    contract = contract_of(make)
    for test in tests:
        names, rows, _ = parameters(contract, f"test_{test}") or ((), [()], [""])
        assert rows
        for row in rows:
            with pytest.raises(pytest.skip.Exception, match=reason):
                getattr(contract(), f"test_{test}")(**dict(zip(names, row, strict=True)))


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("name", at_once(WRONG, *UNCLAIMED))
def test_no_other_check_fails(name: str) -> None:
    wrong = WRONG[name]
    assert tuple(failures(contract_of(wrong.make))) == wrong.failing


def test_edges_that_this_machine_runs_slowly_are_no_faults() -> None:
    """The model asks for a machine that takes them, and lower says that this one does not."""

    def requirements(uses: Sequence[RuleUse]) -> dict[str, str]:
        weights = [use.specs["weight"] for use in uses if "weight" in use.specs]
        usual = all(weight.quant_min == STATIC.weight.quant_min for weight in weights)
        return {} if usual else {"weights": "wide"}

    asked: list[Any] = []
    backend = SoundBackend(
        [LINEAR], requirements=requirements, objection=lambda a: asked.append(a) or "it is old"
    )
    edges = ["test_accepts", "test_refuses", "test_matches_reference"]
    assert failures(contract_of(lambda: backend), edges) == {}
    assert {"weights": "wide"} in asked


class Disclaiming(nn.Module):
    """A program that says, when it is first called, that this machine computes it wrongly."""

    def __init__(self, model: nn.Module, category: type[Warning]) -> None:
        super().__init__()
        self.model, self.category, self.is_called = model, category, False

    def forward(self, *args: Tensor) -> Any:
        if not self.is_called:
            warnings.warn("sums may saturate", self.category, stacklevel=2)
        self.is_called = True
        return self.model(*args)


@pytest.mark.parametrize("fault", ["", "two steps"])
@pytest.mark.parametrize("category", [RequirementWarning, DeprecationWarning])
def test_wrong_numbers_are_excused_where_the_program_says_so(
    fault: str, category: type[Warning]
) -> None:
    """Right ones are as good as those of a program that says nothing."""
    chip = Target("chip", lambda model, _: Finished(Disclaiming(model, category)), runs_here=True)
    rule = weighted("linear", relu=False, fault=fault)
    rule = replace(rule, kernels={"chip": rule.kernels["torch"]})
    suite = Suite(SoundBackend([rule], targets=(chip,)))
    trial = suite.trial(suite.cases()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        outcome: Any = contextlib.nullcontext()
        if fault:
            kind = NotApplicable if category is RequirementWarning else ContractError
            outcome = pytest.raises(kind, match="saturat")
        with outcome:
            matches_reference(suite, trial, "chip")


def test_ties_of_large_integers_are_further_from_the_middle() -> None:
    """The inverse of a scale is rounded: 19828.501 steps became 19828.499."""
    node = Graph().placeholder("x")
    node.graph.call_function(quantized.quantize_per_tensor.default, (node, 1.0, 0, 0, 65535))
    x = torch.tensor([2.502, 19828.502, 40000.49])
    assert (_off_ties_of(x, node) - x).ne(0).tolist() == [False, True, False]


def test_a_model_for_another_machine_is_saved_and_loaded() -> None:
    """`load` refuses it here, which is no fault of the backend, nor of the algorithm."""

    def backend() -> Backend:
        needs: dict[str, Any] = {"requirements": lambda uses: {"isa": "new"}}
        return SoundBackend([LINEAR], name="toy", objection=lambda asked: "it is old", **needs)

    algorithm = {"algorithm": "scale_search", "backends": (backend(),)}
    with offered_by_a_package(backend):
        assert failures(contract_of(backend), ["test_saves"]) == {}
        contract = type("Contract", (AlgorithmContract,), algorithm)
        assert failures(contract, ["test_is_saved"]) == {}


class TestOverrides:
    """Tests of the contract are overridden with a reason, or the contract says so."""

    def changed(self, **tests: Any) -> str:
        """What the contract says of these tests."""
        contract = type("Contract", (BackendContract,), {"backend": SoundBackend, **tests})
        try:
            contract().test_contract_is_whole()
        except pytest.fail.Exception as failure:
            return str(failure)
        return ""

    def test_overrides_and_deletions_are_named(self) -> None:
        assert "test_lowers" in self.changed(test_lowers=lambda self: None)
        assert "test_saves" in self.changed(test_saves=None)
        assert not self.changed(test_speed=lambda self: None), "a test of one's own"

    @pytest.mark.parametrize("reason", ["", "kernels hold state until release 2"])
    def test_an_expected_failure_needs_a_reason(self, reason: str) -> None:
        @pytest.mark.xfail(**({"reason": reason} if reason else {}))
        def test_saves(self: Any, config: str) -> None:
            pass

        assert ("test_saves" in self.changed(test_saves=test_saves)) is not bool(reason)

    def test_who_watches_the_watch(self) -> None:
        with pytest.raises(TypeError, match="test_contract_is_whole"):
            type("Contract", (BackendContract,), {"test_contract_is_whole": lambda self: None})


AUTHOR = """
    import sys
    sys.path.insert(0, {root!r})
    from qompose.testing import BackendContract
    from tests.core.wrong_backends import WRONG

    class TestMine(BackendContract):
        backend = staticmethod(WRONG["a version of the future"].make)

    class TestMissing(BackendContract):
        backend = "nowhere"
"""


def test_pytest_runs_what_an_author_writes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(AUTHOR.format(root=str(Path(__file__).parents[3])))
    result = pytester.runpytest("-k", "loads or refuses or has_configs or annotates", "-rs")

    result.stdout.fnmatch_lines(
        ["*TestMine.test_loads*", "*api_version = 99*", "*TestMissing.test_loads*", "*'nowhere'*"]
    )
    # Nothing loads it, so nothing else passes.
    result.assert_outcomes(passed=1, failed=5, skipped=3)


def test_without_pytest_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("qompose.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(ImportError, match=r"qompose\[testing\]"):
        importlib.import_module("qompose.testing")


class TestExamples:
    """What examples are made of patterns."""

    def of(self, *patterns: OperatorPattern) -> list[Example]:
        return examples_of(Rule(name="rule", patterns=patterns, activations=()))

    def test_every_overload_of_tensors_is_one(self) -> None:
        found = self.of(OperatorPattern((aten.add.Tensor, aten.add_.Tensor)))
        assert [(e.names, e.operators, e.problem) for e in found] == [
            (("self", "other"), (aten.add.Tensor,), ""),
            (("self", "other"), (aten.add_.Tensor,), ""),
        ]

    def test_a_list_of_tensors_has_two(self) -> None:
        (found,) = self.of(OperatorPattern((aten.cat.default,)))
        assert found.names == ("tensors_0", "tensors_1")
        assert found.function(torch.ones(1, 2), torch.ones(3, 2)).shape == (4, 2)

    def test_the_authors_own_is_for_the_first_operator(self) -> None:
        pattern = OperatorPattern(
            (aten.view.default, aten.reshape.default), lambda self: self.view(-1), ((2, 3),)
        )
        first, second = self.of(pattern)
        assert (first.names, first.shapes, first.problem) == (("self",), ((2, 3),), "")
        assert "aten.reshape requires shape" in second.problem


@pytest.mark.parametrize(
    ("shape", "extreme"),
    [((3, 5), False), ((4, 5), True), ((3, 9), False), ((4, 9), True), ((9,), False)],
)  # fmt: skip
def test_two_channels_of_a_parameter_are_extreme_where_as_many_are_not(
    shape: tuple[int, ...], extreme: bool
) -> None:
    values = parameter(shape, torch.float32, torch.Generator().manual_seed(0))
    assert bool((values[0] == 1).all()) is bool((values[:2].abs() == 1).all()) is extreme
    assert not (values[2:].abs() == 1).any()


def test_larger_sizes_come_first_and_the_authors_last() -> None:
    """Parameters have no batch, what makes a tensor stays, and large ones grow no further."""

    def indices() -> Tensor:
        return torch.tensor([1])

    found = list(sizes(((1, 3), (4, 3), (4,)), (False, True, True)))
    assert found[0] == ((4, 12), (16, 12), (16,))
    assert found[-1] == ((1, 3), (4, 3), (4,))
    assert {shapes[1] for shapes in sizes(((8, 4), indices), (True, False))} == {indices}
    assert all(shapes[0][1] < 4096 for shapes in sizes(((2, 3000),), (False,)))
    assert next(sizes(((8, 32),), (False,))) == ((32, 128),), "of 4096 elements, not too many"
    assert [*sizes(((1,),), (False,))] == [((1,),)]


@pytest.mark.parametrize("count", [8, 9])
def test_a_quarter_of_what_is_not_saturated_may_be_a_step_off(count: int) -> None:
    low, high = torch.zeros(99), torch.full((99,), 33.0)
    reference = torch.cat([low, torch.arange(1.0, 33), high])
    actual = reference.clone()
    actual[99 : 99 + count] += 1
    found = rounding_fault([reference], [actual], torch.tensor(1.0))
    assert (found is None) == (count == 8)


ONES = torch.ones(2, 2)
ONE_OFF = torch.tensor([[1.0, 1.0], [1.2, 1.0]])


@pytest.mark.parametrize(
    ("reference", "other", "step", "rest", "named"),
    [
        (ONES, ONES + 0.1, 0.1, 0, None), (ONES, ONE_OFF, 0.1, 0, ("2 steps", "[1, 0]")),
        (ONES * 100, ONES * 100 + 0.009, None, 1e-4, None), (ONES * 100, ONES * 100 + 0.02, None, 1e-4, ()),
        (ONES.repeat(8, 8), ONES.repeat(8, 8) * 1.005, None, 1e-2, ()),
        (ONES, ONES * torch.nan, 1e9, 0, ()), (ONES, torch.ones(4), 1e9, 1e9, ()),
        (ONES, ONES.double(), 1e9, 1e9, ()),
    ],
    ids=["a step", "two", "floats", "floats apart", "all too large",
         "no number", "shapes", "types"],
)  # fmt: skip
def test_how_outputs_are_compared(
    reference: Tensor, other: Tensor, step: Any, rest: float, named: Any
) -> None:
    """By steps and the place, or by the largest float; shapes and types count."""
    found = difference(reference, other, None if step is None else torch.tensor(step), rest)
    assert (found is None) == (named is None)
    assert all(words in str(found) for words in named or ())


@pytest.mark.parametrize(
    "outcome",
    [NotApplicable("of no use here"), ContractError("a", expected="b", found="c", remedy="d")],
)
def test_outcomes_of_checks_pass_through(outcome: Exception) -> None:
    with pytest.raises(type(outcome)) as caught, expecting("linear", "an int8 kernel", "write one"):
        raise outcome
    assert caught.value is outcome


def test_edges_cover_every_type_with_every_scheme() -> None:
    found = {(limit.role, limit.spec.dtype, limit.spec.qscheme) for limit in limits(LINEAR, STATIC)}
    for role in ("activation", "weight", "output"):
        pairs = {(dtype, scheme) for r, dtype, scheme in found if r == role}
        assert {dtype for dtype, _ in pairs} == {torch.int8, torch.uint8, torch.int16}
        assert (torch.int8, torch.per_channel_symmetric) in pairs
    assert all(limit.config != STATIC or limit.spec == INT8 for limit in limits(LINEAR, STATIC))


def test_edges_are_one_step_around_the_bounds_on_each_side() -> None:
    kind = {"dtypes": {torch.int8}, "qschemes": {torch.per_tensor_affine}}
    bounds = TensorConstraint(**kind, quant_min_lower_bound=-8, quant_max_upper_bound=7)
    found = [*_ranges(torch.int8, bounds)]
    assert found[:4] == [(-128, 127), (-8, 7), (-9, 7), (-8, 8)]
