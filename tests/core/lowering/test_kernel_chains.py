# SPDX-License-Identifier: Apache-2.0
"""A kernel that does not fit hands its region to the one named behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning
from qompose.backend import Kernel, NotLowerable, Region, on_integers
from torch import nn
from torch.fx import GraphModule, Node

from tests.core.toy import LINEAR, RELU, convert, export, randn, seeded, toy


def refusing(reason: str) -> Callable[[Region], Node]:
    def emit(region: Region) -> Node:
        raise NotLowerable(reason)

    return emit


def relu_of(kernel: Kernel) -> Any:
    return replace(RELU, shares=True, condition="all", kernels={"torch": kernel})


def lowered(kernel: Kernel) -> GraphModule:
    model, x = seeded(nn.Sequential(nn.Linear(8, 4), nn.ReLU())), randn(3, 8)
    converted = convert(export(model, x), toy(LINEAR, relu_of(kernel)), x)
    result = qompose.lower(converted)
    assert torch.allclose(result(x), converted(x))
    return result


SECOND = Kernel("second", on_integers)


def test_the_second_is_tried_and_told() -> None:
    chain = Kernel("first", refusing("the first does not fit"), otherwise=SECOND)
    (row,) = qompose.report(lowered(chain)).why("relu")
    assert (row.state, row.kernel) == ("int8 kernel", "second")
    assert (chain.promise, len(chain.chain)) == ("first, else second", 2)


def test_the_first_is_taken_where_it_fits() -> None:
    chain = Kernel("first", on_integers, otherwise=Kernel("second", refusing("never asked")))
    assert qompose.report(lowered(chain)).why("relu")[0].kernel == "first"


def test_where_none_fits_the_reason_is_the_first_ones() -> None:
    last = Kernel("second", refusing("nor does the second"))
    with pytest.warns(QomposeWarning, match="the first does not fit"):
        result = lowered(Kernel("first", refusing("the first does not fit"), otherwise=last))
    (row,) = qompose.report(result).why("relu")
    assert (row.state, row.reason) == ("simulated (Q/DQ)", "the first does not fit")


def test_capabilities_promise_the_chain() -> None:
    chain = Kernel("first", refusing("the first does not fit"), otherwise=SECOND)
    rows = toy(relu_of(chain)).quantization_capabilities()
    (capability,) = (row for row in rows if row.mode == "static")
    assert capability.kernels == (("torch", "first, else second"),)
