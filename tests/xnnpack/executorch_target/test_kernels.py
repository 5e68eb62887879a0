# SPDX-License-Identifier: Apache-2.0
"""Regions that ExecuTorch gets in a form of their own, with sizes that are known at run time only."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import qompose
import torch
from qompose.testing.fixtures import sqnr
from torch import Tensor, nn
from torch.export import Dim

from tests.core.toy import Model
from tests.products import xnnpack
from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import converted

pytest.importorskip("executorch")


@pytest.mark.parametrize(
    ("options", "dynamic"),
    at_once(
        itertools.product(({}, {"group_size": 32}), ((), (0,), (1,), (0, 1))),
        ({"group_size": 32}, (1,)),
    ),
    ids=str,
)
def test_a_linear_of_weights_alone(dynamic: tuple[int, ...], options: dict[str, Any]) -> None:
    """Batch and tokens are both dynamic in a language model."""
    model, example = nn.Linear(32, 16), torch.randn(2, 4, 32)
    dims = {dim: Dim(f"dim{dim}", min=1, max=9) for dim in dynamic}
    config = xnnpack(weight_only=True, **options)
    quantized = converted(model, example, quantizer=config, sizes=(dims,) if dims else None)
    lowered = qompose.lower(quantized, target="executorch")
    for batch, tokens in ((2, 4), (7 if 0 in dynamic else 2, 3 if 1 in dynamic else 4)):
        x = torch.randn(batch, tokens, 32)
        assert sqnr(quantized(x), lowered.run(x)) > 100
    (row,) = qompose.report(lowered).rows
    assert row.state == "float kernel on integers"


def beside_themselves(m: Any, x: Tensor) -> list[Tensor]:
    y = m.linear(x)
    return [torch.cat([y] * times, -1) for times in (1, 2, 3)]


def test_a_concatenation_of_a_tensor_with_itself_is_delegated() -> None:
    """One of a single tensor is not, as XNNPACK has none."""
    model, x = Model(beside_themselves, linear=nn.Linear(8, 4)), torch.randn(3, 8)
    quantized = converted(model, x, quantizer=xnnpack(), sizes=({0: Dim("rows", max=9)},))
    lowered = qompose.lower(quantized, target="executorch")
    (left,) = lowered.delegation.portable
    assert left.name == "aten.cat.default"
    assert {row.state for row in qompose.report(lowered).rows} == {"int8 kernel"}
    y = torch.randn(5, 8)
    for found, wanted in zip(lowered.run(y), quantized(y), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def split(m: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    y = m.first(y)
    return [m.last(m.first(x).reshape(-1, 4, 2, 4)), m.last(y.reshape(*y.shape[:2], 2, 4))]


def test_xnnpack_infers_one_size_of_a_view() -> None:
    """Another kernel makes a view of which several sizes are known only at run time."""
    sizes: Any = [{dim: Dim(f"dim{dim}", max=9) for dim in dims} for dims in ((0,), (0, 1))]
    model, inputs = (
        Model(split, first=nn.Linear(6, 8), last=nn.Linear(4, 4)),
        torch.randn(2, 2, 4, 6),
    )
    quantized = converted(model, (*inputs,), quantizer=xnnpack(), sizes=(*sizes,))
    lowered = qompose.lower(quantized, target="executorch")
    kernels = [row.kernel for row in qompose.report(lowered).rows if row.rule == "view"]
    assert kernels == ["XNNPACK delegate", "view on integers"]
    inputs = torch.randn(3, 4, 6), torch.randn(3, 5, 6)
    for wanted, found in zip(quantized(*inputs), lowered.run(*inputs), strict=True):
        assert sqnr(wanted, found) > 40


def test_weights_alone_with_zero_points_are_refused() -> None:
    """ExecuTorch's operator would take them for zeros."""
    model, x = nn.Linear(8, 4), torch.randn(2, 8)
    quantized = converted(model, x, quantizer=xnnpack(weight_only=True))
    (zero_points,) = (v for name, v in quantized.named_buffers() if "zero_point" in name)
    zero_points.fill_(1)
    with pytest.raises(qompose.errors.TargetError, match="rule linear_weight_only"):
        qompose.lower(quantized, target="executorch")


def attends(m: Any, x: Tensor) -> Tensor:
    """A linear layer behind attention, whose result ExecuTorch has in other strides than export."""
    heads = x.view(x.shape[0], 6, 4, 16).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return m.last(mixed.transpose(1, 2).reshape(x.shape[0], 6, 64))


@pytest.mark.full
@pytest.mark.parametrize("dynamic", (True, False), ids=["dynamic", "static"])
def test_a_linear_of_weights_alone_behind_attention(dynamic: bool) -> None:
    shapes = ({0: Dim("batch", min=1, max=8)},) if dynamic else None
    model = Model(attends, last=nn.Linear(64, 32))
    config = xnnpack(weight_only=True)
    quantized = converted(model, torch.randn(4, 6, 64), quantizer=config, sizes=shapes)
    lowered = qompose.lower(quantized, target="executorch")
    x = torch.randn(3 if dynamic else 4, 6, 64)
    assert sqnr(quantized(x), lowered.run(x)) > 100
