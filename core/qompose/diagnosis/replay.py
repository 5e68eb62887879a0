# SPDX-License-Identifier: Apache-2.0
"""Programs that are stepped through beside one another, and share their values."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from qompose.errors import StageError, UserError
from qompose.plan.operator_ids import (
    fingerprint,
    identify,
    isolate,
    restore_written,
)
from qompose.plan.plan import Record
from qompose.plan.user_program import (
    as_graph_module,
    earlier_stage,
    has_quantized_parts,
    unlifted,
    was_quantized_as_a_whole,
)
from qompose.program.aliasing import written_buffers
from qompose.program.control_flow import name_apart, nodes_in
from qompose.program.graph import copy_graph_module, get_attribute, owner_of, set_attribute
from qompose.program.meta import (
    FACTORS_TAG,
    GROUP_TAG,
    INTEGERS_TAG,
    KERNELS_TAG,
    STAGE_KEY,
    tag_of,
    values_of,
)
from qompose.program.rewrites import Candidate, apply_rewrites, is_rewrite, splits
from qompose.program.stepping import Given, Steps, repeatable, run_call, steps
from qompose.reporting.build_report import one_of
from qompose.spec import qdq
from qompose.spec.qparams import along
from qompose.training.train_eval import is_trained

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
        given: an exported program as it was handed in, if parts of it were quantized before.
    """

    stage: str
    graph: GraphModule | None
    run: Callable[..., Any]
    record: Record | None = None
    fingerprint: str = ""
    given: ExportedProgram | GraphModule | None = None

    @property
    def name(self) -> str:
        """Return what it is called."""
        return EXPORTED if self.stage == FLOAT and self.given is not None else self.stage


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
                f"the {argument} of a comparison is in training mode, where dropout is random "
                "and batch norm uses batch statistics; call .eval() first"
            )
        return Side(record.stage, _from_the_start(model, record), model, record)
    if isinstance(model, (ExportedProgram, GraphModule)):
        return _exported(model)
    if not callable(model) or isinstance(model, type):
        raise UserError(
            f"the {argument} of a comparison must be an exported, prepared, converted or lowered program, "
            f"or a callable, got {type(model).__name__}{one_of(model)}"
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
    """Return a program without a record: one that is quantized as a whole has its ids, others get them."""
    if has_quantized_parts(model):
        kept = _with_ids_kept(model)
        if kept.graph is not None and was_quantized_as_a_whole(kept.graph):
            return kept
    return _identified(model)


def with_ids_alike(one: Side, two: Side) -> tuple[Side, Side]:
    """Return two sides with the ids of which they have most in common.

    What was quantized and exported again has those of the program that it was made from, and as an exported
    program like any other those that it gets here: what it was made from may be a part of it, and another
    program may have been prepared from it.
    """
    pairs = product(_forms_of(one), _forms_of(two))
    return max(pairs, key=lambda pair: len(_ids_of(pair[0]) & _ids_of(pair[1])))


def _forms_of(side: Side) -> Iterator[Side]:
    """Yield a side, and what else its values may be called."""
    yield side
    if side.given is None:
        return
    if side.stage != EXPORTED:
        yield _with_ids_kept(side.given)
    elif earlier_stage(side.given) is None:
        yield _identified(side.given)


def _ids_of(side: Side) -> set[str]:
    nodes = () if side.graph is None else nodes_in(side.graph)
    return {value for node in nodes for value in values_of(node)}


def _with_ids_kept(model: ExportedProgram | GraphModule) -> Side:
    quantized = unlifted(model) if isinstance(model, ExportedProgram) else model
    return Side(EXPORTED, quantized, quantized, given=model)


def _identified(model: ExportedProgram | GraphModule) -> Side:
    graph = as_graph_module(model, "compare")
    # What writes to its buffers holds something else once it was run.
    identity = "" if written_buffers(graph.graph) else fingerprint(graph)
    isolate(graph)
    given = model if has_quantized_parts(model) else None
    return Side(FLOAT, graph, graph, fingerprint=identity, given=given)


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
        """Run a node: observers let values pass, fake quantizers round them, and neither looks at them."""
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


MISSING = object()
"""Stands for a value that a program does not compute: of a body that it does not run."""
Key: TypeAlias = tuple[str, int]
"""A value: its id, and how many times it was computed before; bodies of loops compute theirs often."""


@dataclass(frozen=True)
class ReaderGrid:
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
        """Return the nearest integers, as floats; of NaN, which has none, the one that a cast gives."""
        steps_away = torch.round(values * (1.0 / self.scale)) + self.zero_point
        return steps_away.clamp(self.low, self.high).nan_to_num(0.0)

    def to_floats(self, integers: Tensor) -> Tensor:
        """Return what integers stand for."""
        return (integers.to(torch.float32) - self.zero_point) * self.scale

    def rounded(self, values: Tensor) -> Tensor:
        """Return what values become in integers, as floats."""
        return self.to_floats(self.to_integers(values))


@dataclass(frozen=True)
class Speaker:
    """A node that gives values: under which ids, on what grid its readers have them, and how it gives them.

    `factors` are those that balanced channels are held with, by dimension.
    `passes_on` is one that may give the memory of what it reads; `kernel` one that stands for a region.
    """

    values: tuple[str, ...]
    grid: ReaderGrid | None
    integers: bool
    factors: tuple[tuple[int | tuple[int, ...], tuple[float, ...]], ...]
    passes_on: bool
    kernel: bool

    def of(self, wanted: Container[str]) -> Speaker | None:
        """Return what it says of some values; None if it gives none of them."""
        found = tuple(value for value in self.values if value in wanted)
        return replace(self, values=found) if found else None

    def as_read(self, value: Any) -> Any:
        """Return a tensor as the operators behind it read it."""
        if not isinstance(value, Tensor):
            return value
        if self.grid is not None:
            value = self.grid.to_floats(value) if self.integers else self.grid.rounded(value)
        for dim, factors in self.factors:
            value = value / _along(value, dim, factors)
        return value

    def like(self, own: Any, wanted: Any) -> Given | None:
        """Return another value in the form of the node's own, if it can take that."""
        if not isinstance(own, Tensor) or not isinstance(wanted, Tensor):
            return None
        if own.shape != wanted.shape:
            return None
        for dim, factors in self.factors:
            wanted = wanted * _along(wanted, dim, factors)
        if self.integers and self.grid is not None:
            wanted = self.grid.to_integers(wanted)
        elif own.dtype is not wanted.dtype and not own.is_floating_point():
            return None
        return Given(torch.empty_like(own).copy_(wanted))


def _along(value: Tensor, dim: int | tuple[int, ...], factors: tuple[float, ...]) -> Tensor:
    numbers = torch.tensor(factors, dtype=value.dtype)
    if isinstance(dim, tuple):
        return numbers.view(dim)
    return along(numbers, dim % value.dim(), value.dim())


def speakers_in(graph: GraphModule) -> dict[Node, Speaker]:
    """Return the nodes that give values: of several with an id the last, to which the others lead."""
    last = {value: node for node in nodes_in(graph) for value in values_of(node)}
    given = {node: tuple(v for v in values_of(node) if last[v] is node) for node in last.values()}
    return {node: _speaker(node, values) for node, values in given.items()}


def _speaker(node: Node, values: tuple[str, ...]) -> Speaker:
    integers = tag_of(node, INTEGERS_TAG)
    factors = tuple(
        (tuple(dim) if isinstance(dim, list) else dim, tuple(f))
        for dim, f in tag_of(node, FACTORS_TAG) or ()
    )
    facts = (factors, _passes_on(node), tag_of(node, KERNELS_TAG) is not None)
    if integers is not None:
        return Speaker(values, ReaderGrid(*integers), True, *facts)
    users = list(node.users)
    grids = {
        ReaderGrid(*user.args[1:5])  # type: ignore[arg-type]
        for user in users
        if user.target is qdq.quantize_per_tensor
    }
    one = len(grids) == 1 and all(u.target is qdq.quantize_per_tensor for u in users)
    return Speaker(values, grids.pop() if one else None, False, *facts)


class Values:
    """The values of one program on one input, computed as far as somebody asks for them.

    Args:
        wanted: by id, how many times each of its values is going to be asked for.
        forced: another program's values, which are put in the place of this one's once they are known.
        exchange: whether that is done for a value.

    Attributes:
        exchanged: for which it was.
    """

    def __init__(
        self,
        instance: Instance,
        speakers: Mapping[Node, Speaker],
        wanted: Mapping[str, int],
        forced: Values | None = None,
        exchange: Callable[[Key], bool] = bool,
    ) -> None:
        self._instance, self._speakers, self._wanted = instance, speakers, wanted
        self._forced, self._exchange = forced, exchange
        self.exchanged: set[Key]
        self._writes = any(_writes(node) for node in nodes_in(instance.graph))
        self._steps: Steps | None = None
        self._reset()

    def _reset(self) -> None:
        self._kept: dict[Key, Any] = {}
        self._asked: Counter[Key] = Counter()
        self._times: Counter[str] = Counter()
        self._given: Given | None = None
        self.exchanged = set()
        self.result: Any = None

    def start(self, inputs: Sequence[Any]) -> None:
        """Begin on another input; buffers that the program writes to stay as they are."""
        self._reset()
        self._steps = steps(self._instance.graph, inputs, self._instance.call)

    def walk(self) -> Iterator[Key]:
        """Step to the end, and yield each value when it is there."""
        while keys := self._advance():
            yield from keys

    def get(self, key: Key) -> Any:
        """Return a value as it is read; `MISSING` if the program does not compute it."""
        while key not in self._kept and self._advance():
            pass
        if key not in self._kept:
            return MISSING
        self._asked[key] += 1
        last = self._asked[key] == self._wanted[key[0]]
        return self._kept.pop(key) if last else self._kept[key]

    def unasked(self) -> set[Key]:
        """Return the values that were computed on the way and nobody asked for."""
        return {key for key in self._kept if not self._asked[key]}

    def _advance(self) -> list[Key]:
        """Step to the next node that gives values, and return which; at the end, none."""
        while self._steps is not None:
            try:
                seen = self._steps.send(self._given)
            except StopIteration as end:
                self.result, self._steps = end.value, None
                break
            self._given = None
            speaker = self._speakers.get(seen.node)
            if speaker is not None:
                return [self._told(speaker, value, seen.value) for value in speaker.values]
        return []

    def _told(self, speaker: Speaker, name: str, value: Any) -> Key:
        key = (name, self._times[name])
        self._times[name] += 1
        read = speaker.as_read(value)
        own = self._writes and read is value and isinstance(value, Tensor)
        self._kept[key] = value.clone() if own else read  # it may be written to further on
        wanted = MISSING if self._forced is None else self._forced.get(key)
        # What shares its memory has to go on sharing it, where something writes to that.
        fixed = self._writes and speaker.passes_on
        if wanted is not MISSING and not fixed and self._exchange(key):
            self._given = speaker.like(value, wanted)
            self.exchanged.update([key] if self._given else [])
        return key


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _passes_on(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
