# SPDX-License-Identifier: Apache-2.0
"""What every test of an alignment checks: names, all changes at once, each alone, and none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from qompose.program.graph import copy_graph_module, refresh
from qompose.quantizer.interop.alignment import Alignment, align
from qompose.quantizer.interop.correspondence import stamp
from qompose.spec.claim import Change
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from tests.core.quantizer.interop import transforms
from tests.core.quantizer.interop.programs import WIDTH


def aligned(
    program: GraphModule, transform: transforms.Transform
) -> tuple[Alignment, GraphModule, GraphModule]:
    """Return the alignment of a program and what a transform makes of a copy, and both."""
    before, own = copy_graph_module(program), copy_graph_module(program)
    stamp(own)
    after = transform(own)
    return align(before, after), before, after


def applied(program: GraphModule, alignment: Alignment, changes: Collection[Change]) -> GraphModule:
    working = copy_graph_module(program)
    alignment.apply(working, changes)
    working = refresh(working)
    working.graph.lint()
    return working


def run(program: GraphModule, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    copies = [x.clone() for x in inputs]  # a program may write to its inputs
    with torch.no_grad():
        return [x.clone() for x in tree_leaves(program(*copies))]


def edges(program: GraphModule) -> dict[str, tuple[str, ...]]:
    return {n.name: tuple(i.name for i in n.all_input_nodes) for n in program.graph.nodes}


def check_names(alignment: Alignment, before: GraphModule, after: GraphModule) -> None:
    """The rules by which a place means the same in both programs."""
    ours = {node.name: node for node in before.graph.nodes}
    theirs = {node.name: node for node in after.graph.nodes}
    assert len(theirs) == len(after.graph.nodes)
    gone = [name for change in alignment.changes for name in change.nodes]
    come = [name for change in alignment.changes for name in change.pieces]
    assert len(set(gone)) == len(gone) and len(set(come)) == len(come)
    for name, node in ours.items():
        if node.op in ("placeholder", "output"):
            assert theirs[name].op == node.op
        elif node.op == "call_function" and name not in gone:
            assert theirs[name].target == node.target and name not in come
            assert edges(after)[name] == edges(before)[name]
    unchanged = [
        n.name for n in after.graph.nodes if n.op == "call_function" and n.name not in come
    ]
    assert set(unchanged) <= ours.keys() - set(gone)
    order = list(ours)
    assert all(
        list(change.nodes) == sorted(change.nodes, key=order.index) for change in alignment.changes
    )


def check(
    program: GraphModule,
    transform: transforms.Transform,
    inputs: tuple[Tensor, ...],
    choice: Callable[[Any], list[Change]] = lambda changes: list(changes[::2]),
) -> Alignment:
    """All changes are the transform bit for bit; each alone, and some, compute what the program does."""
    alignment, before, after = aligned(program, transform)
    check_names(alignment, before, after)
    whole = applied(program, alignment, alignment.changes)
    assert set(edges(after).items()) >= {
        (node.name, edges(whole)[node.name])
        for node in whole.graph.nodes
        if node.op == "call_function"
    }
    expected = run(before, inputs)
    for ours, theirs in zip(run(whole, inputs), run(after, inputs), strict=True):
        assert torch.equal(ours, theirs)
    for changes in (*([change] for change in alignment.changes), choice(alignment.changes), []):
        partly = applied(program, alignment, changes)
        for ours, theirs in zip(run(partly, inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return alignment


class Function(nn.Module):
    """A function of tensors as a module, with parameters that it may use."""

    def __init__(self, function: Callable[..., Any], **state: Tensor | nn.Module) -> None:
        super().__init__()
        for name, value in state.items():
            setattr(self, name, value)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def exported_function(
    function: Callable[..., Any], *inputs: Tensor, train: bool = False, **state: Any
) -> GraphModule:
    torch.manual_seed(0)
    model = Function(function, **state).train(train)
    module = torch.export.export(model, inputs or (X,)).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module


def changes_of(
    program: GraphModule, transform: transforms.Transform, *inputs: Tensor
) -> list[Change]:
    return list(check(program, transform, inputs or (X,)).changes)
