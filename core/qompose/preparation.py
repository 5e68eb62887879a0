# SPDX-License-Identifier: Apache-2.0
"""Prepare: a program and its Plan in, the same program with one observer per sharing group out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import nn
from torch.fx import GraphModule, Node

from qompose.claims import Claim, Point
from qompose.errors import InternalError
from qompose.graph import constant_of, set_attribute, tag, value_of
from qompose.observers import Observer
from qompose.observing import OBSERVER_PREFIX, BalancedObserver, make_observer
from qompose.plan import Group
from qompose.specs import EdgeOrNode

Callback = Callable[[GraphModule, dict[EdgeOrNode, nn.Module]], None]


def insert_observers(
    model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group], callback: Callback
) -> None:
    """Insert the observers of all groups, in place, and tag the nodes of claims with their numbers.

    `callback` sees {edge or node: observer} first, and may replace observers.
    """
    nodes = {node.name: node for node in model.graph.nodes}
    for number, claim in enumerate(claims):
        for name in claim.nodes:
            tag(nodes[name], claim=number)
    observers = _observers(model, groups, nodes, callback)
    values: dict[str, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for number, group in enumerate(groups):
        set_attribute(model, f"{OBSERVER_PREFIX}{number}", observers[number])
        for point in group.points:
            values[point.source][number].append(point)
    for name, wanted in values.items():
        _observe_value(model, nodes[name], wanted, nodes)


def _observers(
    model: GraphModule, groups: Sequence[Group], nodes: dict[str, Node], callback: Callback
) -> list[nn.Module]:
    made = [_observer(group) for group in groups]
    places: dict[EdgeOrNode, nn.Module] = {}
    numbers: dict[EdgeOrNode, int] = {}
    for number, group in enumerate(groups):
        for point in group.points:
            place: EdgeOrNode = nodes[point.source]
            if point.user is not None:
                place = (nodes[point.source], nodes[point.user])
            places[place], numbers[place] = made[number], number
    original = dict(places)
    callback(model, places)
    for place, observer in places.items():
        if place not in numbers:
            raise InternalError(f"prepare_obs_or_fq_callback added an observer at {place}")
        if observer is not original[place]:
            made[numbers[place]] = observer
    return made


def _observer(group: Group) -> nn.Module:
    observer = make_observer(group.spec)
    if isinstance(observer, Observer):
        observer.subject = str(group.points[0])
    return BalancedObserver(observer, group.balance.dim) if group.balance else observer


def _observe_value(
    model: GraphModule, value: Node, wanted: dict[int, list[Point]], nodes: dict[str, Node]
) -> None:
    """Insert the observer of a value's output first, then those of edges that want another one."""
    users = list(value.users)
    observed = value
    output_group = next((g for g, points in wanted.items() if Point(value.name) in points), None)
    if output_group is not None:
        observed = _insert(model, output_group, value, after=value)
        for user in users:
            user.replace_input_with(value, observed)
    after = observed
    for number, points in wanted.items():
        if number == output_group:
            continue
        after = _insert(model, number, observed, after=after)
        for point in points:
            assert point.user is not None
            nodes[point.user].replace_input_with(observed, after)


def _insert(model: GraphModule, number: int, value: Node, after: Node) -> Node:
    name = f"{OBSERVER_PREFIX}{number}"
    observer = getattr(model, name)
    place = after
    if value.op == "placeholder" and after is value:
        place = [node for node in model.graph.nodes if node.op == "placeholder"][-1]
    with model.graph.inserting_after(place):
        node = model.graph.call_module(name, (value,))
    node.meta["val"] = value_of(value)
    node.meta["nn_module_stack"] = value.meta.get("nn_module_stack", {})
    if constant_of(value) is not None and hasattr(observer, "constant"):
        observer.constant = True
    return node
