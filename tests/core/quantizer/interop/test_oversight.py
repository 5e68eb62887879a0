# SPDX-License-Identifier: Apache-2.0
"""In `prepare_obs_or_fq_callback` a member may look, and replace observers: all else is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeError, UserError
from qompose.observers.min_max import FixedQParamsObserver
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import FIXED, Foreign, aten, calls, edges
from tests.core.toy import NullQuantizer, export, graph_text, prepare, randn, seeded

X = randn(6, 4)
Act = Callable[[GraphModule, dict[Any, Any]], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("shift", randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x)) + self.shift


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.relu, torch.neg, (x,))


def net() -> torch.export.ExportedProgram:
    return export(seeded(Net()), X)


def relu_of(model: GraphModule) -> torch.fx.Node:
    (relu,) = calls(model, aten.relu.default)
    return relu


def another_operator(model: GraphModule, observers: Any) -> None:
    relu_of(model).target = aten.neg.default
    model.recompile()


def another_argument(model: GraphModule, observers: Any) -> None:
    (add,) = calls(model, aten.add.Tensor)
    add.args = (add.args[0], add.args[0])


def an_erased_operator(model: GraphModule, observers: Any) -> None:
    relu = relu_of(model)
    relu.replace_all_uses_with(relu.args[0])  # type: ignore[arg-type]
    model.graph.erase_node(relu)


def an_operator_that_nothing_reads(model: GraphModule, observers: Any) -> None:
    relu = relu_of(model)
    with model.graph.inserting_after(relu):
        model.graph.call_function(aten.neg.default, (relu,))


def a_buffer_in_place(model: GraphModule, observers: Any) -> None:
    next(model.buffers()).zero_()


def another_parameter(model: GraphModule, observers: Any) -> None:
    model.a.weight = nn.Parameter(torch.zeros(4, 4))


def a_parameter_in_place(model: GraphModule, observers: Any) -> None:
    with torch.no_grad():
        model.get_parameter("a.weight").zero_()


def bounds(model: GraphModule, observers: Any) -> None:
    for observer in observers.values():
        observer.quant_min, observer.quant_max = 0, 3


def the_dtype(model: GraphModule, observers: Any) -> None:
    for observer in observers.values():
        observer.dtype = torch.uint8


def the_least_scale(model: GraphModule, observers: Any) -> None:
    for observer in observers.values():
        observer.eps = torch.tensor(1.0)


HARM: dict[str, tuple[Act, str]] = {
    "operator": (another_operator, "the program at relu"),
    "argument": (another_argument, "the program at add"),
    "erased": (an_erased_operator, "the program at relu"),
    "added": (an_operator_that_nothing_reads, "the program at neg"),
    "another parameter": (another_parameter, r"the program at linear"),
    "bounds": (bounds, "quant_max, quant_min of the observer of (the output of linear|x -> linear)"),
    "dtype": (the_dtype, "dtype of the observer of"),
    "eps": (the_least_scale, "eps of the observer of"),
}  # fmt: skip
WRITES: dict[str, Act] = {"shift": a_buffer_in_place, "a.weight": a_parameter_in_place}


def own(act: Act) -> Any:
    class Own(NullQuantizer):
        name = "Acting"

        def prepare_obs_or_fq_callback(self, model: GraphModule, observers: Any) -> None:
            act(model, observers)

    return Own()


def foreign(act: Act) -> Any:
    class Acting(Foreign):
        targets = (aten.add.Tensor,)

        def prepare_obs_or_fq_callback(self, model: GraphModule, observers: Any) -> None:
            act(model, observers)

    return Acting()


KINDS: dict[str, Callable[[Act], Any]] = {"own": own, "foreign": foreign}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HARM)
def test_what_is_changed_is_named_and_by_whom(name: str, kind: str) -> None:
    act, what = HARM[name]
    program = net()
    before, expected = graph_text(program.module()), program.module()(X)
    with pytest.raises(
        UserError, match=f"Acting: prepare_obs_or_fq_callback changed (.*[;,] )?{what}"
    ):
        prepare(program, qompose.compose(Foreign(), KINDS[kind](act)))
    assert graph_text(program.module()) == before
    assert torch.equal(program.module()(X), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor", WRITES)
def test_a_write_to_a_tensor_is_noticed(tensor: str, kind: str) -> None:
    with pytest.raises(UserError, match=f"Acting.*{tensor}"):
        prepare(net(), qompose.compose(Foreign(), KINDS[kind](WRITES[tensor])))


@pytest.mark.parametrize("name", HARM)
def test_a_quantizer_that_is_alone(name: str) -> None:
    act, what = HARM[name]

    class Alone(Foreign):
        def prepare_obs_or_fq_callback(self, model: GraphModule, observers: Any) -> None:
            act(model, observers)

    for quantizer in (Alone(), qompose.compose(Alone())):
        with pytest.raises(UserError, match=f"tests.Alone: prepare_obs_or_fq_callback .*{what}"):
            prepare(net(), quantizer)


def test_in_a_body_too() -> None:
    def act(model: GraphModule, observers: Any) -> None:
        (relu,) = calls(model.true_graph_0, aten.relu.default)
        relu.target = aten.neg.default

    class Bodies(Foreign):
        targets = (aten.relu.default,)

    with pytest.raises(UserError, match="changed the program at true_graph_0_relu"):
        prepare(export(Branches(), X), qompose.compose(Bodies(), own(act)))


def test_parameters_that_were_known() -> None:
    class Sigmoid(Foreign):
        targets = (aten.relu.default,)

        def asked(self, node: torch.fx.Node) -> Any:
            return self.annotation(edges(node, self.spec), FIXED, True, True)

    def act(model: GraphModule, observers: dict[Any, Any]) -> None:
        fixed = [o for o in observers.values() if isinstance(o, FixedQParamsObserver)]
        assert fixed
        for observer in fixed:
            observer.scale = observer.scale * 2

    with pytest.raises(UserError, match="fixed scale and zero point of the observer of the output"):
        prepare(net(), qompose.compose(Sigmoid(), own(act)))


def test_what_a_member_may_do() -> None:
    """It looks, replaces an observer, and leaves entries for tools of its own."""
    replaced = []

    def act(model: GraphModule, observers: dict[Any, Any]) -> None:
        for node in calls(model):
            node.meta["mine"] = 1
            node.meta["custom"] = {**node.meta.get("custom", {}), "mine": 1}
        for place, observer in observers.items():
            if isinstance(place, torch.fx.Node):
                observers[place] = type(observer)(dtype=torch.int8, quant_min=-128, quant_max=127)
                replaced.append(observers[place])
        model.recompile()

    for kind in KINDS.values():
        replaced.clear()
        prepared = prepare(net(), qompose.compose(Foreign(), kind(act)))
        assert replaced and all(any(m is o for m in prepared.modules()) for o in replaced)


def test_an_error_of_the_callback_comes_first() -> None:
    def act(model: GraphModule, observers: Any) -> None:
        another_operator(model, observers)
        raise ValueError("why")

    with pytest.raises(QomposeError, match="raised ValueError: why"):
        prepare(net(), qompose.compose(Foreign(), own(act)))
