# SPDX-License-Identifier: Apache-2.0
"""The values of programs that are stepped through side by side, each kept until those who want it have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose import decomposed
from qompose.diagnosis.sides import Instance
from qompose.diagnosis.stepping import Given, Steps, steps
from qompose.graph import INTEGERS_TAG, VALUE_TAG, tag_of
from qompose.nested import nodes_in
from qompose.sites import PARAMETER

Key: TypeAlias = tuple[str, int]
"""A value: its id, and how many times it was computed before; bodies of loops compute theirs often."""


@dataclass(frozen=True)
class Grid:
    """What the integers of a tensor mean, and their bounds."""

    scale: float
    zero_point: int
    low: int
    high: int

    @property
    def least(self) -> float:
        """The least value that has an integer."""
        return (self.low - self.zero_point) * self.scale

    @property
    def most(self) -> float:
        """The largest value that has an integer."""
        return (self.high - self.zero_point) * self.scale

    def to_integers(self, values: Tensor) -> Tensor:
        """Return the nearest integers, as floats."""
        steps_away = torch.round(values * (1.0 / self.scale)) + self.zero_point
        return steps_away.clamp(self.low, self.high)

    def to_floats(self, integers: Tensor) -> Tensor:
        """Return what integers stand for."""
        return (integers.to(torch.float32) - self.zero_point) * self.scale

    def rounded(self, values: Tensor) -> Tensor:
        """Return what values become in integers, as floats."""
        return self.to_floats(self.to_integers(values))


@dataclass(frozen=True)
class Speaker:
    """A node that gives a value: under which id, on what grid its readers have it, and how it gives it."""

    value: str
    grid: Grid | None
    integers: bool

    def as_read(self, value: Any) -> Any:
        """Return a tensor as the operators behind it read it."""
        if self.grid is None or not isinstance(value, Tensor):
            return value
        return self.grid.to_floats(value) if self.integers else self.grid.rounded(value)

    def like(self, own: Any, wanted: Any) -> Given | None:
        """Return another value in the form of the node's own, if it can take that."""
        if self.value.endswith(PARAMETER) or not isinstance(own, Tensor):
            return None
        if not isinstance(wanted, Tensor) or own.shape != wanted.shape:
            return None
        if self.integers and self.grid is not None:
            wanted = self.grid.to_integers(wanted)
        elif own.dtype is not wanted.dtype and not own.is_floating_point():
            return None
        return Given(torch.empty_like(own).copy_(wanted))


def speakers_in(graph: GraphModule) -> dict[Node, Speaker]:
    """Return the nodes that give values: of several with an id the last, to which the others lead."""
    last = {name: node for node in nodes_in(graph) if (name := tag_of(node, VALUE_TAG))}
    return {node: _speaker(node, name) for name, node in last.items()}


def _speaker(node: Node, name: str) -> Speaker:
    integers = tag_of(node, INTEGERS_TAG)
    if integers is not None:
        return Speaker(name, Grid(*integers), integers=True)
    users = list(node.users)
    grids = {
        Grid(*user.args[1:5])  # type: ignore[arg-type]
        for user in users
        if user.target is decomposed.quantize_per_tensor
    }
    one = len(grids) == 1 and all(u.target is decomposed.quantize_per_tensor for u in users)
    return Speaker(name, grids.pop() if one else None, integers=False)


class Values:
    """The values of one program on one input, computed as far as somebody asks for them.

    Args:
        wanted: by id, how many times each of its values is going to be asked for.
        forced: another program's values, which are put in the place of this one's once they are known.
    """

    def __init__(
        self,
        instance: Instance,
        speakers: Mapping[Node, Speaker],
        wanted: Mapping[str, int],
        forced: Values | None = None,
    ) -> None:
        self._instance, self._speakers, self._wanted = instance, speakers, wanted
        self._forced = forced
        self._writes = any(_writes(node) for node in nodes_in(instance.graph))
        self._steps: Steps | None = None
        self._reset()

    def _reset(self) -> None:
        self._kept: dict[Key, Any] = {}
        self._asked: Counter[Key] = Counter()
        self._times: Counter[str] = Counter()
        self._given: Given | None = None
        self.result: Any = None

    def start(self, inputs: Sequence[Any]) -> None:
        """Begin on another input; buffers that the program writes to stay as they are."""
        self._reset()
        self._steps = steps(self._instance.graph, inputs, self._instance.call)

    def walk(self) -> Iterator[Key]:
        """Step to the end, and yield each value when it is there."""
        while (key := self._advance()) is not None:
            yield key

    def get(self, key: Key) -> Any:
        """Return a value as it is read; None if the program does not compute it."""
        while key not in self._kept and self._advance() is not None:
            pass
        if key not in self._kept:
            return None
        self._asked[key] += 1
        last = self._asked[key] >= self._wanted[key[0]]
        return self._kept.pop(key) if last else self._kept[key]

    def _advance(self) -> Key | None:
        """Step to the next value that has an id; None at the end."""
        while self._steps is not None:
            try:
                seen = self._steps.send(self._given)
            except StopIteration as end:
                self.result, self._steps = end.value, None
                break
            self._given = None
            speaker = self._speakers.get(seen.node)
            if speaker is not None:
                return self._told(speaker, seen.value)
        return None

    def _told(self, speaker: Speaker, value: Any) -> Key:
        key = (speaker.value, self._times[speaker.value])
        self._times[speaker.value] += 1
        if self._wanted.get(speaker.value):
            read = speaker.as_read(value)
            own = self._writes and read is value and isinstance(value, Tensor)
            self._kept[key] = value.clone() if own else read  # it may be written to further on
        if self._forced is not None:
            self._given = speaker.like(value, self._forced.get(key))
        return key


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
