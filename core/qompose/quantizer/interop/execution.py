# SPDX-License-Identifier: Apache-2.0
"""Running some of a program's operators on given values, without a trace in the program or the process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from qompose.quantizer.interop.comparing import SYMBOLIC, content_of

SEED = 2013
"""Of whatever is drawn, so that two runs draw the same."""


class NotRunnable(Exception):  # noqa: N818 - nobody but this module's callers sees it
    """A place cannot be run: a kind of value is not known, or an operator failed."""


def random_like(example: Any, generator: torch.Generator, share: float) -> Any:
    """Return a value of the kind of an example, with its strides.

    Floating point numbers are normal, in every other row eight times as large: some of what operators do
    shows on small numbers and some on large ones. Of integers and truth values, `share` are one.
    """
    if isinstance(example, (tuple, list)):
        return type(example)(random_like(part, generator, share) for part in example)
    if not isinstance(example, Tensor):
        return _number(example)
    sizes = [_number(size) for size in example.shape]
    strides = [_number(stride) for stride in example.stride()]
    extent = _extent(sizes, strides)
    if example.dtype.is_complex or example.dtype.is_floating_point:
        kind = torch.complex64 if example.dtype.is_complex else torch.float32
        row = torch.arange(extent) // (max(1, sizes[-1]) if len(sizes) > 1 else 1)
        made = torch.randn(extent, generator=generator, dtype=kind) * (1 + 7 * (row % 2))
    else:  # zero and one are indices into any table
        made = torch.rand(extent, generator=generator) < share
    return made.to(example.device, example.dtype).as_strided(sizes, strides)


def _extent(sizes: list[int], strides: list[int]) -> int:
    """Return the elements of memory that a tensor spans."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _number(value: Any) -> Any:
    """Return the number that a symbolic one had when the program was exported."""
    if isinstance(value, SYMBOLIC):
        if not value.node.has_hint():
            raise NotRunnable(f"{value} depends on data")
        return value.node.hint
    if value is None:
        raise NotRunnable("export recorded no value")
    return value


def run(nodes: tuple[Node, ...], inputs: Mapping[Node, Any], wanted: list[Node]) -> dict[Node, Any]:
    """Run operators and return the wanted values. Inputs, constants and generators stay as they are."""
    kept = {*wanted}
    own = _Copies() if any(map(_may_write, nodes)) else None
    values = {node: own.of(value) if own else value for node, value in inputs.items()}
    readers = Counter(operand for node in nodes for operand in node.all_input_nodes)
    with _seeded(values.values()):
        for node in nodes:
            for operand in node.all_input_nodes:
                if operand.op == "get_attr" and operand not in values:
                    content = content_of(operand)
                    values[operand] = own.of(content) if own else content
            values[node] = _called(node, values)
            for operand in node.all_input_nodes:
                readers[operand] -= 1
                if not readers[operand] and operand not in kept:
                    del values[operand]
    return {node: values[node] for node in wanted}


@contextmanager
def _seeded(values: Iterable[Any]) -> Iterator[None]:
    """Let operators that draw numbers draw the same each time, and leave no trace of it."""
    gpus = {v.device.index for v in values if isinstance(v, Tensor) and v.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(gpus)):
        torch.default_generator.manual_seed(SEED)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(SEED)
        yield


def _called(node: Node, values: Mapping[Node, Any]) -> Any:
    if node.target is torch.ops.higher_order.while_loop:
        raise NotRunnable(
            f"{node.name} might not end on other values than those that it is made for"
        )

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return values[leaf]
        return _number(leaf) if isinstance(leaf, SYMBOLIC) else leaf

    args, kwargs = map_aggregate((node.args, node.kwargs), argument)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # operators of others fail in ways of their own
        raise NotRunnable(f"{node.name} failed: {error}") from error


def _may_write(node: Node) -> bool:
    """Tell whether an operator may write to what it reads."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    schema = getattr(node.target, "_schema", None)
    updates_statistics = schema is not None and schema.name in _UNSAID
    return updates_statistics or bool(schema is not None and schema.is_mutable)


_UNSAID = ("aten::batch_norm", "aten::instance_norm")


class _Copies:
    """Copies of tensors, which share memory where the tensors do."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        return copy.deepcopy(value.detach(), self._memo) if isinstance(value, Tensor) else value
