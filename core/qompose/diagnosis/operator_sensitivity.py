# SPDX-License-Identifier: Apache-2.0
"""`sensitivity`: what the quantization of each operator costs the outputs, with all others in float.

One run in float keeps every value of a batch. With some claims on, an operator that reads the very values
that it read in float is not run; nor is what stands behind one that gives the same values again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

import torch
from rich.progress import Progress
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.calibration.statistics_data import prepared_record
from qompose.console import Block, Printable, Table, as_decibels, on_terminal, progress_bar
from qompose.conversion.convert import FloatAlternative, insert_qdq
from qompose.conversion.qparams_solver import solve
from qompose.diagnosis.error_measures import Cost, CostMetric, measure_of
from qompose.errors import UserError, near_names
from qompose.json_codec import jsonable
from qompose.plan.operator_ids import restore_written
from qompose.plan.plan import Plan, Record
from qompose.program.aliasing import written_values
from qompose.program.batches import check_limit, input_check, iterated, run_batch
from qompose.program.control_flow import graphs_in, nodes_in
from qompose.program.graph import constant_of, copy_graph_module, holds, owner_of, reached
from qompose.program.stepping import Given, repeatable, run_call, steps
from qompose.spec.qparams import decibels
from qompose.training.qat_conv_bn import deployment_form


@dataclass(frozen=True)
class SiteCost:
    """What it costs to quantize one site: the operators of one claim, which a selector can leave in float.

    Attributes:
        name, operator, module: of the operator that the claim is named after, as in reports.
        operators: names of all its operators.
        macs: their multiply-accumulates.
        owner, rule, config, mode: who quantizes them, and how.
        cost: what is added to the outputs' error where nothing else is quantized: the power of the error
            over that of the float outputs, or what the caller's metric says.
        tensors: the same for each of its tensors alone, by their names; empty unless asked for.
        claim: its number in the plan.
    """

    name: str
    operator: str
    module: str
    operators: tuple[str, ...]
    macs: int
    owner: str
    rule: str
    config: str
    mode: str
    cost: float
    tensors: tuple[tuple[str, float], ...]
    claim: int

    @property
    def label(self) -> str:
        """Return the name with operator and module, for messages."""
        where = f"{self.operator}{f' in {self.module}' if self.module else ''}"
        return f"{self.name} ({where})" if where else self.name


@dataclass(frozen=True)
class Sensitivity(Printable):
    """The sites, the costliest first.

    Attributes:
        rows: one for each site.
        together: the cost of quantizing all of them.
        batches: how many inputs were run.
        notes: what could not be measured, by name.
        relative: whether costs are powers of errors over that of the outputs, which have decibels.
    """

    rows: tuple[SiteCost, ...]
    together: float
    batches: int
    notes: tuple[str, ...] = ()
    relative: bool = True

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SiteCost]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> SiteCost:
        """Return the row of an operator, by its name, or by the path of a module that has one site.

        Raises:
            UserError: there is none, or several; the message has near names.
        """
        named = [row for row in self.rows if name in row.operators or name == row.name]
        found = named or [row for row in self.rows if row.module == name]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(
                f"{name!r} matches {len(found)} sites: {', '.join(r.name for r in found)}"
            )
        known = {known for row in self.rows for known in (*row.operators, row.module)} - {""}
        raise UserError(f"no site {name!r} was measured{near_names(str(name), known)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the ranking as JSON data; a cost that is not finite is a string."""
        data: dict[str, Any] = jsonable(
            {
                "rows": [{**vars(row), "tensors": dict(row.tensors)} for row in self.rows],
                "together": self.together,
                "batches": self.batches,
                "notes": self.notes,
                "relative": self.relative,
            }
        )
        return data

    def _blocks(self) -> list[Block]:
        of = f"{len(self.rows)} sites, {self.batches} inputs; all quantized: "
        head = of + (
            as_decibels(decibels(1.0, self.together)) if self.relative else f"{self.together:.4g}"
        )
        shown = ("SQNR alone", "cost") if self.relative else ("cost",)
        cells = tuple(cell for row in self.rows for cell in self._cells(row))
        header = ("operator", "module", *shown, "MACs", "owner, rule, config")
        table = [Table(header, cells)] if cells else []
        return [head, *table, *(f"- {note}" for note in self.notes)]

    def _cells(self, row: SiteCost) -> Iterator[tuple[object, ...]]:
        names = ", ".join(row.operators) or row.name
        quantized = f"{row.owner}, {row.rule}, {row.config or row.mode}"
        yield (names, row.module, *self._shown(row.cost), row.macs, quantized)
        for tensor, cost in row.tensors:
            yield (f"  {tensor}", "", *self._shown(cost), "", "")

    def _shown(self, cost: float) -> tuple[str, ...]:
        number = f"{cost:.3g}"
        return (as_decibels(decibels(1.0, cost)), number) if self.relative else (number,)


def sensitivity(
    prepared: GraphModule,
    inputs: Iterable[Any],
    *,
    metric: CostMetric | None = None,
    transform: Callable[[Any], Any] | None = None,
    limit: int | None = None,
    tensors: bool = False,
    progress: bool | None = None,
) -> Sensitivity:
    """Rank the operators of a calibrated model by the error that quantizing each one alone causes.

    For each batch, float values are computed once, and each site reruns only what its quantization changes.
    Nothing is kept longer than its batch; buffers start from their exported values with each batch.

    Args:
        prepared: a calibrated result of `prepare_pt2e`. It is left unchanged.
        inputs: batches, as for `calibrate`.
        metric: a function of the outputs and the float outputs of a batch, as the model returns them; 0
            means no difference. Costs are means over batches. Default: the power of the error over that
            of the outputs, averaged over several outputs.
        transform: turns what `inputs` yields into the model's inputs.
        limit: how many batches to use at most.
        tensors: also measure each tensor of a site, which takes several times as long.
        progress: whether to show a progress bar; None shows it on a terminal.

    Raises:
        StageError: the model was not prepared.
        UncalibratedError: it was not calibrated.
        UserError: there are no inputs, or `limit` is not a positive number; the outputs have no floats and
            there is no `metric`, or that returns no number.
        CalibrationError: a batch does not fit.
        MemberError: the metric raised an error.
    """
    check_limit(limit)
    with progress_bar(on_terminal(progress)) as bar:
        limited = islice(iterated(inputs, "sensitivity"), limit)
        total = len(inputs) if isinstance(inputs, Sized) else limit
        total = total if total is None or limit is None else min(total, limit)
        options: dict[str, Any] = {"metric": metric, "transform": transform, "tensors": tensors}
        return measured(prepared, limited, bar, total, **options)


def measured(
    prepared: GraphModule,
    inputs: Iterable[Any],
    bar: Progress,
    batches: int | None = None,
    *,
    metric: CostMetric | None = None,
    transform: Callable[[Any], Any] | None = None,
    tensors: bool = False,
    caller: str = "sensitivity",
) -> Sensitivity:
    """Do what `sensitivity` does, with a bar that is shown already, of so many batches.

    `caller` is the function that messages name.
    """
    record = prepared_record(prepared, caller)
    program, plan = SwitchedProgram(prepared, record), record.plan
    places, measure = _places(program, tensors), measure_of(prepared, metric)
    costs: dict[Any, Cost] = {key: Cost() for key in places}
    task = bar.add_task("sites", total=None if batches is None else batches * len(places))
    bind, count = input_check(prepared), 0
    for count, batch in enumerate(inputs, start=1):
        run = run_batch(
            lambda *a, **k: program.in_float(bind(*a, **k)), batch, transform, count, "batch"
        )
        for key, on in places.items():
            measure(costs[key], program.quantized(run, on), run.outputs)
            bar.advance(task)
        del run  # before the next batch is made
    if not count:
        raise UserError(f"{caller} got no inputs: the iterable is empty or already consumed")
    rows = (_row(plan, n, costs, count) for n in range(len(plan.claims)) if n in costs)
    ranked = tuple(sorted(rows, key=lambda row: -row.cost))
    together = costs[_ALL].mean(count)
    return Sensitivity(ranked, together, count, tuple(_notes(program, plan)), metric is None)


_ALL = "all"


def _places(program: SwitchedProgram, tensors: bool) -> Mapping[Any, On]:
    """Return what is to be measured: everything, each claim, and where asked each of its tensors."""
    known = {n: [(n, name) for name in names] for n, names in sorted(program.parts.items())}
    every = {part for claim in known.values() for part in claim}
    parts = {number: claim for number, claim in known.items() if number not in program.stuck}
    alone = {part: [part] for claim in parts.values() for part in claim} if tensors else {}
    return {_ALL: every, **parts, **alone}


def _row(plan: Plan, number: int, costs: Mapping[Any, Cost], batches: int) -> SiteCost:
    alone = [key for key in costs if isinstance(key, tuple) and key[0] == number]
    tensors = tuple((key[1], costs[key].mean(batches)) for key in alone)
    row = site_of(plan, number)
    return replace(row, cost=costs[number].mean(batches), tensors=tensors)


def site_of(plan: Plan, number: int) -> SiteCost:
    """Return what a plan says of a claim, with a cost of 0."""
    claim = plan.claims[number]
    covered = [operator for operator in plan.operators if operator.claim == number]
    named = [o for o in covered if claim.anchor in (o.name, o.name.replace("/", "_"))]
    first = next(iter(named or covered), None)
    return SiteCost(
        name=claim.anchor if first is None else first.name,
        operator="" if first is None else first.operator,
        module="" if first is None else first.module,
        operators=tuple(operator.name for operator in covered),
        macs=sum(operator.macs for operator in covered),
        owner=claim.owner,
        rule=claim.rule,
        config=claim.config,
        mode=claim.mode,
        cost=0.0,
        tensors=(),
        claim=number,
    )


def _notes(program: SwitchedProgram, plan: Plan) -> Iterator[str]:
    """Name the claims that were not measured, and say why."""
    for number, claim in enumerate(plan.claims):
        name = f"{site_of(plan, number).label} ({claim.owner}, rule {claim.rule})"
        if number in program.dropped:
            yield f"{name} stays in float: {program.dropped[number]}"
        elif number in program.stuck:
            yield f"{name} was not measured: {program.stuck[number]}"
        elif not claim.specs:
            yield f"{name} was not measured: it was quantized before this program was exported"
        elif not program.parts.get(number):
            yield f"{name} was not measured: none of its quantized tensors is read as integers"
        elif number not in program.reached:
            yield f"{name} was not measured: no input reached it"
    if program.writes:
        yield "the program writes in place, so the whole program was run for each site"


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
        dropped: claims that are not followed, with the reason.
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
        solution = solve(self._model, record.plan, allow_uncalibrated=False)
        inserted = insert_qdq(self._model, record.plan, solution, fold_quantize=False)
        self.dropped = solution.dropped
        self.stuck: dict[int, str] = {}
        self.parts: dict[int, list[str]] = defaultdict(list)
        self._reads: dict[Node, _Read] = {}
        self.reached: set[int] = set()
        for alternative in inserted.alternatives:
            self._add(alternative)
        self._sources = {read.source for read in self._reads.values()}
        self._spare = set(self._only_for_reads())
        self.writes = any(written_values(part.graph) for part in graphs_in(self._model))

    def _add(self, alternative: FloatAlternative) -> None:
        known = self._reads.get(alternative.node)
        asked = {(claim, alternative.tensor) for claim in alternative.claims}
        if not _is_there(alternative.source):
            why = f"its observer removed {alternative.tensor}, so the float value is gone"
            self.stuck.update(dict.fromkeys(alternative.claims, why))
            return
        if known is not None and known.asked != asked:
            others = {claim for claim, _ in known.asked | asked}
            why = (
                f"several regions read {alternative.tensor} through one node, so they can only be "
                "quantized together"
            )
            self.stuck.update(dict.fromkeys(others, why))
        self._reads.setdefault(alternative.node, _Read(alternative.source, set())).asked |= asked
        for claim in alternative.claims:
            if alternative.tensor not in self.parts[claim]:
                self.parts[claim].append(alternative.tensor)

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
        needed = reached(live, lambda node: self._spare.intersection(node.all_input_nodes))
        idle = self._spare - needed
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
