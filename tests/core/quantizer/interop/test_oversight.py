# SPDX-License-Identifier: Apache-2.0
"""`transform_for_annotation` is for changes: made in another hook they are an error that names the hook.

In `prepare_obs_or_fq_callback` a member may look, and replace observers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeError, UserError
from qompose.observers.min_max import FixedQParamsObserver
from torch import nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import FIXED, Foreign, acting, aten, calls, edges
from tests.core.toy import Model, NullQuantizer, export, graph_text, prepare, randn, seeded

X = randn(6, 4)
Act = Callable[[GraphModule, dict[Any, Any]], None]


def net() -> nn.Module:
    parts = {"a": nn.Linear(4, 4), "shift": nn.Buffer(randn(4))}
    return seeded(Model(lambda m, x: torch.relu(m.a(x)) + m.shift, **parts))


PROGRAM = export(net(), X)


def relu_of(model: GraphModule) -> torch.fx.Node:
    (relu,) = calls(model, aten.relu.default)
    return relu


def another_operator(model: GraphModule, observers: Any) -> None:
    relu_of(model).target = aten.neg.default
    model.recompile()


def another_argument(model: GraphModule, observers: Any) -> None:
    (add,) = calls(model, aten.add.Tensor)
    add.args = (add.args[0], add.args[0])


def another_keyword(model: GraphModule, observers: Any) -> None:
    calls(model, aten.add.Tensor)[0].kwargs = {"alpha": 2}


def an_erased_operator(model: GraphModule, observers: Any) -> None:
    relu = relu_of(model)
    relu.replace_all_uses_with(relu.args[0])  # type: ignore[arg-type]
    model.graph.erase_node(relu)


def an_operator_that_nothing_reads(model: GraphModule, observers: Any) -> None:
    relu = relu_of(model)
    with model.graph.inserting_after(relu):
        model.graph.call_function(aten.neg.default, (relu,))


def one_more_relu(model: GraphModule, observers: Any) -> None:
    """Which computes the same."""
    relu = relu_of(model)
    with model.graph.inserting_before(relu):
        made = model.graph.call_function(aten.relu.default, relu.args)
    made.meta = dict(relu.meta)
    relu.args = (made,)


def another_parameter(model: GraphModule, observers: Any) -> None:
    model.a.weight = nn.Parameter(torch.zeros(4, 4))


def of_every_observer(**facts: Any) -> Act:
    def act(model: GraphModule, observers: Any) -> None:
        for observer in observers.values():
            vars(observer).update(facts)

    return act


PROGRAM_HARM: dict[str, tuple[Act, str]] = {
    "operator": (another_operator, "relu"),
    "argument": (another_argument, "add"),
    "keyword": (another_keyword, "add"),
    "erased": (an_erased_operator, r"at relu\."),
    "one more": (one_more_relu, "relu"),
}
HARM: dict[str, tuple[Act, str]] = {
    **PROGRAM_HARM,
    "unread": (an_operator_that_nothing_reads, "neg"),
    "another parameter": (another_parameter, "linear"),
    "bounds": (of_every_observer(quant_min=0, quant_max=3), "quant_max, quant_min .*linear"),
    "dtype": (of_every_observer(dtype=torch.uint8), "dtype"),
    "eps": (of_every_observer(eps=torch.tensor(1.0)), "eps"),
}
CALLBACK = "prepare_obs_or_fq_callback"


def own(act: Act) -> Any:
    """A quantizer of qompose's class, that annotates nothing."""

    class Own(NullQuantizer):
        name = "Acting"

        def prepare_obs_or_fq_callback(self, model: GraphModule, observers: Any) -> None:
            act(model, observers)

    return Own()


def foreign(act: Act, hook: str = CALLBACK) -> Any:
    """One by its methods, that annotates linear, add, relu and neg and does something else in a hook."""

    targets = (aten.linear.default, aten.add.Tensor, aten.relu.default, aten.neg.default)
    return acting(hook, lambda model, observers=None: act(model, observers), targets=targets)


MEMBERS: dict[str, Callable[[Act], list[Any]]] = {
    "own, behind another": lambda act: [Foreign(), own(act)],
    "foreign, alone": lambda act: [foreign(act)],
}


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
@pytest.mark.parametrize("name", HARM)
def test_what_the_callback_changes_is_named_and_by_whom(name: str, members: Any) -> None:
    act, what = HARM[name]
    before, expected = graph_text(PROGRAM.module()), PROGRAM.module()(X)
    with pytest.raises(UserError, match=f"Acting: {CALLBACK} .*{what}"):
        prepare(PROGRAM, qompose.compose(*members(act)))
    assert graph_text(PROGRAM.module()) == before
    assert torch.equal(PROGRAM.module()(X), expected)


@pytest.mark.parametrize("hook", ["annotate", "validate"])
@pytest.mark.parametrize("name", PROGRAM_HARM)
def test_what_another_hook_changes_is_named_and_by_whom(name: str, hook: str) -> None:
    act, what = PROGRAM_HARM[name]
    for members in ([foreign(act, hook)], [Foreign(), foreign(act, hook)]):
        with pytest.raises(UserError, match=rf"tests\.Acting: {hook} .*{what}"):
            prepare(PROGRAM, qompose.compose(*members))
    expected = net()
    expected.load_state_dict(PROGRAM.state_dict)
    assert torch.equal(PROGRAM.module()(X), expected(X))


def test_a_quantizer_without_a_composition() -> None:
    with pytest.raises(UserError, match=rf"tests\.Acting: {CALLBACK} .*relu"):
        prepare(PROGRAM, foreign(another_operator))


def test_in_a_body_too() -> None:
    def act(model: GraphModule, observers: Any) -> None:
        another_operator(model.true_graph_0, observers)  # type: ignore[arg-type]

    class Bodies(Foreign):
        targets = (aten.relu.default,)

    with pytest.raises(UserError, match="true_graph_0_relu"):
        prepare(
            export(Model(lambda m, x: torch.cond(x.sum() > 0, torch.relu, torch.neg, (x,))), X),
            qompose.compose(Bodies(), own(act)),
        )


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

    with pytest.raises(UserError, match=r"scale .*relu"):
        prepare(PROGRAM, qompose.compose(Sigmoid(), own(act)))


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

    for kind in (own, foreign):
        replaced.clear()
        prepared = prepare(PROGRAM, qompose.compose(Foreign(), kind(act)))
        assert replaced and all(any(m is o for m in prepared.modules()) for o in replaced)


def test_an_error_of_the_callback_comes_first() -> None:
    def act(model: GraphModule, observers: Any) -> None:
        another_operator(model, observers)
        raise ValueError("why")

    with pytest.raises(QomposeError, match="ValueError") as caught:
        prepare(PROGRAM, qompose.compose(Foreign(), own(act)))
    assert isinstance(caught.value.__cause__, ValueError)
