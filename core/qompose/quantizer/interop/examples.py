# SPDX-License-Identifier: Apache-2.0
"""Example values of operators that a foreign transform made.

It may leave none, those of the operator that it replaced, or fake tensors of a mode of its own. So each
operator is run on example values of the program that was transformed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qompose.program.graph import value_of
from qompose.quantizer.interop.comparing import content_of

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class Examples:
    """Computes example values in the fake mode of a program; where it has none, none are known."""

    def __init__(self, program: GraphModule) -> None:
        modes = (getattr(value_of(node), "fake_mode", None) for node in program.graph.nodes)
        self._mode = next((mode for mode in modes if mode is not None), None)
        values = (value_of(node) for node in program.graph.nodes)
        self._symbols = {symbol for value in values for symbol in _symbols(value)}

    def of_constant(self, read: Node) -> Any:
        """Return an example of what a get_attr node reads."""
        content = content_of(read)
        if not isinstance(content, Tensor) or self._mode is None:
            return content
        with self._mode:
            return torch.empty_strided(
                content.shape, content.stride(), dtype=content.dtype, device=content.device
            )

    def of_call(self, node: Node, known: Mapping[Node, Any]) -> Any:
        """Return what an operator gives for the `known` values of what it reads.

        What its node's meta says is returned where it agrees, and where the operator cannot be run. Symbols
        that a transform invented are the numbers that they stood for. None if nothing is known.
        """
        recorded = self._own(value_of(node))
        if any(known.get(operand) is None for operand in node.all_input_nodes):
            return recorded
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        try:
            with self._tracing():
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # a foreign operator may have no fake kernel, and fails in its own way
            return recorded
        as_it_was = recorded is value_of(node) and self._is_example(recorded, value)
        return recorded if as_it_was else value

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Run operators as export does; what they find out about sizes is forgotten."""
        disabled, _LOG.disabled = _LOG.disabled, True  # it writes failures to standard error
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                if self._mode is not None:
                    stack.enter_context(self._mode)
                    stack.enter_context(enable_python_dispatcher())
                sizes = getattr(self._mode, "shape_env", None)
                if sizes is not None:
                    stack.enter_context(sizes.suppress_guards())
                    stack.enter_context(sizes.ignore_fresh_unbacked_symbols())
                yield
        finally:
            _LOG.disabled = disabled

    def _is_example(self, recorded: Any, value: Any) -> bool:
        """Tell whether a recorded value is of the kind that was computed; that may have fixed a size."""
        if not isinstance(recorded, Tensor) or not isinstance(value, Tensor):
            return False
        return recorded.dtype == value.dtype and _hints(recorded) == _hints(value)

    def _own(self, recorded: Any) -> Any:
        """Return a recorded value in the program's mode and symbols, None where a size is not known."""
        if isinstance(recorded, (tuple, list)):
            return type(recorded)(self._own(part) for part in recorded)
        if self._mode is None or getattr(recorded, "fake_mode", None) is None:
            return recorded
        ours = recorded.fake_mode is self._mode
        if ours and self._symbols.issuperset(_symbols(recorded)):
            return recorded
        numbers = [self._number(size, ours) for size in (*recorded.shape, *recorded.stride())]
        if any(number is None for number in numbers):
            return None
        rank = recorded.dim()
        with self._mode:
            return torch.empty_strided(
                numbers[:rank], numbers[rank:], dtype=recorded.dtype, device=recorded.device
            )

    def _number(self, size: Any, ours: bool) -> Any:
        """Return a size that the program knows, or the number that it was when it was recorded."""
        if not isinstance(size, torch.SymInt) or (
            ours and self._symbols.issuperset(size.node.expr.free_symbols)
        ):
            return size
        return size.node.hint if size.node.has_hint() else None


def _symbols(value: Any) -> Iterator[object]:
    """Yield the symbols in the sizes of values, and in symbolic numbers."""
    for part in value if isinstance(value, (tuple, list)) else (value,):
        for size in part.shape if isinstance(part, Tensor) else (part,):
            if isinstance(size, torch.SymInt):
                yield from size.node.expr.free_symbols


def _hints(tensor: Tensor) -> list[Any]:
    return [_hint(size) for size in (*tensor.shape, *tensor.stride())]


def _hint(size: Any) -> object:
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.hint if size.node.has_hint() else str(size.node.expr)
