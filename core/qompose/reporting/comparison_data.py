# SPDX-License-Identifier: Apache-2.0
"""The result of `compare` as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from qompose.console import Block, Printable, Table, as_decibels
from qompose.errors import UserError, near_names
from qompose.json_codec import jsonable

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
            raise UserError(f"unknown cause {cause!r}; causes: {', '.join(CAUSES)}")
        return tuple(row for row in self.rows if row.cause == cause)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON data; an SQNR of equal values, which is infinite, is "inf"."""
        data: dict[str, Any] = jsonable(asdict(self))
        return data

    def _blocks(self) -> list[Block]:
        custom = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        cells = tuple(_cells(row, custom) for row in self.rows)
        head = f"{self.reference} and {self.other}: {len(self.rows)} values, {self.batches} inputs"
        lines = [f"- not in both: {name}" for name in self.unpaired]
        table = Table((*_HEADER, *custom), cells)
        return [head, *([table] if cells else []), *lines, *(f"- {note}" for note in self.notes)]


_HEADER = ("value", "state", "cause", "SQNR", "own SQNR", "error", "clipped", "range used")


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
