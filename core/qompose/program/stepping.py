# SPDX-License-Identifier: Apache-2.0
"""Programs run node by node: what they compute can be seen, exchanged, and held from one part to the next.

None holds more than its operators still read. Bodies of control flow are stepped through as well, once for
each run of them.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from qompose.program.control_flow import STEPS, is_nested_call
from qompose.program.graph import get_attribute, owner_of
from qompose.program.meta import values_of

_grad_mode = torch.ops.higher_order.wrap_with_set_grad_enabled
_autocast = torch.ops.higher_order.wrap_with_autocast


@dataclass(frozen=True)
class Seen:
    """A node that was just run, and its value."""

    node: Node
    value: Any


@dataclass(frozen=True)
class Given:
    """Sent into the generator to replace the value just computed."""

    value: Any


Steps: TypeAlias = Generator[Seen, Given | None, Any]
Call: TypeAlias = Callable[[Node, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a node that calls something: with its arguments, for its value."""
Mode: TypeAlias = Callable[[], AbstractContextManager[object]]


def run_call(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a node of a plain program: the call of an operator, of a method or of a module."""
    if node.op == "call_module":
        return get_attribute(owner_of(node), str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


@contextmanager
def repeatable(node: Node, times: int) -> Iterator[None]:
    """Have an operator that draws random numbers draw the same ones in every program and run.

    What is compared differs by no chance then, and nobody else's generators move.

    Args:
        times: how often it ran before.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        yield
        return
    name = "; ".join(values_of(node)) or node.name
    seed = zlib.crc32(f"{name}, {times}".encode())
    # A process that has not used a GPU is not made to: torch.manual_seed would seed it once it does.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count() if used else 0)
    with torch.random.fork_rng(devices, device_type="cuda"):
        torch.default_generator.manual_seed(seed)
        if used:
            torch.cuda.manual_seed_all(seed)
        yield


def steps(
    program: GraphModule, inputs: Sequence[Any], call: Call = run_call, mode: Mode = nullcontext
) -> Steps:
    """Run a program on what its placeholders are to be, and return what its output node has.

    Args:
        inputs: one for each placeholder, as `flat_inputs` returns them.
        call: runs a node that calls something.
        mode: what each call is run under.
    """
    values: dict[Node, Any] = {}
    waiting = iter(inputs)
    done = last_reads(program.graph)
    for node in program.graph.nodes:
        args, kwargs = (map_arg(a, values.__getitem__) for a in (node.args, node.kwargs))
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            value = next(waiting)
        elif node.op == "get_attr":
            value = get_attribute(program, str(node.target))
        elif is_nested_call(node):
            value = yield from _nested(node, args, call, mode)
        else:
            with mode():
                value = call(node, args, kwargs)
        given = yield Seen(node, value)
        values[node] = value if given is None else given.value
        for read in done[node]:
            values.pop(read, None)
    raise AssertionError("a graph ends with its output")


def last_reads(graph: Graph) -> Mapping[Node, list[Node]]:
    """Return by node the values that nothing behind it reads."""
    done, seen = defaultdict(list), set()
    for node in reversed(graph.nodes):
        for read in (*node.all_input_nodes, node):
            if read not in seen:
                seen.add(read)
                done[node].append(read)
    return done


def _nested(node: Node, args: tuple[Any, ...], call: Call, mode: Mode) -> Steps:
    """Run a node that calls bodies."""
    if node.target is _grad_mode:  # whoever steps says whether gradients are recorded
        return (yield from steps(args[1], args[2:], call, mode))
    if node.target is _autocast:
        device, dtype, enabled, cache = args[:4]

        def cast() -> AbstractContextManager[object]:
            return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

        return (yield from steps(args[4], args[5:], call, cast))
    running = STEPS[node.target](*args)
    answer = None
    while True:
        try:
            body, operands = running.send(answer)
        except StopIteration as end:
            return end.value
        assert isinstance(body, GraphModule)
        answer = yield from steps(body, operands, call, mode)


def run_part(
    nodes: Iterable[Node], values: dict[Node, Any], call: Call, done: Mapping[Node, Sequence[Node]]
) -> None:
    """Run some nodes of a program that follow one another, on what those before them gave.

    Args:
        values: by node, what they read; those that nothing behind them reads are removed, and theirs added.
        call: runs a node that calls something.
        done: by node, the values that nothing behind it reads (`last_reads`).
    """
    for node in nodes:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        if node.op == "get_attr":
            values[node] = get_attribute(owner_of(node), str(node.target))
        elif is_nested_call(node):
            values[node] = _to_the_end(_nested(node, args, call, nullcontext))
        else:
            values[node] = call(node, args, kwargs)
        for read in done[node]:
            values.pop(read, None)


def _to_the_end(running: Steps) -> Any:
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value
