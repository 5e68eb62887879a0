# SPDX-License-Identifier: Apache-2.0
"""Calibrate: run batches through a prepared model, so that its observers see the data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.errors import BatchError, CalibrationError, UserError
from qompose.graph import value_of
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
        CalibrationError: there was no batch, or one does not fit the model (its number is named), or has
            another value than the one with which the model was exported for what is no tensor.
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
        args, kwargs = _arguments(batch)
        for objection in _changed_constants(prepared, args, kwargs):
            raise CalibrationError(objection)
        prepared(*args, **kwargs)
    except CalibrationError as error:
        raise BatchError(number, f"cannot be used: {error}{_holds(batch)}") from error
    except Exception as error:
        raise BatchError(
            number,
            f"does not fit the model: {type(error).__name__}: {error}. "
            f"The batch is {_describe(batch)}.",
        ) from error


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    raise CalibrationError(
        f"it is a {type(batch).__name__}, not a tensor, tuple or dict; "
        "pass transform= to make one of it"
    )


def _changed_constants(
    prepared: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[str]:
    """Say which arguments are not the constants that they were when the model was exported.

    The model computes with those, whatever it is given.
    """
    info = getattr(prepared.graph._codegen, "pytree_info", None)
    if info is None or info.in_spec is None:
        return
    placeholders = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    positional, by_name = pytree.tree_unflatten(placeholders, info.in_spec)
    wanted = {**dict(zip(info.orig_args, positional, strict=False)), **by_name}
    given = {**dict(zip(info.orig_args, args, strict=False)), **kwargs}
    for name in wanted.keys() & given.keys():
        nodes, spec = pytree.tree_flatten(wanted[name])
        values, own = pytree.tree_flatten(given[name])
        for node, value in zip(nodes, values, strict=True) if spec == own else ():
            if _is_another(value, node):
                yield (
                    f"its {node.target} is {_describe(value, True)}, and the model was exported with the "
                    f"constant {value_of(node)!r}: export it again for another"
                )


def _is_another(value: object, node: Node) -> bool:
    wanted = value_of(node)
    if "val" not in node.meta or isinstance(
        wanted, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    ):
        return False
    return isinstance(value, Tensor) or value != wanted


def _holds(batch: Any) -> str:
    """Say whether a batch has NaN or infinite values, which may come out of a model as NaN."""
    floats = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    floats = [leaf for leaf in floats if leaf.is_floating_point()]
    if any(bool(leaf.isnan().any()) for leaf in floats):
        return "; the batch itself holds NaN"
    if any(bool(leaf.isinf().any()) for leaf in floats):
        return "; the batch itself holds infinite values"
    return ""


def _describe(batch: Any, values: bool = False) -> str:
    """Return a batch as types and sizes; with the values of what is no tensor where asked."""
    if values and not isinstance(batch, Tensor):
        return repr(batch)
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return "(" + ", ".join(map(_describe, batch)) + ")"
    return type(batch).__name__
