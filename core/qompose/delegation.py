# SPDX-License-Identifier: Apache-2.0
"""Observers that convert themselves: their `convert(program, node)` is called, checked and completed.

What it puts in the place of the observer's node is kept: other operators than qompose's, or modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from qompose.errors import MemberError, blaming
from qompose.graph import (
    PROVENANCE,
    constant_of,
    copy_graph_module,
    example_of,
    get_attribute,
    holds,
    operator_name,
    owner_of,
    read_attribute,
    tag_of,
    value_of,
    without_readers,
)
from qompose.observing import GROUP_TAG

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
        self.who = f"convert of {self.kind}, which observes {subject},"

    def isolate(self) -> bool:
        """Give the observer a node of its own to read, if others observe the parameter too; tell if so.

        Some observers change all that reads the node which they read.
        """
        value, node = self.value, self.node
        others = (user for user in value.users if user is not node)
        if value.op != "get_attr" or not any(map(_is_observer, others)):
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
                    self._refuse(f"let {node.name} read {source.name}, which is not there")
            if node.op in ("get_attr", "call_module") and not holds(self.program, str(node.target)):
                self._refuse(f"let {node.name} read {node.target}, which is not there")

    def _note(self, readers: list[Node], others: list[Node]) -> None:
        self.followed = not any(self.value in reader.all_input_nodes for reader in readers)
        if not self.followed:
            self.findings.append(f"{self.subject} was left in float by convert of {self.kind}")
        changed = [user.name for user in others if self.value not in user.all_input_nodes]
        if changed:
            self.findings.append(
                f"{self.subject} was converted by {self.kind}, which changed what {', '.join(changed)} "
                f"{'reads' if len(changed) == 1 else 'read'} too"
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
    with blaming(f"the program that convert of {', '.join(sorted(set(kinds)))} left"):
        graph.lint()


def evaluated(call: Node) -> Tensor | None:
    """Return what a call makes of nothing but parameters, None where it reads anything else."""
    constants = {source: constant_of(source) for source in call.all_input_nodes}
    if any(constant is None for constant in constants.values()):
        return None
    args, keywords = map_arg((call.args, call.kwargs), constants.__getitem__)
    with torch.no_grad():
        result: Tensor = call.target(*args, **keywords)  # type: ignore[operator]
        return result


def is_quantize_affine(node: Node) -> bool:
    """Tell whether a node calls another package's quantize operator, known by its name."""
    return node.op == "call_function" and operator_name(node.target) == QUANTIZE_AFFINE


def _is_observer(node: Node) -> bool:
    return tag_of(node, GROUP_TAG) is not None


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
