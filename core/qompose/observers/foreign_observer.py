# SPDX-License-Identifier: Apache-2.0
"""Observers of other packages, whose inputs are screened and whose own `convert` is called.

Such an observer stays what it is, the very module that the program calls, because other packages' code looks
for it there. So it is not wrapped: its `forward` is. Of one that converts itself, `convert(program, node)` is
called, checked and completed; what it puts in place of its node is kept, operators and modules alike.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node

from qompose.errors import ConfigError, MemberError, blaming
from qompose.observers.value_screening import Screen
from qompose.program.graph import (
    constant_of,
    copy_graph_module,
    example_of,
    get_attribute,
    holds,
    operator_name,
    owner_of,
    read_attribute,
    value_of,
    without_readers,
)
from qompose.program.meta import GROUP_TAG, PROVENANCE, tag_of
from qompose.spec.qparams import PER_CHANNEL
from qompose.spec.quantization_spec import ObserverFactory


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
                f"its observer factory refers to the node {node.name}, which is not in the prepared program"
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
        if isinstance(value, ObserverFactory):
            return self._with(value, arguments=self(value.arguments))
        if isinstance(getattr(value, "p", None), functools.partial):
            inner, called = self._partial(value.p), self(getattr(value, "callable_args", {}))
            return self._with(value, p=inner, callable_args=called)
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


class Guard:
    """The forward of an observer of another engine, with what it must not see kept from it.

    Args:
        observer: the observer, whose own forward is called.
        subject: which tensor is observed, for messages.

    Attributes:
        screen: what was seen of mask values.
    """

    def __init__(self, observer: nn.Module, subject: str) -> None:
        self.forward, self.subject = observer.forward, subject
        self.kind = type(observer).__name__
        self.screen = Screen()
        inner = getattr(observer, "activation_post_process", observer)  # of a fake quantizer
        axis = getattr(inner, "ch_axis", None)
        per_channel = getattr(inner, "qscheme", None) in PER_CHANNEL
        self._axis = axis if per_channel and isinstance(axis, int) else None

    def __call__(self, x: Tensor) -> Tensor:
        """Observe `x`, and return what the observer makes of it: as a rule `x` itself.

        Raises:
            CalibrationError: there is a NaN.
            MemberError: the observer raised an error, or returned no tensor of the shape of `x`.
        """
        if not x.numel():
            return x
        screened = self.screen.clean(x.detach(), self.subject).values
        seen = screened if self.screen.masked else x
        with blaming(f"{self.kind} (observing {self.subject})"):
            result = self.forward(self._presented(seen))
        if not isinstance(result, Tensor) or result.numel() != x.numel():
            raise MemberError(
                f"{self.kind} (observing {self.subject}) returned {_described(result)} for a "
                f"tensor of shape {tuple(x.shape)}; an observer must return a tensor of the "
                "same shape"
            )
        if self.screen.masked:  # the claim will be dropped: the model goes on with its own values
            return x
        return result if result.shape == x.shape else result.reshape(x.shape)

    def _presented(self, x: Tensor) -> Tensor:
        """Give a vector of channels, such as a bias, a second dimension: torch's observers want one."""
        if self._axis is None or x.dim() != 1:
            return x
        return x.unsqueeze(0 if self._axis < 0 else 1)


def guard(observer: nn.Module, subject: str) -> nn.Module:
    """Put a guard before an observer's forward, in place, if it has none, and return the observer."""
    if guard_of(observer) is None:
        observer.forward = Guard(observer, subject)
    return observer


def guard_of(observer: object) -> Guard | None:
    """Return the guard before an observer's forward, None where there is none."""
    found = vars(observer).get("forward") if isinstance(observer, nn.Module) else None
    return found if isinstance(found, Guard) else None


def _described(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return f"{type(result).__name__} {result!r}" if result is not None else "None"


QUANTIZE_AFFINE = "torchao.quantize_affine"
"""What observers of that package put in when they convert themselves."""


class Delegate:
    """One place where an observer that converts itself observes a value.

    Args:
        node: the observer's node, which has readers; what it reads is the value itself.
        subject: which tensor it is, for messages.

    Attributes:
        value: what is observed.
        followed: whether anything else stands in the place of the value.
        findings: what else there is to say.
    """

    def __init__(self, node: Node, subject: str) -> None:
        self.node, self.subject = node, subject
        (self.value,) = node.all_input_nodes
        self.followed = True
        self.findings: list[str] = []
        self.program = owner_of(node)
        self.observer: Any = get_attribute(self.program, str(node.target))
        self.kind = type(self.observer).__name__
        self.who = f"{self.kind}.convert (observing {subject})"

    def isolate(self) -> bool:
        """Give the observer a node of its own to read, if others observe the parameter too; tell if so.

        Some observers change all that reads the node which they read.
        """
        value, node = self.value, self.node
        others = (tag_of(user, GROUP_TAG) for user in value.users if user is not node)
        if value.op != "get_attr" or all(group is None for group in others):
            return False
        with node.graph.inserting_before(node):
            self.value = read_attribute(self.program, str(value.target), value)
        node.replace_input_with(value, self.value)
        return True

    def convert(self) -> list[Node]:
        """Let the observer replace its node, in place, and return the nodes that it made, in order.

        Raises:
            MemberError: it raised an error, or left a graph that cannot run.
        """
        node, value, graph = self.node, self.value, self.program.graph
        readers, others = list(node.users), [user for user in value.users if user is not node]
        before, effects = set(graph.nodes), filter(_has_effects, without_readers(self.program))
        watched = [*filter(_is_of_the_program, readers), *effects]
        with blaming(self.who), torch.no_grad():
            self.observer.convert(self.program, node)
        if not node._erased and not node.users:
            graph.erase_node(node)
        made = [other for other in graph.nodes if other not in before]
        self._check(watched, made)
        self._note(readers, others)
        reader = next(filter(_is_of_the_program, readers), value)
        for other in made:
            in_its_place = any(user in readers for user in other.users)
            _complete(other, reader, value, value_of(node) if in_its_place else None)
        return made

    def _check(self, watched: list[Node], made: list[Node]) -> None:
        """Check that nothing was lost, and that what is there reads what stands before it."""
        lost = [node.name for node in watched if node._erased]
        if lost:
            self._refuse(f"removed {', '.join(lost)}")
        if not self.node._erased:
            self._refuse(f"left its own node {self.node.name} in place")
        for node in (*watched, *made):
            for source in node.all_input_nodes:
                if source._erased or source.graph is not node.graph or not source < node:
                    self._refuse(f"made {node.name} read {source.name}, which does not exist")
            if node.op in ("get_attr", "call_module") and not holds(self.program, str(node.target)):
                self._refuse(f"made {node.name} read {node.target}, which does not exist")

    def _note(self, readers: list[Node], others: list[Node]) -> None:
        self.followed = not any(self.value in reader.all_input_nodes for reader in readers)
        if not self.followed:
            self.findings.append(f"{self.subject} was left in float by {self.kind}.convert")
        changed = [user.name for user in others if self.value not in user.all_input_nodes]
        if changed:
            self.findings.append(
                f"{self.subject} was converted by {self.kind}, which also changed the inputs "
                f"of {', '.join(changed)}"
            )

    def _refuse(self, what: str) -> NoReturn:
        raise MemberError(f"{self.who} {what}")


def can_stand(node: Node, subject: str) -> bool:
    """Tell whether a body of control flow can hold what an observer makes there: no module with tensors.

    Torch takes tensors that a body reads for operands of the call, and does not know those of modules. The
    observer is asked on a copy of the body.

    Raises:
        MemberError: it raised an error, or left a graph that cannot run.
    """
    trial = copy_graph_module(owner_of(node))
    twin = next(other for other in trial.graph.nodes if other.name == node.name)
    made = Delegate(twin, subject).convert()
    modules = [get_attribute(trial, str(n.target)) for n in made if n.op == "call_module"]
    return not any(module.state_dict() for module in modules)


def check_graph(graph: Graph, kinds: Iterable[str]) -> None:
    """Check a whole graph in which observers of some classes converted themselves.

    Raises:
        MemberError: it cannot run; the message names the classes.
    """
    with blaming(f"the program returned by convert of {', '.join(sorted(set(kinds)))}"):
        graph.lint()


def is_quantize_affine(node: Node) -> bool:
    """Tell whether a node calls another package's quantize operator, known by its name."""
    return node.op == "call_function" and operator_name(node.target) == QUANTIZE_AFFINE


def _is_of_the_program(node: Node) -> bool:
    return node.op in ("call_function", "output")


def _has_effects(node: Node) -> bool:
    """Tell whether a node that nothing reads may be there for its effect."""
    schema = getattr(node.target, "_schema", None)
    pure = schema is not None and schema.returns and not schema.is_mutable
    return node.op == "call_function" and not pure


def _complete(node: Node, like: Node, value: Node, example: Any) -> None:
    """Give a node what others have: where it belongs, as `like` does, and an example, which holds no data."""
    for key in PROVENANCE:
        if key != "custom" and key in like.meta:
            node.meta.setdefault(key, like.meta[key])
    constant = constant_of(node)
    known = node.meta.get("val") if constant is None else constant
    if isinstance(known, Tensor) and not isinstance(known, FakeTensor):
        known = example_of(known, value)
    known = example if known is None else known
    if known is not None:
        node.meta["val"] = known
