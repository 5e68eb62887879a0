# SPDX-License-Identifier: Apache-2.0
"""No stage computes on inputs that the program was not exported for."""

from __future__ import annotations

import copy
import warnings
from collections import deque, namedtuple
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, strategies as st
from qompose.errors import BatchError, InputError
from qompose.program.call_signature import read_tree, source
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from tests.core.toy import LINEAR, Call, Model, export, prepare, randn, seeded, toy
from tests.sampling import at_once


def mean(m: Any, x: Tensor, factors: dict[str, Tensor], times: int, base: float) -> Tensor:
    """Divide by a size, which export takes for a constant."""
    return m.linear(x).sum(1) / x.shape[1] * factors["a"] * times + base


def by_sizes(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Take another way by the sizes of the inputs."""
    total = m.linear(x).sum(0)
    return total + y.sum() if 2 * x.shape[0] > y.shape[0] + 1 else total - y.sum()


MEAN, BY_SIZES = (Model(function, linear=nn.Linear(3, 4)) for function in (mean, by_sizes))
LOOSE = Model(lambda m, x, y: x.sum() + y.sum())
X, A = randn(4, 2, 3), randn(4, 4)
INPUTS = (X, {"a": A}, 3, 0.5)
ROWS = Dim("rows", min=3, max=9)


@cache
def program() -> ExportedProgram:
    shapes = ({0: ROWS}, {"a": {0: ROWS}}, None, None)
    return torch.export.export(seeded(MEAN), INPUTS, dynamic_shapes=shapes)


def prepared(exported: ExportedProgram | GraphModule) -> GraphModule:
    return prepare(exported, toy(LINEAR))


def converted(exported: ExportedProgram | GraphModule, **options: Any) -> GraphModule:
    model = prepared(exported)
    model(*INPUTS)
    return qompose.convert_pt2e(model, **options)


def loaded(exported: ExportedProgram, folder: Path) -> GraphModule:
    qompose.save(converted(exported), folder / "m.qompose")
    return qompose.load(folder / "m.qompose")


def copied(model: GraphModule) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own trees
        return copy.deepcopy(model)


STAGES: dict[str, Callable[[ExportedProgram, Path], Any]] = {
    "prepared": lambda p, _: prepared(p),
    "prepared from the module": lambda p, _: prepared(p.module()),
    "prepared for training": lambda p, _: qompose.prepare_qat_pt2e(p, toy(LINEAR)),
    "converted": lambda p, _: converted(p),
    "reference": lambda p, _: converted(p, use_reference_representation=True),
    "loaded": loaded,
    "lowered": lambda p, _: qompose.lower(converted(p)),
    "copied": lambda p, _: copied(qompose.lower(converted(p))),
    "compiled": lambda p, _: torch.compile(converted(p), backend="eager"),
    "compiled for any size": lambda p, _: torch.compile(
        qompose.lower(converted(p)), backend="eager", dynamic=True
    ),
}
WRONG = {  # the inputs, and the one that is named
    "another width": ((randn(4, 3, 3), *INPUTS[1:]), "x"),
    "no width": ((randn(4, 2), *INPUTS[1:]), "x"),
    "a factor of one dimension": ((X, {"a": randn(4)}, 3, 0.5), "factors_a"),
    "fewer factors than rows": ((X, {"a": randn(1, 4)}, 3, 0.5), "factors_a"),
    "too many rows": ((randn(10, 2, 3), {"a": randn(10, 4)}, 3, 0.5), "x"),
    "too few rows": ((randn(2, 2, 3), {"a": randn(2, 4)}, 3, 0.5), "x"),
    "another number": ((X, {"a": A}, 4, 0.5), "times"),
    "no number": ((X, {"a": A}, None, 0.5), "times"),
    "a tensor for a number": ((X, {"a": A}, torch.tensor(3), 0.5), "times"),
    "not a number": ((X, {"a": A}, 3, float("nan")), "base"),
    "no factor": ((X, {}, 3, 0.5), "factors"),
    "another factor": ((X, {"b": A}, 3, 0.5), "factors"),
    "a factor too many": ((X, {"a": A, "b": A}, 3, 0.5), "factors"),
    "a list for a dict": ((X, [A], 3, 0.5), "factors"),
    "a tensor for a dict": ((X, A, 3, 0.5), "factors"),
    "nothing for a dict": ((X, None, 3, 0.5), "factors"),
}


@pytest.fixture(
    scope="module",
    params=at_once(STAGES, "prepared", "converted", "reference", "loaded", "lowered", "compiled"),
)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return STAGES[request.param](program(), tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(("inputs", "name"), WRONG.values(), ids=WRONG)
def test_other_inputs_are_refused_at_every_stage(stage: Any, inputs: Any, name: str) -> None:
    with pytest.raises(InputError) as refused:
        stage(*inputs)
    assert refused.value.name == name


@pytest.mark.parametrize("rows", [3, 9])
def test_sizes_that_may_vary_do(stage: Any, rows: int) -> None:
    x, a = randn(rows, 2, 3), randn(rows, 4)
    assert stage(x, {"a": a}, 3, 0.5).shape == (rows, 4)


Pair = namedtuple("Pair", "x y")
NESTED = Model(lambda m, parts, more: parts[0] + parts[1][0] + more["y"].x + more[2][0])
PARTS, MORE = (X, [X]), {"y": Pair(X, X), 2: deque([X])}


@pytest.mark.parametrize(
    ("parts", "more", "name"),
    [
        ((X,), MORE, "parts"),
        ((X, [X], X), MORE, "parts"),
        ((X, []), MORE, "parts[1]"),
        ((X, X), MORE, "parts[1]"),
        (PARTS, {**MORE, 3: X}, "more"),
        (PARTS, {**MORE, "y": X}, "more['y']"),
        (PARTS, {**MORE, 2: [X]}, "more[2]"),
        (PARTS, {**MORE, 2: deque()}, "more[2]"),
    ],
)
def test_arguments_that_are_nested_otherwise_are_refused(parts: Any, more: Any, name: str) -> None:
    model = nested()
    with pytest.raises(InputError) as refused:
        model(parts, more)
    assert refused.value.name == name


def test_lists_and_tuples_are_one() -> None:
    assert torch.equal(nested()([X, (X,)], {2: deque([X]), "y": (X, X)}), 4 * X)


@cache
def nested() -> GraphModule:
    return prepared(torch.export.export(NESTED, (PARTS, MORE)))


def test_compare_names_the_batch() -> None:
    with pytest.raises(BatchError) as refused:
        qompose.compare(program(), prepared(program()), [INPUTS, WRONG["too many rows"][0]])
    assert refused.value.number == 2


def accepted(model: Any, *inputs: Any) -> bool:
    try:
        model(*inputs)
    except (InputError, AssertionError):
        return False
    return True


DYNAMIC = {0: Dim.DYNAMIC}
DERIVED = {
    "sizes that choose a way": (BY_SIZES, (DYNAMIC, DYNAMIC)),
    "one that is twice another, and one": (LOOSE, ({0: ROWS}, {0: 2 * ROWS + 1})),
    "two that are computed from one": (LOOSE, ({0: 2 * ROWS}, {0: 3 * ROWS + 2})),
    "equal ones": (LOOSE, ({0: ROWS}, {0: ROWS})),
}


@pytest.fixture(scope="module", params=DERIVED)
def both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model, shapes = DERIVED[request.param]
    sizes = {"sizes that choose a way": (8, 8), "equal ones": (8, 8)}.get(request.param)
    first, second = sizes or ((4, 9) if "twice" in request.param else (8, 14))
    program = export(seeded(model), randn(first, 3), randn(second, 3), dynamic_shapes=shapes)
    return program.module(), prepared(program)


@given(rows=st.integers(2, 24), others=st.integers(2, 30))
def test_what_torch_refuses_is_refused_and_nothing_else(
    both: tuple[Any, Any], rows: int, others: int
) -> None:
    inputs = randn(rows, 3), randn(others, 3)
    exported, model = both
    assert accepted(model, *inputs) == accepted(exported, *inputs)


def test_what_export_assumes_of_zero_and_one_is_no_condition() -> None:
    """torch refuses two rows here, because half of them is one."""
    halves = Call(lambda x: x.view(-1, 2, 3).sum(1))
    model = prepared(export(halves, randn(8, 3), dynamic_shapes=((DYNAMIC,),)))
    fits = [accepted(model, randn(rows, 3)) for rows in (2, 3, 4, 6)]
    assert fits == [True, False, True, True]


def test_a_number_that_varies() -> None:
    counted = Call(lambda x, count: x + torch.arange(count).sum())
    program = torch.export.export(counted, (X, 5), dynamic_shapes=((None, Dim.DYNAMIC),))
    model = prepared(program)
    assert torch.equal(model(X, 7), X + 21)
    assert torch.equal(model(X, 1), X), "export assumed two at least"


class TestFiles:
    @pytest.mark.parametrize("tree", [3, ["size", 1, 2], ["value", 0], ["Mod", ["size", 0, 0], 2]])
    def test_conditions(self, tree: Any) -> None:
        assert read_tree(tree, 2) == tree

    @pytest.mark.parametrize(
        "data",
        [
            *("x", None, True, 1.5, [], ["size"], {"size": 0}, ["Pow", 1, 2], ["Add", "x"]),
            *(["size", 2, 0], ["size", -1, 0], ["size", 0, "0"], ["size", 0, True], ["size", 0]),
            *(["value", 0, 0], ["Add"], ["Equality", ["size", 0, 0], ["__import__", "os"]]),
        ],
    )
    def test_what_is_no_condition_never_becomes_source(self, data: Any) -> None:
        with pytest.raises(ValueError, match="condition"):
            read_tree(data, 2)

    def test_source(self) -> None:
        tree = ["Equality", ["Mod", ["Add", ["size", 0, 1], 2], 3], ["value", 1]]
        assert source(tree, ["x", "n"]) == "(((x.shape[1] + 2) % 3) == n)"


def test_symbolic_tracing_passes() -> None:
    traced = torch.fx.symbolic_trace(converted(program()), concrete_args=None)
    assert traced(*INPUTS).shape == (4, 4)
