# SPDX-License-Identifier: Apache-2.0
"""Prepare: a program and its Plan in, the same program with one observer per sharing group out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from qompose.claims import Claim, Point
from qompose.errors import ConfigError, blaming
from qompose.factories import Rebinding
from qompose.fake_quantize import FakeQuantize
from qompose.graph import constant_of, holds, owner_of, tag, value_of
from qompose.guarding import guard
from qompose.learned import LearnableFakeQuantize
from qompose.nested import body_labels, nodes_in
from qompose.observers import Observer
from qompose.observing import (
    GROUP_TAG,
    OBSERVER_PREFIX,
    BalancedObserver,
    DerivedObserver,
    fixed_parameters,
    make_observer,
)
from qompose.oversight import overseen
from qompose.plan import Group
from qompose.repairs.correction import wanted_means
from qompose.repairs.means import watch_means
from qompose.repairs.smoothing import watching
from qompose.specs import EdgeOrNode
from qompose.subjects import subject_of

Callback = Callable[[GraphModule, dict[EdgeOrNode, nn.Module]], None]


def insert_observers(
    model: GraphModule,
    claims: Sequence[Claim],
    groups: Sequence[Group],
    callback: Callback,
    *,
    simulate: bool = False,
) -> None:
    """Insert the observers of all groups, in place, and tag the nodes of claims with their numbers.

    `callback` sees {edge or node: observer} first, and may replace observers. With `simulate`, they are
    fake-quantizers.
    """
    nodes = {node.name: node for node in nodes_in(model)}
    for number, claim in enumerate(claims):
        for name in claim.nodes:
            tag(nodes[name], claim=number)
    bodies = body_labels(model)
    subjects = [subject_of(group, claims, nodes, bodies) for group in groups]
    observers = _observers(model, groups, subjects, nodes, callback, simulate)
    values: dict[str, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for number, group in enumerate(groups):
        for point in group.points:
            values[point.source][number].append(point)
    inserter = _Inserter(nodes, observers)
    for name, wanted in values.items():
        inserter.observe_value(nodes[name], wanted)
    if not simulate:
        watch_means(wanted_means(claims, nodes))


def _observers(
    model: GraphModule,
    groups: Sequence[Group],
    subjects: Sequence[str],
    nodes: dict[str, Node],
    callback: Callback,
    simulate: bool,
) -> list[nn.Module]:
    rebind = Rebinding(model, nodes)
    named = zip(groups, subjects, strict=True)
    made = [_observer(group, subject, nodes, rebind, simulate) for group, subject in named]
    places: dict[EdgeOrNode, nn.Module] = {}
    numbers: dict[EdgeOrNode, int] = {}
    for number, group in enumerate(groups):
        for point in group.points:
            place: EdgeOrNode = nodes[point.source]
            if point.user is not None:
                place = (nodes[point.source], nodes[point.user])
            places[place], numbers[place] = made[number], number
    original = dict(places)
    with blaming("prepare_obs_or_fq_callback"), overseen(_name_of(callback), model, places):
        callback(model, places)
    if places.keys() != numbers.keys():
        odd = ", ".join(str(place) for place in places.keys() ^ numbers.keys())
        raise ConfigError(f"prepare_obs_or_fq_callback added or removed observers at {odd}")
    for place, observer in places.items():
        if observer is not original[place]:
            number = numbers[place]
            _check_replacement(observer, groups[number], subjects[number])
            made[number] = observer
    for observer, group, subject in zip(made, groups, subjects, strict=True):
        _set_subject(observer, subject)
        if isinstance(observer, Observer):
            observer.shared = len({point.source for point in group.points}) > 1
        _place(observer, nodes[group.points[0].source])
        if isinstance(observer, DerivedObserver):
            observer.derive_from([made[number] for number in group.depends_on])
    return made


def _name_of(callback: Callback) -> str:
    return getattr(getattr(callback, "__self__", None), "name", "the quantizer")


def _place(observer: nn.Module, value: Node) -> None:
    """Let an observer of another engine, and parameters, be where their tensor is, and of its size."""
    example = constant_of(value) if value_of(value) is None else value_of(value)
    if not isinstance(example, Tensor):
        return
    if isinstance(observer, LearnableFakeQuantize):
        observer.size_for(example.shape)
    if isinstance(observer, FakeQuantize) or not isinstance(observer, Observer):
        observer.to(example.device)


def _check_replacement(observer: object, group: Group, subject: str) -> None:
    """Check that an observer that a callback put in estimates what the group's specification says."""
    where = f"prepare_obs_or_fq_callback replaced the observer of {subject}"
    if not isinstance(observer, nn.Module) or not hasattr(observer, "calculate_qparams"):
        raise ConfigError(f"{where} by {observer!r}, which has no calculate_qparams")
    for name in ("dtype", "quant_min", "quant_max", "qscheme"):
        wanted, found = getattr(group.spec, name, None), getattr(observer, name, None)
        if wanted is not None and found is not None and wanted != found:
            raise ConfigError(f"{where}: its {name} is {found}, and the specification's {wanted}")


def _observer(
    group: Group, subject: str, nodes: dict[str, Node], rebind: Rebinding, simulate: bool
) -> nn.Module:
    blocks = getattr(group.spec, "block_size", None)
    if blocks is not None and not getattr(group.spec, "is_dynamic", False):
        computed = [p for p in group.points if constant_of(nodes[p.source]) is None]
        if computed:
            raise ConfigError(
                f"{computed[0]} has block_size={blocks}, which is for parameters: what is computed has "
                "blocks only with is_dynamic=True"
            )
    try:
        with blaming(f"the observer factory of {subject}"):
            observer = make_observer(group.spec, rebind, simulate=simulate)
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from error
    if group.balance is None or fixed_parameters(observer) is not None:
        return observer
    inner = watching(observer) if getattr(group.spec, "is_dynamic", False) else observer
    return BalancedObserver(inner, group.balance.dim)


def _set_subject(observer: nn.Module, subject: str) -> None:
    """Tell an observer which tensor it observes; those of other engines are guarded from masks."""
    if isinstance(observer, BalancedObserver):
        observer.channel_observer.subject = subject
        _set_subject(observer.tensor_observer, subject)
    elif isinstance(observer, Observer):
        observer.subject = subject
    else:
        guard(observer, subject)


class _Inserter:
    """Puts observers into a graph, each as a call of a module of the call's own name.

    Observers of other engines look for one another by that name. One that observes several values has
    several names.
    """

    def __init__(self, nodes: dict[str, Node], observers: Sequence[nn.Module]) -> None:
        self.nodes, self.observers = nodes, observers
        self._next: dict[Graph, int] = defaultdict(lambda: len(observers))

    def observe_value(self, value: Node, wanted: dict[int, list[Point]]) -> None:
        """Insert the observer of a value's output first, then those of edges that want another one."""
        users = list(value.users)
        observed = value
        output = next((g for g, points in wanted.items() if Point(value.name) in points), None)
        if output is not None:
            observed = self._insert(output, value, after=value)
            for user in users:
                user.replace_input_with(value, observed)
        after = observed
        for number, points in wanted.items():
            if number == output:
                continue
            after = self._insert(number, observed, after=after)
            for point in points:
                assert point.user is not None
                self.nodes[point.user].replace_input_with(observed, after)

    def _insert(self, number: int, value: Node, after: Node) -> Node:
        graph, observer = value.graph, self.observers[number]
        place = after
        if value.op == "placeholder" and after is value:
            place = _last_placeholder(graph)
        with graph.inserting_after(place):
            node = self._call(number, value)
        owner_of(value).add_module(node.name, observer)
        node.meta["val"] = value_of(value)
        node.meta["nn_module_stack"] = value.meta.get("nn_module_stack", {})
        tag(node, **{GROUP_TAG: number})
        if constant_of(value) is not None and isinstance(observer, Observer):
            observer.constant = True
        return node

    def _call(self, number: int, value: Node) -> Node:
        """Insert a call whose name is free in graph and module: with the group's number, if that one is."""
        graph, name = value.graph, f"{OBSERVER_PREFIX}{number}"
        while True:
            if not holds(owner_of(value), name):
                node = graph.create_node("call_module", name, (value,), {}, name)
                if node.name == name:
                    return node
                graph.erase_node(node)
            name = f"{OBSERVER_PREFIX}{self._next[graph]}"
            self._next[graph] += 1


def _last_placeholder(graph: Graph) -> Node:
    placeholders: list[Node] = [node for node in graph.nodes if node.op == "placeholder"]
    return placeholders[-1]
