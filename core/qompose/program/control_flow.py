# SPDX-License-Identifier: Apache-2.0
"""The bodies of cond, while_loop, scan and map, of `no_grad` and of autocast regions.

Export passes every parameter that a body reads as an operand. Rules look for parameters where they are
read, so `sink_constants` moves them into the bodies, and `hoist_constants` back: torch can save and
export again only the form that it exports. Bodies that hold observers run as plain Python: torch's operators
trace their bodies when gradients are recorded, and an observer would then see fake tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from qompose.program.aliasing import DisjointSets, written_buffers
from qompose.program.graph import (
    address_of,
    constant_of,
    copy_graph_module,
    free_attribute,
    get_attribute,
    holds,
    module_path,
    owner_of,
    read_attribute,
    set_attribute,
)
from qompose.program.meta import RAN_KEY

aten, higher_order = torch.ops.aten, torch.ops.higher_order


@dataclass(frozen=True)
class _Layout:
    """Where a higher-order operator has its bodies and operands; numbers index its arguments.

    Placeholders of a body are the operands in the order `carried` (the first iteration's values),
    `slices` (of the operands' first dimension), `whole`. `spread` means that the whole operands are
    all arguments from that index on, not a list. `results` are the bodies whose outputs the call returns,
    the carried ones first; `stacked` means that the outputs behind the carried ones are stacked.
    """

    bodies: tuple[int, ...]
    whole: int
    results: tuple[int, ...]
    carried: int | None = None
    slices: int | None = None
    spread: bool = False
    stacked: bool = False


LAYOUTS: dict[Any, _Layout] = {
    higher_order.cond: _Layout(bodies=(1, 2), whole=3, results=(0, 1)),
    higher_order.while_loop: _Layout(bodies=(0, 1), carried=2, whole=3, results=(1,)),
    higher_order.scan: _Layout((0,), carried=1, slices=2, whole=3, results=(0,), stacked=True),
    higher_order.map_impl: _Layout((0,), slices=1, whole=2, results=(0,), stacked=True),
    higher_order.wrap_with_set_grad_enabled: _Layout((1,), whole=2, results=(0,), spread=True),
    higher_order.wrap_with_autocast: _Layout((4,), whole=5, results=(0,), spread=True),
}
"""The operators whose bodies are visited; the report says of any other that it is not."""


Body = Callable[..., Any]
Running: TypeAlias = Generator[tuple[Body, Sequence[Any]], Any, Any]
"""An operator that runs: it yields a body with its operands, and is sent what that returned."""


def cond_steps(predicate: Any, if_true: Body, if_false: Body, operands: Sequence[Any]) -> Running:
    """Run one of two bodies."""
    return (yield (if_true if bool(predicate) else if_false), operands)


def while_loop_steps(
    condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any]
) -> Running:
    """Run a body while a condition holds."""
    values = tuple(carried)
    while bool((yield condition, (*values, *additional))):
        values = tuple((yield body, (*values, *additional)))
    return values


def scan_steps(
    body: Body, carried: Sequence[Any], slices: Sequence[Tensor], additional: Sequence[Any]
) -> Running:
    """Run a body on each slice in turn."""
    values, rows = list(carried), []
    for index in range(len(slices[0])):
        outputs = yield body, (*values, *(x[index] for x in slices), *additional)
        values = list(outputs[: len(values)])
        rows.append(outputs[len(values) :])
    return [*values, *_stacked(rows)]


def map_steps(body: Body, slices: Sequence[Tensor], additional: Sequence[Any]) -> Running:
    """Run a body on each slice and stack the outputs."""
    rows = []
    for index in range(len(slices[0])):
        rows.append((yield body, (*(x[index] for x in slices), *additional)))
    return _stacked(rows)


def _stacked(rows: Sequence[Sequence[Any]]) -> list[Any]:
    columns = zip(*rows, strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]


STEPS: dict[Any, Callable[..., Running]] = {
    higher_order.cond: cond_steps,
    higher_order.while_loop: while_loop_steps,
    higher_order.scan: scan_steps,
    higher_order.map_impl: map_steps,
}
"""By operator, and by the function that does the same: how it runs its bodies."""


def _runner(steps: Callable[..., Running]) -> Callable[..., Any]:
    """Return a function that does what an operator does, with the bodies called as plain Python."""

    def run(*arguments: Any) -> Any:
        running, answer = steps(*arguments), None
        while True:
            try:
                body, operands = running.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(body, GraphModule):
                body.meta[RAN_KEY] = True
            answer = body(*operands)

    run.__name__ = run.__qualname__ = f"run_{steps.__name__.removesuffix('_steps')}"
    return run


RUNNERS = {operator: _runner(steps) for operator, steps in STEPS.items()}
"""By operator: the function that does the same. Wrappers of grad mode and autocast run as they are."""
# Graphs and pickles have these names.
run_cond, run_while_loop, run_scan, run_map = RUNNERS.values()
LAYOUTS.update({runner: LAYOUTS[operator] for operator, runner in RUNNERS.items()})
STEPS.update({runner: STEPS[operator] for operator, runner in RUNNERS.items()})
_OPERATORS = {runner: operator for operator, runner in RUNNERS.items()}


def is_nested_call(node: Node) -> bool:
    """Tell whether a node calls bodies that qompose visits."""
    return node.op == "call_function" and node.target in LAYOUTS


def body_of(reference: Node) -> GraphModule:
    """Return the body that a get_attr node, an argument of a nested call, reads."""
    module = get_attribute(owner_of(reference), str(reference.target))
    assert isinstance(module, GraphModule)
    return module


def bodies_of(call: Node) -> list[GraphModule]:
    """Return the bodies of a nested call, in the order of its arguments."""
    return [body_of(call.args[index]) for index in LAYOUTS[call.target].bodies]  # type: ignore[arg-type]


def graphs_in(module: GraphModule) -> Iterator[GraphModule]:
    """Yield a graph and all bodies inside it, each before its own bodies, and once.

    Those are the bodies in which rules apply: of cond, while_loop, scan and map, of `no_grad` and of autocast
    regions. Bodies of other operators are left out.
    """
    seen: set[int] = set()

    def walk(part: GraphModule) -> Iterator[GraphModule]:
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            for node in part.graph.nodes:
                if is_nested_call(node):
                    for body in bodies_of(node):
                        yield from walk(body)

    yield from walk(module)


def nodes_in(module: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of all bodies inside it (`graphs_in`)."""
    for part in graphs_in(module):
        yield from part.graph.nodes


def name_apart(module: GraphModule) -> None:
    """Rename nodes of bodies, in place, so that no two nodes of a program have one name.

    Nodes of a body get the path of the body in front; a program whose names differ is left alone.
    """
    taken: set[str] = set()

    def rename(part: GraphModule, prefix: str) -> None:
        for node in part.graph.nodes:
            if prefix and not node.name.startswith(prefix):
                node._rename(f"{prefix}{node.name}")
            while node.name in taken:
                node._rename(f"{node.name}_1")
            taken.add(node.name)
        for node in part.graph.nodes:
            for reference in references_of(node):
                rename(body_of(reference), f"{prefix}{str(reference.target).replace('.', '_')}_")

    rename(module, "")


def references_of(call: Node) -> list[Node]:
    """Return the get_attr nodes of a call's bodies, in the order of its arguments; of others, none."""
    indices = LAYOUTS[call.target].bodies if is_nested_call(call) else ()
    return [node for node in (call.args[index] for index in indices) if isinstance(node, Node)]


def _placeholders(body: GraphModule) -> list[Node]:
    return [node for node in body.graph.nodes if node.op == "placeholder"]


def operands_of(call: Node) -> dict[str, list[Any]]:
    """Return a call's operands by kind, in the order of the bodies' placeholders."""
    layout = LAYOUTS[call.target]
    lists: dict[str, list[Any]] = {}
    for kind in ("carried", "slices"):
        index = getattr(layout, kind)
        lists[kind] = [] if index is None else list(call.args[index])
    whole = call.args[layout.whole :] if layout.spread else call.args[layout.whole]
    lists["whole"] = list(whole)  # type: ignore[arg-type]
    return lists


def _set_whole(call: Node, operands: list[Any]) -> None:
    layout = LAYOUTS[call.target]
    if layout.spread:
        call.args = (*call.args[: layout.whole], *operands)
        return
    same_type = operands if isinstance(call.args[layout.whole], list) else tuple(operands)
    call.args = (*call.args[: layout.whole], same_type)


def sink_constants(module: GraphModule) -> None:
    """Let bodies, in place, read parameters themselves that are operands of their calls.

    Buffers that the program writes to stay operands.
    """
    _unshare_bodies(module)
    written = written_buffers(module.graph)
    for call in [node for node in module.graph.nodes if is_nested_call(node)]:
        _sink(module, call, written)
        for body in bodies_of(call):
            _give_module_stacks(body, call)
            sink_constants(body)


def _unshare_bodies(module: GraphModule) -> None:
    """Give every call bodies of its own, in place: they are going to differ in their operands."""
    seen: set[int] = set()
    for call in [node for node in module.graph.nodes if is_nested_call(node)]:
        for index in LAYOUTS[call.target].bodies:
            reference = call.args[index]
            assert isinstance(reference, Node)
            body = body_of(reference)
            if id(body) in seen:
                body = copy_graph_module(body)
                path = free_attribute(module, str(reference.target))
                set_attribute(module, path, body)
                with module.graph.inserting_before(call):
                    call.update_arg(index, module.graph.get_attr(path))
            seen.add(id(body))


def _sink(module: GraphModule, call: Node, written: frozenset[str]) -> None:
    operands = operands_of(call)
    first = len(operands["carried"]) + len(operands["slices"])
    sunk = [
        i
        for i, operand in enumerate(operands["whole"])
        if isinstance(operand, Node)
        and constant_of(operand) is not None
        and str(operand.target) not in written
    ]
    for body in bodies_of(call):
        placeholders = _placeholders(body)
        for i in sunk:
            _read_inside(module, body, placeholders[first + i], operands["whole"][i])
    _set_whole(call, [o for i, o in enumerate(operands["whole"]) if i not in sunk])


def _read_inside(module: GraphModule, body: GraphModule, placeholder: Node, operand: Node) -> None:
    if placeholder.users:
        path = free_attribute(body, str(operand.target))
        set_attribute(body, path, get_attribute(module, str(operand.target)))
        with body.graph.inserting_before(placeholder):
            read = body.graph.get_attr(path)
        read.meta["val"] = placeholder.meta.get("val")
        placeholder.replace_all_uses_with(read)
    body.graph.erase_node(placeholder)


_MODULE_TYPES: dict[Any, type[torch.nn.Module]] = {
    aten.linear.default: torch.nn.Linear,
    aten.embedding.default: torch.nn.Embedding,
    aten.conv1d.default: torch.nn.Conv1d,
    aten.conv2d.default: torch.nn.Conv2d,
    aten.conv3d.default: torch.nn.Conv3d,
    aten.conv_transpose1d.default: torch.nn.ConvTranspose1d,
    aten.conv_transpose2d.input: torch.nn.ConvTranspose2d,
    aten.conv_transpose3d.input: torch.nn.ConvTranspose3d,
}
_STRICT_ROOT = re.compile(r"^_export_root(\.|$)")


def _give_module_stacks(body: GraphModule, call: Node) -> None:
    """Say of operators in a body which module they belong to.

    Strict export says it, under another root. The default one does not: then it is the module that holds
    the operator's parameter, or else the one that makes the call.
    """
    for node in body.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            stack = {k: (_STRICT_ROOT.sub("", path), kind) for k, (path, kind) in stack.items()}
        elif node.op == "call_function":
            stack = _stack_of(node, call)
        node.meta["nn_module_stack"] = stack


def _stack_of(node: Node, call: Node) -> dict[str, Any]:
    stack = dict(call.meta.get("nn_module_stack") or {})
    read = [] if is_nested_call(node) else node.all_input_nodes
    paths = [str(argument.target) for argument in read if constant_of(argument) is not None]
    owner = paths[0].rpartition(".")[0] if paths else ""
    if owner and owner != module_path(call):
        kind = _MODULE_TYPES.get(node.target, torch.nn.Module)
        stack[owner] = (owner, f"{kind.__module__}.{kind.__qualname__}")
    return stack


def hoist_constants(module: GraphModule) -> None:
    """Make parameters that bodies read operands of their calls again, in place."""
    for call in [node for node in module.graph.nodes if is_nested_call(node)]:
        _hoist_all(module, call)


def _hoist_all(module: GraphModule, call: Node) -> None:
    for body in bodies_of(call):
        hoist_constants(body)
    _hoist(module, call)


def _hoist(module: GraphModule, call: Node) -> None:
    bodies, operands = bodies_of(call), operands_of(call)["whole"]
    reads = {
        node: id(get_attribute(body, str(node.target)))
        for body in bodies
        for node in body.graph.nodes
        if constant_of(node) is not None
    }
    once = {constant: read for read, constant in reversed(reads.items())}
    constants = list(reversed(once.items()))
    operands += [_read_outside(module, call, read) for _, read in constants]
    for body in bodies:
        for constant, read in constants:
            placeholder = _append_placeholder(body, read)
            for node in [n for n, c in reads.items() if c == constant and n.graph is body.graph]:
                node.replace_all_uses_with(placeholder)
    for read in reads:
        read.graph.erase_node(read)
    _set_whole(call, operands)


def _read_outside(module: GraphModule, call: Node, read: Node) -> Node:
    path, constant = str(read.target), get_attribute(owner_of(read), str(read.target))
    if not holds(module, path) or get_attribute(module, path) is not constant:
        path = free_attribute(module, path)
        set_attribute(module, path, constant)
    with module.graph.inserting_before(call):
        return read_attribute(module, path, call)


def _append_placeholder(body: GraphModule, read: Node) -> Node:
    placeholders = _placeholders(body)
    graph = body.graph
    last = placeholders[-1] if placeholders else next(iter(graph.nodes)).prev
    with graph.inserting_after(last):
        placeholder = graph.placeholder(str(read.target).replace(".", "_"))
    placeholder.target = placeholder.name  # unlike the name, it was not made unique
    placeholder.meta = dict(read.meta)
    return placeholder


def same_tensors(module: GraphModule) -> dict[str, str]:
    """Return, for values that are one tensor under two names across the border of a body, a common name.

    Those are an operand and its placeholder, an output and the result of the call, and in loops the value
    that one iteration hands on to the next. Names that are not in the answer stand for themselves.
    """
    sets: DisjointSets[str] = DisjointSets()
    for call in (node for node in nodes_in(module) if is_nested_call(node)):
        for one, other in borders(call):
            sets.join(other.name, one.name)
    return {name: sets.find(name) for name in sets}


def borders(call: Node) -> Iterator[tuple[Node, Node]]:
    """Yield (value, the same value behind a border of the call's bodies), both in the order of the flow."""
    layout, operands, bodies = LAYOUTS[call.target], operands_of(call), bodies_of(call)
    flat = [*operands["carried"], *[None] * len(operands["slices"]), *operands["whole"]]
    for body in bodies:
        yield from _nodes(flat, _placeholders(body))
    results = {node.args[1]: node for node in call.users if len(node.args) == 2}
    for number in layout.results:
        outputs = _outputs(bodies[number])
        carried = len(operands["carried"])
        yield from _nodes(outputs[:carried], _placeholders(bodies[number])[:carried])
        returned = outputs[:carried] if layout.stacked else outputs
        yield from _nodes(returned, [results.get(i) for i in range(len(returned))])


def _outputs(body: GraphModule) -> list[Any]:
    result = body.graph.output_node().args[0]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _nodes(ones: list[Any], others: list[Any]) -> Iterator[tuple[Node, Node]]:
    for one, other in zip(ones, others, strict=True):
        if isinstance(one, Node) and isinstance(other, Node):
            yield one, other


def count_readers(module: GraphModule) -> dict[int, int]:
    """Count the readers of each parameter by address, so that tied ones are seen under every name."""
    count: dict[int, int] = {}
    for node in nodes_in(module):
        constant = constant_of(node)
        if constant is not None and constant.numel():
            key = address_of(constant)
            count[key] = count.get(key, 0) + len(node.users)
    return count


def run_observed_in_python(module: GraphModule) -> None:
    """Let calls whose bodies hold observers run them as plain Python; give others back their operands.

    The program is changed in place.
    """
    for call in [node for node in module.graph.nodes if is_nested_call(node)]:
        bodies = bodies_of(call)
        if any(node.op == "call_module" for body in bodies for node in nodes_in(body)):
            call.target = RUNNERS.get(call.target, call.target)
            for body in bodies:
                run_observed_in_python(body)
        else:
            _hoist_all(module, call)


def run_as_exported(module: GraphModule) -> None:
    """Undo `run_observed_in_python` in a whole program, in place."""
    for node in nodes_in(module):
        if node.target in _OPERATORS:
            node.target = _OPERATORS[node.target]


def body_labels(module: GraphModule) -> dict[Graph, str]:
    """Return what messages call each body of a program: `true_graph_0 of cond`."""
    return {
        body.graph: f"{reference.target} of {_OPERATORS.get(call.target, call.target).__name__}"
        for part in graphs_in(module)
        for call in part.graph.nodes
        for reference in references_of(call)
        for body in [body_of(reference)]
    }
