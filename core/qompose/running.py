# SPDX-License-Identifier: Apache-2.0
"""Control flow as plain Python, for bodies that hold observers.

Torch's operators trace their bodies when gradients are recorded; an observer would then see fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

Body = Callable[..., Any]

RAN_KEY = "qompose_ran"
"""Key in the `meta` of a body that ran: the observers inside one that did not saw nothing."""


def _run(body: Body, *values: Any) -> Any:
    if isinstance(body, GraphModule):
        body.meta[RAN_KEY] = True
    return body(*values)


def run_cond(predicate: Any, if_true: Body, if_false: Body, operands: Sequence[Any]) -> Any:
    """Run one of two bodies, as `torch.ops.higher_order.cond` does."""
    return _run(if_true if bool(predicate) else if_false, *operands)


def run_while_loop(
    condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any]
) -> tuple[Any, ...]:
    """Run a body while a condition holds, as `torch.ops.higher_order.while_loop` does."""
    values = tuple(carried)
    while bool(_run(condition, *values, *additional)):
        values = tuple(_run(body, *values, *additional))
    return values


def run_scan(
    body: Body, carried: Sequence[Any], slices: Sequence[Tensor], additional: Sequence[Any]
) -> list[Any]:
    """Run a body on each slice in turn, as `torch.ops.higher_order.scan` does.

    Returns:
        the last carried values, and each other output stacked along a new first dimension.
    """
    values, rows = list(carried), []
    for index in range(len(slices[0])):
        outputs = _run(body, *values, *(x[index] for x in slices), *additional)
        values = list(outputs[: len(values)])
        rows.append(outputs[len(values) :])
    return [*values, *_stacked(rows)]


def run_map(body: Body, slices: Sequence[Tensor], additional: Sequence[Any]) -> list[Any]:
    """Run a body on each slice and stack the outputs, as `torch.ops.higher_order.map_impl` does."""
    return _stacked(
        [_run(body, *(x[index] for x in slices), *additional) for index in range(len(slices[0]))]
    )


def _stacked(rows: Sequence[Sequence[Any]]) -> list[Any]:
    columns = zip(*rows, strict=True)
    return [None if column[0] is None else torch.stack(column) for column in columns]


_control = torch.ops.higher_order
RUNNERS: dict[Any, Callable[..., Any]] = {
    _control.cond: run_cond,
    _control.while_loop: run_while_loop,
    _control.scan: run_scan,
    _control.map_impl: run_map,
}
"""By operator: the function that does the same. Wrappers of grad mode and autocast run as they are."""
