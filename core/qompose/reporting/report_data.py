# SPDX-License-Identifier: Apache-2.0
"""Results as data: the report of all float operators, and the comparison of two forms of a program."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from qompose.console import (
    Block,
    Printable,
    Table,
    as_decibels,
    as_markdown,
    as_text,
    counted,
)
from qompose.errors import ConfigError, UserError, near_names
from qompose.files import draft_of
from qompose.json_codec import is_integer, jsonable, of_type, plain
from qompose.plan.plan import Requantized
from qompose.program.aten_operators import only_moves
from qompose.reporting.graph_drawing import DASHED, DOTTED, FULL, NOBODY

EQUAL, INHERITED, ARITHMETIC = "equal", "inherited", "arithmetic"
ROUNDING, CLIPPING, FALLBACK, KERNEL_ERROR = "rounding", "clipping", "fallback", "kernel error"
NOT_FINITE, UNKNOWN = "not finite", "unknown"
CAUSES = (
    KERNEL_ERROR,
    NOT_FINITE,
    CLIPPING,
    FALLBACK,
    ROUNDING,
    UNKNOWN,
    ARITHMETIC,
    INHERITED,
    EQUAL,
)
"""Why a value differs, the most alarming first.

A kernel error is what a kernel computes beyond one step off the same region in quantize and dequantize
operators; not finite, that one program has NaN or infinity where the other has a number; a fallback, the
rounding of a region that was to have a kernel and has none; arithmetic, what a rewriting does to floats; and
inherited, what the operators before did. Of a program that can only be called the cause is unknown.
"""


@dataclass(frozen=True)
class Compared:
    """One value in both programs.

    Attributes:
        value: its id (`qompose.provenance`).
        module, operator, name: where it comes from, and what the report calls the operator; a parameter's
            operator is "parameter".
        state, owner: as in the report of the operator; "" where there is no report.
        sqnr: of the whole run, in dB: how the other program's value differs from the reference's.
        relative_error: the same as norm of the difference / norm of the reference's value.
        own_sqnr: in dB, of what the operator itself adds where it reads the reference's values; None where
            that cannot be run.
        steps: the largest difference between a kernel and the quantize and dequantize operators that it
            replaced, in steps of its output; None where there is no kernel, or no such form to run.
        clipping: the part of the reference's values that are beyond the range of the integers; None: not
            quantized.
        range_use: the part of the range of the integers that the reference's values span; None as above.
        cause: one of `CAUSES`.
        metrics: by name, what metrics of the caller's own gave.
    """

    value: str
    module: str
    operator: str
    name: str
    state: str
    owner: str
    sqnr: float
    relative_error: float
    own_sqnr: float | None
    steps: float | None
    clipping: float | None
    range_use: float | None
    cause: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison(Printable):
    """The rows, those first whose operators add most, and what could not be compared.

    Attributes:
        reference, other: the stages of the programs: "float", "prepared", "converted", "lowered", ...
        rows: kernel errors first, then by what operators themselves add.
        unpaired: values that the plan of the other program quantizes and that were not found in both.
        notes: what else there is to say.
        batches: how many inputs were compared.
        fingerprint: of the exported program's parameters, where one of the programs was quantized by qompose.
    """

    reference: str
    other: str
    rows: tuple[Compared, ...]
    unpaired: tuple[str, ...]
    notes: tuple[str, ...]
    batches: int
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Compared:
        """Return the row of a value by its id, or by the name of its operator.

        Raises:
            UserError: there is none; the message has near names.
        """
        for row in self.rows:
            if name in (row.value, row.name):
                return row
        known = {known for row in self.rows for known in (row.value, row.name)} - {""}
        raise UserError(f"no value {name!r} was compared{near_names(name, known)}")

    def of_cause(self, cause: str) -> tuple[Compared, ...]:
        """Return the rows with a cause.

        Raises:
            UserError: it is not one of `CAUSES`.
        """
        if cause not in CAUSES:
            raise UserError(f"unknown cause {cause!r}. Causes: {', '.join(CAUSES)}")
        return tuple(row for row in self.rows if row.cause == cause)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON data; an SQNR of equal values, which is infinite, is "inf"."""
        data: dict[str, Any] = jsonable(asdict(self))
        return data

    def _blocks(self) -> list[Block]:
        custom = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        cells = tuple(_cells(row, custom) for row in self.rows)
        head = f"{self.reference} and {self.other}: {len(self.rows)} values, {self.batches} inputs"
        lines = [f"- only in one program: {name}" for name in self.unpaired]
        table = Table((*_COMPARED, *custom), cells)
        return [head, *([table] if cells else []), *lines, *(f"- {note}" for note in self.notes)]


_COMPARED = ("value", "state", "cause", "SQNR", "own SQNR", "error", "clipped", "range used")


def _cells(row: Compared, custom: list[str]) -> tuple[str, ...]:
    return (
        row.value,
        row.state,
        row.cause + (f" ({row.steps:.3g} steps)" if row.cause == KERNEL_ERROR else ""),
        as_decibels(row.sqnr),
        as_decibels(row.own_sqnr),
        f"{row.relative_error:.2g}",
        "" if row.clipping is None else f"{row.clipping:.2%}",
        "" if row.range_use is None else f"{row.range_use:.0%}",
        *(f"{row.metrics[name]:.4g}" if name in row.metrics else "" for name in custom),
    )


KERNEL, SIMULATED, FLOAT = "int8 kernel", "simulated (Q/DQ)", "float"
OBSERVED, REFERENCE = "observed", "integer reference"
FLOAT_KERNEL, UNVERIFIED = "float kernel on integers", "unverified kernel"
STATES = (KERNEL, REFERENCE, FLOAT_KERNEL, SIMULATED, OBSERVED, UNVERIFIED, FLOAT)
"""Where an operator may end, in the order in which reports list them."""
_BORDERS = dict(zip(STATES, (FULL, FULL, FULL, DASHED, DASHED, DASHED, DOTTED), strict=True))
_COLORS = dict(
    zip(STATES, ("green", "green", "cyan", "yellow", "blue", "yellow", "magenta"), strict=True)
)
_KERNELS = {
    KERNEL: "int8 kernels",
    REFERENCE: "integer references",
    FLOAT_KERNEL: "float kernels on integers",
    UNVERIFIED: "unverified kernels",
}
_ENDS = {**{s: f"in {name}" for s, name in _KERNELS.items()}, FLOAT: "in float"}
"""How a sentence about a part of the model goes on, where it is not the state's name."""
SCHEMA = 1
"""The version of the form of `Report.to_dict`, which is what `--json` prints."""


@dataclass(frozen=True)
class Row:
    """One operator of the exported program: where it ended, who took it by which rule, and why (not).

    `macs` counts multiply-accumulates for one call with the example shapes. `reason` says why an operator
    is float or has no kernel. `inputs` are the names of the rows whose results the operator reads, past what
    has no row, and into and out of bodies of control flow; what a loop hands on to its next pass is not
    among them. `region` numbers what is quantized together: operators of one region run in one kernel.
    """

    name: str
    operator: str
    module: str
    macs: int
    state: str
    owner: str = ""
    rule: str = ""
    config: str = ""
    mode: str = ""
    selector: str = ""
    kernel: str = ""
    reason: str = ""
    inputs: tuple[str, ...] = ()
    region: int | None = None

    @property
    def explanation(self) -> str:
        """Return what runs the operator, or why no kernel does, with who says so."""
        if self.state in _KERNELS:
            return f"{self.owner}: {self.kernel}"
        if self.owner and self.reason:
            return f"{self.owner}: {self.reason}"
        return f"{self.owner}: rule {self.rule}, {self.config}" if self.owner else self.reason

    def __str__(self) -> str:
        """Return the row as a sentence: `linear (aten.linear in head) is float: no rule claims it`."""
        where = f"{self.name} ({self.operator}{f' in {self.module}' if self.module else ''})"
        if not self.owner:
            return f"{where} is {self.state}: {self.reason}"
        by = f"{self.owner}, rule {self.rule}, config {self.config}"
        by += f" (from {self.selector})" if self.selector else ""
        what = self.kernel or self.reason
        return f"{where} is {self.state}{f': {what}' if what else ''}; {by}"


@dataclass(frozen=True)
class MeasuredRow(Row):
    """A row of a report with the numbers of a comparison; None where that has none."""

    sqnr: float | None = None
    own_sqnr: float | None = None
    cause: str = ""

    @property
    def who(self) -> str:
        """Return the owner, or `NOBODY`."""
        return self.owner or NOBODY


def measured_rows(rows: Iterable[Row], comparison: Comparison | None) -> tuple[MeasuredRow, ...]:
    """Return rows with what a comparison has of each: of several values of an operator, the first."""
    found: dict[str, Compared] = {}
    for compared in comparison or ():
        found.setdefault(compared.name, compared)
    return tuple(
        MeasuredRow(**vars(row), sqnr=c.sqnr, own_sqnr=c.own_sqnr, cause=c.cause)
        if (c := found.get(row.name))
        else MeasuredRow(**vars(row))
        for row in rows
    )


@dataclass(frozen=True)
class Report(Printable):
    """What happened to every float operator at one stage, with conflicts, rewrites and notes.

    Attributes:
        stage, target: "prepared", "converted", "reference" or "lowered", and the target of the latter.
        rows: all float operators, in the order of the exported program.
        counts: observers, Q/DQ operators and kernels in the graph; only kernels for other runtimes.
        requantizations: tensors that two specifications quantize differently.
        conflicts, rewrites, notes: claims that lost, and to which; changes to the program; other remarks.
        bytes_before, bytes_after: bytes of all parameters and buffers, or of another runtime's program file.
        file_bytes: their size in a file of `save`, where weights of six bits or fewer are packed; 0 for
            models without such weights and for other runtimes.
        fingerprint: a hash of the exported program's parameters, which tells whether a comparison belongs to
            this model.
        idle_owners: quantizers of the composition that own no operator; `notes` has the reasons.
    """

    stage: str
    target: str
    rows: tuple[Row, ...]
    counts: Counts
    requantizations: tuple[Requantized, ...]
    conflicts: tuple[str, ...]
    rewrites: tuple[str, ...]
    notes: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    fingerprint: str = ""
    idle_owners: tuple[str, ...] = ()
    file_bytes: int = 0

    def count(self, state: str, owner: str | None = None) -> int:
        """Return how many operators are in a state, of one owner or of all.

        Raises:
            UserError: the state or the owner is unknown.
        """
        _check_state(state)
        owners = {row.owner for row in self.rows} - {""}
        if owner is not None and owners and owner not in owners.union(self.idle_owners):
            raise UserError(
                f"unknown owner {owner!r}{near_names(str(owner), owners)}. Owners: "
                f"{', '.join(sorted(owners.union(self.idle_owners)))}"
            )
        return sum(row.state == state and owner in (None, row.owner) for row in self.rows)

    def coverage(self, state: str = KERNEL, operator: str | None = None) -> float:
        """Return the share of multiply-accumulates in a state, of one kind of operator or of all.

        Raises:
            UserError: the state is unknown, or the model has no such operator.
        """
        _check_state(state)
        known = {row.operator for row in self.rows}
        if operator is not None and operator not in known:
            raise UserError(
                f"the report has no operator {operator!r}{near_names(str(operator), known)}"
            )
        rows = [row for row in self.rows if operator in (None, row.operator)]
        total = sum(row.macs for row in rows)
        return sum(row.macs for row in rows if row.state == state) / total if total else 0.0

    @property
    def quantized_part(self) -> float:
        """Return the share of all multiply-accumulates that is quantized."""
        return sum(self.coverage(state) for state in STATES if state != FLOAT)

    def why(self, name: str) -> tuple[Row, ...]:
        r"""Return the rows of an operator, of a module or of a kind of operator.

        `name` is the operator's name, the module's path, or a kind such as "aten.linear".

        `print(*report.why("encoder.layers.0"), sep="\n")` shows what became of a part of the model.

        Raises:
            UserError: no float operator has that name; the message suggests similar ones.
        """
        if not isinstance(name, str):
            raise UserError(
                f"why expects an operator name, a module path or an operator type, got {name!r}"
            )
        ways: tuple[Callable[[Row], bool], ...] = (
            lambda row: row.name == name,
            lambda row: row.module == name or row.module.startswith(f"{name}."),
            lambda row: row.operator == name,
        )
        for matches in ways:
            found = tuple(row for row in self.rows if matches(row))
            if found:
                return found
        known = {part for row in self.rows for part in (row.name, row.module, row.operator)} - {""}
        raise UserError(
            f"{name!r} is not the name, module or type of an operator in the "
            f"report{near_names(name, known)}"
        )

    def summary(self) -> list[tuple[str, str, str, str, int, int]]:
        """Return (operator, state, owner, kernel or reason, operators, multiply-accumulates) in groups."""
        return _summary(self.rows)

    def by_owner(self) -> list[tuple[str, str, str, str, int, int]]:
        """Return (owner, state, config, selector, operators, multiply-accumulates) in groups.

        Two quantizers of the same backend are separate groups, since their settings may differ.
        """
        owned = [row for row in self.rows if row.owner]
        return _grouped(owned, lambda row: (row.owner, row.state, row.config, row.selector))

    def headline(self) -> str:
        """Return one line: operators by state and owner, and the share of work that is quantized."""
        owners = Counter(row.owner for row in self.rows if row.owner)
        who = (
            ", ".join(f"{owner} {n}" for owner, n in sorted(owners.items())) or "nothing quantized"
        )
        part = f"{self.quantized_part:.1%} of multiply-accumulates quantized"
        return f"{self._where_operators_are()} ({who}), {part}; graph: {self.counts}"

    def _where_operators_are(self) -> str:
        """Return the stage, and how many operators are in how many kernels of each kind."""
        parts: list[str] = []
        for state in (state for state in STATES if self.count(state)):
            regions = {row.region for row in self.rows if row.state == state}
            number = self.count(state)
            found = f"{number:,}" if parts else counted(number, "operator")
            kernels = state in _KERNELS and f"in {counted(len(regions), state, _KERNELS[state])}"
            parts.append(f"{found} {kernels or _ENDS.get(state, state)}")
        stage = f"{self.stage}{f' for {self.target}' if self.target else ''}"
        return f"{stage}: {', '.join(parts) or 'no float operators'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data; `schema` is the version of its form."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=False))
        return {"schema": SCHEMA, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Return the report for the data of `to_dict`.

        Raises:
            ConfigError: fields or values are not those of a report of this release.
        """
        try:
            fields_alone = {**data}
            if fields_alone.pop("schema", None) != SCHEMA:
                raise ValueError(f"schema must be {SCHEMA}")
            report: Report = _REPORT.read(fields_alone, "report")
            states = {row.state for row in report.rows}
            if report.stage not in _STAGES or not states.issubset(STATES):
                raise ValueError("unknown stage or row state")
            return report
        except ValueError as error:
            wanted = ", ".join(field.name for field in fields(cls))
            raise ConfigError(
                f"not a report from this qompose version ({error}); expected fields: {wanted}"
            ) from error

    def to_json(self, indent: int | None = 2) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def details(self, width: int = 80) -> str:
        """Return a line for every operator, in the order of the program, with its module and reason."""
        rows = [(r.name, r.module, r.state, r.explanation) for r in self.rows]
        header = ("operator", "module", "state", "kernel, rule or reason")
        return as_text([Table(header, tuple(rows))], width)

    def to_markdown(self) -> str:
        """Return totals, the summary, the owners and all remarks as Markdown."""
        blocks: list[Block] = [f"{line}  " for line in self._totals()]
        blocks.append(Table(_HEADER, tuple(_summary(_moves_as_one(self.rows)))))
        blocks += [Table(_OWNERS, tuple(self.by_owner()))] if self.by_owner() else []
        return as_markdown([*blocks, *self._remarks()]).rstrip()

    def save(self, path: str | PathLike[str], comparison: Comparison | None = None) -> None:
        """Write the report to a file: a page for browsers (`.html`), data (`.json`) or Markdown (`.md`).

        The page is one file that loads nothing. An existing file is replaced atomically.

        Args:
            path: the file; its suffix selects the format.
            comparison: a result of `qompose.compare`, to show the error of each operator.

        Raises:
            UserError: the suffix is none of these; a comparison is given for `.json`, which has no place for
                it; or `comparison` is not a comparison, or of another model.
            OSError: the file cannot be written.
        """
        if not isinstance(path, (str, PathLike)):
            raise UserError(f"save expects a file path, got {path!r}")
        if comparison is not None:
            operators = {row.name: row.operator for row in self.rows}
            check_comparison(comparison, self.fingerprint, operators, self.stage)
        kind = Path(path).suffix.lower()
        if kind == ".html":
            text = self._page(comparison)
        elif kind == ".md":
            more = [] if comparison is None else [comparison.to_markdown()]
            text = "\n\n".join([self.to_markdown(), *more])
        elif kind == ".json" and comparison is None:
            text = self.to_json()
        else:
            kinds = (
                ".html, .json or .md" if comparison is None else ".html or .md with a comparison"
            )
            raise UserError(f"{path} must end in {kinds}")
        with draft_of(Path(path)) as draft:
            draft.write_bytes(f"{text.rstrip()}\n".encode())

    def _page(self, comparison: Comparison | None) -> str:
        from qompose.reporting.html_page import page  # here: jinja2 takes a tenth of a second

        return page(
            measured_rows(self.rows, comparison),
            comparison,
            data={
                "report": self.to_dict(),
                "comparison": None if comparison is None else comparison.to_dict(),
            },
            totals=self._totals(),
            remarks={
                "Requantizations": [*map(str, self.requantizations)],
                "Conflicts": self.conflicts,
                "Rewrites": self.rewrites,
                "Notes": self.notes,
            },
            states=_BORDERS,
        )

    def _totals(self) -> list[str]:
        total = sum(row.macs for row in self.rows)
        shares = [(self.coverage(state), _ENDS.get(state, state)) for state in STATES]
        share = ", ".join(f"{part:.1%} {state}" for part, state in shares if part)
        lines = [self._where_operators_are()]
        lines += [f"{counted(total, 'multiply-accumulate')}: {share}"] if total else []
        if self.bytes_after and self.bytes_before:
            ratio = self.bytes_after / self.bytes_before
            in_file = f", {self.file_bytes:,} in a file" if self.file_bytes else ""
            lines.append(
                f"model bytes: {self.bytes_before:,} -> {self.bytes_after:,} ({ratio:.1%}){in_file}"
            )
        rest = str(self._not_in_kernels())
        lines += [f"also in the graph: {rest}"] if rest != "nothing" else []
        if self.requantizations:
            number = counted(len(self.requantizations), "requantization")
            lines.append(f"{number} between different specifications")
        return lines

    def _not_in_kernels(self) -> Counts:
        """Return the counts without the kernels, where the first line has them all."""
        shown = {row.region for row in self.rows if row.state in _KERNELS}
        return replace(self.counts, kernels=0) if len(shown) == self.counts.kernels else self.counts

    def _remarks(self) -> list[str]:
        meetings = map(str, self.requantizations)
        remarks = (*meetings, *self.conflicts, *_few_of_a_kind(self.rewrites), *self.notes)
        return [f"- {line}" for line in remarks]

    def _blocks(self) -> list[Block]:
        """Return the totals, a table with a part for each state, one of owners, and the remarks."""
        rows: list[tuple[object, ...]] = []
        for state in STATES:
            in_state = [row for row in _moves_as_one(self.rows) if row.state == state]
            groups = _grouped(in_state, lambda row: (row.operator, row.explanation))
            rows += [(state,), *((f"  {name}", *rest) for name, *rest in groups)] if groups else []
        header = ("operator", "kernel, rule or reason", "operators", "MACs")
        table = Table(header, tuple(rows), _COLORS)
        apart = {(row.owner, row.config, row.selector) for row in self.rows if row.owner}
        owners = [Table(_OWNERS, tuple(self.by_owner()))] if len(apart) > 1 else []
        return [*self._totals(), *([table] if rows else []), *owners, *self._remarks()]


_STAGES = ("prepared", "converted", "reference", "lowered")
_FEW = 4
"""Up to how many rewrites of one kind are printed one by one."""


def _few_of_a_kind(rewrites: Sequence[str]) -> Iterator[str]:
    """Yield the rewrites, but one line for a kind with many; `gptq on linear: ...` has the kind gptq."""
    by_kind: dict[str, list[str]] = {}
    for line in rewrites:
        by_kind.setdefault(re.split(" on | of |: ", line, maxsplit=1)[0], []).append(line)
    for kind, lines in by_kind.items():
        many = f"{kind}: {len(lines)} rewrites (listed in `report.rewrites`)"
        yield from lines if len(lines) <= _FEW else [many]


def _check_state(state: object) -> None:
    if state not in STATES:
        close = near_names(str(state), STATES)
        raise UserError(f"unknown state {state!r}{close}. States: {', '.join(STATES)}")


_HEADER = ("operator", "state", "owner", "kernel or reason", "operators", "MACs")
_OWNERS = ("owner", "state", "config", "selector", "operators", "MACs")


def _summary(rows: Iterable[Row]) -> list[Any]:
    return _grouped(
        rows, lambda row: (row.operator, row.state, row.owner, row.kernel or row.reason)
    )


def _grouped(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> list[Any]:
    """Count rows and their multiply-accumulates by key, the most work first."""
    operators: Counter[tuple[str, ...]] = Counter()
    work: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        operators[key(row)] += 1
        work[key(row)] += row.macs
    ordered = sorted(operators, key=lambda key: (-work[key], key))
    return [(*key, operators[key], work[key]) for key in ordered]


_KINDS = 4
"""How many kinds of operators that only move values are named."""


def _moves_as_one(rows: Iterable[Row]) -> list[Row]:
    """Return rows in which all float operators that only move, cast or copy values are of one kind."""
    rows = list(rows)
    moves = [r for r in rows if r.state == FLOAT and not r.macs and only_moves(r.operator)]
    if len({(row.operator, row.explanation) for row in moves}) < 2:
        return rows
    kinds = Counter(row.operator.removeprefix("aten.") for row in moves).most_common()
    named = [f"{count} {kind}" for kind, count in kinds[:_KINDS]]
    rest = sum(count for _, count in kinds[_KINDS:])
    words = ", ".join([*named, *([f"{rest} others"] if rest else [])])
    merged = {id(row) for row in moves}
    return [
        replace(row, operator="moves, casts, copies", owner="", reason=words)
        if id(row) in merged
        else row
        for row in rows
    ]


_NAMED = 3
"""How many operators tell a model in a message."""


def check_comparison(
    comparison: object, fingerprint: str, operators: Mapping[str, str], stage: str
) -> None:
    """Make sure that something is a comparison of a report's model.

    Args:
        fingerprint: of the report's model; "" of a report that an earlier release wrote.
        operators: by the names of the report's rows, what operators they are.
        stage: of the report.

    Raises:
        UserError: it is not a comparison, or is one of another model; the message names both.
    """
    if not isinstance(comparison, Comparison):
        raise UserError(
            f"comparison must be the result of qompose.compare, got {type(comparison).__name__}"
        )
    compared = {row.name: row.operator for row in comparison if row.name and row.state}
    known = bool(fingerprint and comparison.fingerprint)
    same = fingerprint == comparison.fingerprint if known else compared.items() <= operators.items()
    if not same:
        raise UserError(
            "the comparison and the report belong to different models: the comparison is of "
            f"{comparison.reference} and {comparison.other} programs with {_some(compared)} "
            f"(hash {comparison.fingerprint[:8] or 'unknown'}), and the report is of a {stage} "
            f"program with {_some(operators)} (hash {fingerprint[:8] or 'unknown'})"
        )


def _some(operators: Iterable[str]) -> str:
    """Return the first of a model's operators, by which people know it."""
    names = list(operators)
    more = f" and {len(rest):,} more" if (rest := names[_NAMED:]) else ""
    return (", ".join(names[:_NAMED]) or "no operators in the report") + more


@dataclass(frozen=True)
class Counts:
    """How many of each stand in a graph and in the bodies inside it.

    `cast` are conversions between float types that a specification asked for; `kernels` counts the regions
    that a kernel replaced, not the operators it consists of.
    """

    observers: int = 0
    quantize: int = 0
    dequantize: int = 0
    choose_qparams: int = 0
    cast: int = 0
    kernels: int = 0

    def __str__(self) -> str:
        """Return the counts that are not zero in one line, "nothing" where all are."""
        named = ((_ONE.get(name, name) if n == 1 else name, n) for name, n in vars(self).items())
        return ", ".join(f"{n:,} {name}" for name, n in named if n) or "nothing"


_ONE = {"observers": "observer", "kernels": "kernel"}
_COUNT = plain("a non-negative integer", lambda value: is_integer(value) and value >= 0)
_REPORT = of_type(Report, {int: _COUNT})
