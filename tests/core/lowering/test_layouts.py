# SPDX-License-Identifier: Apache-2.0
"""Lowered graphs whose kernels lay their results out in another way than export saw."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import Kernel, Region
from qompose.lowering import layouts
from qompose.program.meta import KERNELS_TAG, tag
from torch import Tensor, fx, nn

from tests.core.toy import RELU, Model, convert, toy

aten = torch.ops.aten
CHANNELS_LAST = torch.channels_last
DYNAMIC = ({0: torch.export.Dim("batch", min=2, max=9)},)


def of(function: Callable[[Tensor], Any]) -> nn.Module:
    return Model(lambda m, x: function(x.relu()))


def relu_channels_last(x: Tensor) -> Tensor:
    return x.relu().contiguous(memory_format=CHANNELS_LAST)


def relu_contiguous(x: Tensor) -> Tensor:
    return x.relu().contiguous()


def lowered(
    function: Callable[[Tensor], Any],
    x: Tensor,
    kernel: Callable[[Tensor], Tensor],
    dynamic_shapes: Any = None,
) -> fx.GraphModule:
    """Export, and put a kernel in the place of each relu."""
    program = torch.export.export(of(function), (x,), dynamic_shapes=dynamic_shapes)
    gm = program.module()
    for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
        node.target = kernel
        tag(node, **{KERNELS_TAG: [0]})
    layouts.allow_any(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def written_through_a_view(y: Tensor) -> Tensor:
    y.view(2, -1).mul_(3)
    return y + 1


def written_below_a_view(y: Tensor) -> Tensor:
    view = y.view(2, -1)
    y.mul_(3)
    return view.sum(0)


def written_behind_an_operator(y: Tensor) -> Tensor:
    y = y.neg()
    y.flatten(1)[:, :7].zero_()
    return y * 2


CASES: dict[str, Callable[[Tensor], Any]] = {
    "output": lambda y: y,
    "output behind an operator": lambda y: y + 1,
    "permuted output": lambda y: y.permute(0, 2, 3, 1),
    "part of it": lambda y: y[:, 1:3],
    "several": lambda y: (y, y.neg(), y.split(2, 1)),
    "as_strided": lambda y: y.as_strided((2, 5), (5, 1)) + 0,
    "other bits": lambda y: y.view(torch.int32),
    "written through a view": written_through_a_view,
    "written below a view": written_below_a_view,
    "written behind an operator": written_behind_an_operator,
}


NEEDS_CONTIGUOUS = {"written through a view", "written below a view"}
"""The views of these are none of an image that is channels-last."""
FIXED = {"written through a view", "written below a view", "as_strided"}
"""These name sizes."""


@pytest.mark.parametrize(
    ("case", "channels_last"),
    [(c, last) for c in CASES for last in (False, True) if not (last and c in NEEDS_CONTIGUOUS)],
)
def test_values_and_strides_are_those_exported(case: str, channels_last: bool) -> None:
    """The program has the one layout, the kernel makes the other."""
    function, x = CASES[case], torch.randn(2, 4, 3, 5)
    x = x.contiguous(memory_format=CHANNELS_LAST) if channels_last else x
    kernel = relu_contiguous if channels_last else relu_channels_last
    got = lowered(function, x, kernel, None if case in FIXED else DYNAMIC)(x)
    expected = function(x.relu())
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (got, expected)), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


def test_a_matrix_has_its_layout_back() -> None:
    x = torch.randn(4, 6)
    got = lowered(lambda y: y, x, lambda x: x.relu().t().contiguous().t())(x)
    assert torch.equal(got, x.relu()) and got.stride() == x.stride()


def test_another_batch_than_the_example() -> None:
    example = torch.randn(2, 4, 3, 5)
    gm = lowered(lambda y: y.permute(0, 3, 1, 2), example, relu_channels_last, DYNAMIC)
    x = torch.randn(7, 4, 3, 5)
    got, expected = gm(x), x.relu().permute(0, 3, 1, 2)
    assert torch.equal(got, expected) and got.stride() == expected.stride()


def test_views_take_any_layout_without_a_copy_of_their_operand() -> None:
    gm = lowered(lambda y: y.view(2, -1).sum(1), torch.randn(2, 4, 3, 5), relu_channels_last)
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [relu_channels_last, aten.reshape.default, aten.sum.dim_IntList]


def opaque(x: Tensor) -> Tensor:
    """A kernel that runs on real tensors alone."""
    return torch.from_numpy(relu_channels_last(x).numpy())


def contiguous_calls(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=aten.contiguous.default))


def test_nothing_is_added_where_the_layout_is_right_already() -> None:
    x = torch.randn(2, 4, 3, 5)
    assert contiguous_calls(lowered(lambda y: y + 1, x, relu_contiguous)) == 0
    assert contiguous_calls(lowered(lambda y: y + 1, x, relu_channels_last)) == 1
    gm = torch.export.export(of(lambda y: y), (x,)).module()
    layouts.allow_any(gm)
    assert contiguous_calls(gm) == 0, "no kernel touched it"


def test_a_kernel_that_no_example_passes() -> None:
    x = torch.randn(2, 4, 3, 5)
    got, expected = lowered(lambda y: y + 1, x, opaque)(x), x.relu() + 1
    assert torch.equal(got, expected) and got.stride() == expected.stride()


def test_a_kernel_of_several_calls() -> None:
    """What is before the last of them is laid out as kernels lay out, whatever its example says."""

    def emit(region: Region) -> fx.Node:
        first = region.call(relu_channels_last, region.node("output").args[0])
        return region.call(aten.clamp.default, first, 0.25, 8.0)

    two_calls = replace(RELU, kernels={"torch": Kernel("two calls", emit, float_output=True)})
    x = torch.randn(2, 4, 3, 5)
    module = of(lambda y: (y.as_strided((2, 5), (5, 1)) + 0, y))
    lowered = qompose.lower(convert(torch.export.export(module, (x,)), toy(two_calls), x))
    strided, whole = lowered(x)
    assert 0.2 < float(whole.min()) < 0.3, "the kernel ran"
    assert whole.is_contiguous() and torch.equal(strided, whole.flatten()[:10].view(2, 5))


def test_what_comes_of_a_part_of_several_results() -> None:
    def emit(region: Region) -> fx.Node:
        pair = region.call(aten.sort.default, region.node("output").args[0])
        return region.call(aten.relu.default, region.call(operator.getitem, pair, 0))

    parts = replace(RELU, kernels={"torch": Kernel("parts", emit, float_output=True)})
    x = torch.randn(2, 5)
    program = torch.export.export(of(lambda y: y), (x,))
    assert contiguous_calls(qompose.lower(convert(program, toy(parts), x))) == 0
