# SPDX-License-Identifier: Apache-2.0
"""The operators ``vnni_lstm`` and ``vnni_gru``, which compiled programs run in C++ of our own (recurrent.h).

``x`` is (T, B, in), or (B, T, in) where ``batch_first``; ``hidden`` is (layers * directions, B, width) and
``cell`` (layers * directions, B, hidden). All are float32 and contiguous. `Packed` holds the weights. The
C++ rounds inputs and states to 16 bits of the largest of their row, and its sums of products are exact
integers. A row with a value that is not finite makes what depends on it NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qompose_x86_inductor.native.vnni import FOUR, PANEL, VECTOR, filled, warn_uncompiled
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.recurrent import Cell, Weight, computed_in_float
from qompose_x86_inductor.operators.registration import register

_MIDDLE: Final = 128
"""What stands for the digit 0."""


class Sizes(NamedTuple):
    """The numbers of `enum RecurrentSize` in recurrent.h, in its order; ``projected``: 0 for none."""

    gates: int
    input_width: int
    hidden: int
    projected: int
    layers: int
    directions: int
    batch_first: int

    @property
    def width(self) -> int:
        """Return the width of a hidden state."""
        return self.projected or self.hidden

    def depth(self, layer: int) -> int:
        """Return the width of what a layer reads."""
        return self.width * self.directions if layer else self.input_width


class Packed(NamedTuple):
    """Weights as the C++ reads them, one after the other: int8, int32 and float32, flat."""

    weights: Tensor
    starts: Tensor
    values: Tensor


def pack(cells: Iterable[Cell], sizes: Sizes) -> Packed:
    """Return the weights of all layers as the C++ reads them."""
    order, parts = _order(sizes), []
    panel = sizes.gates * VECTOR
    for cell in cells:
        parts += [_packed(weight, order, panel) for weight in cell[:2]]
        if cell.projection is not None:
            rows = torch.arange(-(-sizes.projected // VECTOR) * VECTOR)
            rows[sizes.projected :] = -1
            parts.append(_packed(cell.projection, rows, PANEL, has_bias=False))
    return Packed(*(torch.cat(each) for each in zip(*parts, strict=True)))


def unpack(packed: Packed, sizes: Sizes) -> Iterator[Cell]:
    """Yield the cells that `pack` was given; biases that were None are zeros."""
    places, reader = _order(sizes).argsort()[-sizes.gates * sizes.hidden :], _Reader(packed)
    for layer in range(sizes.layers):
        for _ in range(sizes.directions):
            gates = -(-sizes.hidden // VECTOR) * VECTOR * sizes.gates
            depths = (sizes.depth(layer), sizes.width)
            by_input, by_state = (
                reader.next(gates, depth, sizes.gates * VECTOR).rows(places) for depth in depths
            )
            projection = None
            if sizes.projected:
                rows = -(-sizes.projected // VECTOR) * VECTOR
                kept = torch.arange(sizes.projected)
                whole = reader.next(rows, sizes.hidden, PANEL, has_bias=False)
                projection = whole.rows(kept)._replace(bias=None)
            yield Cell(by_input, by_state, projection)


def _order(sizes: Sizes) -> Tensor:
    """Return which row of a gates' matrix each lane has: 16 units of every gate side by side; -1 for none."""
    units = torch.arange(-(-sizes.hidden // VECTOR) * VECTOR)
    rows = units[None] + sizes.hidden * torch.arange(sizes.gates)[:, None]
    rows[:, sizes.hidden :] = -1
    return rows.reshape(sizes.gates, -1, VECTOR).transpose(0, 1).flatten()


def _packed(weight: Weight, order: Tensor, panel: int, *, has_bias: bool = True) -> Packed:
    matrix, scale, bias = weight.rows(order)
    assert bias is not None
    quads = filled(matrix, 1, FOUR).reshape(len(order), -1, FOUR)
    panels = [part.transpose(0, 1).flatten() for part in torch.split(quads, panel)]
    starts = -_MIDDLE * matrix.sum(1, dtype=torch.int32)
    values = torch.cat([scale, bias]) if has_bias else scale
    return Packed(torch.cat(panels), starts, values)


class _Reader:
    """Reads packed weights in their order."""

    def __init__(self, packed: Packed) -> None:
        self._left = packed

    def next(self, rows: int, depth: int, panel: int, *, has_bias: bool = True) -> Weight:
        """Return the next weight, with as many rows as were packed."""
        quads = -(-depth // FOUR)
        counts = (rows * quads * FOUR, rows, rows * (1 + has_bias))
        pairs = list(zip(self._left, counts, strict=True))
        flat, _, values = (all_[:count] for all_, count in pairs)
        self._left = Packed(*(all_[count:] for all_, count in pairs))
        panels = torch.split(flat, panel * quads * FOUR)
        matrix = torch.cat([p.reshape(quads, -1, FOUR).transpose(0, 1).flatten(1) for p in panels])
        scale, *bias = torch.split(values, rows)
        return Weight(matrix[:, :depth], scale, bias[0] if bias else None)


def _uncompiled(x: Tensor, states: list[Tensor], packed: Packed, flat: list[int]) -> Any:
    """Compute an operator in a graph that was not compiled, or compiled without the C++."""
    warn_uncompiled()
    return reference(x, states, packed, flat)


def reference(x: Tensor, states: list[Tensor], packed: Packed, flat: list[int]) -> Any:
    """Return what an operator computes, with the inputs and states that the C++ rounds to 16 bits."""
    sizes = Sizes(*flat)
    cells = unpack(packed, sizes)
    both = sizes.directions == 2
    return computed_in_float(x, states, cells, sizes.layers, both, bool(sizes.batch_first))


def _fake(x: Tensor, states: list[Tensor], flat: list[int]) -> tuple[Tensor, ...]:
    sizes = Sizes(*flat)
    out = x.new_empty((*x.shape[:2], sizes.width * sizes.directions))
    return (out, *(state.new_empty(state.shape) for state in states))


_SIZES: Final = "Tensor weights, Tensor starts, Tensor values, int[] sizes"
register(
    NAMESPACE,
    {
        "vnni_lstm": f"(Tensor x, Tensor hidden, Tensor cell, {_SIZES}) -> (Tensor, Tensor, Tensor)",
        "vnni_gru": f"(Tensor x, Tensor hidden, {_SIZES}) -> (Tensor, Tensor)",
    },
    {
        "vnni_lstm": (
            lambda x, h, c, *rest: _uncompiled(x, [h, c], Packed(*rest[:3]), rest[3]),
            lambda x, h, c, *rest: _fake(x, [h, c], rest[3]),
        ),
        "vnni_gru": (
            lambda x, h, *rest: _uncompiled(x, [h], Packed(*rest[:3]), rest[3]),
            lambda x, h, *rest: _fake(x, [h], rest[3]),
        ),
    },
    torch.Tag.needs_contiguous_strides,
)
_OPS: Final = getattr(torch.ops, NAMESPACE)
LSTM, GRU = _OPS.vnni_lstm.default, _OPS.vnni_gru.default


def _declaration(name: str, tensors: int, results: int) -> str:
    handles = ", ".join(["AtenTensorHandle"] * tensors)
    pointers = ", ".join(["AtenTensorHandle*"] * results)
    return f"AOTITorchError aoti_torch_cpu_{name}({handles}, const int64_t*, int64_t, {pointers})"


DECLARATIONS: Final = {LSTM: _declaration("vnni_lstm", 6, 3), GRU: _declaration("vnni_gru", 5, 2)}
"""The C++ of the operators, for torch's option of `vnni.shims`, whose header defines it."""
