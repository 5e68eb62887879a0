# SPDX-License-Identifier: Apache-2.0
"""Kernels that read integers and compute in float are told apart from int8 ones."""

from __future__ import annotations

import pytest
import qompose
import torch
from qompose.backend import Kernel, Region
from torch import nn
from torch.fx import Node

from tests.core.toy import LINEAR_PATTERN, WEIGHT_ONLY, convert, export, randn, rule, seeded, toy


@torch.library.custom_op("qompose_float_kernels::linear", mutates_args=())
def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return nn.functional.linear(x, weight.float() * scale[:, None], bias)


@linear.register_fake
def _(x, weight, scale, bias) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def emit(region: Region) -> Node:
    weight = region.quantized("weight")
    return region.call(
        linear, region.inputs("input")[0], weight.node, weight.scale, region.argument("op", "bias")
    )


def lowered(*, float_arithmetic: bool) -> torch.fx.GraphModule:
    kernel = Kernel("dequantizing", emit, float_output=True, float_arithmetic=float_arithmetic)
    row = rule(
        "linear", LINEAR_PATTERN, anchor="op", weight="weight", output=False,
        modes=frozenset({"weight-only"}), kernels={"torch": kernel},
    )  # fmt: skip
    x = randn(3, 8)
    converted = convert(export(seeded(nn.Linear(8, 4)), x), toy(row, config=WEIGHT_ONLY), x)
    result = qompose.lower(converted)
    assert torch.allclose(result(x), converted(x), atol=1e-6)
    return result


@pytest.mark.parametrize(
    ("float_arithmetic", "state"), [(True, "float kernel on integers"), (False, "int8 kernel")]
)
def test_their_work_is_not_counted_as_int8(float_arithmetic: bool, state: str) -> None:
    report = qompose.report(lowered(float_arithmetic=float_arithmetic))
    (row,) = report.rows
    assert (row.state, row.explanation) == (state, "toy: dequantizing")
    assert report.coverage() == (0.0 if float_arithmetic else 1.0)
    assert report.coverage(state) == 1.0
    assert state in str(report)


def test_they_are_what_was_asked_for() -> None:
    qompose.assert_lowered(lowered(float_arithmetic=True))
