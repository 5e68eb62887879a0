# SPDX-License-Identifier: Apache-2.0
"""Compare: two forms of a program run side by side, value by value, and a table of where they differ.

The other program runs twice beside the reference: by itself, for what its values end up as, and with the
reference's values in the place of its own, for what each operator adds. A lowered one is compared with its
converted model in the same way, which tells what a kernel does from what quantization does. All are stepped
through a value at a time (`qompose.diagnosis.stepping`), and nothing but sums is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from qompose.batches import check_limit, iterated, run_batch
from qompose.diagnosis.comparison import Comparison
from qompose.diagnosis.sides import OUTPUTS, Side, side_of
from qompose.diagnosis.tables import OutputTable, ValueTable
from qompose.diagnosis.tallies import Metric
from qompose.errors import (
    BatchError,
    CalibrationError,
    InputError,
    QomposeError,
    StageError,
    UserError,
)


class _Table(Protocol):
    """What is filled by one input after the other."""

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Run both programs on an input."""

    def comparison(self, batches: int) -> Comparison:
        """Return what was found."""


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
    """Say where two forms of one program differ, by how much, and why.

    Memory grows neither with the inputs nor with the layers: values are compared as they are computed.

    Args:
        reference, other: an exported, prepared, converted or lowered program each. Of what can only be
            called, as a program of another runtime or a compiled one, the outputs are compared.
        inputs: tensors, tuples of positional arguments or dicts of keyword arguments, as for `calibrate`.
        converted: what `other` was lowered from, to tell errors of kernels from those of rounding. A lowered
            model knows it, unless it was pickled.
        transform: turns what `inputs` yields into the program's inputs.
        limit: how many inputs to take at most.
        metrics: by name, functions of a value of the reference and the other program's, which return a
            number. The table has their means over all inputs.

    Raises:
        UserError: a program is none, `inputs` cannot be iterated, an option is none, or a metric returned no
            number; the programs have nothing in common, or `converted` is of another.
        StageError: a program is in training, or `converted` is of another stage.
        MemberError: a metric raised an error.
        CalibrationError: there was no input, or one does not fit the programs.
    """
    one, two = side_of(reference, "reference"), side_of(other, "other program")
    check_limit(limit)
    own = _metrics(metrics)
    table: _Table
    if one.graph is None or two.graph is None:
        table = OutputTable(one, two, own)
    else:
        table = ValueTable(one, two, _converted(one, two, converted), own)
    number = 0
    with torch.no_grad():
        for number, batch in enumerate(islice(iterated(inputs, "compare"), limit), start=1):
            _run(batch, transform, number, table)
    if not number:
        raise CalibrationError("compare got no inputs: the iterable was empty (or used up before)")
    return table.comparison(number)


def _run(batch: Any, transform: Callable[[Any], Any] | None, number: int, table: _Table) -> None:
    """Count a batch; what is no fault of its own, as an error of a metric, is not put down to it."""
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
        raise UserError(f"metrics={given!r} are no functions by name, as {{'largest': function}}")
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
        what = f"a {side.stage} model" if side.stage != OUTPUTS else "what can only be called"
        raise StageError(
            f"converted= is what convert_pt2e returned, beside which kernels are judged, and not {what}"
        )
    if _fingerprint(side) != _fingerprint(two):
        raise UserError(
            "converted= is of another program, or one with other parameters: pass the model that was lowered"
        )
    return side.graph


def _fingerprint(side: Side) -> str:
    return "" if side.record is None else side.record.fingerprint
