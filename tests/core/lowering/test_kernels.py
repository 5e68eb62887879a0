# SPDX-License-Identifier: Apache-2.0
"""Kernels that compute in float are told apart from int8 ones; one that does not fit hands on its region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning
from qompose.backend import Kernel, NotLowerable, Region, on_integers
from qompose.errors import MemberError, NotLoweredError
from torch import nn
from torch.fx import GraphModule, Node

from tests.core.toy import (
    LINEAR,
    LINEAR_PATTERN,
    RELU,
    WEIGHT_ONLY,
    convert,
    export,
    randn,
    rule,
    seeded,
    toy,
)


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


def lowered(**facts: bool) -> GraphModule:
    kernel = Kernel("dequantizing", emit, float_output=True, **facts)
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


def test_what_nothing_confirms_is_listed_apart_and_does_not_count() -> None:
    model = lowered(unverified=True)
    report = qompose.report(model)
    (row,) = report.rows
    assert (row.state, row.explanation) == ("unverified kernel", "toy: dequantizing")
    assert report.coverage() == 0.0 and report.quantized_part == 1.0
    assert "in 1 unverified kernel" in report.headline()
    with pytest.raises(NotLoweredError, match="dequantizing"):
        qompose.assert_lowered(model, 0.1)


def refusing(reason: str) -> Callable[[Region], Node]:
    def emit(region: Region) -> Node:
        raise NotLowerable(reason)

    return emit


def relu_of(kernel: Kernel) -> Any:
    return replace(RELU, shares=True, condition="all", kernels={"torch": kernel})


def lowered_chain(kernel: Kernel) -> GraphModule:
    model, x = seeded(nn.Sequential(nn.Linear(8, 4), nn.ReLU())), randn(3, 8)
    converted = convert(export(model, x), toy(LINEAR, relu_of(kernel)), x)
    result = qompose.lower(converted)
    assert torch.allclose(result(x), converted(x))
    return result


SECOND = Kernel("second", on_integers)


def test_the_second_is_tried_and_told() -> None:
    chain = Kernel("first", refusing("the first does not fit"), otherwise=SECOND)
    (row,) = qompose.report(lowered_chain(chain)).why("relu")
    assert (row.state, row.kernel) == ("int8 kernel", "second")
    assert (chain.promise, len(chain.chain)) == ("first, else second", 2)


def test_the_first_is_taken_where_it_fits() -> None:
    chain = Kernel("first", on_integers, otherwise=Kernel("second", refusing("never asked")))
    assert qompose.report(lowered_chain(chain)).why("relu")[0].kernel == "first"


@pytest.mark.parametrize("reason", ["", " ", None, 3], ids=repr)
def test_a_kernel_that_does_not_fit_gives_the_reason(reason: Any) -> None:
    chain = Kernel("speechless", refusing(reason), otherwise=SECOND)
    with pytest.raises(MemberError, match=rf"'speechless' of toy, rule relu.* got {reason!r}"):
        lowered_chain(chain)


def test_where_none_fits_the_reason_is_the_first_ones() -> None:
    last = Kernel("second", refusing("nor does the second"))
    with pytest.warns(QomposeWarning, match="the first does not fit"):
        result = lowered_chain(Kernel("first", refusing("the first does not fit"), otherwise=last))
    (row,) = qompose.report(result).why("relu")
    assert (row.state, row.reason) == ("simulated (Q/DQ)", "the first does not fit")


def test_capabilities_promise_the_chain() -> None:
    chain = Kernel("first", refusing("the first does not fit"), otherwise=SECOND)
    rows = toy(relu_of(chain)).quantization_capabilities()
    (capability,) = (row for row in rows if row.mode == "static")
    assert capability.kernels == (("torch", "first, else second"),)
