# SPDX-License-Identifier: Apache-2.0
"""What is counted of two programs on one input after the other, and the rows that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.batches import binder
from qompose.diagnosis.comparison import KERNEL, ROUNDING, UNKNOWN, Compared, Comparison
from qompose.diagnosis.lockstep import Lockstep, parameters_of, unread_in
from qompose.diagnosis.pairing import Values
from qompose.diagnosis.sides import FLOAT, Instance, Side, with_rewrites_of
from qompose.diagnosis.tallies import Metric, Tally
from qompose.errors import CalibrationError, UserError
from qompose.graph import module_path, operator_name, values_of
from qompose.ledger import SIMULATED, Row
from qompose.nested import nodes_in
from qompose.repairs.equalization import equalized_identity
from qompose.reporting import report
from qompose.rewrites import is_rewrite
from qompose.sites import PARAMETER


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
                f"no operator of the {one.stage} program gives a value that the {two.stage} one has: are "
                "they of one model? To compare outputs alone, pass one as a function: "
                "lambda *args: model(*args)"
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
        for name in wanted.keys() & found.keys() & (quantized if self._record else found.keys()):
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
        # A report calls pieces of an operator by its name and theirs behind a slash, which nodes have not.
        listed = {row.name.replace("/", "_"): row for row in report_rows(self._two)}
        rows = [
            self._row(value, tally, self._lockstep.reference.get(value), listed)
            for value, tally in self._tallies.items()
            if tally.inputs and self._tells(value, tally)
        ]
        alone = sorted({self._ids.get(n, n) for n in self._annotated() if not self._is_paired(n)})
        stages, ordered = (self._one.stage, self._two.stage), sorted(rows, key=_badness)
        told, notes = "" if self._record is None else self._record.fingerprint, self._notes()
        return Comparison(*stages, tuple(ordered), tuple(alone), tuple(notes), batches, told)

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
        return tally is not None and tally.inputs > 0

    def _tells(self, value: str, tally: Tally) -> bool:
        """Tell whether a value is worth a row: inputs that stay in float are what they were."""
        node = self._lockstep.reference.get(value)
        return node is None or node.op != "placeholder" or tally.grid is not None

    def _row(
        self, value: str, tally: Tally, node: Node | None, told: Mapping[str, Row]
    ) -> Compared:
        while node is not None and node.target is getitem and node.name not in told:
            source = node.args[0]  # one of several results has the row of what computes them
            assert isinstance(source, Node)
            node = source
        row = None if node is None else told.get(node.name)
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
            f"{value} was not computed as often in one as in the other"
            for value in sorted(self._lockstep.apart)
        ]
        made = self._record.plan.rewrites if self._record and self._one.stage == FLOAT else ()
        notes += [
            f"{rewrite} was not made in the float program, so values there may differ by more than rounding: "
            "take the prepared model as the reference"
            for rewrite in made
            if not is_rewrite(rewrite.name)
        ]
        if (
            self._one.fingerprint
            and self._record
            and self._record.fingerprint
            != equalized_identity(self._one.fingerprint, self._record.plan.rewrites)
        ):
            notes.append(
                f"the float program has other parameters than the one that became the {self._two.stage} one: "
                "differences are not of quantization alone"
            )
        notes += [f"{value} is {told}" for value, told in sorted(self._lockstep.unlike.items())]
        if self._lacks_parameters:
            notes.append(
                "parameters inside kernels and of integer references have no values that could be compared"
            )
        if self._two.stage == "lowered" and self._simulated is None and not self._directly:
            notes.append(
                "what kernels do is not told from rounding: pass the converted model as converted="
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
            raise CalibrationError(f"the programs return floats of the shapes {shapes}")
        if not wanted:
            raise UserError("the programs return no floats, which are what is compared")
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
        note = f"only outputs can be had of what is called ({', '.join(opaque)}), so only those are compared"
        return Comparison(
            self._one.stage,
            self._two.stage,
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
                raise AssertionError("nothing was asked for")
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
    return row.cause != KERNEL, own, row.sqnr
