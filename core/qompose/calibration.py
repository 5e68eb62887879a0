# SPDX-License-Identifier: Apache-2.0
"""Calibrate: run batches through a prepared model, so that its observers see the data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.fx import GraphModule

from qompose.errors import CalibrationError, UserError
from qompose.plan import record_of


def calibrate(
    prepared: GraphModule,
    batches: Iterable[Any],
    *,
    transform: Callable[[Any], Any] | None = None,
    progress: bool | None = None,
) -> GraphModule:
    """Run every batch through a prepared model, without gradients, and return the model.

    Args:
        batches: tensors, tuples of positional arguments or dicts of keyword arguments; a DataLoader fits.
        transform: turns what `batches` yields into the model's inputs, as `lambda batch: batch[0]`.
        progress: whether to show a progress bar; None shows it on a terminal.

    Raises:
        StageError: the model was not prepared.
        UserError: `batches` cannot be iterated.
        CalibrationError: there was no batch, or one does not fit the model (its number is named).
    """
    record_of(
        prepared,
        stages=("prepared",),
        function="calibrate",
        remedy="Call qompose.prepare_pt2e first.",
    )
    try:
        iterator = iter(batches)
    except TypeError:
        raise UserError(
            f"calibrate takes an iterable of batches, and got {type(batches).__name__}; for one batch "
            "pass [batch]"
        ) from None
    shown = sys.stderr.isatty() if progress is None else progress
    total = len(batches) if isinstance(batches, Sized) else None
    count = 0
    with _bar(shown) as bar, torch.no_grad():
        task = bar.add_task("calibrating", total=total)
        for count, batch in enumerate(iterator, start=1):
            _run(prepared, transform(batch) if transform else batch, count)
            bar.advance(task)
    if count == 0:
        raise CalibrationError(
            "calibrate got no batches: the iterable was empty (or used up before)"
        )
    return prepared


def _bar(shown: bool) -> Progress:
    from rich.console import Console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def _run(prepared: GraphModule, batch: Any, number: int) -> None:
    try:
        if isinstance(batch, Tensor):
            prepared(batch)
        elif isinstance(batch, Mapping):
            prepared(**batch)
        elif isinstance(batch, (tuple, list)):
            prepared(*batch)
        else:
            raise CalibrationError(
                f"it is a {type(batch).__name__}, not a tensor, tuple or dict; "
                "pass transform= to make one of it"
            )
    except CalibrationError as error:
        raise CalibrationError(f"calibration batch {number} cannot be used: {error}") from error
    except Exception as error:
        raise CalibrationError(
            f"calibration batch {number} does not fit the model: {type(error).__name__}: {error}. "
            f"The batch is {_describe(batch)}."
        ) from error


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return "(" + ", ".join(map(_describe, batch)) + ")"
    return type(batch).__name__
