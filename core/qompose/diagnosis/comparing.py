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

from qompose.batches import iterated, run_batch
from qompose.diagnosis.comparison import Comparison
from qompose.diagnosis.sides import Side, side_of
from qompose.diagnosis.tables import OutputTable, ValueTable
from qompose.diagnosis.tallies import Metric
from qompose.errors import CalibrationError, UserError
from qompose.origins import source_of


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
        converted: what `other` was lowered from, to tell errors of kernels from those of rounding. If it is
            left out, that model is taken as long as the caller keeps it.
        transform: turns what `inputs` yields into the program's inputs.
        limit: how many inputs to take at most.
        metrics: by name, functions of a value of the reference and the other program's, which return a
            number. The table has their means over all inputs.

    Raises:
        UserError: a program is none, `inputs` cannot be iterated, or an option is none.
        StageError: a program is in training.
        CalibrationError: there was no input, or one does not fit the programs.
    """
    one, two = side_of(reference, "reference"), side_of(other, "other program")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise UserError(f"limit={limit!r} is no number of inputs, of which there is one at least")
    own = {} if metrics is None else dict(metrics)
    table: _Table
    if one.graph is None or two.graph is None:
        table = OutputTable(one, two, own)
    else:
        table = ValueTable(one, two, _converted(one, two, other, converted), own)
    number, called = 0, next((side.graph for side in (one, two) if side.graph), None)
    with torch.no_grad():
        for number, batch in enumerate(islice(iterated(inputs, "compare"), limit), start=1):
            run_batch(called, batch, transform, number, table.add)
    if not number:
        raise CalibrationError("compare got no inputs: the iterable was empty (or used up before)")
    return table.comparison(number)


def _converted(one: Side, two: Side, other: Any, given: GraphModule | None) -> GraphModule | None:
    """Return the converted model with whose regions kernels are compared; None if there is none to run."""
    if two.stage != "lowered" or one.stage in ("converted", "reference"):
        return None
    found = source_of(other) if given is None else given
    return None if found is None else side_of(found, "converted model").graph
