# SPDX-License-Identifier: Apache-2.0
"""Observer factories, known by their shape: what they make, how they are called, which graph they hold."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import pytest
import torch
from qompose import QuantizationSpec
from qompose.errors import ConfigError
from qompose.observers import PartialWrapper
from qompose.observers.foreign_observer import Rebinding
from qompose.observers.min_max import MinMaxObserver, PerBlockMinMaxObserver
from qompose.spec.quantization_spec import (
    ObserverFactory,
    class_of,
    converts_itself,
    made_by,
    takes_axis,
)
from torch import nn
from torch.ao.quantization import observer as torch_ao
from torch.fx import GraphModule, Node

from tests.core.toy import Call, export, nodes_calling, randn

Pair = namedtuple("Pair", "first second")
CHAIN = export(Call(lambda x: torch.cat([torch.relu(x), torch.sigmoid(x)])), randn(2, 3))


class Holder(nn.Module):
    """Keeps what it is given."""

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        super().__init__()
        self.positional, self.arguments = positional, arguments


class PerChannelHolder(Holder):
    """By its name it takes an axis."""


class Converting(Holder):
    """Replaces its own node."""

    def convert(self, model: GraphModule, node: Node) -> None:
        """Replace nothing."""


class WithArguments(Holder):
    """Makes its factories in a way of its own."""

    @classmethod
    def with_args(cls, **arguments: Any) -> Any:
        return lambda: cls(made_by="with_args", **arguments)


def wrapped(kind: Any, **arguments: Any) -> Any:
    return torch_ao._with_args(kind, **arguments)


def function(**arguments: Any) -> Holder:
    return Holder(**arguments)


WRAPPINGS = [
    pytest.param(lambda kind: kind, id="the class"),
    pytest.param(lambda kind: functools.partial(kind, eps=1), id="partial"),
    pytest.param(
        lambda kind: functools.partial(functools.partial(kind), eps=1), id="partial twice"
    ),
    pytest.param(lambda kind: wrapped(kind, eps=1), id="torch's wrapper"),
    pytest.param(lambda kind: wrapped(wrapped(kind, eps=1), bins=2), id="torch's wrapper twice"),
    pytest.param(lambda kind: ObserverFactory(kind, (("eps", 1),)), id="qompose's"),
]


@pytest.mark.parametrize("wrap", WRAPPINGS)
@pytest.mark.parametrize("kind", [Holder, PerChannelHolder, Converting])
def test_the_class_is_found_behind_every_wrapper(kind: Any, wrap: Any) -> None:
    factory = wrap(kind)
    assert class_of(factory) is kind
    assert takes_axis(factory, per_channel=False) is (kind is PerChannelHolder)
    assert takes_axis(factory, per_channel=True)
    assert converts_itself(factory) is (kind is Converting)
    made = made_by(factory, {"dtype": None, "eps": 3})
    assert type(made) is kind
    assert made.arguments == {**made.arguments, "dtype": None, "eps": 3}, "they come before its own"


class Named(Holder):
    def __init__(self, ch_axis: int = 0, eps: float = 0.0) -> None:
        super().__init__(ch_axis=ch_axis, eps=eps)


class Without(Holder):
    def __init__(self, eps: float = 0.0) -> None:
        super().__init__(eps=eps)


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_an_axis_is_for_those_that_take_one(wrap: Any) -> None:
    assert takes_axis(wrap(Named), per_channel=True)
    assert not takes_axis(wrap(Named), per_channel=False)
    assert not takes_axis(wrap(Without), per_channel=True)


def test_functions_and_classes_with_a_way_of_their_own() -> None:
    assert class_of(function) is function
    assert takes_axis(function, per_channel=True)
    assert not takes_axis(function, per_channel=False)
    assert made_by(function, {"eps": 3}).arguments == {"eps": 3}
    assert made_by(WithArguments, {"eps": 3}).arguments == {"eps": 3, "made_by": "with_args"}


def test_instances_that_convert_themselves() -> None:
    given = Holder()
    assert not converts_itself(given)
    given.convert = lambda model, node: None
    assert converts_itself(given)
    assert converts_itself(Converting())


def test_observers_of_qompose_are_converted_by_qompose() -> None:
    """Some have a `convert` for other engines."""
    observer = MinMaxObserver(dtype=torch.int8)
    observer(torch.tensor([1.0, -torch.inf]))
    assert not converts_itself(observer)
    assert not converts_itself(
        PerBlockMinMaxObserver(block_size=(2,), qscheme=torch.per_channel_affine)
    )


@pytest.fixture
def places() -> tuple[Node, Node, Rebinding]:
    """A node of a snapshot, the same of a program, and what puts the one in the place of the other."""
    snapshot, program = (CHAIN.module(check_guards=False) for _ in range(2))
    (old,), (new,) = (nodes_calling(module, "cat") for module in (snapshot, program))
    return old, new, Rebinding(program, {node.name: node for node in program.graph.nodes})


def test_nodes_and_graphs_of_a_snapshot_become_those_of_the_program(
    places: tuple[Node, Node, Rebinding],
) -> None:
    old, new, rebinding = places
    snapshot, program = (node.graph.owning_module for node in (old, new))
    value = {"node": old, "graph": old.graph, "model": snapshot, "rest": [1, (old, "cat")]}
    found = rebinding({**value, "pair": Pair(old, 2)})
    assert found["node"] is new
    assert found["graph"] is new.graph
    assert found["model"] is program
    assert found["rest"] == [1, (new, "cat")]
    assert found["rest"][1][0] is new
    assert isinstance(found["pair"], Pair)
    assert found["pair"].first is new


@pytest.mark.parametrize("wrap", [p for p in WRAPPINGS if p.id != "the class"])
def test_inside_factories_of_every_kind(wrap: Any, places: tuple[Node, Node, Rebinding]) -> None:
    """At any depth, and the given factory keeps what it had."""
    old, new, rebinding = places
    kind = functools.partial(Holder, old, graph=[old.graph])
    inner = wrapped(Holder, node=old)
    factory = functools.partial(Holder, wrap(Holder), inner=inner, outer=kind)
    found = rebinding(factory)
    assert found is not factory
    assert found.keywords["inner"]().arguments == {"node": new}
    assert found.keywords["outer"]().positional == (new,)
    assert found.keywords["outer"]().arguments == {"graph": [new.graph]}
    assert inner().arguments == {"node": old}, "the given one is as it was"
    assert factory.keywords["outer"]().positional == (old,)


def test_arguments_that_are_made_at_each_call(places: tuple[Node, Node, Rebinding]) -> None:
    old, new, rebinding = places
    factory = wrapped(Holder).with_callable_args(made=functools.partial(list, [old]))
    assert rebinding(factory)().arguments == {"made": [new]}
    own = ObserverFactory(Holder, (("graph", old.graph),))
    assert rebinding(own)().arguments == {"graph": new.graph}  # type: ignore[operator]


def test_what_holds_no_graph_is_not_copied(places: tuple[Node, Node, Rebinding]) -> None:
    *_, rebinding = places
    values: list[Any] = [
        Holder, function, 3, None, "x", torch.ones(2), [1, 2], (1, [2]), {"a": (1,)}, Pair(1, 2),
        wrapped(Holder, eps=1), functools.partial(Holder, eps=[1]), ObserverFactory(Holder, (("a", 1),)),
        Holder(), object(),
    ]  # fmt: skip
    for value in values:
        assert rebinding(value) is value


def test_a_node_that_the_program_has_not(places: tuple[Node, Node, Rebinding]) -> None:
    old, _, rebinding = places
    with old.graph.inserting_after(old):
        extra = old.graph.call_function(torch.ops.aten.neg.default, (old,))
    with pytest.raises(ConfigError, match="neg_default"):
        rebinding(wrapped(Holder, node=extra))


def test_one_that_converts_itself_has_an_axis_too() -> None:
    facts: dict[str, Any] = {"dtype": torch.int8, "qscheme": torch.per_channel_symmetric}
    spec = QuantizationSpec(observer_or_fake_quant_ctr=Converting, **facts)
    assert spec.ch_axis == 0


def test_a_partial_is_wrapped_as_this_field_wraps_it() -> None:
    """It is one class with the factories of `with_args`, and equal to the same one of these."""
    made = PartialWrapper(functools.partial(MinMaxObserver, dtype=torch.int8))
    assert isinstance(MinMaxObserver.with_args(), PartialWrapper)
    assert made == MinMaxObserver.with_args(dtype=torch.int8) != MinMaxObserver.with_args()
    assert made.p.keywords == {"dtype": torch.int8}
    assert made.p.func is made.with_args(eps=1.0).observer is MinMaxObserver
    with pytest.raises(ConfigError):
        PartialWrapper(functools.partial(MinMaxObserver, torch.int8))
