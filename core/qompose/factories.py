# SPDX-License-Identifier: Apache-2.0
"""Observer factories of this field: what they make, how they are called, and which graph they hold on to.

A factory is an observer class, such a class with some of its arguments (`functools.partial`, torch's wrapper
of one, qompose's own), or any function. All are known by their shape.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from qompose.errors import ConfigError


@dataclass(frozen=True)
class ObserverFactory:
    """An observer class with some of its arguments; compares by value, unlike functools.partial."""

    observer: type[nn.Module]
    arguments: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.arguments, key=lambda item: item[0])
        object.__setattr__(self, "arguments", tuple(ordered))

    @property
    def __name__(self) -> str:
        """Return the observer's name, by which other engines know whether it takes `ch_axis`."""
        return self.observer.__name__

    def with_args(self, **arguments: Any) -> ObserverFactory:
        """Return a factory with more arguments; a later value for a name replaces the earlier one."""
        merged = {**dict(self.arguments), **arguments}
        return ObserverFactory(self.observer, tuple(merged.items()))

    def __call__(self, **arguments: Any) -> nn.Module:
        return self.observer(**{**dict(self.arguments), **arguments})


_PER_CHANNEL = "PerChannel"


def class_of(factory: Any) -> Any:
    """Return the class whose instances a factory makes; of a function, the function."""
    while not isinstance(factory, type):
        if isinstance(factory, functools.partial):
            factory = factory.func
        elif isinstance(getattr(factory, "p", None), functools.partial):
            factory = factory.p
        elif isinstance(getattr(factory, "observer", None), type):
            factory = factory.observer
        else:
            break
    return factory


def takes_axis(factory: Any, per_channel: bool) -> bool:
    """Tell whether a factory of another engine is given `ch_axis`.

    Engines of this field go by the name of its class alone, and so lose the axis of others that have
    channels. Here those get it too, if they take such an argument.
    """
    kind = class_of(factory)
    if _PER_CHANNEL in getattr(kind, "__name__", ""):
        return True
    parameters = inspect.signature(kind).parameters if per_channel and callable(kind) else {}
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "ch_axis" in parameters or any_keyword


def converts_itself(maker: Any) -> bool:
    """Tell whether an observer, or what a factory makes, replaces its own node when it is converted."""
    if isinstance(maker, nn.Module) and callable(vars(maker).get("convert")):
        return True
    # Of the class, not the instance: qompose's own have a property that is for other engines.
    kind = type(maker) if isinstance(maker, nn.Module) else class_of(maker)
    return callable(getattr(kind, "convert", None))


def made_by(factory: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a factory with arguments that take the place of its own, in the way of this field."""
    with_args = getattr(factory, "with_args", None)
    return factory(**arguments) if with_args is None else with_args(**arguments)()


class Rebinding:
    """Lets factories that a quantizer filled on its snapshot of a program refer to the program instead.

    Args:
        program: the program.
        nodes: all its nodes by name, those of bodies too; the snapshot's have the same names.
    """

    def __init__(self, program: GraphModule, nodes: Mapping[str, Node]) -> None:
        self.program, self.nodes = program, nodes

    def __call__(self, value: Any) -> Any:
        """Return `value` with other nodes, graphs and programs in it, or `value` itself where it has none.

        Factories and containers are looked into, and never copied whole.

        Raises:
            ConfigError: a node has no namesake in the program.
        """
        if isinstance(value, Node):
            return self._node(value)
        if isinstance(value, Graph):
            return self._graph(value)
        if isinstance(value, GraphModule):
            return self._graph(value.graph).owning_module
        if isinstance(value, (tuple, list, dict)):
            return self._container(value)
        return value if isinstance(value, type) else self._factory(value)

    def _node(self, node: Node) -> Node:
        if node.name not in self.nodes:
            raise ConfigError(
                f"its observer factory refers to the node {node.name}, which the prepared program has not"
            )
        return self.nodes[node.name]

    def _graph(self, graph: Graph) -> Graph:
        """Return the graph that has a node of the same name: a body's names are its own."""
        twins = (self.nodes.get(node.name) for node in graph.nodes if node.op != "output")
        return next((twin.graph for twin in twins if twin is not None), self.program.graph)

    def _container(self, value: Any) -> Any:
        items = list(value.values() if isinstance(value, dict) else value)
        found = [self(item) for item in items]
        if all(one is other for one, other in zip(items, found, strict=True)):
            return value
        if isinstance(value, dict):
            return dict(zip(value, found, strict=True))
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)

    def _factory(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(getattr(value, "p", None), functools.partial):
            inner, called = self._partial(value.p), self(getattr(value, "callable_args", {}))
            return self._with(value, p=inner, callable_args=called)
        if isinstance(getattr(value, "observer", None), type):  # qompose's own
            return self._with(value, arguments=self(value.arguments))
        return value

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        parts = (value.func, value.args, value.keywords)
        function, args, keywords = (self(part) for part in parts)
        if function is parts[0] and args is parts[1] and keywords is parts[2]:
            return value
        return functools.partial(function, *args, **keywords)

    def _with(self, wrapper: Any, **parts: Any) -> Any:
        """Return a shallow copy of a wrapper with other parts, or itself where they are the same."""
        if all(getattr(wrapper, name, part) is part for name, part in parts.items()):
            return wrapper
        twin = copy.copy(wrapper)
        vars(twin).update(parts)
        return twin
