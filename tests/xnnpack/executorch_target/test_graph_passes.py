# SPDX-License-Identifier: Apache-2.0
"""What XNNPACK or its runtime gets wrong is written otherwise before it is lowered, and runs as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_xnnpack.executorch_target.graph_passes import EXPORT_PASSES
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.core.toy import Model, randn
from tests.products import xnnpack
from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import converted, in_two_programs

pytest.importorskip("executorch")

STATIC: dict[str, Any] = {}
aten = torch.ops.aten


def behind(layer: nn.Module, function: Callable[..., Any]) -> nn.Module:
    """A layer, and a function of its output and of further inputs."""
    return Model(lambda m, x, *more: function(m.layer(x), *more), layer=layer)


def cropped(sizes: tuple[int, ...], *, before: bool) -> nn.Module:
    if not before:
        return behind(nn.Conv2d(4, 4, 3), lambda y: F.pad(y, sizes))
    inner = 3 if len(sizes) == 6 else 4
    return nn.Sequential(nn.ConstantPad2d(sizes, 0.5), nn.Conv2d(inner, 4, 3))


INT4 = {"weight_qmin": -8, "weight_qmax": 7}
INT4_DYNAMIC = {**INT4, "is_dynamic": True}
X, LINE, ROWS, NUMBER = randn(2, 4, 8, 8), randn(2, 4, 8), randn(3, 8), torch.tensor(0.7)
Made = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]


def cases() -> dict[str, Made]:
    torch.manual_seed(0)
    return {
        "int4 conv2d": (nn.Conv2d(4, 6, 3), (X,), INT4),
        "int4 depthwise": (nn.Conv2d(4, 8, 3, groups=4), (X,), INT4),
        "int4 transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (X,), INT4),
        "int4 conv1d": (nn.Conv1d(4, 6, 3), (LINE,), INT4),
        "int4 dynamic conv2d": (nn.Conv2d(4, 6, 3), (X,), INT4_DYNAMIC),
        "int4 dynamic linear": (nn.Linear(8, 4), (X,), INT4_DYNAMIC),
        **{
            f"bounds in the wrong order, {name}": (
                behind(nn.Conv2d(3, 8, 3), lambda y, clamp=clamp: (y, clamp(y))), (randn(2, 3, 9, 9),), STATIC
            )
            for name, clamp in {
                "clamp": lambda y: y.clamp(0.3, 0.1),
                "hardtanh": lambda y: aten.hardtanh(y, 0.3, 0.1),
            }.items()
        },
        **{
            f"crop {number} {'before' if before else 'behind'}": (cropped(sizes, before=before), (X,), STATIC)
            for number, sizes in enumerate([(-1, 2, 0, -1), (-1, 0, 2, 2, 0, -1)])
            for before in (False, True)
        },
        **{
            f"number {name}": (behind(nn.Linear(8, 8), function), (ROWS, NUMBER), STATIC)
            for name, function in {
                "relu": lambda y, t: F.relu(y + t), "left": lambda y, t: t - y
            }.items()
        },
        "constant": (
            Model(
                lambda m, x: m.last(m.layer(x) * m.factor),
                layer=nn.Linear(8, 8), last=nn.Linear(8, 8), factor=nn.Buffer(NUMBER),
            ), (ROWS,), STATIC,
        ),
    }  # fmt: skip


with torch.random.fork_rng():
    CASES = cases()


AT_ONCE = ("int4 conv2d", "bounds in the wrong order, clamp", "crop 0 before")


def quantized(name: str) -> Any:
    model, inputs, options = CASES[name]
    return converted(model, inputs, quantizer=xnnpack(**options))


made = in_two_programs(CASES, AT_ONCE, quantized)


@pytest.mark.parametrize("name", at_once(CASES, *AT_ONCE))
def test_runs_as_in_torch(name: str) -> None:
    """Of bounds in the wrong order XNNPACK gave either: 7 x 7 pixels end in the middle of a vector."""
    model, method = made(name)
    _, inputs, options = CASES[name]
    wanted, given = model(*inputs), method.run(*inputs)
    for one, other in zip(*(tree_leaves(each) for each in (wanted, given)), strict=True):
        assert torch.allclose(one, other, atol=1e-6 if options is INT4 else 1e-5)
    rows = qompose.report(method).rows
    if "int4" in name:
        assert [row.state for row in rows] == ["int8 kernel"]
    elif name == "constant":
        assert {row.rule for row in rows} == {"linear", "mul"}


@pytest.mark.parametrize("name", [name for name in CASES if "number" in name])
def test_sums_with_a_number_are_left_in_float(name: str) -> None:
    assert any("dimensions" in row.reason for row in qompose.report(quantized(name)).rows)


@pytest.mark.full
def test_cropping_of_a_batch_known_at_run_time() -> None:
    model = nn.Sequential(nn.ZeroPad2d((-1, 2, 0, -1)), nn.Conv2d(4, 4, 3))
    batch = {0: torch.export.Dim("batch", max=4)}
    made = converted(model, X, quantizer=xnnpack(), sizes=(batch,))
    program, x = qompose.lower(made, "executorch"), randn(3, 4, 8, 8)
    assert torch.allclose(program.run(x), made(x), atol=1e-6)


def behind_passes(model: nn.Module, *inputs: Tensor, sizes: Any = None) -> Any:
    """What is exported, behind the passes."""
    graph: Any = torch.export.export(model, inputs, dynamic_shapes=sizes).module()
    for change in EXPORT_PASSES:
        change(graph.graph)
    graph.recompile()
    return graph


def passed(function: Callable[[Tensor], Tensor], target: Any, sizes: Any = None) -> tuple[Any, Any]:
    """A graph behind the passes, and the arguments of its calls of an operator but their inputs."""
    model = behind_passes(Model(lambda m, x: function(x)), LINE, sizes=(sizes,))
    return model, [node.args[1:] for node in model.graph.nodes if node.target is target]


@pytest.mark.parametrize("bounds", [(0.3,), (None, 0.1), (0.1, 0.3)], ids=str)
def test_bounds_in_order_are_left_alone(bounds: tuple[float | None, ...]) -> None:
    assert passed(lambda x: x.clamp(*bounds), aten.clamp.default)[1] == [bounds]


def test_only_sides_that_are_cropped_are_sliced() -> None:
    length = {2: torch.export.Dim("length", min=4, max=9)}
    model, slices = passed(lambda x: F.pad(x, (-1, 0, 0, 2)), aten.slice.Tensor, length)
    assert slices == [(2, 1, None)]
    assert torch.equal(model(LINE), F.pad(LINE, (-1, 0, 0, 2)))


EXPAND = "aten.expand_copy.default"


def lowered(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Any:
    """The program of a function, which gives what the function gives, and its portable operators."""
    exported = torch.export.export(Model(lambda m, x, y: function(x, y)), inputs, **options)
    program = lower_to_executorch(exported.module(), inputs, **options)
    torch.testing.assert_close(program.run(*inputs), function(*inputs), rtol=1e-4, atol=1e-5)
    return program, [operator.name for operator in program.delegation.portable]


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).relu() @ x


class TestExpands:
    """Those that change nothing are gone before the partitioner looks; those that do something stay."""

    inputs = (randn(2, 3, 4, 4), randn(3, 2, 3, 4, 4)[2])

    def test_matrix_products_are_one_delegate(self) -> None:
        program, portable = lowered(product, *self.inputs)
        assert (portable, len(program.delegation.delegates)) == ([], 1)

    @pytest.mark.full
    def test_with_a_dynamic_batch_too(self) -> None:
        batch = {0: torch.export.Dim("batch", max=8)}
        program, portable = lowered(product, *self.inputs, dynamic_shapes=(batch, batch))
        assert EXPAND not in portable
        for rows in (1, 8):
            x, y = torch.randn(2, rows, 3, 4, 4)
            torch.testing.assert_close(program.run(x, y), product(x, y), rtol=1e-4, atol=1e-5)

    def test_those_that_grow_their_input_or_are_returned_stay(self) -> None:
        """What is returned is an output of its own."""
        _, portable = lowered(
            lambda x, y: (x[:, :1].expand(2, 3, 4, 4) @ y, (x + y).expand(2, 3, 4, 4)), *self.inputs
        )
        assert portable.count(EXPAND) == 2


def normed(x: Tensor) -> tuple[Tensor, ...]:
    """What a decoder has around its linears."""
    rows = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return rows, rows.mean(-1), torch.cat([x + 1.0, x + 1.0], -1), (x + 2.0).unsqueeze(1) * 3.0


def test_norms_of_rows_run_in_delegates() -> None:
    """As do a dimension of size 1 and a tensor beside itself: XNNPACK takes none of them as it is."""

    def model(_: Any, x: Tensor) -> tuple[Tensor, ...]:
        again = x + 1.0
        return *normed(x), torch.cat([again, again], 0)

    graph = torch.export.export(Model(model), (LINE,)).module()
    program = lower_to_executorch(graph, (LINE,))
    assert not program.delegation.portable
    for wanted, actual in zip(graph(LINE), program.run(LINE), strict=True):
        assert torch.allclose(wanted, actual, atol=1e-6)


def test_means_of_rows_of_unknown_number_are_left() -> None:
    """Their method would have to run first with the largest sizes, which methods with state cannot."""
    batch = {0: torch.export.Dim("batch", max=4)}
    _, calls = passed(lambda x: x.mean(-1), aten.mean.dim, batch)
    assert calls == [([-1],)]
    assert passed(lambda x: x.mean(-1), aten.mean.dim)[1] == [([2, 3], True)]


def test_routers_count_and_sort() -> None:
    """Of a router's numbers, of numbers between and outside of the bounds, and of a bound itself."""
    x = torch.tensor([0.0, 1.0, 3.0, 3.0, 2.0, -1.0, 4.0, 0.5, 2.0])

    def model(_: Any, x: Tensor) -> tuple[Tensor, ...]:
        places = torch.empty_like(x, dtype=torch.int64)
        values, order = x.sort()
        places[order] = torch.arange(9)
        counts = torch.histc(x, 4, 0, 3), torch.histc(x, 5, -1.0, 2.0)
        return *counts, values[places], x.view(3, 3).sort(0, True)[0]

    graph = torch.export.export(Model(model), (x,)).module()
    for wanted, actual in zip(graph(x), lower_to_executorch(graph, (x,)).run(x), strict=True):
        assert torch.equal(wanted, actual)


@pytest.mark.parametrize("bounds", [(0, 29), (2, 2), (-1,), ()])
@pytest.mark.parametrize("shape", [(29,), (29, 1)])
def test_histograms_are_those_of_torch(shape: tuple[int, ...], bounds: tuple[int, ...]) -> None:
    """Bounds of the data's own, bounds that are left out, several dimensions, and values on an edge."""
    x = torch.arange(29.0).reshape(shape)
    model = Model(lambda _, x: torch.histc(x, 29, *bounds))
    assert torch.equal(behind_passes(model, x)(x), model(x))


def test_results_that_are_viewed_lie_in_memory_as_recorded() -> None:
    def attention(_: Any, q: Tensor) -> Tensor:
        heads = q.transpose(1, 2)
        result = F.scaled_dot_product_attention(heads, heads, heads)
        return result.transpose(1, 2).contiguous().view(2, 3, 32)

    q = randn(2, 3, 4, 8)
    torch.testing.assert_close(behind_passes(Model(attention), q)(q), attention(None, q))
    x = randn(2, 3, 8).transpose(1, 2)
    ordered = Model(lambda _, x: x.sort(-1)[0].transpose(1, 2).contiguous().view(2, 24))
    assert torch.equal(behind_passes(ordered, x)(x), ordered(x))


def test_a_mask_that_is_written_is_looked_at_again() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(3, 3, dtype=torch.bool))

        def forward(self, q: Tensor, t: Tensor) -> Tensor:
            first = F.scaled_dot_product_attention(q, q, q, self.kept)
            torch.gt(t, 0, out=self.kept)
            return first + F.scaled_dot_product_attention(q, q, q, self.kept)

    q, t = randn(1, 2, 3, 8), torch.eye(3)
    torch.testing.assert_close(behind_passes(Masked(), q, t)(q, t), Masked()(q, t))
