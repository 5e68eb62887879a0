# SPDX-License-Identifier: Apache-2.0
"""A program's way to be called, recovered from its graph, is what a second export needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose.program.call_signature import call_signature
from qompose.program.graph import copy_graph_module, refresh
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from tests.core.toy import Call, Model, randn


def shifted(m: Any, x: Tensor, rest: Any = None, *, scale: Any = None) -> Any:
    y = m.linear(x)
    for value in pytree.tree_leaves((rest, scale)):
        y = y if value is None else y + value.sum()
    return {"y": y}


NET = Model(shifted, linear=nn.Linear(3, 4))


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
    pytest.param((X, {"b": randn(2), "a": [randn(1)]}), {}, id="a dict with a list"),
    pytest.param((X, randn(1)), {"scale": {"s": randn(2)}}, id="both"),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_arguments(args: Any, kwargs: Any) -> None:
    program = torch.export.export(NET, args, kwargs)
    signature, twice = again(program)
    expected = pytree.tree_flatten((args, kwargs))
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
SHORT = {0: Dim("n", max=7)}
SHAPES: dict[str, Any] = {
    "a range": ((X,), {}, {"x": {0: BATCH}}),
    "no range": ((X,), {}, {"x": {0: Dim("batch")}}),
    "from one": ((X,), {}, {"x": {0: Dim("batch", min=1, max=9)}}),
    "automatic": ((X,), {}, {"x": {0: Dim.AUTO}}),
    "one for two": ((X, randn(4)), {}, {"x": {0: BATCH}, "rest": {0: BATCH}}),
    "a list": ((X, [randn(5), randn(2)]), {}, {"x": None, "rest": [SHORT, None]}),
    "a keyword": ((X,), {"scale": randn(5)}, {"x": {0: BATCH}, "scale": SHORT}),
}


@pytest.mark.parametrize(("args", "kwargs", "shapes"), SHAPES.values(), ids=SHAPES)
def test_dynamic_dimensions_survive_with_their_ranges(args: Any, kwargs: Any, shapes: Any) -> None:
    full = {"rest": None, **shapes} if len(args) == 2 else shapes
    program = torch.export.export(NET, args, kwargs, dynamic_shapes=full)
    signature, twice = again(program)
    assert ranges(twice) == ranges(program)
    if shapes.get("rest") == shapes["x"]:
        assert signature.dynamic_shapes["x"][0] is signature.dynamic_shapes["rest"][0]
    assert symbolic(twice) == symbolic(program)


def symbolic(program: ExportedProgram) -> list[list[bool]]:
    """Which sizes of each input vary."""
    inputs = [n for n in program.graph.nodes if n.op == "placeholder" and "linear" not in n.name]
    return [[isinstance(s, torch.SymInt) for s in n.meta["val"].shape] for n in inputs]


def test_the_ends_of_a_range_run_after_a_second_export() -> None:
    shapes = {"x": {0: Dim("batch", min=1, max=9)}}
    _, twice = again(torch.export.export(NET, (X,), dynamic_shapes=shapes))
    for size in (1, 9):
        assert twice.module()(randn(size, 3))["y"].shape == (size, 4)


def test_integers_and_other_types_keep_theirs() -> None:
    lookup = Call(lambda table, ids: table[ids])
    signature, _ = again(torch.export.export(lookup, (randn(5).half(), torch.tensor([1, 2]))))
    assert [a.dtype for a in signature.args] == [torch.float16, torch.int64]
    assert not any(bool(a.any()) for a in signature.args), "values are zeros"


@pytest.mark.parametrize(
    ("dim", "example", "factor", "offset"),
    [(2 * BATCH, 8, 2, 0), (BATCH + 1, 5, 1, 1), (3 * BATCH - 2, 10, 3, -2)],
    ids=["twice", "one more", "linear"],
)
def test_a_linear_function_of_a_dimension_stays_tied_to_it(
    dim: Any, example: int, factor: int, offset: int
) -> None:
    shapes = {"x": {0: BATCH}, "rest": {0: dim}}
    program = torch.export.export(NET, (X, randn(example)), dynamic_shapes=shapes)
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
    halves, half = Call(lambda x: x.view(2, -1) + 1), Dim("half", min=2, max=32)
    program = torch.export.export(halves, (randn(8),), dynamic_shapes=(({0: 2 * half},),))
    _, twice = again(program)
    assert twice.module()(randn(64)).shape == (2, 32)
    with pytest.raises(AssertionError, match="Guard failed"):
        twice.module()(randn(7))


def test_a_sum_of_two_dimensions_is_left_to_export() -> None:
    joined, inputs = Call(lambda x, y, z: torch.cat([x, y]) + z), (randn(3), randn(4), randn(7))
    shapes = (({0: Dim.AUTO},) * 3,)
    signature, twice = again(torch.export.export(joined, inputs, dynamic_shapes=shapes))
    assert signature.dynamic_shapes["inputs_2"][0] is Dim.AUTO
    assert twice.module()(randn(5), randn(6), randn(11)).shape == (11,)


def test_a_number_that_varies() -> None:
    shifted, shapes = Call(lambda x, n: x + n), ((None, Dim.DYNAMIC),)
    _, twice = again(torch.export.export(shifted, (randn(3), 5), dynamic_shapes=shapes))
    assert torch.equal(twice.module()(torch.zeros(3), 9), torch.full((3,), 9.0))
