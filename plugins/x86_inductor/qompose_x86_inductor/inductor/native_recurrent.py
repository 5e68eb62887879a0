# SPDX-License-Identifier: Apache-2.0
"""The replacement of recurrent layers by calls of our own C++ (`native.recurrent`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.inductor.buffers import registered
from qompose_x86_inductor.native import processor
from qompose_x86_inductor.native.recurrent import GRU, LSTM, RecurrentSizes, pack
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.recurrent import GATES, RecurrentCall

_OPS: Final = getattr(torch.ops, NAMESPACE)
OPERATORS: Final = {_OPS.lstm.default: LSTM, _OPS.gru.default: GRU}
"""By operator, that of the C++."""


def replace(node: fx.Node, arguments: list[Any], attribute: Callable[[Any], Tensor | None]) -> bool:
    """Let a call compute the same in C++, in place; return False where that is not for it.

    Args:
        attribute: returns the value of a node that reads an attribute.
    """
    call, gm = RecurrentCall(*arguments), node.graph.owning_module
    params, scales = (list(map(attribute, given)) for given in (call.params, call.scales))
    isa = processor.isa()
    if isa is None or any(value is None for value in (*params, *scales)):
        return False
    known: Any = call._replace(params=params, scales=scales)
    if not all(isa.admits(weight.matrix) for cell in known.cells() for weight in cell if weight):
        return False
    first = next(iter(known.cells()))
    gates = GATES[node.target._opname]  # type: ignore[union-attr]
    sizes = RecurrentSizes(
        gates,
        input_width=first.input.matrix.shape[1],
        hidden=first.input.matrix.shape[0] // gates,
        projected=0 if first.projection is None else first.projection.matrix.shape[0],
        layers=call.num_layers,
        directions=call.directions,
        batch_first=int(call.batch_first),
        lanes=isa.lanes,
    )
    assert gm is not None
    with node.graph.inserting_before(node):
        names = [registered(gm, value) for value in pack(known.cells(), sizes)]
        buffers = [node.graph.get_attr(name) for name in names]
    node.args = (call.input, *call.states, *buffers, [*sizes])
    node.target, node.kwargs = OPERATORS[node.target], {}
    return True
