# SPDX-License-Identifier: Apache-2.0
"""The operators that only move or choose values commute with quantization, each on arguments of its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose.backend import ORDER_PRESERVING, SCALE_PRESERVING, VALUE_PRESERVING
from qompose.program.aten_operators import NOT_ON_INTEGERS
from torch import Tensor
from torch.fx import Node

from tests.core.toy import INT8, UINT8, Annotator, Call, annotate, export, groups_of, prepare, randn

aten = torch.ops.aten
Use = Callable[[Any, Tensor, Tensor], Any]

FIRST: Use = lambda op, x, y: op(x)  # noqa: E731
BOTH: Use = lambda op, x, y: op(x, y)  # noqa: E731

CALLS: dict[Any, list[Use]] = {
    operator.getitem: [lambda op, x, y: op(aten.split.Tensor(x, 2, 1), 1)],
    aten.adaptive_max_pool2d.default: [lambda op, x, y: op(x, [3, 2])[0]],
    aten.alias.default: [FIRST],
    aten.amax.default: [lambda op, x, y: op(x, [1, -1]), lambda op, x, y: op(x, [0], True)],
    aten.amin.default: [lambda op, x, y: op(x, [1, -1]), lambda op, x, y: op(x, [0], True)],
    aten.cat.default: [lambda op, x, y: op([x, y, x], 1), lambda op, x, y: op([x, x])],
    aten.channel_shuffle.default: [lambda op, x, y: op(x, 2)],
    aten.chunk.default: [lambda op, x, y: op(x, 2, 1), lambda op, x, y: op(x, 3, -1)],
    aten.clone.default: [FIRST],
    aten.concat.default: [lambda op, x, y: op([x, y], -1)],
    aten.contiguous.default: [lambda op, x, y: op(x.transpose(1, 2))],
    aten.detach.default: [FIRST],
    aten.diagonal.default: [lambda op, x, y: op(x, 1, 0, 2)],
    aten.expand.default: [lambda op, x, y: op(x[:, :1], [-1, 3, -1, -1])],
    aten.expand_as.default: [lambda op, x, y: op(x[:1], y)],
    aten.flatten.using_ints: [lambda op, x, y: op(x, 1, 2)],
    aten.flip.default: [lambda op, x, y: op(x, [0, -1])],
    aten.gather.default: [lambda op, x, y: op(x, 1, torch.tensor([[[[3, 0]]]]))],
    aten.index.Tensor: [lambda op, x, y: op(x, [None, torch.tensor([2, 2, 0])])],
    aten.index_select.default: [lambda op, x, y: op(x, 1, torch.tensor([3, 1]))],
    aten.max_pool1d.default: [lambda op, x, y: op(x[0], [2], [1], [1])],
    aten.max_pool2d.default: [
        lambda op, x, y: op(x, [3, 3], [2, 2], [1, 1]),
        lambda op, x, y: op(x, [2], [1], [0], [2], True),
    ],
    aten.max_pool3d.default: [lambda op, x, y: op(x, [2, 2, 2], [1, 1, 1], [1, 1, 1])],
    aten.maximum.default: [BOTH],
    aten.minimum.default: [BOTH],
    aten.movedim.int: [lambda op, x, y: op(x, 1, -1)],
    aten.movedim.intlist: [lambda op, x, y: op(x, [0, 1], [2, 0])],
    aten.narrow.default: [lambda op, x, y: op(x, 1, 1, 2)],
    aten.permute.default: [lambda op, x, y: op(x, [3, 0, 2, 1])],
    aten.pixel_shuffle.default: [lambda op, x, y: op(x, 2)],
    aten.pixel_unshuffle.default: [lambda op, x, y: op(x, 2)],
    aten.relu.default: [FIRST],
    aten.relu_.default: [lambda op, x, y: op(x.clone())],
    aten.repeat.default: [lambda op, x, y: op(x, [2, 1, 1, 3])],
    aten.repeat_interleave.self_int: [lambda op, x, y: op(x, 3, 1), lambda op, x, y: op(x, 2)],
    aten.reshape.default: [lambda op, x, y: op(x, [4, -1])],
    aten.reshape_as.default: [lambda op, x, y: op(x.transpose(0, 1), y)],
    aten.roll.default: [lambda op, x, y: op(x, [3, 1], [0, 2]), lambda op, x, y: op(x, [5])],
    aten.rot90.default: [lambda op, x, y: op(x, 1, [2, 3])],
    aten.select.int: [lambda op, x, y: op(x, 1, -1)],
    aten.slice.Tensor: [lambda op, x, y: op(x, 1, 1, 4, 2)],
    aten.split.Tensor: [lambda op, x, y: op(x, 3, 1)],
    aten.split_with_sizes.default: [lambda op, x, y: op(x, [1, 3], 1)],
    aten.squeeze.default: [lambda op, x, y: op(x[:1])],
    aten.squeeze.dim: [lambda op, x, y: op(x[:1], 0)],
    aten.squeeze.dims: [lambda op, x, y: op(x[:1, :1], [0, 1])],
    aten.stack.default: [lambda op, x, y: op([x, y], -1)],
    aten.swapaxes.default: [lambda op, x, y: op(x, 0, 2)],
    aten.t.default: [lambda op, x, y: op(x[0, 0])],
    aten.tile.default: [lambda op, x, y: op(x, [2, 1])],
    aten.transpose.int: [lambda op, x, y: op(x, 1, -1)],
    aten.unbind.int: [lambda op, x, y: op(x, 1)],
    aten.unflatten.int: [lambda op, x, y: op(x, 1, [2, -1])],
    aten.unfold.default: [lambda op, x, y: op(x, 2, 3, 1)],
    aten.unsqueeze.default: [lambda op, x, y: op(x, -1)],
    aten.upsample_nearest1d.vec: [lambda op, x, y: op(x[0], None, [2.0])],
    aten.upsample_nearest2d.vec: [lambda op, x, y: op(x, [9, 5], None)],
    aten.view.default: [lambda op, x, y: op(x, [-1, 4])],
    aten.view_as.default: [lambda op, x, y: op(x.reshape(-1), y)],
}
"""How each operator is called on one or two tensors of shape (2, 4, 4, 4)."""

ROWS = [
    pytest.param(target, call, id=f"{target}{i or ''}".removeprefix("aten."))
    for target, calls in CALLS.items()
    for i, call in enumerate(calls)
]


def test_every_operator_of_the_table_is_called_here() -> None:
    assert set(CALLS) == SCALE_PRESERVING
    assert not VALUE_PRESERVING & ORDER_PRESERVING


def commutes(call: Use, target: Any, change: Callable[[Tensor], Tensor]) -> bool:
    """Tell whether `target` gives the same whether its inputs are changed or its outputs."""
    x, y = randn(2, 4, 4, 4) * 3, randn(2, 4, 4, 4, seed=1)
    before = call(target, change(x), change(y))
    after = call(target, x, y)
    pairs = [(before, after)] if isinstance(after, Tensor) else zip(before, after, strict=True)
    return all(torch.equal(one, change(other)) for one, other in pairs)


def through(low: int, high: int, scale: float, zero_point: int) -> Callable[[Tensor], Tensor]:
    def fake(x: Tensor) -> Tensor:
        return (torch.clamp(torch.round(x / scale) + zero_point, low, high) - zero_point) * scale

    return fake


@pytest.mark.parametrize(("target", "call"), ROWS)
@settings(max_examples=10)
@given(st.floats(1e-3, 2.0), st.integers(0, 15))
def test_it_commutes_with_quantization(
    target: Any, call: Use, scale: float, zero_point: int
) -> None:
    """Clipping included: at 4 bits, most scales clip something."""
    assert commutes(call, target, through(0, 15, scale, zero_point))


MOVED = [row for row in ROWS if row.values[0] in VALUE_PRESERVING]


@pytest.mark.parametrize(("target", "call"), MOVED)
def test_moved_values_commute_with_any_function_of_a_value(target: Any, call: Use) -> None:
    """It need not keep the order, as quantization does; nor may an operator put in a zero."""
    assert commutes(call, target, lambda x: torch.cos(x) + 2)


@pytest.mark.parametrize(("target", "call"), [r for r in ROWS if r not in MOVED])
def test_chosen_values_are_those_of_inputs_or_zero(target: Any, call: Use) -> None:
    x, y = randn(2, 4, 4, 4), randn(2, 4, 4, 4, seed=1)
    known = {0.0, *x.flatten().tolist(), *y.flatten().tolist()}
    assert set(call(target, x, y).flatten().tolist()) <= known
    assert not commutes(call, target, lambda x: -x), "else it belongs into the other table"


@pytest.mark.parametrize(
    ("target", "call"),
    [
        (aten.add.Tensor, BOTH), (aten.gelu.default, FIRST), (aten.mean.dim, lambda op, x, y: op(x, [1])),
        (aten.neg.default, FIRST), (aten.constant_pad_nd.default, lambda op, x, y: op(x, [1, 1], 0.3)),
    ],
    ids=["add", "gelu", "mean", "neg", "a pad that is no step"],
)  # fmt: skip
def test_other_operators_do_not_commute(target: Any, call: Use) -> None:
    """The check can fail."""
    assert target not in SCALE_PRESERVING
    assert not commutes(call, target, through(0, 15, 0.21, 3))


def moved(*calls: tuple[Any, Use]) -> Call:
    """A model of the calls, each on tensors of its own."""
    return Call(lambda x, y: [call(op, torch.sin(x), torch.cos(y)) for op, call in calls])


def both_sides(targets: Collection[Any], output: Any = INT8) -> Annotator:
    def annotate_node(node: Node) -> None:
        if node.target in targets:
            floats = [a for a in node.all_input_nodes if a.meta["val"].dtype is torch.float32]
            annotate(node, dict.fromkeys(floats, INT8), output)

    return Annotator(annotate_node)


SIMPLE = [
    row.values
    for row in MOVED
    if row.values[0] is not operator.getitem
    and not isinstance(row.values[1](row.values[0], randn(2, 4, 4, 4), randn(2, 4, 4, 4)), tuple | list)
]  # fmt: skip


def test_alike_specifications_on_both_sides_are_one_scale() -> None:
    """Backends refuse a slice or a transpose whose two sides differ in scale."""
    x, y = randn(2, 4, 4, 4), randn(2, 4, 4, 4, seed=1)
    targets = {target for target, _ in SIMPLE}
    prepared = prepare(export(moved(*SIMPLE), x, y), both_sides(targets))
    prepared(x, y)
    moves = [n for n in qompose.convert_pt2e(prepared).graph.nodes if n.target in targets]
    assert {n.target for n in moves} == targets and len(moves) >= len(SIMPLE)
    for node in moves:
        quantized = {a.args[1:] for a in node.all_input_nodes if "dequantize" in a.name}
        quantized |= {a.args[1:] for a in node.users}
        assert len(quantized) == 1, node


@pytest.mark.parametrize("output", [UINT8, None], ids=["unlike", "float"])
def test_unlike_specifications_stay_apart(output: Any) -> None:
    call = (lambda x, y: x.permute(1, 0, 2, 3), BOTH)
    prepared = prepare(
        export(moved(call), *[randn(2, 4, 4, 4)] * 2), both_sides([aten.permute.default], output)
    )
    assert len(groups_of(prepared)) == 1 + (output is not None)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_the_table_of_those_that_torch_cannot_compute_on_integers(dtype: torch.dtype) -> None:
    x, y = (torch.arange(4 * 4 * 6 * 6).view(4, 4, 6, 6).to(dtype) for _ in range(2))
    for target, call in (row.values for row in ROWS):
        if dtype in NOT_ON_INTEGERS.get(target, ()):
            with pytest.raises(NotImplementedError):
                call(target, x, y)
        else:
            call(target, x, y)
