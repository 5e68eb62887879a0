# SPDX-License-Identifier: Apache-2.0
"""Quantizers without selectors, kept out of parts of a program."""

from __future__ import annotations

import re
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.errors import SelectorError
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from tests.core.quantizer.interop.foreign import INT8, Foreign, Shared, annotation_of, aten, put
from tests.core.toy import LINEAR, Model, convert, export, prepare, randn, seeded, toy

X = randn(4, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def net() -> nn.Module:
    return seeded(
        Model(lambda m, x: m.head(m.second(m.first(x))), first=Block(), second=Block(),
              head=nn.Linear(6, 3))
    )  # fmt: skip


class LinearsAndTanhs(Foreign):
    targets = (aten.linear.default, aten.tanh.default)


PROGRAM = export(net(), X)
LINEARS = ["linear", "linear_1", "linear_2", "linear_3", "linear_4"]
TANHS = ["tanh", "tanh_1"]


def taken(quantizer: Any) -> list[str]:
    rows = qompose.report(prepare(PROGRAM, quantizer)).rows
    return sorted(row.name for row in rows if row.owner)


def is_last(node: Node) -> bool:
    return node.name == "linear_4"


@pytest.mark.parametrize(
    ("entry", "picked"),
    [
        pytest.param("first", ["linear", "linear_1", "tanh"], id="path"),
        pytest.param("first.up", ["linear"], id="inner path"),
        pytest.param(re.compile("(first|second).up"), ["linear", "linear_2"], id="expression"),
        pytest.param(re.compile("FIRST", re.I), ["linear", "linear_1", "tanh"], id="flags"),
        pytest.param(nn.Tanh, [], id="type that is not there"),
        pytest.param(nn.Linear, LINEARS, id="module type"),
        pytest.param(aten.tanh.default, TANHS, id="overload"),
        pytest.param(torch.ops.aten.tanh, TANHS, id="packet"),
        pytest.param(F.linear, LINEARS, id="function"),
        pytest.param(is_last, ["linear_4"], id="predicate"),
    ],
)
def test_each_kind_of_entry_excludes_and_includes(entry: Any, picked: list[str]) -> None:
    everything = {*LINEARS, *TANHS}
    member = LinearsAndTanhs()
    assert taken(qompose.restrict(member, exclude=[entry])) == sorted(everything - {*picked})
    assert taken(qompose.restrict(member, only=[entry])) == sorted(picked)


def test_the_reason_names_the_selector_and_others_may_take_it() -> None:
    member = qompose.restrict(Foreign(), exclude=["head"])
    rows = {row.name: row for row in qompose.report(prepare(PROGRAM, member)).rows}
    assert "module name head" in rows["linear_4"].reason
    report = qompose.report(prepare(PROGRAM, qompose.compose(member, toy(LINEAR))))
    assert {row.name: row.owner for row in report.rows if row.owner} == {
        **dict.fromkeys(LINEARS[:4], "tests.Foreign"),
        "linear_4": "toy",
    }


def test_restrictions_add_up() -> None:
    once = qompose.restrict(LinearsAndTanhs(), only=["first"])
    twice = qompose.restrict(once, exclude=[nn.Linear])
    assert taken(twice) == ["tanh"] and taken(once) == ["linear", "linear_1", "tanh"]
    with pytest.raises(UserError):
        qompose.restrict(once, only=["second"])


def test_what_is_shared_with_a_dropped_tensor_keeps_what_it_was_to_have() -> None:
    """The tanh has the scale of the linear layer in front, which is no longer quantized."""

    class Sharing(Foreign):
        def annotate(self, model: GraphModule) -> None:
            super().annotate(model)
            for node in model.graph.nodes:
                if node.target is aten.tanh.default:
                    source = node.args[0]
                    put(node, {source: Shared(source)}, INT8)

    module = seeded(Model(lambda m, x: m.linear(x).tanh(), linear=nn.Linear(6, 4)))
    restricted = qompose.restrict(Sharing(), exclude=[nn.Linear])
    converted = convert(export(module, X), restricted, X)
    quantized = [n for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target)]
    assert len(quantized) == 4  # both sides of the tanh alone
    assert torch.allclose(converted(X), module(X), atol=0.05)


class WithInput(Foreign):
    """It quantizes the input of the program by itself, as quantizers for accelerators do."""

    def annotate(self, model: GraphModule) -> None:
        super().annotate(model)
        (node,) = (node for node in model.graph.nodes if node.op == "placeholder")
        put(node, {}, INT8)


def test_an_input_is_quantized_as_long_as_something_may_read_it() -> None:
    layers = {"linear": nn.Linear(6, 4), "other": nn.Linear(6, 4)}
    program = export(seeded(Model(lambda m, x: m.linear(x) + m.other(x), **layers)), X)
    for excluded, owned, observed in ((["linear"], 1, 3), (["linear", "other"], 0, 0)):
        prepared = prepare(program, qompose.restrict(WithInput(), exclude=excluded))
        assert sum(bool(row.owner) for row in qompose.report(prepared).rows) == owned
        assert sum(n.op == "call_module" for n in prepared.graph.nodes) == observed


def test_a_path_that_is_not_there_is_an_error_and_a_type_a_note() -> None:
    with pytest.raises(SelectorError, match=r"tests\.Foreign.*'haed'.*'head'") as caught:
        prepare(PROGRAM, qompose.restrict(Foreign(), exclude=["haed"]))
    assert "set_module_name" not in str(caught.value)  # a method that it does not have
    notes = qompose.report(prepare(PROGRAM, qompose.restrict(Foreign(), exclude=[nn.LSTM]))).notes
    assert any("tests.Foreign" in note and "LSTM" in note for note in notes)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        pytest.param(lambda: qompose.restrict(toy(LINEAR), exclude=["head"]), UserError, id="rules"),
        pytest.param(lambda: qompose.restrict(qompose.compose(Foreign(), toy()), exclude=["head"]),
                     UserError, id="composition"),
        pytest.param(lambda: qompose.restrict("xnnpack", exclude=["head"]), UserError, id="a name"),
        pytest.param(lambda: qompose.restrict(Foreign(), exclude="head"), SelectorError, id="string"),
        pytest.param(lambda: qompose.restrict(Foreign(), only=3), SelectorError, id="number"),
        pytest.param(lambda: qompose.restrict(Foreign(), exclude=[3]), SelectorError, id="entry"),
        pytest.param(lambda: qompose.restrict(Foreign(), exclude=[re.compile(b"a")]), SelectorError,
                     id="bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_restricted_so(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_the_quantizer_itself_stays_as_it_is() -> None:
    member = Foreign()
    qompose.restrict(member, exclude=["head"])
    assert taken(member) == LINEARS
    assert annotation_of(next(iter(PROGRAM.graph.nodes))) is None
