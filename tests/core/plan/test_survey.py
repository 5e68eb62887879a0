# SPDX-License-Identifier: Apache-2.0
"""Multiply-accumulates are half of the operations that torch counts; bytes are counted once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from qompose.plan.float_operators import macs, state_bytes
from torch import Tensor, nn
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.core.toy import (
    CONV,
    LINEAR,
    NullQuantizer,
    OperatorPattern,
    convert,
    export,
    plan_of,
    prepare,
    randn,
    rule,
    toy,
)

aten = torch.ops.aten


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


CASES = [
    pytest.param(nn.Linear(3, 5), [(4, 3)], id="linear"),
    pytest.param(nn.Linear(3, 5), [(2, 4, 3)], id="linear with a 3-D input"),
    pytest.param(nn.Conv1d(4, 6, 3, stride=2), [(2, 4, 9)], id="conv1d"),
    pytest.param(nn.Conv2d(4, 6, 3, padding=1), [(2, 4, 7, 7)], id="conv2d"),
    pytest.param(nn.Conv2d(4, 8, 3, groups=2), [(2, 4, 7, 7)], id="grouped conv2d"),
    pytest.param(nn.Conv2d(4, 4, 3, groups=4), [(2, 4, 7, 7)], id="depthwise conv2d"),
    pytest.param(nn.Conv2d(4, 6, 3, padding="same"), [(2, 4, 7, 7)], id="conv2d padding same"),
    pytest.param(nn.Conv3d(2, 3, 2), [(1, 2, 4, 4, 4)], id="conv3d"),
    pytest.param(nn.ConvTranspose2d(4, 6, 3), [(2, 4, 5, 5)], id="transposed"),
    pytest.param(Call(torch.matmul), [(4, 3), (3, 5)], id="matmul"),
    pytest.param(Call(torch.matmul), [(2, 6, 4, 3), (2, 6, 3, 5)], id="batched matmul"),
    pytest.param(Call(torch.mm), [(4, 3), (3, 5)], id="mm"),
    pytest.param(Call(torch.bmm), [(7, 4, 3), (7, 3, 5)], id="bmm"),
    pytest.param(Call(torch.addmm), [(5,), (4, 3), (3, 5)], id="addmm"),
    pytest.param(Call(F.scaled_dot_product_attention), [(2, 4, 5, 8)] * 3, id="attention"),
    pytest.param(
        Call(F.scaled_dot_product_attention),
        [(2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)],
        id="cross attention",
    ),
]


@pytest.mark.parametrize(("module", "shapes"), CASES)
def test_macs_are_half_of_torchs_count(module: nn.Module, shapes: Any) -> None:
    inputs = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # it does not know the fused one
        module(*inputs)
    plan = plan_of(prepare(export(module, *inputs), NullQuantizer()))
    assert sum(operator.macs for operator in plan.operators) * 2 == counter.get_total_flops() > 0


STEPS, BATCH, IN, OUT = 5, 2, 3, 4


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        pytest.param(nn.LSTM(IN, OUT), (STEPS, BATCH, IN), 4 * (IN + OUT), id="lstm"),
        pytest.param(nn.GRU(IN, OUT, bias=False), (STEPS, BATCH, IN), 3 * (IN + OUT), id="gru"),
        pytest.param(
            nn.RNN(IN, OUT, 2, bidirectional=True, batch_first=True), (BATCH, STEPS, IN),
            2 * (IN + OUT) + 2 * (2 * OUT + OUT), id="rnn of two layers, both ways",
        ),
        pytest.param(
            nn.LSTM(IN, OUT, proj_size=2), (STEPS, BATCH, IN), 4 * (IN + 2) + 2, id="projected"
        ),
        pytest.param(nn.LSTMCell(IN, OUT), (STEPS * BATCH, IN), 4 * (IN + OUT), id="lstm cell"),
        pytest.param(nn.GRUCell(IN, OUT), (STEPS * BATCH, IN), 3 * (IN + OUT), id="gru cell"),
        pytest.param(nn.RNNCell(IN, OUT), (STEPS * BATCH, IN), IN + OUT, id="rnn cell"),
    ],
)  # fmt: skip
def test_macs_of_recurrence(module: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    """`expected` is per position and feature of the output."""
    plan = plan_of(prepare(_exported(module, randn(*shape)), NullQuantizer()))
    assert sum(operator.macs for operator in plan.operators) == STEPS * BATCH * OUT * expected


def _exported(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The tensor attributes .*_flat_weights")
        return export(module, x)


MATMUL = rule("matmul", OperatorPattern((aten.matmul.default,)), activations=("self", "other"))
SPLIT = [
    pytest.param(
        Call(lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2, :, :4], enable_gqa=True)),
        (2, 4, 5, 8), "split_attention", id="attention",
    ),
    pytest.param(
        nn.LSTM(IN, OUT, 2, bidirectional=True), (STEPS, BATCH, IN), "unroll_recurrent", id="lstm"
    ),
    pytest.param(nn.GRU(IN, OUT), (STEPS, BATCH, IN), "unroll_recurrent", id="gru"),
    pytest.param(nn.LSTMCell(IN, OUT), (BATCH, IN), "split_cells", id="lstm cell"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shape", "rewrite"), SPLIT)
def test_pieces_have_the_macs_of_the_whole(module: nn.Module, shape: Any, rewrite: str) -> None:
    program = _exported(module, randn(*shape))
    before = plan_of(prepare(program, NullQuantizer())).operators
    plan = plan_of(prepare(program, toy(LINEAR, MATMUL, rewrites=(rewrite,))))
    assert [r.name for r in plan.rewrites] == [rewrite]
    assert sum(o.macs for o in plan.operators) == sum(o.macs for o in before) > 0
    assert sum(o.macs for o in plan.operators if o.claim is None) == 0
    assert len({o.name for o in plan.operators}) == len(plan.operators)
    assert "getitem" not in {o.operator for o in plan.operators}, "they went with the whole"


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Call(lambda x: F.scaled_dot_product_attention(x, x, x))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.attention(x))


def test_pieces_are_listed_in_place_of_the_operator() -> None:
    program = export(Heads(), randn(2, 5, 8))
    quantizer = toy(MATMUL, rewrites=("split_attention",))
    plan = plan_of(prepare(program, quantizer))
    site = "scaled_dot_product_attention"
    listed = [(o.name, o.operator, o.module, o.macs, o.claim, o.reason) for o in plan.operators]
    nobody, path = "no rule claims it", "attention"
    assert listed == [
        (f"{site}/transpose", "aten.transpose.int", path, 0, None, nobody),
        (f"{site}/matmul", "aten.matmul", path, 2 * 5 * 5 * 8, 0, ""),
        (f"{site}/mul", "aten.mul.Tensor", path, 0, None, nobody),
        (f"{site}/softmax", "aten.softmax.int", path, 0, None, nobody),
        (f"{site}/matmul_1", "aten.matmul", path, 2 * 5 * 5 * 8, 1, ""),
        ("tanh", "aten.tanh", "", 0, None, nobody),
    ]


def test_pieces_that_a_rule_refuses_have_its_reason() -> None:
    add = rule("mul", OperatorPattern((aten.mul.Tensor,)), activations=("self", "other"))
    program = export(Heads(), randn(2, 5, 8))
    plan = plan_of(prepare(program, toy(MATMUL, add, rewrites=("split_attention",))))
    (mul,) = (o for o in plan.operators if o.operator == "aten.mul.Tensor")
    assert mul.reason == "toy: other is a number, not a tensor"


def test_matrix_times_vector() -> None:
    program = export(Call(torch.matmul), randn(4, 3), randn(3))
    (node,) = (n for n in program.graph.nodes if n.op == "call_function")
    assert macs(node) == 12


@pytest.mark.parametrize("function", [torch.tanh, torch.relu, lambda x: x.sum(0)])
def test_everything_else_has_none(function: Any) -> None:
    (operator,) = plan_of(prepare(export(Call(function), randn(4, 3)), NullQuantizer())).operators
    assert operator.macs == 0


def test_dynamic_shapes_count_with_the_example() -> None:
    shapes = ({0: torch.export.Dim("batch")},)
    program = export(nn.Linear(3, 5), randn(4, 3), dynamic_shapes=shapes)
    (operator,) = plan_of(prepare(program, NullQuantizer())).operators
    assert operator.macs == 4 * 3 * 5


def test_only_operators_on_floats_are_listed() -> None:
    program = export(Call(lambda x: (x + 1)[x > 0].sum() * 2.0), torch.arange(4))
    names = [o.name for o in plan_of(prepare(program, NullQuantizer())).operators]
    assert names == ["mul"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("halves", torch.zeros(8, dtype=torch.float16))


def test_tied_parameters_are_counted_once() -> None:
    assert state_bytes(Tied()) == 4 * 16 + 2 * 8


def test_views_of_one_storage_are_counted_each() -> None:
    base, module = torch.zeros(8), nn.Module()
    module.register_buffer("first", base[:4])
    module.register_buffer("second", base[4:])
    assert state_bytes(module) == 32


def test_a_quantized_model_is_smaller() -> None:
    x = randn(2, 128)
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh(), nn.Linear(128, 128))
    record = convert(export(model, x), toy(LINEAR), x).meta["qompose"]
    assert record.plan.float_bytes == 4 * (2 * 128 * 128 + 128)
    assert record.bytes <= 0.30 * record.plan.float_bytes


class Looped(nn.Module):
    """One layer in a body, and one like it outside that sees all rows at once."""

    def __init__(self, loop: Any) -> None:
        super().__init__()
        self.inside, self.outside, self.loop = nn.Linear(8, 8), nn.Linear(8, 8), loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self.inside, x) + self.outside(x)


def _mapped(layer: Any, x: Tensor) -> Tensor:
    return hop_map(layer, x)


def _scanned(layer: Any, x: Tensor) -> Tensor:
    def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return carried + 1, layer(row) + carried

    return scan(step, torch.zeros(8), x)[1]


def _mapped_twice(layer: Any, x: Tensor) -> Tensor:
    return hop_map(lambda rows: hop_map(layer, rows), x.reshape(5, 6, 8)).reshape(30, 8)


@pytest.mark.parametrize("loop", [_mapped, _scanned, _mapped_twice])
def test_what_a_loop_runs_for_every_slice_counts_as_often(loop: Any) -> None:
    with torch.no_grad():  # with gradients, the export itself warns
        program = export(Looped(loop), randn(30, 8))
    plan = plan_of(prepare(program, NullQuantizer()))
    counted = {o.module: o.macs for o in plan.operators if o.macs}
    assert counted == {"inside": 30 * 64, "outside": 30 * 64}


def test_a_while_loop_counts_as_one_pass_and_a_condition_every_branch() -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.cond(x.sum() > 0, self.a, self.b, (x,))
            (z,) = while_loop(lambda v: v.sum() < 3, lambda v: (self.c(v) + 1,), (y,))
            return z

    with torch.no_grad():
        program = export(Repeats(), randn(2, 8))
    plan = plan_of(prepare(program, NullQuantizer()))
    assert [o.macs for o in plan.operators if o.macs] == [2 * 64] * 3


class Stem(nn.Module):
    """A convolution with a batch norm, and a sum with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).sigmoid()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("conv", "toy: left in float by module name conv"),
        ("norm", "fold_batch_norm was not made: module name norm wants float for a part of it"),
    ],
)
def test_a_batch_norm_that_is_not_folded_has_the_reason(module: str, expected: str) -> None:
    """No rule takes a batch norm alone, which is not why it is float where a selector lets go of it."""
    program = export(Stem().eval(), randn(1, 3, 6, 6))
    plan = plan_of(prepare(program, toy(CONV).set_module_name(module, None)))
    assert {o.name: o.reason for o in plan.operators if o.claim is None}["batch_norm"] == expected


def test_a_batch_norm_behind_nothing_has_no_rule() -> None:
    program = export(nn.BatchNorm2d(3).eval(), randn(1, 3, 6, 6))
    plan = plan_of(prepare(program, toy(CONV)))
    assert [o.reason for o in plan.operators] == ["no rule claims it"]


class Numbers(nn.Module):
    """A product of a float operator's value and a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid() * 2


def test_a_number_that_would_be_a_tensor_is_not_the_reason() -> None:
    """It was made one, and still the rule waited for integers."""
    mul = rule(
        "mul", OperatorPattern((aten.mul.Tensor,)), activations=("self", "other"), condition="all"
    )
    quantizer = toy(mul, rewrites=("scalar_to_tensor",))
    plan = plan_of(prepare(export(Numbers(), randn(2, 3)), quantizer))
    assert [o.reason for o in plan.operators] == [
        "no rule claims it",
        "toy: its input is not quantized",
    ]
