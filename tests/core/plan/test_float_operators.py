# SPDX-License-Identifier: Apache-2.0
"""Multiply-accumulates are half of the operations that torch counts; bytes are counted once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import qompose
import torch
from qompose.plan.float_operators import state_bytes
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
    MATMUL,
    Annotator,
    Call,
    Model,
    NullQuantizer,
    aten,
    convert,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)
from tests.sampling import at_once
from tests.zoo import ZooModel, tagged


def macs_of(program: torch.export.ExportedProgram) -> int:
    return sum(o.macs for o in plan_of(prepare(program, NullQuantizer())).operators)


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
        Call(F.scaled_dot_product_attention), [(2, 4, 5, 8), *[(2, 4, 9, 8)] * 2], id="cross"
    ),
]


@pytest.mark.parametrize(("module", "shapes"), CASES)
def test_macs_are_half_of_torchs_count(module: nn.Module, shapes: Any) -> None:
    inputs = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # it does not know the fused one
        module(*inputs)
    assert 2 * macs_of(export(module, *inputs)) == counter.get_total_flops() > 0


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
    assert macs_of(_exported(module, randn(*shape))) == STEPS * BATCH * OUT * expected


def _exported(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The tensor attributes .*_flat_weights")
        return export(module, x)


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
    plan = plan_of(prepare(program, toy(LINEAR, MATMUL, rewrites=(rewrite,))))
    assert [r.name for r in plan.rewrites] == [rewrite]
    assert sum(o.macs for o in plan.operators) == macs_of(program) > 0
    assert sum(o.macs for o in plan.operators if o.claim is None) == 0
    assert len({o.name for o in plan.operators}) == len(plan.operators)
    assert "getitem" not in {o.operator for o in plan.operators}, "they went with the whole"


def test_pieces_are_listed_in_place_of_the_operator() -> None:
    attention = Call(lambda x: F.scaled_dot_product_attention(x, x, x))
    model = Model(lambda m, x: torch.tanh(m.attention(x)), attention=attention)
    program = export(model, randn(2, 5, 8))
    plan = plan_of(prepare(program, toy(MATMUL, rewrites=("split_attention",))))
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


def test_matrix_times_vector() -> None:
    assert macs_of(export(Call(torch.matmul), randn(4, 3), randn(3))) == 12


def test_dynamic_shapes_count_with_the_example() -> None:
    shapes = ({0: torch.export.Dim("batch")},)
    assert macs_of(export(nn.Linear(3, 5), randn(4, 3), dynamic_shapes=shapes)) == 4 * 3 * 5


def test_only_operators_on_floats_are_listed() -> None:
    program = export(Call(lambda x: (x + 1)[x > 0].sum() * 2.0), torch.arange(4))
    names = [o.name for o in plan_of(prepare(program, NullQuantizer())).operators]
    assert names == ["mul"]


def test_tied_parameters_are_counted_once_and_views_of_one_storage_each() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    tied.register_buffer("halves", torch.zeros(8, dtype=torch.float16))
    for name, half in zip(("first", "second"), torch.zeros(8).chunk(2), strict=True):
        tied.register_buffer(name, half)
    assert state_bytes(tied) == 4 * 16 + 2 * 8 + 4 * 8


def test_a_quantized_model_is_smaller() -> None:
    x = randn(2, 128)
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh(), nn.Linear(128, 128))
    record = convert(export(model, x), toy(LINEAR), x).meta["qompose"]
    assert record.plan.float_bytes == 4 * (2 * 128 * 128 + 128)
    assert record.bytes <= 0.30 * record.plan.float_bytes


def _scanned(layer: Any, x: Tensor) -> Tensor:
    def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return carried + 1, layer(row) + carried

    return scan(step, torch.zeros(8), x)[1]


def _mapped_twice(layer: Any, x: Tensor) -> Tensor:
    return hop_map(lambda rows: hop_map(layer, rows), x.reshape(5, 6, 8)).reshape(30, 8)


@pytest.mark.parametrize("loop", [hop_map, _scanned, _mapped_twice])
def test_what_a_loop_runs_for_every_slice_counts_as_often(loop: Any) -> None:
    """One layer in a body, and one like it outside that sees all rows at once."""
    with torch.no_grad():  # with gradients, the export itself warns
        layers = {"inside": nn.Linear(8, 8), "outside": nn.Linear(8, 8)}
        model = Model(lambda m, x: loop(m.inside, x) + m.outside(x), **layers)
        program = export(model, randn(30, 8))
    plan = plan_of(prepare(program, NullQuantizer()))
    counted = {o.module: o.macs for o in plan.operators if o.macs}
    assert counted == {"inside": 30 * 64, "outside": 30 * 64}


def test_a_while_loop_counts_as_one_pass_and_a_condition_every_branch() -> None:
    def repeats(m: Any, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, m.a, m.b, (x,))
        (z,) = while_loop(lambda v: v.sum() < 3, lambda v: (m.c(v) + 1,), (y,))
        return z

    with torch.no_grad():
        program = export(Model(repeats, **{name: nn.Linear(8, 8) for name in "abc"}), randn(2, 8))
    plan = plan_of(prepare(program, NullQuantizer()))
    assert [o.macs for o in plan.operators if o.macs] == [2 * 64] * 3


X = randn(4, 4)


def read(module: nn.Module | Any, x: Tensor = X, quantizer: Any = None) -> dict[str, Any]:
    """By the name of each operator, those that it reads; of a function, with two layers."""
    if not isinstance(module, nn.Module):
        module = Model(module, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with torch.no_grad():  # with gradients, loops take seconds to be exported
        program = export(seeded(module), x)
    prepared = prepare(program, quantizer or NullQuantizer())
    return {row.name: row.inputs for row in qompose.report(prepared).rows}


class TestPlainPrograms:
    """No bodies, no rewrites."""

    def test_a_skip_connection(self) -> None:
        def skip(self: Any, x: Tensor) -> Tensor:
            y = self.a(x)
            return y.relu() + y

        assert read(skip) == {"linear": (), "relu": ("linear",), "add": ("relu", "linear")}

    def test_what_is_read_twice_stands_once(self) -> None:
        assert read(lambda self, x: (y := self.a(x)) * y)["mul"] == ("linear",)

    def test_past_operators_without_a_row(self) -> None:
        """Taking one of several results; a comparison, whose result is no float."""

        def masked(self: Any, x: Tensor) -> Tensor:
            first, second = self.a(x).chunk(2)
            return torch.where(self.b(x)[:2] > 0, first, second.relu())

        found = read(masked)
        assert found["relu"] == ("chunk",)
        assert found["where"][1:] == ("chunk", "relu")
        assert found["where"][0].startswith("slice")

    def test_a_size_is_no_result(self) -> None:
        def kept(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            positive = self.a(x).flatten().masked_select(x.flatten() > 0)
            return positive.sin(), x.new_zeros(positive.shape[0], 4)

        found = read(kept)
        assert found["sin"] == ("masked_select",)
        assert found["new_zeros"] == ()


class TestRewrites:
    """What was merged or taken apart has its place in the graph all the same."""

    def test_a_folded_batch_norm(self) -> None:
        def normed(m: Any, x: Tensor) -> Tensor:
            y = m.norm(m.conv(x.relu()))
            return y.tanh() + y

        model = Model(normed, conv=nn.Conv2d(2, 3, 1), norm=nn.BatchNorm2d(3))
        found = read(model, randn(1, 2, 4, 4), toy(CONV))
        assert found == {
            "relu": (), "conv2d": ("relu",), "batch_norm": ("conv2d",), "tanh": ("batch_norm",),
            "add": ("tanh", "batch_norm"),
        }  # fmt: skip

    def test_an_operator_that_was_taken_apart(self) -> None:
        def attend(self: Any, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(self.a(x), x.sin(), self.b(x)).relu()

        found = read(attend, randn(1, 4, 4), toy(MATMUL, rewrites=("split_attention",)))
        name = "scaled_dot_product_attention"
        assert found["relu"] == (f"{name}/matmul_1",)
        assert found[f"{name}/matmul"] == ("linear", f"{name}/transpose")
        assert found[f"{name}/transpose"] == ("sin",)
        assert found[f"{name}/matmul_1"] == (f"{name}/softmax", "linear_1")

    def test_what_a_quantizer_made_itself(self) -> None:
        class Doubles(Annotator):
            def transform_for_annotation(self, model: Any) -> Any:
                (relu,) = model.graph.find_nodes(op="call_function", target=aten.relu.default)
                with model.graph.inserting_after(relu):
                    made = model.graph.call_function(aten.tanh.default, (relu.args[0],))
                made.meta = dict(relu.meta)
                relu.replace_all_uses_with(made)
                model.graph.erase_node(relu)
                return model

        quantizer = Doubles(lambda node: None)
        found = read(lambda self, x: self.b(self.a(x).relu()), X, quantizer)
        assert found == {"linear": (), "tanh_default": ("linear",), "linear_1": ("tanh_default",)}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a")  # torch's own
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
class TestBodies:
    """Edges go into bodies of control flow and out of them."""

    def test_cond(self) -> None:
        def branches(self: Any, x: Tensor) -> Tensor:
            y = self.a(x)
            return torch.cond(x.sum() > 0, lambda y: y.relu(), lambda y: y.sin(), (y,)).tanh()

        found = read(branches)
        inside = {name: inputs for name, inputs in found.items() if "graph" in name}
        assert sorted(inputs for inputs in inside.values()) == [("linear",), ("linear",)]
        assert found["tanh"] == tuple(inside)

    def test_one_of_several_results(self) -> None:
        def branches(self: Any, x: Tensor) -> Tensor:
            one, two = torch.cond(
                x.sum() > 0, lambda y: (y.relu(), y.sin()), lambda y: (y.cos(), y.exp()), (x,)
            )
            return one.tanh() + two

        found = read(branches)
        kinds = {name.rpartition("_graph_0_")[2].partition("_")[0] for name in found["tanh"]}
        assert kinds == {"relu", "cos"}

    def test_loops_read_what_comes_in_and_not_what_comes_round(self) -> None:
        def loop(self: Any, x: Tensor) -> Tensor:
            return while_loop(
                lambda n, y: n < 3,
                lambda n, y: (n + 1, y.relu().sin()),
                (torch.tensor(0), self.a(x)),
            )[1].tanh()

        found = read(loop)
        (relu,) = (name for name in found if "relu" in name)
        (sin,) = (name for name in found if "sin" in name)
        assert (found[relu], found[sin], found["tanh"]) == (("linear",), (relu,), (sin,))

    def test_scan(self) -> None:
        def run(self: Any, x: Tensor) -> Tensor:
            last, every = scan(lambda h, e: ((h + e).relu(), h.sin()), self.b(x)[0], self.a(x))
            return last.tanh() + every.cos()

        found = read(run)
        (total,) = (name for name in found if "_add" in name)
        (relu,) = (name for name in found if "relu" in name)
        (sin,) = (name for name in found if "sin" in name and "cos" not in name)
        assert len(found[total]) == 2
        assert "linear_1" in found[total]  # the slices
        assert (found["tanh"], found["cos"]) == ((relu,), (sin,))


NETWORKS = tagged(without="transformers")


@pytest.mark.parametrize("model", at_once(NETWORKS, *NETWORKS[::6]), ids=str)
def test_inputs_are_rows_and_never_their_own(model: ZooModel) -> None:
    """Over the zoo: what is read is there, and without circles."""
    rows = qompose.report(prepare(model.export(), toy(CONV, LINEAR))).rows
    left = {row.name: set(row.inputs) for row in rows}
    assert set().union(*left.values()) <= set(left)
    while left:
        done = {row for row, inputs in left.items() if not inputs & set(left)}
        assert done, f"in a circle: {left}"
        left = {row: inputs for row, inputs in left.items() if row not in done}


def test_reports_that_were_written_before_rows_had_inputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    data = qompose.report(convert(export(seeded(model), X), toy(), X)).to_dict()
    assert [row.pop("inputs") for row in data["rows"]] == [[], ["linear"]]
    assert [row.inputs for row in qompose.Report.from_dict(data).rows] == [(), ()]
