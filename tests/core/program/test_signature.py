# SPDX-License-Identifier: Apache-2.0
"""A program's way to be called, recovered from its graph, is what a second export needs."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.program.call_signature import call_signature
from qompose.program.graph import copy_graph_module, refresh
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from tests.core.toy import LINEAR, convert, randn, toy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor, rest: Any = None, *, scale: Any = None) -> Any:
        y = self.linear(x)
        for value in pytree.tree_leaves((rest, scale)):
            y = y if value is None else y + value.sum()
        return {"y": y}


def again(program: ExportedProgram) -> tuple[Any, ExportedProgram]:
    """The signature, and the program exported a second time with it."""
    module = refresh(copy_graph_module(program.module()))
    signature = call_signature(module)
    twice = torch.export.export(
        module, signature.args, dict(signature.kwargs), dynamic_shapes=signature.dynamic_shapes
    )
    return signature, twice


X = randn(4, 3)
CALLS: list[Any] = [
    pytest.param((X,), {}, id="one tensor"),
    pytest.param((X, randn(2)), {}, id="two tensors"),
    pytest.param((X, (randn(2), randn(1))), {}, id="a tuple"),
    pytest.param((X, {"b": randn(2), "a": [randn(1)]}), {}, id="a dict with a list"),
    pytest.param((X,), {"scale": randn(2)}, id="a keyword"),
    pytest.param((X, randn(1)), {"scale": {"s": randn(2)}}, id="both"),
    pytest.param((X.double().to(torch.bfloat16).float(),), {}, id="another value"),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_arguments(args: Any, kwargs: Any) -> None:
    program = torch.export.export(Net(), args, kwargs)
    signature, twice = again(program)
    expected, actual = pytree.tree_flatten((args, kwargs)), None
    actual = pytree.tree_flatten((signature.args, dict(signature.kwargs)))
    assert actual[1] == expected[1]
    assert [(a.shape, a.dtype) for a in actual[0]] == [(e.shape, e.dtype) for e in expected[0]]
    assert signature.dynamic_shapes is None
    torch.testing.assert_close(
        twice.module()(*args, **kwargs), program.module()(*args, **kwargs), rtol=0, atol=0
    )


def ranges(program: ExportedProgram) -> list[tuple[int, str]]:
    """Bounds of the symbols. Tracing takes all for at least 2, and does not refuse smaller sizes."""
    found = program.range_constraints.values()
    return sorted((max(int(r.lower), 2), str(r.upper)) for r in found)


BATCH = Dim("batch", min=2, max=64)
SHAPES: list[Any] = [
    pytest.param((X,), {}, {"x": {0: BATCH}}, id="a range"),
    pytest.param((X,), {}, {"x": {0: Dim("batch")}}, id="no range"),
    pytest.param((X,), {}, {"x": {0: Dim("batch", min=3)}}, id="a lower bound"),
    pytest.param((X,), {}, {"x": {0: Dim("batch", min=1, max=9)}}, id="from one"),
    pytest.param((X,), {}, {"x": {0: Dim.AUTO}}, id="automatic"),
    pytest.param((X, randn(5)), {}, {"x": {0: BATCH}, "rest": {0: Dim("n", max=7)}}, id="two"),
    pytest.param((X, randn(4)), {}, {"x": {0: BATCH}, "rest": {0: BATCH}}, id="one for two"),
    pytest.param(
        (X, [randn(5), randn(2)]),
        {},
        {"x": None, "rest": [{0: Dim("n", max=7)}, None]},
        id="a list",
    ),
    pytest.param(
        (X,), {"scale": randn(5)}, {"x": {0: BATCH}, "scale": {0: Dim("n", max=7)}}, id="a keyword"
    ),
]


@pytest.mark.parametrize(("args", "kwargs", "shapes"), SHAPES)
def test_dynamic_dimensions_survive_with_their_ranges(args: Any, kwargs: Any, shapes: Any) -> None:
    full = {"rest": None, **shapes} if len(args) == 2 else shapes
    program = torch.export.export(Net(), args, kwargs, dynamic_shapes=full)
    _, twice = again(program)
    assert ranges(twice) == ranges(program)
    inputs = [n for n in twice.graph.nodes if n.op == "placeholder" and "linear" not in n.name]
    symbolic = [[isinstance(s, torch.SymInt) for s in n.meta["val"].shape] for n in inputs]
    before = [n for n in program.graph.nodes if n.op == "placeholder" and "linear" not in n.name]
    assert symbolic == [[isinstance(s, torch.SymInt) for s in n.meta["val"].shape] for n in before]


def test_sizes_computed_from_a_symbol_stay_dynamic() -> None:
    shapes = {"x": {0: BATCH}, "rest": {0: 2 * BATCH}}
    _, twice = again(torch.export.export(Net(), (X, randn(8)), dynamic_shapes=shapes))
    for size in (2, 5, 64):
        assert twice.module()(randn(size, 3), randn(2 * size))["y"].shape == (size, 4)


@pytest.mark.parametrize("size", [1, 9])
def test_the_ends_of_a_range_run_after_a_second_export(size: int) -> None:
    shapes = {"x": {0: Dim("batch", min=1, max=9)}}
    _, twice = again(torch.export.export(Net(), (X,), dynamic_shapes=shapes))
    assert twice.module()(randn(size, 3))["y"].shape == (size, 4)


def test_one_symbol_for_two_inputs_stays_one() -> None:
    program = torch.export.export(
        Net(), (X, randn(4)), dynamic_shapes={"x": {0: BATCH}, "rest": {0: BATCH}}
    )
    signature, _ = again(program)
    assert signature.dynamic_shapes["x"][0] is signature.dynamic_shapes["rest"][0]


def test_a_converted_model_keeps_it_all() -> None:
    args, kwargs = (X, (randn(2), randn(1))), {"scale": randn(5)}
    shapes = {"x": {0: BATCH}, "rest": (None, None), "scale": {0: Dim("n", max=7)}}
    program = torch.export.export(Net(), args, kwargs, dynamic_shapes=shapes)
    prepared = convert_with_keywords(program, args, kwargs)
    signature = call_signature(prepared)
    twice = torch.export.export(
        prepared, signature.args, dict(signature.kwargs), dynamic_shapes=signature.dynamic_shapes
    )
    assert ranges(twice) == ranges(program)
    result = twice.module()(randn(9, 3), (randn(2), randn(1)), scale=randn(7))
    assert result["y"].shape == (9, 4)


def convert_with_keywords(program: ExportedProgram, args: Any, kwargs: Any) -> Any:
    prepared = qompose.prepare_pt2e(program, toy(LINEAR))
    prepared(*args, **kwargs)
    return qompose.convert_pt2e(prepared)


def test_integers_and_other_types_keep_theirs() -> None:
    class Lookup(nn.Module):
        def forward(self, table: Tensor, ids: Tensor) -> Tensor:
            return table[ids]

    program = torch.export.export(Lookup(), (randn(5).half(), torch.tensor([1, 2])))
    signature, _ = again(program)
    assert [a.dtype for a in signature.args] == [torch.float16, torch.int64]
    assert not any(bool(a.any()) for a in signature.args), "values are zeros"


def test_a_converted_positional_model() -> None:
    program = torch.export.export(nn.Linear(3, 4), (X,), dynamic_shapes=({0: BATCH},))
    converted = convert(program, toy(LINEAR), X)
    signature = call_signature(converted)
    assert list(signature.dynamic_shapes) == ["input"]


X4 = randn(4, 3)
DERIVED: list[Any] = [
    pytest.param(2 * BATCH, 8, 2, 0, id="twice"),
    pytest.param(BATCH + 1, 5, 1, 1, id="one more"),
    pytest.param(BATCH - 1, 3, 1, -1, id="one less"),
    pytest.param(3 * BATCH - 2, 10, 3, -2, id="linear"),
]


@pytest.mark.parametrize(("dim", "example", "factor", "offset"), DERIVED)
def test_a_linear_function_of_a_dimension_stays_tied_to_it(
    dim: Any, example: int, factor: int, offset: int
) -> None:
    shapes = {"x": {0: BATCH}, "rest": {0: dim}}
    program = torch.export.export(Net(), (X4, randn(example)), dynamic_shapes=shapes)
    signature, twice = again(program)
    assert Dim.AUTO not in (signature.dynamic_shapes["x"][0], signature.dynamic_shapes["rest"][0])
    for batch in (3, 7, 64):
        fits = factor * batch + offset
        assert twice.module()(randn(batch, 3), randn(fits))["y"].shape == (batch, 4)
        with pytest.raises(AssertionError, match="Guard failed"):
            twice.module()(randn(batch, 3), randn(fits + 1))
    with pytest.raises(AssertionError, match="Guard failed"):
        twice.module()(randn(65, 3), randn(factor * 65 + offset))


def test_a_dimension_whose_root_is_no_input() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, -1) + 1

    half = Dim("half", min=2, max=32)
    program = torch.export.export(Halves(), (randn(8),), dynamic_shapes=({0: 2 * half},))
    _, twice = again(program)
    assert twice.module()(randn(64)).shape == (2, 32)
    with pytest.raises(AssertionError, match="Guard failed"):
        twice.module()(randn(7))


def test_a_sum_of_two_dimensions_is_left_to_export() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return torch.cat([x, y]) + z

    free = {0: Dim.AUTO}
    program = torch.export.export(
        Joined(), (randn(3), randn(4), randn(7)), dynamic_shapes=(free, free, free)
    )
    signature, twice = again(program)
    assert signature.dynamic_shapes["z"][0] is Dim.AUTO
    assert twice.module()(randn(5), randn(6), randn(11)).shape == (11,)


def test_a_number_that_varies() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor, n: int) -> Tensor:
            return x + n

    program = torch.export.export(
        Shifted(), (randn(3), 5), dynamic_shapes={"x": None, "n": Dim.DYNAMIC}
    )
    _, twice = again(program)
    assert torch.equal(twice.module()(torch.zeros(3), 9), torch.full((3,), 9.0))
