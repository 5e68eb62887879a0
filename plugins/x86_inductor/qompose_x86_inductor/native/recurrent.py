# SPDX-License-Identifier: Apache-2.0
"""The operators ``native_lstm`` and ``native_gru``, which compiled programs run in C++ (recurrent.h).

``x`` is (T, B, in), or (B, T, in) where ``batch_first``; ``hidden`` is (layers * directions, B, width) and
``cell`` (layers * directions, B, hidden). All are float32 and contiguous. `PackedLayers` holds the weights.
The C++ rounds inputs and states to 16 bits of the largest of their row, and its sums of products are exact
integers. A row with a value that is not finite makes what depends on it NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qompose_x86_inductor.native import code
from qompose_x86_inductor.native.products import FOUR, filled
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.recurrent import Cell, Weight, computed_in_float
from qompose_x86_inductor.operators.registration import register

_MIDDLE: Final = 128
"""What stands for the digit 0."""


class RecurrentSizes(NamedTuple):
    """The numbers of `enum RecurrentSize` in recurrent.h, in its order; ``projected``: 0 for none.

    ``lanes`` are those of the vectors that weights are packed for.
    """

    gates: int
    input_width: int
    hidden: int
    projected: int
    layers: int
    directions: int
    batch_first: int
    lanes: int

    @property
    def width(self) -> int:
        """Return the width of a hidden state."""
        return self.projected or self.hidden

    def depth(self, layer: int) -> int:
        """Return the width of what a layer reads."""
        return self.width * self.directions if layer else self.input_width


class PackedLayers(NamedTuple):
    """Weights as the C++ reads them, one after the other: int8, int32 and float32, flat."""

    weights: Tensor
    starts: Tensor
    values: Tensor


def pack(cells: Iterable[Cell], sizes: RecurrentSizes) -> PackedLayers:
    """Return the weights of all layers as the C++ reads them."""
    order, parts, lanes = _order(sizes), [], sizes.lanes
    panel = sizes.gates * lanes
    for cell in cells:
        parts += [_packed(weight, order, panel) for weight in cell[:2]]
        if cell.projection is not None:
            rows = torch.arange(-(-sizes.projected // lanes) * lanes)
            rows[sizes.projected :] = -1
            parts.append(_packed(cell.projection, rows, FOUR * lanes, has_bias=False))
    return PackedLayers(*(torch.cat(each) for each in zip(*parts, strict=True)))


def unpack(packed: PackedLayers, sizes: RecurrentSizes) -> Iterator[Cell]:
    """Yield the cells that `pack` was given; biases that were None are zeros."""
    lanes = sizes.lanes
    places, reader = _order(sizes).argsort()[-sizes.gates * sizes.hidden :], _Reader(packed)
    for layer in range(sizes.layers):
        for _ in range(sizes.directions):
            gates = -(-sizes.hidden // lanes) * lanes * sizes.gates
            depths = (sizes.depth(layer), sizes.width)
            by_input, by_state = (
                reader.next(gates, depth, sizes.gates * lanes).rows(places) for depth in depths
            )
            projection = None
            if sizes.projected:
                rows = -(-sizes.projected // lanes) * lanes
                kept = torch.arange(sizes.projected)
                whole = reader.next(rows, sizes.hidden, FOUR * lanes, has_bias=False)
                projection = whole.rows(kept)._replace(bias=None)
            yield Cell(by_input, by_state, projection)


def _order(sizes: RecurrentSizes) -> Tensor:
    """Return which row of a gates' matrix each lane has, -1 for none: a vector of every gate side by side."""
    units = torch.arange(-(-sizes.hidden // sizes.lanes) * sizes.lanes)
    rows = units[None] + sizes.hidden * torch.arange(sizes.gates)[:, None]
    rows[:, sizes.hidden :] = -1
    return rows.reshape(sizes.gates, -1, sizes.lanes).transpose(0, 1).flatten()


def _packed(weight: Weight, order: Tensor, panel: int, *, has_bias: bool = True) -> PackedLayers:
    matrix, scale, bias = weight.rows(order)
    assert bias is not None
    quads = filled(matrix, 1, FOUR).reshape(len(order), -1, FOUR)
    panels = [part.transpose(0, 1).flatten() for part in torch.split(quads, panel)]
    starts = -_MIDDLE * matrix.sum(1, dtype=torch.int32)
    values = torch.cat([scale, bias]) if has_bias else scale
    return PackedLayers(torch.cat(panels), starts, values)


class _Reader:
    """Reads packed weights in their order."""

    def __init__(self, packed: PackedLayers) -> None:
        self._left = packed

    def next(self, rows: int, depth: int, panel: int, *, has_bias: bool = True) -> Weight:
        """Return the next weight, with as many rows as were packed."""
        quads = -(-depth // FOUR)
        counts = (rows * quads * FOUR, rows, rows * (1 + has_bias))
        pairs = list(zip(self._left, counts, strict=True))
        flat, _, values = (all_[:count] for all_, count in pairs)
        self._left = PackedLayers(*(all_[count:] for all_, count in pairs))
        panels = torch.split(flat, panel * quads * FOUR)
        matrix = torch.cat([p.reshape(quads, -1, FOUR).transpose(0, 1).flatten(1) for p in panels])
        scale, *bias = torch.split(values, rows)
        return Weight(matrix[:, :depth], scale, bias[0] if bias else None)


def _uncompiled(x: Tensor, states: list[Tensor], packed: PackedLayers, flat: list[int]) -> Any:
    """Compute an operator in a graph that was not compiled, or compiled without the C++."""
    code.warn_uncompiled()
    return reference(x, states, packed, flat)


def reference(x: Tensor, states: list[Tensor], packed: PackedLayers, flat: list[int]) -> Any:
    """Return what an operator computes, with the inputs and states that the C++ rounds to 16 bits."""
    sizes = RecurrentSizes(*flat)
    cells = unpack(packed, sizes)
    both = sizes.directions == 2
    return computed_in_float(x, states, cells, sizes.layers, both, bool(sizes.batch_first))


def _fake(x: Tensor, states: list[Tensor], flat: list[int]) -> tuple[Tensor, ...]:
    sizes = RecurrentSizes(*flat)
    out = x.new_empty((*x.shape[:2], sizes.width * sizes.directions))
    return (out, *(state.new_empty(state.shape) for state in states))


_SIZES: Final = "Tensor weights, Tensor starts, Tensor values, int[] sizes"
register(
    NAMESPACE,
    {
        "native_lstm": f"(Tensor x, Tensor hidden, Tensor cell, {_SIZES}) -> (Tensor, Tensor, Tensor)",
        "native_gru": f"(Tensor x, Tensor hidden, {_SIZES}) -> (Tensor, Tensor)",
    },
    {
        "native_lstm": (
            lambda x, h, c, *rest: _uncompiled(x, [h, c], PackedLayers(*rest[:3]), rest[3]),
            lambda x, h, c, *rest: _fake(x, [h, c], rest[3]),
        ),
        "native_gru": (
            lambda x, h, *rest: _uncompiled(x, [h], PackedLayers(*rest[:3]), rest[3]),
            lambda x, h, *rest: _fake(x, [h], rest[3]),
        ),
    },
    torch.Tag.needs_contiguous_strides,
)
_OPS: Final = getattr(torch.ops, NAMESPACE)
LSTM, GRU = _OPS.native_lstm.default, _OPS.native_gru.default


_OTHERS: Final = (*[code.HANDLE] * 3, code.INTEGERS)
DECLARATIONS: Final = {
    LSTM: code.declaration("native_lstm", *[code.HANDLE] * 3, *_OTHERS, results=3),
    GRU: code.declaration("native_gru", *[code.HANDLE] * 2, *_OTHERS, results=2),
}
"""Their functions of C, for what `products.shims` returns, whose header defines them."""
