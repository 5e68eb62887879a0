# SPDX-License-Identifier: Apache-2.0
"""Recording: a function that calls operators, written into a graph in place of one call.

make_fx would take linear, matmul and softmax apart as well, and rules would not know the pieces. So the
function calls a `Recorder`, which writes each operator as torch.export would, and runs it on example
values, symbolic sizes included.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from qompose.graph import arguments_of, call, example_of, hand_over, tag, value_of
from qompose.strides import laid_out, order_of, same_layout

aten = torch.ops.aten

Build = Callable[..., Node | list[Node]]
"""Gets a recorder and an operator's arguments by name, and returns its result or the list of its results."""


class Recorder:
    """Writes the operators that a decomposition calls before a site, with its provenance.

    A piece is called after the site and its operator, so that names in reports say where it is from; it
    is tagged with the operator too, so that selectors of that operator's type apply to it.
    """

    def __init__(self, site: Node) -> None:
        self.site = site
        self.nodes: list[Node] = []
        self._mode = getattr(_tensors(site)[0], "fake_mode", None)

    def __call__(self, operator: torch._ops.OpOverload, *args: Any, **options: Any) -> Node:
        """Write one call and return its node."""
        values, named = map_arg((args, options), self._example)
        with self._mode or nullcontext(), torch.no_grad():
            value = operator(*values, **named)
        with self.site.graph.inserting_before(self.site):
            node = call(self.site.graph, operator, args, self.site, value)
        node.kwargs = options
        tag(node, origin=str(self.site.target), source=self.site.name)
        node._rename(f"{self.site.name}_{operator._schema.name.partition('::')[2]}")
        self.nodes.append(node)
        return node

    def size(self, node: Node, dim: int) -> int | Node:
        """Return a dimension: a number, or a node where it is symbolic."""
        size = value_of(node).shape[dim]
        return self(aten.sym_size.int, node, dim) if isinstance(size, torch.SymInt) else int(size)

    def _example(self, node: Node) -> Any:
        value = value_of(node)
        is_real = isinstance(value, Tensor) and not hasattr(value, "fake_mode")
        return example_of(value, self.site) if is_real and self._mode else value


def recording_obstacle(site: Node) -> str | None:
    """Return why operators cannot be recorded in place of a call, None where they can."""
    if any(value_of(node) is None for node in (site, *site.all_input_nodes)):
        return "export recorded no example values for it"
    if any(free_unbacked_symbols(tensor) for tensor in _tensors(site, *site.all_input_nodes)):
        return "its shapes depend on data"
    several = isinstance(value_of(site), (tuple, list))
    if several and any(user.target is not getitem for user in site.users):
        return "its results are not taken apart"
    return None


def replace_call(site: Node, build: Build) -> tuple[str, ...]:
    """Replace a call by the operators that `build` calls, in place, and return their names."""
    record = Recorder(site)
    built = build(record, **arguments_of(site))
    results = built if isinstance(built, list) else [built]
    results = [_as_wanted(record, r, v) for r, v in zip(results, _tensors(site), strict=True)]
    if isinstance(built, list):
        for user in list(site.users):
            result = results[user.args[1]]  # type: ignore[index]
            user.replace_all_uses_with(result)
            hand_over(user, result)
            site.graph.erase_node(user)
    else:
        site.replace_all_uses_with(results[0])
        hand_over(site, results[0])
    site.graph.erase_node(site)
    for node in reversed(record.nodes):
        if not node.users:
            site.graph.erase_node(node)
    return tuple(node.name for node in record.nodes if node.users)


def _tensors(*nodes: Node) -> list[Tensor]:
    values = [value_of(node) for node in nodes]
    flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else [value])]
    return [value for value in flat if isinstance(value, Tensor)]


def _as_wanted(do: Recorder, result: Node, wanted: Tensor) -> Node:
    """Copy a result where its strides are not those that export saw: recorded views could fail on it."""
    if same_layout(wanted, value_of(result)):
        return result
    order = order_of(wanted)
    assert order is not None  # see recording_obstacle
    return laid_out(do, result, order)
