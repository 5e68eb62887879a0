# SPDX-License-Identifier: Apache-2.0
"""What `compare` is given, in the form in which it is run: a graph that can be stepped through, or a call."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from qompose.aliases import written_buffers
from qompose.diagnosis.stepping import repeatable, run_call
from qompose.errors import StageError, UserError
from qompose.exported import as_graph_module, unlifted
from qompose.fingerprints import fingerprint
from qompose.graph import (
    STAGE_KEY,
    copy_graph_module,
    get_attribute,
    owner_of,
    set_attribute,
    tag_of,
)
from qompose.isolation import isolate, restore_written
from qompose.nested import name_apart, nodes_in
from qompose.observing import GROUP_TAG
from qompose.plan import Record
from qompose.reporting import one_of
from qompose.rewrites import Candidate, apply_rewrites, is_rewrite, splits
from qompose.sites import identify
from qompose.training import is_trained

FLOAT, EXPORTED, OUTPUTS = "float", "exported", "outputs"


@dataclass(frozen=True)
class Side:
    """One of two programs to be compared.

    Attributes:
        stage: "float", "prepared", "converted", "reference" or "lowered"; "exported" of a quantized program
            that was exported again; "outputs" of what can only be called.
        graph: where it can be stepped through.
        run: how it is called as a whole.
        record: what qompose knows of it.
        fingerprint: of a float program's parameters.
    """

    stage: str
    graph: GraphModule | None
    run: Callable[..., Any]
    record: Record | None = None
    fingerprint: str = ""


def side_of(model: Any, argument: str) -> Side:
    """Return what is to be compared.

    Raises:
        UserError: `model` can neither be stepped through nor called.
        StageError: it is in training.
    """
    meta = getattr(model, "meta", None)
    record = meta.get(STAGE_KEY) if isinstance(meta, dict) else None
    if isinstance(model, GraphModule) and isinstance(record, Record):
        if model.training and is_trained(model):
            raise StageError(
                f"the {argument} of a comparison is in training, where batch norms and dropouts differ from "
                "run to run: call its eval() first"
            )
        return Side(record.stage, _from_the_start(model, record), model, record)
    if isinstance(model, (ExportedProgram, GraphModule)):
        return _exported(model)
    if not callable(model) or isinstance(model, type):
        raise UserError(
            f"the {argument} of a comparison is an exported, prepared, converted or lowered program, or "
            f"something that is called as one, and not {type(model).__name__}{one_of(model)}"
        )
    stage = record.stage if isinstance(record, Record) else OUTPUTS
    return Side(stage, None, model, record if isinstance(record, Record) else None)


def _from_the_start(model: GraphModule, record: Record) -> GraphModule:
    """Return a program whose buffers hold what they did when it was exported, if it writes to them."""
    written = written_buffers(model.graph)
    if not written:
        return model
    copied = copy_graph_module(model)
    restore_written(copied, {path: v for path, v in record.state.items() if path in written})
    return copied


def _exported(model: ExportedProgram | GraphModule) -> Side:
    """Return a program without a record: a float one gets its ids, a quantized one has them."""
    if any(tag_of(node, "claim") is not None for node in model.graph.nodes):
        quantized = unlifted(model) if isinstance(model, ExportedProgram) else model
        return Side(EXPORTED, quantized, quantized)
    graph = as_graph_module(model, "compare")
    # What writes to its buffers holds something else once it was run.
    identity = "" if written_buffers(graph.graph) else fingerprint(graph)
    isolate(graph)
    return Side(FLOAT, graph, graph, fingerprint=identity)


def with_rewrites_of(side: Side, record: Record | None) -> tuple[GraphModule, GraphModule]:
    """Return a side's graph as the plan of another saw it: operators taken apart, and all rewrites made.

    Operators that were taken apart have values in between, which only the first has; folded parameters, with
    which quantized ones are to be compared, only the second.
    """
    assert side.graph is not None
    if side.stage != FLOAT or record is None:
        return side.graph, side.graph
    made = [Candidate(r.name, r.nodes) for r in record.plan.rewrites if is_rewrite(r.name)]
    apart = [candidate for candidate in made if splits(candidate)]
    return _rewritten(side.graph, apart), _rewritten(side.graph, made)


def _rewritten(graph: GraphModule, candidates: list[Candidate]) -> GraphModule:
    known = {node.name for node in nodes_in(graph)}
    copied = copy_graph_module(graph)
    # A program that was exported otherwise than the one that was prepared may not have them.
    apply_rewrites(copied, [c for c in candidates if known.issuperset(c.nodes)])
    name_apart(copied)  # as it was when it was prepared
    identify(copied)
    return copied


@dataclass
class Instance:
    """A program to be stepped through once, which neither observes nor writes to what is not its own."""

    graph: GraphModule
    _observers: dict[Node, nn.Module] = field(default_factory=dict)
    _times: Counter[Node] = field(default_factory=Counter)

    @classmethod
    def of(cls, graph: GraphModule) -> Instance:
        """Return a copy that shares parameters and has buffers of its own where it writes to them."""
        copied = copy_graph_module(graph)
        for path in written_buffers(copied.graph):
            value = get_attribute(copied, path)
            assert isinstance(value, Tensor)
            set_attribute(copied, path, value.clone())
        return cls(copied)

    def call(self, node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a node: observers let values pass, fake-quantizers round them, and neither looks at them."""
        if node.op != "call_module":
            self._times[node] += 1
            with repeatable(node, self._times[node]):
                return run_call(node, args, dict(kwargs))
        if tag_of(node, GROUP_TAG) is None:
            return run_call(node, args, dict(kwargs))
        if node not in self._observers:
            self._observers[node] = _looking_away(node)
        return self._observers[node](*args)


def _looking_away(node: Node) -> nn.Module:
    module = get_attribute(owner_of(node), str(node.target))
    if not hasattr(module, "disable_observer"):
        return nn.Identity()
    still: Any = copy.deepcopy(module)
    still.disable_observer()
    return still  # type: ignore[no-any-return]
