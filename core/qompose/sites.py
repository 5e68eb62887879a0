# SPDX-License-Identifier: Apache-2.0
"""What a tensor of a program is called in every plan of it: by module, operator and port.

Names of nodes change with what a backend rewrites; these stay wherever the operator does.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from itertools import count

from torch.fx import GraphModule, Node

from qompose.graph import (
    VALUE_TAG,
    constant_of,
    get_attribute,
    module_path,
    owner_of,
    tag,
    tag_of,
    values_of,
)
from qompose.modes import BatchNorm, SwitchedOperator
from qompose.nested import body_labels, nodes_in
from qompose.observing import GROUP_TAG

PARAMETER = "parameter"
"""How the ids of parameters end, where those of computed values have operator and port."""


@dataclass(frozen=True, order=True)
class Site:
    """Where a tensor comes from.

    Attributes:
        module: path of the module whose operator computes it, "" for the root.
        operator: name of the operator, as `aten.linear.default`; "input" for an argument.
        port: "output", with a number from the second operator of that name in that module on, and an
            index where the operator returns several; the name of an argument.
    """

    module: str
    operator: str
    port: str = "output"

    def __str__(self) -> str:
        return f"{self.module or 'the program'}: {self.operator}, {self.port}"


def sites_of(model: GraphModule) -> dict[Node, Site]:
    """Return the site of each node of a program and its bodies that is no observer."""
    bodies, seen = body_labels(model), Counter[tuple[str, str]]()
    found: dict[Node, Site] = {}
    for node in nodes_in(model):
        if tag_of(node, GROUP_TAG) is not None:
            continue
        inside = bodies.get(node.graph, "")
        if node.op == "placeholder":
            found[node] = Site(inside, "input", str(node.target))
        elif node.target is operator.getitem and node.args[0] in found:
            source = found[node.args[0]]  # type: ignore[index]
            found[node] = Site(source.module, source.operator, f"{source.port}[{node.args[1]}]")
        elif (operator_called := _operator(node)) is not None:
            path = ", ".join(part for part in (module_path(node), inside) if part)
            seen[path, operator_called] += 1
            number = seen[path, operator_called]
            port = "output" if number == 1 else f"output {number}"
            found[node] = Site(path, operator_called, port)
    return found


def _operator(node: Node) -> str | None:
    """Return the name of the operator that a node calls, in training too; None where it calls none."""
    if node.op == "call_module":
        module = get_attribute(owner_of(node), str(node.target))
        return module.name if isinstance(module, (SwitchedOperator, BatchNorm)) else None
    return str(node.target) if node.op == "call_function" else None


def identify(program: GraphModule) -> None:
    """Give each value of a program, in place, an id that stays with it through all later stages.

    It is the value's site in the exported program, or the path of a parameter. Nodes that have one keep it,
    but of several with the same one only the last: the others are steps on the way to it.
    """
    found, bodies = sites_of(program), body_labels(program)
    holders = {name: node for node in found for name in values_of(node)}
    taken = set(holders)
    for node in nodes_in(program):
        own = [name for name in values_of(node) if holders.get(name) is node]
        if constant_of(node) is not None:
            place = ", ".join(part for part in (str(node.target), bodies.get(node.graph)) if part)
            tag(node, **{VALUE_TAG: [f"{place}: {PARAMETER}"]})
        elif node in found:
            tag(node, **{VALUE_TAG: own or [_free(str(found[node]), taken)]})


def _free(name: str, taken: set[str]) -> str:
    """Return a name, with a number behind it where it is taken, which then is taken."""
    free = next(n for i in count(1) if (n := name if i == 1 else f"{name} ({i})") not in taken)
    taken.add(free)
    return free
