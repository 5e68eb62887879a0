# SPDX-License-Identifier: Apache-2.0
"""`CallInterface`: what the file of another runtime keeps of how a program is called."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from qompose.backend import CallInterface
from torch import Tensor, nn
from torch.export import Dim


class Odd(nn.Module):
    """Nested arguments, a number that varies, one that is fixed, and results of each kind."""

    def forward(self, pair: tuple[Tensor, Tensor], times: int, *, mode: str) -> Any:
        x, y = pair
        return {"sum": (x + y) * times, "times": times, "mode": mode, "none": None}


class WrongCallError(ValueError):
    """The class of errors that these tests ask for."""


def exported(batch: Any = None) -> torch.export.ExportedProgram:
    batch = Dim("batch", max=8) if batch is None else batch
    shapes = {"pair": ({0: batch}, {0: batch}), "times": Dim.DYNAMIC, "mode": None}
    inputs = ((torch.ones(4, 3), torch.ones(4, 3)), 5)
    return torch.export.export(Odd(), inputs, {"mode": "add"}, dynamic_shapes=shapes)


@pytest.fixture(params=["made", "read"])
def interface(request: pytest.FixtureRequest) -> CallInterface:
    made = CallInterface.of(exported())
    return (
        made
        if request.param == "made"
        else CallInterface.from_dict(json.loads(json.dumps(made.to_dict())))
    )


def called(
    interface: CallInterface, x: Any, y: Any, times: Any = 2, mode: Any = "add"
) -> list[Any]:
    return interface.flat(((x, y), times), {"mode": mode}, of="it", error=WrongCallError)


def test_a_call_is_flattened_as_the_program_takes_it(interface: CallInterface) -> None:
    x = torch.randn(6, 3, requires_grad=True)
    found = called(interface, x, x)
    assert [type(leaf) for leaf in found] == [Tensor, Tensor, int, str]
    assert not found[0].requires_grad
    assert called(interface, x[:0], x[:0])[0].shape == (0, 3)  # as torch takes it
    assert [a.is_number for a in interface.arguments] == [False, False, True, False]
    assert [a.is_fixed for a in interface.arguments] == [False, False, False, True]


X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"x": X.double()}, "float64"),
        ({"x": torch.ones(9, 3), "y": torch.ones(9, 3)}, "0 to 8"),
        ({"x": torch.ones(4, 2)}, "3"),
        ({"x": X[0]}, r"\(3,\)"),
        ({"y": torch.ones(5, 3)}, "dimension 0"),
        ({"x": X.to_sparse()}, "sparse"),
        ({"x": X.to("meta")}, "meta"),
        ({"x": 1}, "pair_0"),
        ({"times": 2.5}, "a Python int"),
        ({"times": True}, "True"),
        ({"times": None}, "None"),
        ({"mode": "sub"}, "'sub'"),
        ({"x": (X, X)}, "structure"),
    ],
)
def test_what_does_not_fit_is_named(interface: CallInterface, given: Any, named: str) -> None:
    with pytest.raises(WrongCallError, match=named):
        called(interface, **{"x": X, "y": X, **given})


def test_keyword_arguments_are_taken_by_name(interface: CallInterface) -> None:
    with pytest.raises(WrongCallError, match="it expects"):
        interface.flat(((X, X), 2), {}, of="it", error=WrongCallError)
    with pytest.raises(TypeError, match="the program expects"):
        interface.flat(((X, X), 2), {"mood": "add"})


def test_results_have_their_structure(interface: CallInterface) -> None:
    wanted = Odd()((X, X), 2, mode="add")
    for outputs in ([wanted["sum"], 2], [wanted["sum"], 2, "add", None]):
        found = interface.result(outputs)
        assert torch.equal(found.pop("sum"), wanted["sum"])
        assert found == {"times": 2, "mode": "add", "none": None}


def test_sizes_without_a_bound_take_any() -> None:
    interface = CallInterface.of(exported(Dim("batch")))
    big = torch.ones(1000, 3)
    assert len(called(interface, big, big)) == 4
    assert "at least 0" in str(interface.arguments[0])


def test_a_size_that_is_derived_from_another() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, x]) + y

    batch = Dim("batch", min=3, max=8)
    program = torch.export.export(
        Doubled(), (torch.ones(4), torch.ones(8)), dynamic_shapes=({0: batch}, {0: 2 * batch})
    )
    x, y = CallInterface.of(program).arguments
    assert (x.sizes[0].low, x.sizes[0].high) == (3, 8)
    assert (y.sizes[0].low, y.sizes[0].high) == (6, 16)


def test_a_class_that_is_not_registered_leaves_leaves() -> None:
    data = CallInterface.of(exported()).to_dict()
    for side in ("inputs", "outputs"):
        data[side] = data[side].replace("builtins.", "elsewhere.")
    interface = CallInterface.from_dict(data)
    assert interface.inputs is None and interface.outputs is None
    assert len(interface.flat((X, X, 2, "add"), {})) == 4
    assert interface.result([X, 2]) == [X, 2, "add", None]
    with pytest.raises(TypeError, match="3 inputs"):
        interface.flat((X, X, 2), {})
