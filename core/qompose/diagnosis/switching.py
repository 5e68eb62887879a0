# SPDX-License-Identifier: Apache-2.0
"""A program whose quantization can be switched on claim by claim, run again only where that changes anything.

One run in float keeps every value of a batch. With some claims on, an operator that reads the very values
that it read in float is not run; nor is what stands behind one that gives the same values again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.aliases import written_values
from qompose.conversion import Conversion, convert_observers
from qompose.diagnosis.stepping import Given, repeatable, run_call, steps
from qompose.graph import constant_of, copy_graph_module, holds, owner_of
from qompose.isolation import restore_written
from qompose.nested import graphs_in, nodes_in
from qompose.plan import Record
from qompose.switches import Switch
from qompose.training import deployment_form

On: TypeAlias = Collection[tuple[int, str]]
"""What is quantized: claims by number, each with the name of a tensor that it reads or gives."""


@dataclass
class _Read:
    """A node behind a quantize operator, and the value that its reader has in float."""

    source: Node
    asked: set[tuple[int, str]]


@dataclass
class FloatRun:
    """What a batch gave in float.

    `calls` are all values, by the node and how often it ran before, with the arguments. It is empty for
    programs that write in place, whose values are not what they were.
    """

    inputs: Sequence[Any]
    outputs: Any = None
    calls: dict[Hashable, tuple[Any, Any, Any]] = field(default_factory=dict)


class SwitchedProgram:
    """A calibrated program with explicit quantize operators for all claims, all of which are off at first.

    Attributes:
        conversion: what became of the claims.
        parts: by number of a claim, the names of the tensors that can be switched for it.
        stuck: of claims that cannot be switched, or not apart from others, why.
        writes: whether it writes in place: it is then run as a whole each time.
        reached: claims of which data has come by a tensor; in bodies that do not run there are others.

    Raises:
        UncalibratedError, CalibrationError, MemberError: as `convert_pt2e`.
    """

    def __init__(self, prepared: GraphModule, record: Record) -> None:
        self._model, self._state = copy_graph_module(prepared), record.state
        deployment_form(self._model)
        self.conversion: Conversion = convert_observers(
            self._model, record.plan, allow_uncalibrated=False, fold_quantize=False
        )
        self.stuck: dict[int, str] = {}
        self.parts: dict[int, list[str]] = defaultdict(list)
        self._reads: dict[Node, _Read] = {}
        self.reached: set[int] = set()
        for switch in self.conversion.switches:
            self._add(switch)
        self._sources = {read.source for read in self._reads.values()}
        self._spare = set(self._only_for_reads())
        self.writes = any(written_values(part.graph) for part in graphs_in(self._model))

    def _add(self, switch: Switch) -> None:
        known = self._reads.get(switch.node)
        asked = {(claim, switch.tensor) for claim in switch.claims}
        if not _is_there(switch.source):
            why = f"its observer took {switch.tensor} away, so there is nothing to go back to"
            self.stuck.update(dict.fromkeys(switch.claims, why))
            return
        if known is not None and known.asked != asked:
            others = {claim for claim, _ in known.asked | asked}
            why = (
                f"{switch.tensor} is read by several through one node, which are quantized together"
            )
            self.stuck.update(dict.fromkeys(others, why))
        self._reads.setdefault(switch.node, _Read(switch.source, set())).asked |= asked
        for claim in switch.claims:
            if switch.tensor not in self.parts[claim]:
                self.parts[claim].append(switch.tensor)

    def _only_for_reads(self) -> Iterable[Node]:
        """Yield what is computed only for reads that may be off: quantize operators, their parameters."""
        spare: set[Node] = set()
        for node in reversed(list(nodes_in(self._model))):
            free = node.op == "call_function" and node not in self._sources and node.users
            if free and all(user in self._reads or user in spare for user in node.users):
                spare.add(node)
                yield node

    def in_float(self, inputs: Sequence[Any]) -> FloatRun:
        """Run a batch in float, and keep what later runs of it need.

        Args:
            inputs: one for each placeholder.
        """
        run = FloatRun(inputs)
        run.outputs = self._run(run, (), keep=not self.writes)
        return run

    def quantized(self, run: FloatRun, on: On) -> Any:
        """Return the outputs of a batch, as its output node has them, with some claims quantized."""
        return self._run(run, on, keep=False)

    def _run(self, run: FloatRun, on: On, *, keep: bool) -> Any:
        chosen = set(on)
        live = {node for node, read in self._reads.items() if not chosen.isdisjoint(read.asked)}
        idle = self._spare.difference(self._behind(live))
        off = self._reads.keys() - live
        inputs = run.inputs
        if self.writes:
            restore_written(self._model, self._state)
            inputs = pytree.tree_map_only(Tensor, torch.clone, list(inputs))
        times: Counter[Node] = Counter()

        def call(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if node in idle or node in off:
                return None
            key = (node, times[node])
            times[node] += 1
            known = run.calls.get(key)
            if known is not None and _same(known[:2], (args, kwargs)):
                return known[2]
            with repeatable(node, times[node]):
                value = run_call(node, args, kwargs)
            if keep:
                run.calls[key] = (args, kwargs, value)
            return value if known is None else _settled(value, known[2])

        with torch.no_grad():
            return self._driven(inputs, call, off)

    def _driven(
        self, inputs: Sequence[Any], call: Callable[..., Any], off: Collection[Node]
    ) -> Any:
        """Step through the program; what is switched off is read in float."""
        running = steps(self._model, inputs, call)
        given: Given | None = None
        floats: dict[Node, Any] = {}
        while True:
            try:
                seen = running.send(given)
            except StopIteration as end:
                return end.value
            given = None
            if seen.node in off:
                self.reached.update(claim for claim, _ in self._reads[seen.node].asked)
                source = self._reads[seen.node].source
                constant = constant_of(source)  # which may stand behind what was made of it
                given = Given(floats[source] if constant is None else constant)
            if seen.node in self._sources:
                floats[seen.node] = seen.value if given is None else given.value

    def _behind(self, live: Collection[Node]) -> set[Node]:
        """Return the spare nodes that some reads need."""
        found: set[Node] = set()
        waiting = list(live)
        while waiting:
            needed = self._spare.intersection(waiting.pop().all_input_nodes) - found
            found |= needed
            waiting += needed
        return found


def _is_there(source: Node) -> bool:
    """Tell whether a program still has a value; some observers that convert themselves remove it."""
    if source.op == "get_attr":
        return holds(owner_of(source), str(source.target))
    return not source._erased


def _same(one: Any, other: Any) -> bool:
    """Tell whether arguments are the very same tensors, and equal numbers."""
    if one is other:
        return True
    if isinstance(one, (tuple, list)):
        alike = isinstance(other, (tuple, list)) and len(one) == len(other)
        return alike and all(map(_same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return not isinstance(one, Tensor) and type(one) is type(other) and bool(one == other)


def _settled(new: Any, old: Any) -> Any:
    """Return `old`, itself, where `new` has the same values; of several results, what differs is new."""
    if isinstance(new, Tensor):
        alike = isinstance(old, Tensor) and new.dtype == old.dtype and new.layout == old.layout
        return old if alike and torch.equal(new, old) else new
    if isinstance(new, (tuple, list)) and isinstance(old, (tuple, list)) and len(new) == len(old):
        parts = [_settled(a, b) for a, b in zip(new, old, strict=True)]
        unchanged = all(a is b for a, b in zip(parts, old, strict=True))
        return old if unchanged else type(new)(parts)
    return new
