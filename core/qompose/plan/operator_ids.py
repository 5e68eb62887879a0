# SPDX-License-Identifier: Apache-2.0
"""Names of operators and values that survive the stages, and the fingerprint of a program.

Names of nodes change as backends rewrite a program. The id of a value (`identify`) is made once, of module,
operator and port, and stays with it. `note_regions` tags operators that were quantized together, so that
`earlier_regions` finds them after another export. By the `fingerprint`, statistics know their model.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.program.aliasing import written_buffers
from qompose.program.control_flow import body_labels, name_apart, nodes_in, sink_constants
from qompose.program.graph import (
    constant_of,
    copies_of,
    get_attribute,
    holds,
    module_path,
    owner_of,
    set_attribute,
)
from qompose.program.meta import (
    GROUP_TAG,
    PARAMETER,
    REGION_TAG,
    VALUE_TAG,
    tag,
    tag_of,
    values_of,
)
from qompose.spec.claim import Claim, Operand


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
    """Return the site of each node of a program and its bodies that is not an observer."""
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
        # Of modules that stand for an operator in training.
        name: str | None = getattr(module, "operator_name", None)
        return name
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


def isolate(exported: GraphModule) -> dict[str, Tensor]:
    """Make a program ready to be annotated, in place: names and ids of its own, and buffers to write to.

    Returns:
        the exported values of the buffers that the program writes to, by path.
    """
    sink_constants(exported)
    name_apart(exported)
    written = sorted(written_buffers(exported.graph))
    state = copies_of({path: get_attribute(exported, path) for path in written})
    restore_written(exported, state)
    identify(exported)
    return state


def restore_written(model: GraphModule, state: Mapping[str, Tensor]) -> None:
    """Give buffers that the program writes to the values of `state`, in copies of the model's own.

    So neither the caller's model nor a converted one keeps what calibration wrote. A buffer that conversion
    made a quantized constant of, where only another method writes to it, is not brought back.
    """
    for path, value in copies_of(state).items():
        if holds(model, path):
            set_attribute(model, path, value)


_VALUES = 64
"""How many values of a tensor are hashed: a look at each must not cost what a forward pass costs."""


def fingerprint(module: GraphModule) -> str:
    """Return a hash of the names, types, shapes and some values of a program's parameters and buffers.

    It does not depend on how the model was exported: for other sizes, or with dimensions left open.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(chain(module.named_parameters(), module.named_buffers())):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_some_bytes(tensor))
    return digest.hexdigest()


def _some_bytes(tensor: Tensor) -> bytes:
    if not tensor.numel() or tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter):
        return b""
    flat = tensor.detach().flatten()[:: max(1, tensor.numel() // _VALUES)][:_VALUES]
    return bytes(flat.cpu().contiguous().view(torch.uint8).numpy())


_TEXTS = ("owner", "rule", "anchor", "output", "config", "selector", "mode")
QUANTIZED_BEFORE = "quantized before"
"""The rule of regions that were quantized before a program was exported, where no more is known of them."""
UNKNOWN_QUANTIZER = (
    "it was quantized before this program was exported, and its quantizer is unknown; "
    "torch.export.export(..., strict=True) keeps it for what qompose quantized"
)


def note_regions(
    model: GraphModule, claims: Mapping[int, Claim], backends: Mapping[str, str], program: str
) -> None:
    """Let the operators of claims say what they are, in place, so that `earlier_regions` finds them again.

    Args:
        claims: those that were followed, by number.
        backends: names of the backends that own claims, by owner.
        program: an identity of the model.
    """
    nodes = {node.name: node for node in nodes_in(model) if node.op == "call_function"}
    for number, claim in claims.items():
        if not nodes.keys() >= {*claim.nodes}:  # of an input, say: it has no operators
            continue
        facts: dict[str, Any] = {name: getattr(claim, name) for name in _TEXTS}
        facts["backend"] = backends.get(claim.owner, "")
        facts["nodes"] = list(claim.nodes)
        facts["operands"] = [[o.role, o.user, list(o.position)] for o in claim.operands]
        facts["captures"] = [list(capture) for capture in claim.captures]
        items = ((name, _item(nodes[name])) for name in claim.nodes)
        facts["items"] = [[name, *item] for name, item in items if item is not None]
        for name in claim.nodes:
            known = {"of": f"{program}/{number}", "name": name}
            tag(nodes[name], **{REGION_TAG: {**known, **(facts if name == claim.anchor else {})}})


def earlier_regions(model: GraphModule) -> list[tuple[Claim, str]]:
    """Return claims, without specifications, on what was quantized before a program was exported.

    Returns:
        each with the name of its backend, "" where that is not known. A module that is called twice gives
        two of each.
    """
    copies: dict[str, list[dict[str, Node]]] = defaultdict(list)
    for node in nodes_in(model):
        fact = tag_of(node, REGION_TAG)
        if fact is None:
            continue
        copy = next((c for c in copies[fact["of"]] if fact["name"] not in c), None)
        if copy is None:
            copies[fact["of"]].append(copy := {})
        copy[fact["name"]] = node
    found = [copy for several in copies.values() for copy in several]
    for copy in found:
        _add_items(copy)
    return [_known_again(copy) for copy in found]


def _item(node: Node) -> tuple[str, int] | None:
    """Return which result of which operator a node takes; None where it computes something."""
    source = node.args[0] if node.target is operator.getitem else None
    return (source.name, int(node.args[1])) if isinstance(source, Node) else None  # type: ignore[arg-type]


def _add_items(nodes: dict[str, Node]) -> None:
    """Add the results of its operators that a claim holds, in place: export takes each for its operator."""
    facts = [tag_of(node, REGION_TAG) for node in nodes.values()]
    for name, source, index in (item for fact in facts for item in fact.get("items", ())):
        for user in nodes[source].users if source in nodes else ():
            if _item(user) == (nodes[source].name, index):
                nodes.setdefault(name, user)


def _known_again(nodes: Mapping[str, Node]) -> tuple[Claim, str]:
    """Return the claim on operators by the names that they had, and the name of its backend."""
    names = {name: node.name for name, node in nodes.items()}
    facts: dict[str, Any] = next(
        (f for f in (tag_of(n, REGION_TAG) for n in nodes.values()) if "owner" in f), {}
    )
    if not facts or nodes.keys() != {*facts["nodes"]}:  # another tool removed an operator
        first, *_, last = [*names.values()] * 2
        owner = facts.get("owner", QUANTIZED_BEFORE)
        return Claim(
            owner=owner,
            rule=QUANTIZED_BEFORE,
            anchor=first,
            nodes=tuple(names.values()),
            output=last,
            specs=(),
        ), ""
    texts = {name: facts[name] for name in _TEXTS}
    return Claim(
        **{**texts, "anchor": names[texts["anchor"]], "output": names[texts["output"]]},
        nodes=tuple(names[name] for name in facts["nodes"]),
        specs=(),
        operands=tuple(Operand(r, names[user], tuple(p)) for r, user, p in facts["operands"]),
        captures=tuple((role, names.get(name, "")) for role, name in facts["captures"]),
    ), facts["backend"]
