# SPDX-License-Identifier: Apache-2.0
"""Whether a comparison is of the model that a report is of: drawn together, two models would be a fiction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qompose.diagnosis.comparison import Comparison
from qompose.errors import UserError

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
        UserError: it is none, or one of another model; the message names both.
    """
    if not isinstance(comparison, Comparison):
        raise UserError(
            f"comparison= is what qompose.compare returned, and not {type(comparison).__name__}"
        )
    told = {row.name: row.operator for row in comparison if row.name and row.state}
    known = bool(fingerprint and comparison.fingerprint)
    same = fingerprint == comparison.fingerprint if known else told.items() <= operators.items()
    if not same:
        raise UserError(
            f"the comparison is of another model: it is of a {comparison.reference} and a {comparison.other} "
            f"program with {_some(told)}, parameters {comparison.fingerprint[:8] or 'unknown'}; the report "
            f"is of a {stage} one with {_some(operators)}, parameters {fingerprint[:8] or 'unknown'}"
        )


def _some(operators: Iterable[str]) -> str:
    """Return the first of a model's operators, by which people know it."""
    names = list(operators)
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "no operators that have a row") + more
