# SPDX-License-Identifier: Apache-2.0
"""What a kernel may ask of its region, and what it is told where it asks for something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import Kernel, QuantizedTensor, Region
from qompose.errors import ConfigError, InternalError
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import (
    LINEAR_NO_BIAS_PATTERN,
    LINEAR_PATTERN,
    Model,
    convert,
    export,
    nodes_calling,
    randn,
    rule,
    seeded,
    toy,
)

X = randn(4, 8)


def lowered(emit: Callable[[Region], Node], *, bias: bool = True, output: bool = True) -> Any:
    """A linear, lowered with the kernel; and the Q/DQ model."""
    linear = rule(
        "linear", LINEAR_PATTERN, LINEAR_NO_BIAS_PATTERN, anchor="op", weight="weight",
        output=output, kernels={"torch": Kernel("kernel", emit)},
    )  # fmt: skip
    model = seeded(nn.Sequential(nn.Linear(8, 4, bias=bias), nn.Sigmoid()))
    converted = convert(export(model, X), toy(linear), X)
    return qompose.lower(converted), converted


@torch.library.custom_op("qompose_region_tests::linear", mutates_args=())
def linear(
    x: Tensor, scale: float, zero: int, weight: Tensor, scales: Tensor, bias: Tensor | None,
    out_scale: float, out_zero: int, low: int, high: int,
) -> Tensor:  # fmt: skip
    total = nn.functional.linear(x.long() - zero, weight.long()) * (scales * scale)
    total = total if bias is None else total + bias
    return (torch.round(total / out_scale) + out_zero).clamp(low, high).to(torch.int8)


@linear.register_fake
def _(x, scale, zero, weight, *rest) -> Tensor:  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def emit_linear(region: Region) -> Node:
    x, weight, y = (region.quantized(role) for role in ("input", "weight", "output"))
    return region.call(
        linear, x.node, x.scale, x.zero_point, weight.node, weight.scale,
        region.argument("op", "bias"), y.scale, y.zero_point, y.low, y.high, dtype=y.dtype,
    )  # fmt: skip


class TestWhatThereIs:
    @pytest.mark.parametrize("bias", [True, False])
    def test_inputs_weight_and_output_by_name(self, bias: bool) -> None:
        result, converted = lowered(emit_linear, bias=bias)
        assert torch.equal(result(X), converted(X))

    def test_an_operator_made_from_a_function(self) -> None:
        """The graph gets the operator, which can be exported, and not the function around it."""
        result, _ = lowered(emit_linear)
        (node,) = nodes_calling(result, "linear")
        assert node.target is torch.ops.qompose_region_tests.linear.default
        assert torch.equal(torch.export.export(result, (X,)).module()(X), result(X))

    def test_output_that_is_wanted_in_float(self) -> None:
        """The region stays as it is, and the report says why."""
        with pytest.warns(qompose.QomposeWarning, match="linear"):
            result, _ = lowered(emit_linear, output=False)
        (row,) = (row for row in qompose.report(result).rows if "linear" in row.operator)
        assert row.state == "simulated (Q/DQ)" and "output" in row.reason


def at_run_time(found: QuantizedTensor) -> QuantizedTensor:
    return replace(found, scale=found.node, zero_point=found.node)


@pytest.mark.parametrize("told", ["tensor", "scales", "zero_points"])
def test_what_is_known_at_run_time_only(told: str) -> None:
    """A kernel that needs its values refuses by asking for them."""
    with pytest.warns(qompose.QomposeWarning, match="linear"):
        lowered(lambda region: getattr(at_run_time(region.quantized("input")), told).numel())


# (what the kernel asks for, what there is not, what there is instead)
WRONG: tuple[tuple[Callable[[Region], Any], str], ...] = (
    (lambda region: region.quantized("x"), "'x'.* input, weight.*output"),
    (lambda region: region.quantized_inputs("self"), "'self'.* input, weight"),
    (lambda region: region.inputs("bias"), "'bias'.* input, weight"),
    (lambda region: region.node("linear"), "'linear'.* op, output"),
    (lambda region: region.node("input"), "'input'.* op, output"),
    (lambda region: region.argument("act", "dim"), "'act'.* op, output"),
    (lambda region: region.argument("op", "stride"), r"'stride'.*aten::linear\("),
)


CALLS: tuple[tuple[Callable[[Region], Any], str], ...] = (
    (
        lambda region: region.call(torch.ops.aten.mm.default, region.node("op")),
        "without mat2; .*aten::mm",
    ),
    (
        lambda region: region.call(torch.ops.aten.relu.default, 1, 2),
        r"with 2 arguments; .*aten::relu",
    ),
    (lambda region: region.call(torch.ops.aten.relu.default, region.quantized("input")), r"\.node"),
    (
        lambda region: region.call(torch.ops.aten.add.Tensor, region.node("op"), torch.ones(8)),
        r"region\.constant",
    ),
    (
        lambda region: region.call(
            torch.ops.aten.elu.default, region.node("op"), region.quantized("weight").node
        ),
        "alpha must be of type number, got .* of shape ",
    ),
    (lambda region: region.call(torch.ops.aten.relu.default, None), "self must be the node"),
)


@pytest.mark.parametrize(
    ("ask", "told"),
    CALLS,
    ids=["too few", "too many", "no node", "a tensor", "a vector", "nothing"],
)
def test_calls_that_cannot_be(ask: Callable[[Region], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"of toy, rule linear, at linear calls .*{told}"):
        lowered(ask)


@pytest.mark.parametrize(("ask", "told"), WRONG, ids=[row[1][:8] for row in WRONG])
def test_what_there_is_not(ask: Callable[[Region], Any], told: str) -> None:
    """The message says whose kernel asked, where, and what there is instead."""
    with pytest.raises(ConfigError, match=rf"of toy, rule linear, at linear .*{told}"):
        lowered(ask)


def test_a_region_without_its_output_is_an_internal_error() -> None:
    with pytest.raises(InternalError):
        lowered(lambda region: Region(region.module, region.claim, []).output_node)


def twice(self: Any, x: Tensor) -> Tensor:
    return self.last(self.other(self.one(x).sigmoid()).sigmoid()).sigmoid()


def lowered_twice(emit: Callable[[Region], Node]) -> Any:
    """Two linears with one weight, and a third with its own."""
    linear = rule(
        "linear", LINEAR_PATTERN, anchor="op", weight="weight",
        kernels={"torch": Kernel("kernel", emit)},
    )  # fmt: skip
    model: Any = Model(twice, **{name: nn.Linear(8, 8) for name in ("one", "other", "last")})
    model.other.weight = model.one.weight
    return qompose.lower(convert(export(seeded(model), X), toy(linear), X))


def test_who_reads_a_parameter() -> None:
    """The claims of the converted model, also of regions that have their kernels already."""
    found: list[tuple[str, ...]] = []

    def emit(region: Region) -> Node:
        found.append(tuple(claim.anchor for claim in region.readers("weight")))
        return emit_linear(region)

    lowered_twice(emit)
    assert found == [("linear", "linear_1"), ("linear", "linear_1"), ("linear_2",)]


def test_equal_constants_under_one_path_are_stored_once() -> None:
    values = iter([torch.ones(3), torch.ones(3), torch.zeros(3)])
    targets = []

    def emit(region: Region) -> Node:
        targets.append(str(region.constant("shared.values", next(values)).target))
        return emit_linear(region)

    lowered_twice(emit)
    assert targets == ["shared.values", "shared.values", "shared.values_1"]


def test_a_constant_is_never_a_buffer_of_the_model() -> None:
    """Equal values, but the program may write to its own."""

    def emit(region: Region) -> Node:
        path = str(region.quantized("weight").node.target)
        assert str(region.constant(path, region.quantized("weight").tensor.clone()).target) != path
        return emit_linear(region)

    lowered(emit)
