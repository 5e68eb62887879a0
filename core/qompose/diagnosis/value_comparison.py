# SPDX-License-Identifier: Apache-2.0
"""`compare`: a table of where a quantized model differs from its float model, value by value.

The other program runs twice beside the reference: by itself, for what its values end up as, and with the
reference's values in the place of its own, for what each operator adds. A lowered one is compared with its
converted model in the same way, which tells what a kernel does from what quantization does. All are stepped
through a value at a time (`qompose.diagnosis.replay`), and nothing but sums is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from qompose.diagnosis.error_measures import Metric, Tally
from qompose.diagnosis.replay import (
    FLOAT,
    MISSING,
    OUTPUTS,
    Instance,
    Side,
    Speaker,
    Values,
    side_of,
    speakers_in,
    with_ids_alike,
    with_rewrites_of,
)
from qompose.errors import (
    BatchError,
    CalibrationError,
    InputError,
    QomposeError,
    StageError,
    UserError,
)
from qompose.plan.plan import rewritten_identity
from qompose.program.aten_operators import is_copy
from qompose.program.batches import binder, check_limit, describe, iterated, run_batch
from qompose.program.control_flow import nodes_in, sink_constants
from qompose.program.graph import get_attribute, module_path, operator_name, owner_of, reached
from qompose.program.meta import PARAMETER, values_of
from qompose.program.rewrites import is_rewrite
from qompose.reporting.build_report import report
from qompose.reporting.report_data import (
    KERNEL_ERROR,
    ROUNDING,
    SIMULATED,
    UNKNOWN,
    Compared,
    Comparison,
    Row,
)


def compare(
    reference: Any,
    other: Any,
    inputs: Iterable[Any],
    *,
    converted: GraphModule | None = None,
    transform: Callable[[Any], Any] | None = None,
    limit: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Comparison:
    """Find where two forms of a program differ, by how much, and why.

    Memory does not grow with the inputs or the layers: values are compared as they are computed.

    Args:
        reference, other: exported, prepared, converted or lowered programs. For anything else that can be
            called, such as a compiled model or another runtime's program, only outputs are compared.
        inputs: tensors, tuples of positional arguments or dicts of keyword arguments, as for `calibrate`.
        converted: the model that `other` was lowered from, to tell kernel errors from rounding. A lowered
            model knows it, unless it was pickled.
        transform: turns what `inputs` yields into the program's inputs.
        limit: how many inputs to use at most.
        metrics: by name, functions of a value of the reference and of the other program, which return a
            number. The table has their means over all inputs.

    Raises:
        UserError: a program or an option is invalid, `inputs` cannot be iterated, or a metric returned no
            number; the programs have nothing in common, or `converted` belongs to another model.
        StageError: a program is in training mode, or `converted` is of another stage.
        MemberError: a metric raised an error.
        CalibrationError: there was no input, or one does not fit the programs.
    """
    one, two = with_ids_alike(side_of(reference, "reference"), side_of(other, "other program"))
    check_limit(limit)
    own = _metrics(metrics)
    table: OutputTable | ValueTable
    if one.graph is None or two.graph is None:
        table = OutputTable(one, two, own)
    else:
        table = ValueTable(one, two, _converted(one, two, converted), own)
    number = 0
    with torch.no_grad():
        for number, batch in enumerate(islice(iterated(inputs, "compare"), limit), start=1):
            _run(batch, transform, number, table)
    if not number:
        raise CalibrationError("compare got no inputs: the iterable is empty or already consumed")
    return table.comparison(number)


def _run(
    batch: Any, transform: Callable[[Any], Any] | None, number: int, table: OutputTable | ValueTable
) -> None:
    """Count a batch; an error that is not its fault, such as one of a metric, is not blamed on it."""
    try:
        run_batch(table.add, batch, transform, number, "input")
    except BatchError as error:
        cause = error.__cause__
        of_the_batch = isinstance(cause, (CalibrationError, InputError))
        if isinstance(cause, QomposeError) and not of_the_batch:
            raise cause from cause.__cause__
        raise


def _metrics(given: Mapping[str, Metric] | None) -> dict[str, Metric]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(map(callable, given.values())):
        raise UserError(f"metrics must be a mapping from names to functions, got {given!r}")
    return dict(given)


def _converted(one: Side, two: Side, given: GraphModule | None) -> GraphModule | None:
    """Return the converted model with whose regions kernels are compared; None if there is none to run."""
    if two.stage != "lowered" or one.stage in ("converted", "reference"):
        return None
    if given is None:
        source = None if two.record is None or two.graph is None else two.record.source
        return None if source is None else side_of(source, "converted model").graph
    side = side_of(given, "converted model")
    if side.stage not in ("converted", "reference"):
        what = f"a model of stage {side.stage!r}" if side.stage != OUTPUTS else "a callable"
        raise StageError(f"converted= must be the model that convert_pt2e returned, got {what}")
    if _fingerprint(side) != _fingerprint(two):
        raise UserError(
            "converted= belongs to a different program or has different parameters; pass the "
            "model that was passed to qompose.lower"
        )
    return side.graph


def _fingerprint(side: Side) -> str:
    return "" if side.record is None else side.record.fingerprint


class ValueTable:
    """Every value that two programs have in common."""

    def __init__(
        self,
        one: Side,
        two: Side,
        simulated: GraphModule | None,
        metrics: Mapping[str, Metric],
    ) -> None:
        assert two.graph is not None
        self._one, self._two, self._metrics = one, two, metrics
        self._simulated = simulated
        self._record = two.record or one.record
        apart, folded = with_rewrites_of(one, self._record)
        self._lockstep = Lockstep(apart, two.graph, simulated)
        if not any(node.op != "placeholder" for node in self._lockstep.reference.values()):
            raise UserError(
                f"the {one.name} and the {two.name} program have no values in common; do "
                "they come from the same model? To compare outputs only, pass one as a "
                "function: lambda *args: model(*args)"
            )
        self._directly = two.stage == "lowered" and one.stage in ("converted", "reference")
        self._tallies = {
            # Of balanced channels each has a range of its own.
            value: Tally(None if speaker.factors else speaker.grid)
            for value, speaker in self._lockstep.speakers.items()
        }
        # What one rewriting calls by a name is another value in the program before it.
        known = [folded, apart, two.graph, *([] if simulated is None else [simulated])]
        self._ids = {
            node.name: values[-1]
            for graph in known
            for node in nodes_in(graph)
            if (values := values_of(node))
        }
        self._unread = {node.name for node in unread_in(apart)}
        self._lacks_parameters = False
        self._compare_parameters(parameters_of(folded), parameters_of(simulated or two.graph))
        # Inside kernels and in integer references there are integers alone.
        wanted = any(_is_parameter(self._ids.get(name, "")) for name in self._annotated())
        self._lacks_parameters = wanted and not any(map(_is_parameter, self._tallies))

    def _compare_parameters(
        self, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]
    ) -> None:
        # Others are what they were, unless a repair changed them on purpose.
        quantized = {self._ids.get(name) for name in self._annotated()}
        known = wanted.keys() & found.keys() & (quantized if self._record else found.keys())
        for name in sorted(known):
            if wanted[name].shape == found[name].shape:
                tally = self._tallies[name] = Tally(None)
                tally.add(wanted[name], found[name], self._metrics)
                tally.add_own(wanted[name], found[name])

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Run the programs on one input, side by side."""
        for moment in self._lockstep.run(*args, **kwargs):
            tally = self._tallies[moment.value]
            tally.add(moment.reference, moment.other, self._metrics)
            tally.add_own(moment.reference, moment.own)
            simulated = moment.reference if self._directly else moment.simulated
            if simulated is not None and self._lockstep.speakers[moment.value].kernel:
                tally.add_kernel(simulated, moment.own, moment.reference)

    def comparison(self, batches: int) -> Comparison:
        """Return the rows of what was computed, the worst first."""
        # A report calls pieces of an operator by its name and theirs behind a slash, which nodes do not have.
        listed = {row.name.replace("/", "_"): row for row in report_rows(self._two)}
        rows = [
            self._row(name, tally, node, listed)
            for value, tally in self._tallies.items()
            if tally.inputs and self._tells(value, tally)
            for name, node in self._computed_by(value)
        ]
        alone = sorted({self._ids.get(n, n) for n in self._annotated() if not self._is_paired(n)})
        stages, ordered = (self._one.name, self._two.name), sorted(rows, key=_badness)
        fingerprint = "" if self._record is None else self._record.fingerprint
        return Comparison(
            *stages, tuple(ordered), tuple(alone), tuple(self._notes()), batches, fingerprint
        )

    def _annotated(self) -> set[str]:
        """Return the names of what the plan quantizes, but for parameters that neither program has."""
        if self._record is None:
            return set()
        names = {p.source for group in self._record.plan.groups for p in group.points}
        if "lowered" in (self._one.stage, self._two.stage):  # which leaves out what nobody reads
            names -= self._unread
        if self._lacks_parameters:
            names = {name for name in names if not _is_parameter(self._ids.get(name, ""))}
        # Without floats to start from, parameters have no names; what is computed has, at every stage.
        return names if self._one.stage in (FLOAT, "prepared") else names & self._ids.keys()

    def _is_paired(self, name: str) -> bool:
        tally = self._tallies.get(self._ids.get(name, ""))
        return tally is not None and bool(tally.inputs)

    def _computed_by(self, value: str) -> Iterator[tuple[str, Node | None]]:
        """Yield the name and node that a value's row has: of a copy, such as dropout, those of its source.

        Nothing where the source has a row itself: the copy would say the same once more.
        """
        node = source = self._lockstep.reference.get(value)
        while source is not None and is_copy(source) and isinstance(source.args[0], Node):
            source = source.args[0]
        known = None if source is None or source is node else self._ids.get(source.name)
        if known is None:
            yield value, node
        elif known not in self._tallies or not self._tallies[known].inputs:
            yield known, source

    def _tells(self, value: str, tally: Tally) -> bool:
        """Tell whether a value is worth a row: inputs that stay in float are what they were."""
        node = self._lockstep.reference.get(value)
        return node is None or node.op != "placeholder" or tally.grid is not None

    def _row(
        self, value: str, tally: Tally, node: Node | None, listed: Mapping[str, Row]
    ) -> Compared:
        while node is not None and node.target is getitem and node.name not in listed:
            source = node.args[0]  # one of several results has the row of what computes them
            assert isinstance(source, Node)
            node = source
        row = None if node is None else listed.get(node.name)
        fallback = self._two.stage == "lowered" and row is not None and row.state == SIMULATED
        place = value.removesuffix(f": {PARAMETER}")
        module = place.rpartition(".")[0] if node is None else module_path(node)
        kind = PARAMETER if node is None else _kind(node)
        return Compared(
            value=value,
            module=module,
            operator=kind,
            name=row.name if row is not None else "" if node is None else node.name,
            state="" if row is None else row.state,
            owner="" if row is None else row.owner,
            cause=tally.cause(fallback),
            **tally.figures(),
        )

    def _notes(self) -> list[str]:
        notes = [
            f"{value} was not computed the same number of times in both programs"
            for value in sorted(self._lockstep.apart)
        ]
        made = self._record.plan.rewrites if self._record and self._one.stage == FLOAT else ()
        notes += [
            (
                f"{rewrite} was not applied to the float program, so values there may differ by "
                "more than rounding; use the prepared model as the reference"
            )
            for rewrite in made
            if not is_rewrite(rewrite.name)
        ]
        if (
            self._one.fingerprint
            and self._record
            and self._record.fingerprint
            != rewritten_identity(self._one.fingerprint, self._record.plan.rewrites)
        ):
            notes.append(
                f"the float program and the {self._two.stage} program have different "
                "parameters, so differences are not only due to quantization"
            )
        notes += [f"{value} is {shapes}" for value, shapes in sorted(self._lockstep.unlike.items())]
        if self._lacks_parameters:
            notes.append(
                "parameters inside kernels and integer references have no comparable values"
            )
        if self._two.stage == "lowered" and self._simulated is None and not self._directly:
            notes.append(
                "kernel errors cannot be separated from rounding; pass the converted model "
                "as converted="
            )
        return notes


class OutputTable:
    """The outputs of two programs, one of which can only be called."""

    def __init__(self, one: Side, two: Side, metrics: Mapping[str, Metric]) -> None:
        self._one, self._two, self._metrics = one, two, metrics
        self._whole = [_Whole(side) for side in (one, two)]
        self._tallies: list[Tally] = []

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Run both programs on one input."""
        wanted, found = (whole(*args, **kwargs) for whole in self._whole)
        if [v.shape for v in wanted] != [v.shape for v in found]:
            shapes = " and ".join(str([list(v.shape) for v in part]) for part in (wanted, found))
            raise CalibrationError(f"numbers or shapes of float outputs differ: {shapes}")
        if not wanted:
            raise UserError("the programs return no float tensors to compare")
        self._tallies = self._tallies or [Tally(None) for _ in wanted]
        for tally, reference, other in zip(self._tallies, wanted, found, strict=True):
            tally.add(reference, other, self._metrics)

    def comparison(self, batches: int) -> Comparison:
        """Return a row for each output."""
        rows = [
            Compared(
                value=f"the program: output {number}",
                module="",
                operator="output",
                name="",
                state="",
                owner="",
                cause=UNKNOWN if (cause := tally.cause(fallback=False)) == ROUNDING else cause,
                **tally.figures(),
            )
            for number, tally in enumerate(self._tallies)
        ]
        records = [side.record for side in (self._two, self._one) if side.record is not None]
        opaque = [side.stage for side in (self._one, self._two) if side.graph is None]
        note = (
            "only outputs are compared, because a callable has no intermediate values "
            f"({', '.join(opaque)})"
        )
        return Comparison(
            self._one.name,
            self._two.name,
            tuple(sorted(rows, key=_badness)),
            (),
            (note,),
            batches,
            records[0].fingerprint if records else "",
        )


class _Whole:
    """A program as a function from its arguments to the floats that it returns."""

    def __init__(self, side: Side) -> None:
        self._run = side.run
        self._values: Values | None = None
        if side.graph is not None:  # calling it would let observers look
            self._values = Values(Instance.of(side.graph), {}, {})
            self._bind = binder(side.graph)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        if self._values is None:
            result = self._run(*args, **kwargs)
        else:
            self._values.start(self._bind(*args, **kwargs))
            for _ in self._values.walk():
                raise AssertionError("no value was requested")
            result = self._values.result
        leaves = pytree.tree_leaves(result)
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def report_rows(side: Side) -> tuple[Row, ...]:
    """Return the report's rows of a program; of one without a report, none."""
    return () if side.record is None else report(side.run).rows


def _is_parameter(value: str) -> bool:
    return value.endswith(f": {PARAMETER}")


def _kind(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    return operator_name(node.target) if node.op == "call_function" else node.op


def _badness(row: Compared) -> tuple[bool, float, float]:
    """Order rows: errors of kernels first, then what operators add, then what values end up as."""
    own = row.sqnr if row.own_sqnr is None else row.own_sqnr
    return row.cause != KERNEL_ERROR, own, row.sqnr


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
        first, second = ({v: n for n, s in part.items() for v in s.values} for part in spoken[:2])
        common = first.keys() & second.keys()
        self.reference = {value: node for value, node in first.items() if value in common}
        self.speakers = {v: spoken[1][node] for v, node in second.items() if v in common}
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
            self._simulated = Values(
                copies[3], known[3], once, base, lambda key: key in self._own.exchanged
            )
        made = (self._reference, self._free, self._own, self._simulated)
        self._all = [
            (values, binder(program))
            for values, program in zip([v for v in made if v is not None], programs, strict=True)
        ]

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
    """Return what gives values that are not parameters."""
    return {n: s for n, s in speakers_in(program).items() if not s.values[0].endswith(PARAMETER)}


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
    ends = (node for node in nodes if node.op == "output" or node.is_impure())
    return set(nodes) - reached(ends, lambda node: node.all_input_nodes)
