# SPDX-License-Identifier: Apache-2.0
"""Rows name the rows whose results they read: past what has none, through rewrites, into bodies and out."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.plan.float_operators import Flow
from qompose.program.control_flow import nodes_in
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from tests.core.toy import (
    CONV,
    LINEAR,
    Annotator,
    NullQuantizer,
    OperatorPattern,
    aten,
    convert,
    export,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)
from tests.zoo import ZOO, by_name

X = randn(4, 4)


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def read(module: nn.Module, *inputs: Tensor, quantizer: Any = None) -> dict[str, tuple[str, ...]]:
    """By the name of each operator, those that it reads."""
    prepared = prepare(export(seeded(module), *inputs), quantizer or NullQuantizer())
    return {row.name: row.inputs for row in qompose.report(prepared).rows}


class TestPlainPrograms:
    """No bodies, no rewrites."""

    def test_a_skip_connection(self) -> None:
        def skip(self: Any, x: Tensor) -> Tensor:
            y = self.a(x)
            return y.relu() + y

        assert read(Call(skip), X) == {"linear": (), "relu": ("linear",), "add": ("relu", "linear")}

    def test_what_is_read_twice_stands_once(self) -> None:
        found = read(Call(lambda self, x: (y := self.a(x)) * y), X)
        assert found["mul"] == ("linear",)

    def test_past_operators_without_a_row(self) -> None:
        """Taking one of several results; a comparison, whose result is no float."""

        def masked(self: Any, x: Tensor) -> Tensor:
            first, second = self.a(x).chunk(2)
            return torch.where(self.b(x)[:2] > 0, first, second.relu())

        found = read(Call(masked), X)
        assert found["relu"] == ("chunk",)
        assert found["where"][1:] == ("chunk", "relu")
        assert found["where"][0].startswith("slice")

    def test_a_size_is_no_result(self) -> None:
        def kept(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            positive = self.a(x).flatten().masked_select(x.flatten() > 0)
            return positive.sin(), x.new_zeros(positive.shape[0], 4)

        found = read(Call(kept), X)
        assert found["sin"] == ("masked_select",)
        assert found["new_zeros"] == ()


class TestRewrites:
    """What was merged or taken apart has its place in the graph all the same."""

    def test_a_folded_batch_norm(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

            def forward(self, x: Tensor) -> Tensor:
                y = self.norm(self.conv(x.relu()))
                return y.tanh() + y

        found = read(Net(), randn(1, 2, 4, 4), quantizer=toy(CONV))
        assert found == {
            "relu": (), "conv2d": ("relu",), "batch_norm": ("conv2d",), "tanh": ("batch_norm",),
            "add": ("tanh", "batch_norm"),
        }  # fmt: skip

    def test_an_operator_that_was_taken_apart(self) -> None:
        matmul = rule(
            "matmul", OperatorPattern((aten.matmul.default,)), activations=("self", "other")
        )

        def attend(self: Any, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(self.a(x), x.sin(), self.b(x)).relu()

        quantizer = toy(matmul, rewrites=("split_attention",))
        found = read(Call(attend), randn(1, 4, 4), quantizer=quantizer)
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

        found = read(
            Call(lambda self, x: self.b(self.a(x).relu())), X,
            quantizer=Doubles(lambda node: None),
        )  # fmt: skip
        assert found == {"linear": (), "tanh_default": ("linear",), "linear_1": ("tanh_default",)}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a")  # torch's own
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
class TestBodies:
    """Edges go into bodies of control flow and out of them."""

    def test_cond(self) -> None:
        def branches(self: Any, x: Tensor) -> Tensor:
            y = self.a(x)
            return torch.cond(x.sum() > 0, lambda y: y.relu(), lambda y: y.sin(), (y,)).tanh()

        found = read(Call(branches), X)
        inside = {name: inputs for name, inputs in found.items() if "graph" in name}
        assert sorted(inputs for inputs in inside.values()) == [("linear",), ("linear",)]
        assert found["tanh"] == tuple(inside)

    def test_a_branch_that_hands_on_its_operand(self) -> None:
        def branches(self: Any, x: Tensor) -> Tensor:
            y = self.a(x)
            return torch.cond(x.sum() > 0, lambda y: y.relu(), lambda y: y.clone(), (y,)).tanh()

        found = read(Call(branches), X)
        assert len(found["tanh"]) == 2
        assert {found[name] for name in found["tanh"]} == {("linear",)}

    def test_one_of_several_results(self) -> None:
        def branches(self: Any, x: Tensor) -> Tensor:
            one, two = torch.cond(
                x.sum() > 0, lambda y: (y.relu(), y.sin()), lambda y: (y.cos(), y.exp()), (x,)
            )
            return one.tanh() + two

        found = read(Call(branches), X)
        kinds = {name.rpartition("_graph_0_")[2].partition("_")[0] for name in found["tanh"]}
        assert kinds == {"relu", "cos"}

    def test_loops_read_what_comes_in_and_not_what_comes_round(self) -> None:
        def loop(self: Any, x: Tensor) -> Tensor:
            return while_loop(
                lambda n, y: n < 3,
                lambda n, y: (n + 1, y.relu().sin()),
                (torch.tensor(0), self.a(x)),
            )[1].tanh()

        found = read(Call(loop), X)
        (relu,) = (name for name in found if "relu" in name)
        (sin,) = (name for name in found if "sin" in name)
        assert (found[relu], found[sin], found["tanh"]) == (("linear",), (relu,), (sin,))

    def test_scan(self) -> None:
        def run(self: Any, x: Tensor) -> Tensor:
            last, every = scan(lambda h, e: ((h + e).relu(), h.sin()), self.b(x)[0], self.a(x))
            return last.tanh() + every.cos()

        found = read(Call(run), X)
        (total,) = (name for name in found if "_add" in name)
        (relu,) = (name for name in found if "relu" in name)
        (sin,) = (name for name in found if "sin" in name and "cos" not in name)
        assert len(found[total]) == 2
        assert "linear_1" in found[total]  # the slices
        assert (found["tanh"], found["cos"]) == ((relu,), (sin,))


@pytest.mark.parametrize("name", [m.name for m in ZOO if "transformers" not in m.tags], ids=str)
def test_inputs_are_rows_and_never_their_own(name: str) -> None:
    """Over the zoo: what is read is there, and without circles."""
    rows = qompose.report(prepare(by_name(name).export(), toy(CONV, LINEAR))).rows
    left = {row.name: set(row.inputs) for row in rows}
    assert set().union(*left.values()) <= set(left)
    while left:
        done = {row for row, inputs in left.items() if not inputs & set(left)}
        assert done, f"in a circle: {left}"
        left = {row: inputs for row, inputs in left.items() if row not in done}


def test_a_program_without_ends_gives_what_stands_first() -> None:
    program = prepare(export(seeded(nn.Linear(4, 4)), X), NullQuantizer())
    (linear,) = (node for node in nodes_in(program) if node.target is aten.linear.default)
    assert Flow(program).producers(linear, lambda node: node.op == "placeholder")


class TestOlderData:
    """What was written before rows had inputs has none."""

    REPORT = qompose.report(
        convert(export(seeded(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), X), toy(), X)
    )

    def test_reports(self) -> None:
        data = self.REPORT.to_dict()
        assert [row["inputs"] for row in data["rows"]] == [[], ["linear"]]
        for row in data["rows"]:
            del row["inputs"]
        assert [row.inputs for row in qompose.Report.from_dict(data).rows] == [(), ()]

    @pytest.mark.parametrize("wrong", ["linear", [3], None, {"a": 1}], ids=str)
    def test_other_data_is_refused(self, wrong: object) -> None:
        data = self.REPORT.to_dict()
        data["rows"][1]["inputs"] = wrong
        with pytest.raises(qompose.errors.ConfigError, match="not a report"):
            qompose.Report.from_dict(data)
