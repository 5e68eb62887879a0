# SPDX-License-Identifier: Apache-2.0
"""Prepare: a program and its Plan in, the same program with one observer per sharing group out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import nn
from torch.fx import Graph, GraphModule, Node

from qompose.claims import Claim, Point
from qompose.errors import ConfigError, blaming
from qompose.graph import (
    constant_of,
    holds,
    module_path,
    owner_of,
    set_attribute,
    tag,
    value_of,
)
from qompose.nested import body_labels, nodes_in
from qompose.observers import Observer
from qompose.observing import (
    OBSERVER_PREFIX,
    BalancedObserver,
    DerivedObserver,
    ScreenedObserver,
    fixed_parameters,
    make_observer,
)
from qompose.plan import Group
from qompose.specs import EdgeOrNode

Callback = Callable[[GraphModule, dict[EdgeOrNode, nn.Module]], None]


def insert_observers(
    model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group], callback: Callback
) -> None:
    """Insert the observers of all groups, in place, and tag the nodes of claims with their numbers.

    `callback` sees {edge or node: observer} first, and may replace observers.
    """
    nodes = {node.name: node for node in nodes_in(model)}
    for number, claim in enumerate(claims):
        for name in claim.nodes:
            tag(nodes[name], claim=number)
    observers = _observers(model, claims, groups, nodes, callback)
    values: dict[str, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for number, group in enumerate(groups):
        for point in group.points:
            values[point.source][number].append(point)
            path = f"{OBSERVER_PREFIX}{number}"
            if not holds(owner_of(nodes[point.source]), path):
                set_attribute(owner_of(nodes[point.source]), path, observers[number])
    for name, wanted in values.items():
        _observe_value(nodes[name], wanted, nodes)


def _observers(
    model: GraphModule,
    claims: Sequence[Claim],
    groups: Sequence[Group],
    nodes: dict[str, Node],
    callback: Callback,
) -> list[nn.Module]:
    made = [_observer(group, nodes) for group in groups]
    places: dict[EdgeOrNode, nn.Module] = {}
    numbers: dict[EdgeOrNode, int] = {}
    for number, group in enumerate(groups):
        for point in group.points:
            place: EdgeOrNode = nodes[point.source]
            if point.user is not None:
                place = (nodes[point.source], nodes[point.user])
            places[place], numbers[place] = made[number], number
    original = dict(places)
    with blaming("prepare_obs_or_fq_callback"):
        callback(model, places)
    if places.keys() != numbers.keys():
        odd = ", ".join(str(place) for place in places.keys() ^ numbers.keys())
        raise ConfigError(f"prepare_obs_or_fq_callback added or removed observers at {odd}")
    for place, observer in places.items():
        if observer is not original[place]:
            _check_replacement(observer, groups[numbers[place]])
            made[numbers[place]] = observer
    bodies = body_labels(model)
    observers = [
        _with_subject(observer, _subject(group, claims, nodes, bodies))
        for observer, group in zip(made, groups, strict=True)
    ]
    for observer, group in zip(observers, groups, strict=True):
        if isinstance(observer, DerivedObserver):
            observer.derive_from([observers[number] for number in group.depends_on])
    return observers


def _check_replacement(observer: object, group: Group) -> None:
    """Check that an observer that a callback put in estimates what the group's specification says."""
    where = f"prepare_obs_or_fq_callback replaced the observer of {group.points[0]}"
    if not isinstance(observer, nn.Module) or not hasattr(observer, "calculate_qparams"):
        raise ConfigError(f"{where} by {observer!r}, which has no calculate_qparams")
    for name in ("dtype", "quant_min", "quant_max", "qscheme"):
        wanted, found = getattr(group.spec, name, None), getattr(observer, name, None)
        if wanted is not None and found is not None and wanted != found:
            raise ConfigError(f"{where}: its {name} is {found}, and the specification's {wanted}")


def _observer(group: Group, nodes: dict[str, Node]) -> nn.Module:
    blocks = getattr(group.spec, "block_size", None)
    if blocks is not None and not getattr(group.spec, "is_dynamic", False):
        computed = [p for p in group.points if constant_of(nodes[p.source]) is None]
        if computed:
            raise ConfigError(
                f"{computed[0]} has block_size={blocks}, which is for parameters: what is computed has "
                "blocks only with is_dynamic=True"
            )
    with blaming(f"the observer of {group.points[0]}"):
        observer = make_observer(group.spec)
    if group.balance is None or fixed_parameters(observer) is not None:
        return observer
    return BalancedObserver(observer, group.balance.dim)


def _subject(
    group: Group, claims: Sequence[Claim], nodes: dict[str, Node], bodies: dict[Graph, str]
) -> str:
    """Name a group's first tensor, its module and body, and who wants it, for messages."""
    claim = claims[group.claims[0]]
    anchor = nodes[claim.anchor]
    places = [module_path(anchor), bodies.get(anchor.graph, "")]
    where = "".join(f" in {place}" for place in places if place)
    return f"{group.points[0]}{where} ({claim.owner}, rule {claim.rule})"


def _with_subject(observer: nn.Module, subject: str) -> nn.Module:
    if isinstance(observer, BalancedObserver):
        observer.channel_observer.subject = subject
        observer.tensor_observer = _with_subject(observer.tensor_observer, subject)
        return observer
    if not isinstance(observer, Observer):
        return ScreenedObserver(observer, subject)
    observer.subject = subject
    return observer


def _observe_value(value: Node, wanted: dict[int, list[Point]], nodes: dict[str, Node]) -> None:
    """Insert the observer of a value's output first, then those of edges that want another one."""
    users = list(value.users)
    observed = value
    output_group = next((g for g, points in wanted.items() if Point(value.name) in points), None)
    if output_group is not None:
        observed = _insert(output_group, value, after=value)
        for user in users:
            user.replace_input_with(value, observed)
    after = observed
    for number, points in wanted.items():
        if number == output_group:
            continue
        after = _insert(number, observed, after=after)
        for point in points:
            assert point.user is not None
            nodes[point.user].replace_input_with(observed, after)


def _insert(number: int, value: Node, after: Node) -> Node:
    name, graph = f"{OBSERVER_PREFIX}{number}", value.graph
    observer = getattr(owner_of(value), name)
    place = after
    if value.op == "placeholder" and after is value:
        place = _last_placeholder(graph)
    with graph.inserting_after(place):
        node = graph.call_module(name, (value,))
    node.meta["val"] = value_of(value)
    node.meta["nn_module_stack"] = value.meta.get("nn_module_stack", {})
    if constant_of(value) is not None and hasattr(observer, "constant"):
        observer.constant = True
    return node


def _last_placeholder(graph: Graph) -> Node:
    placeholders: list[Node] = [node for node in graph.nodes if node.op == "placeholder"]
    return placeholders[-1]
