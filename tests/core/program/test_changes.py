# SPDX-License-Identifier: Apache-2.0
"""What changed in a program is told by operator; names are given back to what is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from qompose.program.changes import Changes, KeptNames, SignatureError, Values, calls_of, changes
from qompose.program.graph import copy_graph_module
from torch import nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import aten, calls, rebuilt
from tests.core.toy import Model, export, graph_text, randn, seeded

X = randn(2, 4)


def net() -> Any:
    parts = {"a": nn.Linear(4, 4), "shift": nn.Buffer(torch.ones(4))}
    return seeded(Model(lambda m, x: torch.tanh(torch.relu(m.a(x)) + m.shift), **parts))


def program() -> GraphModule:
    return copy_graph_module(export(net(), X).module(check_guards=False))


def nothing(model: GraphModule) -> None:
    """Leave it as it is."""


def retarget(model: GraphModule) -> None:
    (relu,) = calls(model, aten.relu.default)
    relu.target = aten.neg.default


def erase(model: GraphModule) -> None:
    (relu,) = calls(model, aten.relu.default)
    relu.replace_all_uses_with(relu.args[0])  # type: ignore[arg-type]
    model.graph.erase_node(relu)


def insert(model: GraphModule) -> None:
    (relu,) = calls(model, aten.relu.default)
    with model.graph.inserting_before(relu):
        relu.args = (model.graph.call_function(aten.neg.default, relu.args),)


def another_tensor(model: GraphModule) -> None:
    model.register_buffer("shift", torch.zeros(4))


def another_result(model: GraphModule) -> None:
    (relu,) = calls(model, aten.relu.default)
    model.graph.output_node().args = ((relu,),)


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (nothing, Changes((), (), ())),
        (retarget, Changes(("relu",), ("relu",), ())),
        (erase, Changes(("relu",), (), ())),
        (insert, Changes(("relu",), ("neg_default", "relu"), ())),
        (another_tensor, Changes(("add",), ("add",), ())),
        (another_result, Changes((), (), ("output", "output"))),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_gone_made_or_differs(edit: Callable[[GraphModule], None], found: Changes) -> None:
    model = program()
    before = calls_of(model)
    edit(model)
    assert changes(before, calls_of(model)) == found
    assert bool(found) == (edit is not nothing)


def test_what_reads_another_by_keyword_is_the_same() -> None:
    model = program()
    (add,) = calls(model, aten.add.Tensor)
    add.args, add.kwargs = (), dict(zip(("self", "other"), add.args, strict=True))
    before = calls_of(model)
    erase(model)
    assert changes(before, calls_of(model)) == Changes(("relu",), (), ())


def test_a_number_returned_for_a_tensor_is_refused() -> None:
    model = program()
    values = Values(model)
    model.graph.output_node().args = ((1,),)
    with pytest.raises(SignatureError):
        values.update(model)


class TestNames:
    """A program that was made anew."""

    def made(self, edit: Callable[[GraphModule], None]) -> tuple[GraphModule, Changes]:
        model = program()
        before = calls_of(model)
        names = KeptNames(model)
        edit(model)
        result = names.restored(rebuilt(model))
        return result, changes(before, calls_of(result))

    def test_is_the_same_one(self) -> None:
        result, found = self.made(nothing)
        assert not found
        assert graph_text(result) == graph_text(program())
        assert result.state_dict().keys() == program().state_dict().keys()
        assert [n.meta.get("custom") for n in result.graph.nodes] == [
            n.meta.get("custom") for n in program().graph.nodes
        ]
        assert torch.equal(result(X), program()(X))

    def test_differs_where_it_was_edited(self) -> None:
        result, found = self.made(insert)
        assert found.removed == ("relu",)
        (new,) = (name for name in found.made if name != "relu")
        torch.testing.assert_close(result(X), torch.tanh(torch.relu(-net().a(X)) + 1))
        assert new not in calls_of(program())
        names = [node.name for node in result.graph.nodes]
        assert len(set(names)) == len(names)

    def test_another_signature(self) -> None:
        def more(model: GraphModule) -> None:
            end: Any = model.graph.output_node()
            end.args = ((*end.args[0], *end.args[0]),)

        with pytest.raises(SignatureError):
            self.made(more)
