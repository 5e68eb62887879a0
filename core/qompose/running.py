# SPDX-License-Identifier: Apache-2.0
"""Control flow as plain Python, for bodies that hold observers.

Torch's operators trace their bodies when gradients are recorded; an observer would then see fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

Body = Callable[..., Any]

RAN_KEY = "qompose_ran"
"""Key in the `meta` of a body that ran: the observers inside one that did not saw nothing."""


Running: TypeAlias = Generator[tuple[Body, Sequence[Any]], Any, Any]
"""An operator that runs: it yields a body with its operands, and is sent what that returned."""


def cond_steps(predicate: Any, if_true: Body, if_false: Body, operands: Sequence[Any]) -> Running:
    """Run one of two bodies."""
    return (yield (if_true if bool(predicate) else if_false), operands)


def while_loop_steps(
    condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any]
) -> Running:
    """Run a body while a condition holds."""
    values = tuple(carried)
    while bool((yield condition, (*values, *additional))):
        values = tuple((yield body, (*values, *additional)))
    return values


def scan_steps(
    body: Body, carried: Sequence[Any], slices: Sequence[Tensor], additional: Sequence[Any]
) -> Running:
    """Run a body on each slice in turn."""
    values, rows = list(carried), []
    for index in range(len(slices[0])):
        outputs = yield body, (*values, *(x[index] for x in slices), *additional)
        values = list(outputs[: len(values)])
        rows.append(outputs[len(values) :])
    return [*values, *_stacked(rows)]


def map_steps(body: Body, slices: Sequence[Tensor], additional: Sequence[Any]) -> Running:
    """Run a body on each slice and stack the outputs."""
    rows = []
    for index in range(len(slices[0])):
        rows.append((yield body, (*(x[index] for x in slices), *additional)))
    return _stacked(rows)


def _run(running: Running) -> Any:
    """Run the bodies that are asked for."""
    answer = None
    while True:
        try:
            body, operands = running.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(body, GraphModule):
            body.meta[RAN_KEY] = True
        answer = body(*operands)


def run_cond(predicate: Any, if_true: Body, if_false: Body, operands: Sequence[Any]) -> Any:
    """Run one of two bodies, as `torch.ops.higher_order.cond` does."""
    return _run(cond_steps(predicate, if_true, if_false, operands))


def run_while_loop(
    condition: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any]
) -> Any:
    """Run a body while a condition holds, as `torch.ops.higher_order.while_loop` does."""
    return _run(while_loop_steps(condition, body, carried, additional))


def run_scan(
    body: Body, carried: Sequence[Any], slices: Sequence[Tensor], additional: Sequence[Any]
) -> Any:
    """Run a body on each slice in turn, as `torch.ops.higher_order.scan` does.

    Returns:
        the last carried values, and each other output stacked along a new first dimension.
    """
    return _run(scan_steps(body, carried, slices, additional))


def run_map(body: Body, slices: Sequence[Tensor], additional: Sequence[Any]) -> Any:
    """Run a body on each slice and stack the outputs, as `torch.ops.higher_order.map_impl` does."""
    return _run(map_steps(body, slices, additional))


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

STEPS: dict[Any, Callable[..., Running]] = {
    _control.cond: cond_steps,
    _control.while_loop: while_loop_steps,
    _control.scan: scan_steps,
    _control.map_impl: map_steps,
}
"""By operator, and by the function that does the same: how it runs its bodies."""
STEPS.update({runner: STEPS[operator] for operator, runner in RUNNERS.items()})
