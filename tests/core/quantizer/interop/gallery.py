# SPDX-License-Identifier: Apache-2.0
"""Quantizers that do what quantizers of this field do: one habit each, told apart by name."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from qompose.plan import Plan
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop.foreign import (
    UINT8,
    Annotation,
    Foreign,
    annotation_of,
    aten,
    calls,
    edges,
    rebuilt,
    silu_in_pieces,
)
from tests.core.toy import Model, export, randn, seeded

LINEAR, SILU, MUL, TANH = (
    aten.linear.default, aten.silu.default, aten.mul.Tensor, aten.tanh.default,
)  # fmt: skip


class Modest(Foreign):
    """Leaves alone what is marked as taken."""

    targets = (LINEAR, TANH)

    def wanted(self, model: GraphModule) -> list[Node]:
        return [n for n in super().wanted(model) if not getattr(annotation_of(n), "_annotated", 0)]


class Overwriting(Foreign):
    """Looks at nothing, and does not mark what it takes."""

    spec = UINT8

    def asked(self, node: Node) -> Any:
        return Annotation(edges(node, self.spec), self.spec)


class Editing(Foreign):
    """Edits an annotation that it finds, rather than replacing it."""

    targets = (LINEAR, SILU)
    spec = UINT8

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in self.wanted(model):
            found = node.meta.setdefault("quantization_annotation", Annotation())
            found.input_qspec_map.update(edges(node, self.spec))
            found.output_qspec = self.spec
        return model


class Alone(Foreign):
    """Asserts that nobody has annotated anything, with an error that says nothing."""

    targets = (LINEAR, SILU)

    def annotate(self, model: GraphModule) -> None:
        assert not [node for node in model.graph.nodes if annotation_of(node)]
        super().annotate(model)


class Remembering(Foreign):
    """Takes no operator of a name that it took before, in any program."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def wanted(self, model: GraphModule) -> list[Node]:
        found = [node for node in super().wanted(model) if node.name not in self.done]
        self.done.update(node.name for node in found)
        return found


class Uncopyable(Foreign):
    """Holds what cannot be copied, and counts its calls."""

    targets = (TANH,)

    def __init__(self) -> None:
        self.keys = OrderedDict(a=1).keys()
        self.programs_seen = 0

    def annotate(self, model: GraphModule) -> GraphModule:
        self.programs_seen += 1
        return super().annotate(model)


class Marking(Foreign):
    """Leaves entries in meta for tools that come later, on everything that it looks at."""

    targets = (LINEAR, SILU)

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            node.meta["custom"] = {**node.meta.get("custom", {}), "_arm_annotation_info": node.name}
            node.meta["quantizer_matched"] = True
        return super().annotate(model)


class Decomposing(Foreign):
    """Takes silu apart in place, and annotates the product."""

    targets = (MUL,)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        silu_in_pieces(model)
        return model


class Rebuilding(Foreign):
    """Returns a new module in which everything has another name."""

    targets = (LINEAR, SILU)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        return rebuilt(model)


class RebuildingInPieces(Decomposing):
    """Returns a new module of other operators under other names."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        return rebuilt(super().transform_for_annotation(model))


class Unspecific:
    """Has the two methods that every engine calls, and no others; annotates all there is."""

    def annotate(self, model: GraphModule) -> None:
        for node in calls(model):
            node.meta["quantization_annotation"] = Foreign().asked(node)

    def validate(self, model: GraphModule) -> None:
        """Accept everything."""


class Idle(Foreign):
    """Annotates nothing."""

    targets = ()

    def wanted(self, model: GraphModule) -> list[Node]:
        return []


GALLERY: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Modest, Overwriting, Editing, Alone, Remembering, Uncopyable, Marking,
        Decomposing, Rebuilding, RebuildingInPieces, Unspecific, Idle,
    )
}  # fmt: skip


def net(seed: int = 0) -> nn.Module:
    """Two products with what lies between them, and a mask."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(m.a(x))
        return torch.tanh(m.b((hidden + m.mask).softmax(-1)))

    mask = nn.Buffer(torch.tensor([0.0, 0.0, 0.0, -torch.inf]))
    return seeded(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), mask=mask), seed)


X = randn(6, 4)
PROGRAM = export(net(), X)
EXPECTED = PROGRAM.module()(X)


def is_named(plan: Plan, winner: str, loser: str) -> bool:
    """Tell whether it is said that one took from the other: as a conflict, or in a note on the latter.

    An operator that the first rewrote is gone when the second is asked: then a note names both.
    """
    listed = {(conflict.winner, conflict.loser) for conflict in plan.conflicts}
    noted = [note for note in plan.notes if note.startswith(f"{loser} ") and winner in note]
    return (winner, loser) in listed or bool(noted)
