# SPDX-License-Identifier: Apache-2.0
"""Programs stepped through side by side on the same inputs, and what each has for a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qompose.batches import binder, describe
from qompose.diagnosis.pairing import MISSING, Key, Speaker, Values, speakers_in
from qompose.diagnosis.sides import Instance
from qompose.graph import get_attribute, owner_of
from qompose.nested import nodes_in, sink_constants
from qompose.sites import PARAMETER


@dataclass(frozen=True)
class Moment:
    """One value: what the reference has, the other program, its operator by itself, and the simulated one."""

    value: str
    reference: Tensor
    other: Tensor
    own: Tensor
    simulated: Tensor | None


class Lockstep:
    """A reference, another program twice, and where there is one the simulation of the other.

    Attributes:
        speakers: by id, the nodes of the other program that give values which both programs have.
        reference: by id, the reference's nodes of those.
        apart: ids that one program computed more often than another: bodies of control flow.
        unlike: by id, of floats of which the other program has none of that shape, what both have.
    """

    def __init__(
        self, reference: GraphModule, other: GraphModule, simulated: GraphModule | None
    ) -> None:
        programs = [p for p in (reference, other, other, simulated) if p is not None]
        copies = [Instance.of(program) for program in programs]
        spoken = [_computed(instance.graph) for instance in copies]
        first, second = (_by_value(part) for part in spoken[:2])
        common = first.keys() & second.keys()
        self.reference = {value: first[value] for value in common}
        self.speakers = {value: spoken[1][second[value]] for value in common}
        self.apart: set[str] = set()
        self.unlike: dict[str, str] = {}
        # What is inside a kernel is computed in the simulation too, or the two would read other values.
        known = [{n: s for n, part in p.items() if (s := part.of(common))} for p in spoken]
        # Each is read here, and where it takes the place of another's.
        often = Counter(dict.fromkeys(common, 2))
        often.update(value for part in known[3:] for s in part.values() for value in s.values)
        once = dict.fromkeys(common, 1)
        # A kernel that gives several values passes the first ones on to the last.
        last = {speaker.values[-1] for speaker in known[1].values()}
        base = Values(copies[0], known[0], often)
        self._reference, self._free = base, Values(copies[1], known[1], once)
        self._own = Values(copies[2], known[2], once, base, lambda key: key[0] in last)
        self._simulated = None
        if simulated is not None:
            self._simulated = Values(copies[3], known[3], once, base, self._own_has)
        made = (self._reference, self._free, self._own, self._simulated)
        self._all = [
            (values, binder(program))
            for values, program in zip([v for v in made if v is not None], programs, strict=True)
        ]

    def _own_has(self, key: Key) -> bool:
        """Tell whether the other program reads the reference's value, for its simulation to do as it does."""
        return key in self._own.exchanged

    def run(self, *args: Any, **kwargs: Any) -> Iterator[Moment]:
        """Yield the values of one input that are floats."""
        for values, bind in self._all:
            values.start(bind(*args, **kwargs))
        for key in self._own.walk():
            found = self._reference.get(key), self._free.get(key), self._own.get(key)
            simulated = None if self._simulated is None else self._simulated.get(key)
            if any(value is MISSING for value in found):
                self.apart.add(key[0])
            elif _comparable(*found):
                wanted, other, own = found
                fits = simulated is not None and _comparable(own, simulated)
                yield Moment(key[0], wanted, other, own, simulated if fits else None)
            elif _comparable(found[0]):
                self.unlike[key[0]] = (
                    f"{describe(found[0])} in one and {describe(found[1])} in the other"
                )
        for values, _ in self._all:  # to the end: they may write to their buffers there
            for key in values.walk():
                self.apart.add(key[0])
        # One that looked for what it does not compute went to its end on the way.
        self.apart.update(name for name, _ in self._free.unasked())


def _computed(program: GraphModule) -> dict[Node, Speaker]:
    """Return what gives values that are no parameters."""
    return {n: s for n, s in speakers_in(program).items() if not s.values[0].endswith(PARAMETER)}


def _by_value(speakers: Mapping[Node, Speaker]) -> dict[str, Node]:
    return {value: node for node, speaker in speakers.items() for value in speaker.values}


def _comparable(*values: Any) -> bool:
    """Tell whether values are floats of one shape."""
    first = values[0]
    return isinstance(first, Tensor) and all(
        isinstance(v, Tensor) and v.is_floating_point() and v.shape == first.shape for v in values
    )


def parameters_of(program: GraphModule) -> dict[str, Tensor]:
    """Return by id what operators read of parameters that are floats: of integers what they mean."""
    instance = Instance.of(program)
    sink_constants(instance.graph)
    found = {
        value: speaker.as_read(_evaluated(node, instance.call))
        for node, speaker in speakers_in(instance.graph).items()
        for value in speaker.values
        if value.endswith(PARAMETER)
    }
    return {
        name: value.detach()
        for name, value in found.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _evaluated(node: Node, call: Callable[[Node, Any, Mapping[str, Any]], Any]) -> Any:
    """Return the value of a node that depends on parameters alone; None of others."""
    if node.op == "get_attr":
        return get_attribute(owner_of(node), str(node.target))
    if node.op not in ("call_function", "call_module"):
        return None
    known = {source: _evaluated(source, call) for source in node.all_input_nodes}
    if any(value is None for value in known.values()):
        return None
    args: Any = map_arg(node.args, known.__getitem__)
    kwargs: Any = map_arg(node.kwargs, known.__getitem__)
    return call(node, args, kwargs)


def unread_in(program: GraphModule) -> set[Node]:
    """Return the nodes that neither an output nor what is done for its effect depends on."""
    nodes = list(nodes_in(program))
    waiting = [node for node in nodes if node.op == "output" or node.is_impure()]
    read = set(waiting)
    while waiting:
        sources = set(waiting.pop().all_input_nodes) - read
        read |= sources
        waiting += sources
    return set(nodes) - read
