# SPDX-License-Identifier: Apache-2.0
"""Patterns find what they say, wherever it is, and nothing that only looks like it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from qompose.backend import OperatorPattern, Pattern, pattern as pattern_file
from qompose.backend.pattern import Chain, OperatorIndex
from qompose.backend.pattern_question import question_of
from qompose.errors import ConfigError
from torch import Tensor, nn
from torch.fx import Graph
from torch.fx.node import map_arg
from torch.nn import functional as F

from tests.core.toy import (
    LINEAR_NO_BIAS_PATTERN,
    LINEAR_PATTERN,
    LINEAR_RELU_PATTERN,
    Model,
    export,
    randn,
    rule,
    toy,
)

aten = torch.ops.aten
ADD = OperatorPattern((aten.add.Tensor, aten.add_.Tensor))
CAT = OperatorPattern((aten.cat.default,))


ONES = torch.ones(3)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    return first + second


_ADD = (("op", aten.add.Tensor),)
SUM = Pattern(_sum, ((2, 3), (2, 3)), _ADD)
SUM_RELU = Pattern(lambda first, second: (first + second).relu(), ((2, 3), (2, 3)), _ADD)


def find(pattern: Any, function: Any) -> list[tuple[str, ...]]:
    """The names of the operators of each match in the program of `function(module, x, y)`."""
    return [tuple(node.name for node in match.nodes) for match in pattern.find(index(function))]


# (the pattern, the program, the operators of each match)
CASES = {
    "an operator": (ADD, lambda m, x, y: x + y, [("add",)]),
    "both overloads": (ADD, lambda m, x, y: x.clone().add_(y) + x, [("add_",), ("add",)]),
    "an operator with itself": (ADD, lambda m, x, y: x + x, [("add",)]),
    "an operator with a number": (ADD, lambda m, x, y: x + 2, [("add",)]),
    "a sum": (SUM, lambda m, x, y: x + y, [("add",)]),
    "no sum with a number": (SUM, lambda m, x, y: x + 2, []),
    "in a chain": (SUM, lambda m, x, y: (x + y) + y, [("add",), ("add_1",)]),
    "two operators": (SUM_RELU, lambda m, x, y: (x + y).relu(), [("add", "relu")]),
    "a value in the middle leaks": (SUM_RELU, lambda m, x, y: [(z := x + y).relu(), z], []),
    "one behind the other": (
        SUM_RELU, lambda m, x, y: ((x + y).relu() + (x - y)).relu(), [("add", "relu"), ("add_1", "relu_1")]
    ),
    "with bias": (LINEAR_PATTERN, lambda m, x, y: m.linear(x), [("linear",)]),
    "bias wanted, none there": (LINEAR_PATTERN, lambda m, x, y: m.plain(x), []),
    "no bias": (LINEAR_NO_BIAS_PATTERN, lambda m, x, y: m.plain(x), [("linear",)]),
    "none wanted, a bias there": (LINEAR_NO_BIAS_PATTERN, lambda m, x, y: m.linear(x), []),
    "computed parameters, which guards decide on": (
        LINEAR_PATTERN, lambda m, x, y: F.linear(x, y, y[0][:2]), [("linear",)]
    ),
    "one module twice": (
        LINEAR_RELU_PATTERN,
        lambda m, x, y: m.linear(x).relu() + m.linear(y).relu(),
        [("linear", "relu"), ("linear_1", "relu_1")],
    ),
    "a second call is another value": (
        LINEAR_RELU_PATTERN, lambda m, x, y: [m.linear(x).relu(), m.linear(x)], [("linear", "relu")]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pattern", "function", "expected"), CASES.values(), ids=CASES)
def test_matches(pattern: Any, function: Any, expected: Any) -> None:
    assert find(pattern, function) == expected


def index(function: Any) -> OperatorIndex:
    layers = {"linear": nn.Linear(3, 3), "plain": nn.Linear(3, 3, bias=False)}
    program = export(Model(function, **layers), randn(2, 3), randn(2, 3, seed=1))
    return OperatorIndex(program.module(check_guards=False))


def test_names_stand_for_nodes_and_arguments() -> None:
    (match,) = LINEAR_RELU_PATTERN.find(index(lambda m, x, y: m.linear(x).relu()))
    names = {name: getattr(node, "name", node) for name, node in match.captures.items()}
    assert names == {
        "input": "x", "weight": "linear_weight", "bias": "linear_bias", "op": "linear", "relu": "relu",
        "output": "relu",
    }  # fmt: skip
    (match,) = ADD.find(index(lambda m, x, y: torch.add(x, y, alpha=3)))
    assert (match.captures["alpha"], match.node("alpha")) == (3, None)
    (match,) = ADD.find(index(lambda m, x, y: x + y))
    assert match.captures["alpha"] == 1, "the schema's default"
    for name, argument in (("self", "alpha"), ("output", "beta")):
        with pytest.raises(ConfigError):
            match.argument(name, argument)


def test_list_arguments_give_all_their_tensors_and_places() -> None:
    (match,) = CAT.find(index(lambda m, x, y: torch.cat([x, y, x])))
    assert [node.name for node in match.tensors("tensors")] == ["x", "y", "x"]
    assert [operand.position for operand in match.operands("tensors")] == [(0, 0), (0, 1), (0, 2)]
    (match,) = ADD.find(index(lambda m, x, y: x + x))
    assert [operand.position for operand in match.operands("self")] == [(0,), (1,)]


def test_a_pattern_is_captured_only_where_its_operators_occur() -> None:
    calls = []

    def counting(first: Tensor, second: Tensor) -> Tensor:
        calls.append(1)
        return first - second

    pattern = Pattern(counting, ((2, 3), (2, 3)), (("op", aten.sub.Tensor),))
    assert list(pattern.find(index(lambda m, x, y: x + y))) == []
    assert calls == []
    for _ in range(3):
        assert len(list(pattern.find(index(lambda m, x, y: x - y)))) == 1
    assert len(calls) == 1, "captured once per process"


def test_a_name_for_an_operator_that_is_not_called_is_an_error() -> None:
    pattern = Pattern(_sum, ((2, 3), (2, 3)), (("op", aten.mul.Tensor),))
    with pytest.raises(ConfigError, match=r"_sum .*aten.mul"):
        list(pattern.find(index(lambda m, x, y: x * y + x)))


def _linear_or_with_bias(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight, bias)


def test_a_variant_without_the_last_parameters() -> None:
    """Fewer shapes than parameters leave the last ones at their defaults."""
    op, shapes = (("op", aten.linear.default),), ((2, 3), (4, 3), (4,))
    full, short = (Pattern(_linear_or_with_bias, shapes[:n], op) for n in (3, 2))
    assert full.names - short.names == {"bias"}
    both = lambda m, x, y: m.linear(x) + m.plain(y)  # noqa: E731
    assert find(full, both) == [("linear",)]
    assert find(short, both) == [("linear_1",)]


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x * ONES, aten.mul.Tensor),
        (nn.PReLU(), aten.prelu.default),
        (lambda x: x.relu() if torch.compiler.is_exporting() else x.sin(), aten.relu.default),
    ],
    ids=["a tensor", "a module", "another way when it is exported"],
)
def test_functions_are_captured_as_models_are(function: Any, operator: Any) -> None:
    assert Pattern(function, ((2, 3),), (("op", operator),)).calls() == (operator,)


def test_a_chain_is_captured_as_the_function_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its functions once, for the tensors that it takes, in place or with a tensor of its own too."""
    seen, real = [], pattern_file._exported
    monkeypatch.setattr(
        pattern_file,
        "_exported",
        lambda function, *args: seen.append(function) or real(function, *args),
    )
    narrow, widen = (lambda x: x[:, 1:].relu_()), (lambda x: x * ONES)
    shapes, named = ((2, 4), (2, 3)), (("op", aten.add.Tensor),)
    links = [(narrow, ()), (torch.add, ("y",)), (torch.sub, ("y",)), (torch.add, ("y",))]
    chain = Chain(("x", "y"), links)
    whole = lambda x, y: narrow(x) + y - y + y  # noqa: E731
    graphs = [pattern_file._matcher(Pattern(f, shapes, named)).pattern for f in (chain, whole)]
    assert len({*map(_form, graphs)}) == 1
    assert seen == [narrow, torch.add, torch.sub, whole], "torch.add once"
    own = Chain(("x", "y"), [*links, (widen, ())])
    assert Pattern(own, shapes, named).calls()[-1] == aten.mul.Tensor
    assert seen[-1] is own, "as a whole"


def _form(graph: Graph) -> str:
    """A graph without the names of its values."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    named = [(n.op, n.op == "call_function" and n.target, n.args, n.kwargs) for n in graph.nodes]
    return repr(map_arg([list(row) for row in named], lambda node: number[node]))


def test_rows_capture_no_pattern_before_their_operators_are_read() -> None:
    seen = []

    def relu(x: Tensor) -> Tensor:
        seen.append(1)
        return x.relu()

    own = rule("own", Pattern(relu, ((2, 3),), (("op", aten.relu.default),)), activations=("x",))
    row = toy(own).quantization_capabilities()[0]
    assert row.notes == () and not seen
    assert row.operators == (("aten.relu.default",),) == copy.deepcopy(row).operators
    assert seen == [1] and hash(row.operators) == hash((("aten.relu.default",),))


def test_what_a_pattern_names_answers_questions_about_others() -> None:
    """Capturing every pattern of every installed backend would take half a minute."""

    def fails(x: Tensor) -> Tensor:
        raise AssertionError("captured")

    names = (("op", aten.relu.default), ("sum", aten.add.Tensor))
    relu_add = rule("relu_add", Pattern(fails, ((2, 3),), names), activations=("x",))
    for question in ("sigmoid", "relu", "relu -> sigmoid", "sigmoid -> add"):
        assert not question_of(question).is_about(relu_add)
    with pytest.raises(ConfigError, match="captured"):
        question_of("relu -> add").is_about(relu_add)


TOPK = OperatorPattern((aten.topk.default,), lambda self: torch.topk(self, 2)[0], ((4,),), result=0)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda m, x, y: torch.topk(x[0], 2)[0] + 1, True),
        (lambda m, x, y: torch.topk(x[0], 2)[1] + 1, False),
        (lambda m, x, y: [*torch.topk(x[0], 2)], False),
    ],
    ids=["the first", "the second", "both"],
)
def test_one_of_several_results(function: Any, found: bool) -> None:
    matches = [*TOPK.find(index(function))]
    assert len(matches) == found
    for match in matches:
        operator, taken = match.nodes
        assert operator.target is aten.topk.default and match.node("op") is operator
        assert match.output is taken and taken.args[1] == 0
        assert match.argument("op", "k") == 2
    assert {"op", "output", "self", "k"} <= TOPK.names
