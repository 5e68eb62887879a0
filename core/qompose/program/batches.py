# SPDX-License-Identifier: Apache-2.0
"""Batches of inputs as users hand them in, matched with the signature of a program."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.errors import BatchError, CalibrationError, InputError, UserError
from qompose.program.graph import pytree_info


def iterated(batches: Iterable[Any], function: str) -> Iterator[Any]:
    """Return an iterator over batches.

    Raises:
        UserError: they cannot be iterated, or are a single batch.
    """
    check_several(batches, function)
    try:
        return iter(batches)
    except TypeError:
        raise UserError(
            f"{function} takes an iterable of batches, and got {type(batches).__name__}; for one batch "
            "pass [batch]"
        ) from None


def check_several(batches: object, function: str) -> None:
    """Make sure that batches are no single one: going through a tensor or a dict gives rows or names.

    Raises:
        UserError: they are.
    """
    if isinstance(batches, (Tensor, Mapping)):
        rows = isinstance(batches, Tensor) and batches.dim() > 1
        more = "; where its slices are the batches, list(tensor)" if rows else ""
        raise UserError(
            f"{function} takes several batches, and got a single one, {describe(batches)}: pass [batch]{more}"
        )


def check_limit(limit: object) -> None:
    """Make sure that a limit is None or a number of batches.

    Raises:
        UserError: it is neither.
    """
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise UserError(f"limit={limit!r} is no number of batches, of which there is one at least")


def run_batch(
    call: Callable[..., Any],
    batch: Any,
    transform: Callable[[Any], Any] | None,
    number: int,
    what: str = "calibration batch",
) -> Any:
    """Call a program, or what takes its place, with the arguments that a batch stands for.

    Args:
        batch: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        transform: turns what was given into that.
        number, what: of the batch, and what it is called, for messages.

    Raises:
        BatchError: it does not fit, or what was called raised an error.
    """
    try:
        batch = transform(batch) if transform else batch
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise BatchError(number, f"cannot be used: transform raised {told}", what) from error
    try:
        args, kwargs = _arguments(batch)
        return call(*args, **kwargs)
    except CalibrationError as error:
        raise BatchError(number, f"cannot be used: {error}{_holds(batch)}", what) from error
    except Exception as error:
        told = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise BatchError(
            number,
            f"does not fit the model: {told}. The batch is {describe(batch)}.{_surplus(call, batch)}",
            what,
        ) from error


def _surplus(call: Callable[..., Any], batch: Any) -> str:
    """Say what to do where a batch has more in it than a program takes: labels, as a rule."""
    graph = getattr(call, "graph", None)
    info = None if graph is None else pytree_info(graph)
    if info is None or not isinstance(batch, (tuple, list)) or len(batch) <= len(info.orig_args):
        return ""
    taken = info.orig_args
    part = "batch[0]" if len(taken) == 1 else f"batch[:{len(taken)}]"
    return (
        f" The model takes {', '.join(taken) or 'no arguments'}: pass transform= to take that out of a "
        f"batch, for example transform=lambda batch: {part}."
    )


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


def _holds(batch: Any) -> str:
    """Say whether a batch has NaN or infinite values, which may come out of a model as NaN."""
    floats = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    floats = [leaf for leaf in floats if leaf.is_floating_point()]
    if any(bool(leaf.isnan().any()) for leaf in floats):
        return "; the batch itself holds NaN"
    if any(bool(leaf.isinf().any()) for leaf in floats):
        return "; the batch itself holds infinite values"
    return ""


def describe(batch: Any) -> str:
    """Return a batch as types and sizes."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return "(" + ", ".join(map(describe, batch)) + ")"
    return type(batch).__name__


def binder(program: GraphModule) -> Callable[..., list[Any]]:
    """Return what takes a program's arguments and returns the value of each of its placeholders."""
    graph = Graph()
    graph._codegen = copy.copy(program.graph._codegen)
    placeholders: list[Node] = []
    for node in program.graph.find_nodes(op="placeholder"):
        placeholders.append(graph.node_copy(node))
    graph.output(placeholders)
    info = pytree_info(graph)
    if info is not None:
        graph._codegen.pytree_info = info._replace(out_spec=None)  # type: ignore[attr-defined]
    bound: Callable[..., list[Any]] = GraphModule({}, graph)
    return bound
