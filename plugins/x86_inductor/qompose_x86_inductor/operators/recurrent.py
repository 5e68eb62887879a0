# SPDX-License-Identifier: Apache-2.0
"""The operators ``lstm`` and ``gru``: recurrent layers with int8 weights, float32 in and out.

Arguments are those of ``aten::lstm`` and ``aten::gru``, but for ``params``, whose matrices are int8, and
``scales``, float32 (out,) of each matrix in their order. Compiled, they multiply
integers (`native.recurrent`). Here torch's own loop computes with weights in float32, which are made
once: step by step, int8 products are slower than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.onednn.packed_weights import cached
from qompose_x86_inductor.operators.registration import register

GATES: Final = {"lstm": 4, "gru": 3}

_REST: Final = (
    "Tensor[] params, Tensor[] scales, bool has_biases, int num_layers, bool bidirectional,"
    " bool batch_first"
)
SCHEMAS: Final = {
    "lstm": f"(Tensor input, Tensor[] hx, {_REST}) -> (Tensor, Tensor, Tensor)",
    "gru": f"(Tensor input, Tensor hx, {_REST}) -> (Tensor, Tensor)",
}


class Weight(NamedTuple):
    """An int8 matrix (out, in), its scales and its bias, both float32 (out,)."""

    matrix: Tensor
    scale: Tensor
    bias: Tensor | None

    def rows(self, order: Tensor) -> Weight:
        """Return rows in an order, zeros where that says -1, and zeros for a bias that there is not."""
        some, kept = order.clamp(min=0), order >= 0
        bias = torch.zeros_like(self.scale) if self.bias is None else self.bias
        vectors = (torch.where(kept, vector[some], 0.0) for vector in (self.scale, bias))
        return Weight(torch.where(kept[:, None], self.matrix[some], 0), *vectors)

    def real(self) -> Tensor:
        """Return the matrix in float32."""
        return self.matrix * self.scale[:, None]


class Cell(NamedTuple):
    """The weights of one layer in one direction."""

    input: Weight
    hidden: Weight
    projection: Weight | None


class RecurrentCall(NamedTuple):
    """All arguments of an operator; tensors while it runs, nodes while a graph is built or rewritten."""

    input: Tensor
    hx: Any
    params: Sequence[Any]
    scales: Sequence[Any]
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool

    @property
    def states(self) -> list[Tensor]:
        """Return the first states: hidden, and of an LSTM also cell."""
        return [*self.hx] if isinstance(self.hx, (list, tuple)) else [self.hx]

    @property
    def directions(self) -> int:
        """Return in how many directions sequences are read."""
        return 2 if self.bidirectional else 1

    def cells(self) -> Iterator[Cell]:
        """Yield the weights of layers, directions within them."""
        size, scales = len(self.params) // (self.num_layers * self.directions), iter(self.scales)
        for first in range(0, len(self.params), size):
            w_ih, w_hh, *others = self.params[first : first + size]
            b_ih, b_hh = others[:2] if self.has_biases else (None, None)
            pair = (Weight(w_ih, next(scales), b_ih), Weight(w_hh, next(scales), b_hh))
            projects = len(others) % 2 == 1
            yield Cell(*pair, Weight(others[-1], next(scales), None) if projects else None)

    def checked(self) -> RecurrentCall:
        """Return itself. Raises ValueError on dtypes or counts that do not fit."""
        matrices = [p for p in self.params if p.dim() == 2]
        dtypes = [x.dtype for x in (self.input, *self.states)]
        if any(dtype != torch.float32 for dtype in dtypes):
            raise ValueError(f"input and states must be float32, got {dtypes}")
        if len(matrices) != len(self.scales) or any(m.dtype != torch.int8 for m in matrices):
            raise ValueError("expected int8 matrices with scales")
        if any(s.shape != m.shape[:1] for s, m in zip(self.scales, matrices, strict=True)):
            raise ValueError("the scales do not match their matrices")
        return self


def computed_in_float(
    x: Tensor,
    states: Sequence[Tensor],
    cells: Iterable[Cell],
    layers: int,
    bidirectional: bool,
    batch_first: bool,
    *,
    keep: bool = False,
) -> tuple[Tensor, ...]:
    """Compute layers by torch's operator, with weights in float32.

    Args:
        keep: keep these weights beside the integers, for calls to come.
    """
    params: list[Tensor] = []
    for cell in cells:
        weights = [weight for weight in cell if weight is not None]
        real = [_kept(w) if keep else w.real() for w in weights]
        biases = [w.bias for w in cell[:2] if w.bias is not None]
        params += [*real[:2], *biases, *real[2:]]
    has_biases = len(params) > len([p for p in params if p.dim() == 2])
    operator: Any = torch.ops.aten.lstm.input if len(states) == 2 else torch.ops.aten.gru.input
    hx = [*states] if len(states) == 2 else states[0]
    rest = (has_biases, layers, 0.0, False, bidirectional, batch_first)
    result: tuple[Tensor, ...] = operator(x, hx, params, *rest)
    return result


def _kept(weight: Weight) -> Tensor:
    return cached(weight.matrix, "float32", weight.real)


def recurrent(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute an operator in float32."""
    return _computed(RecurrentCall(*arguments).checked(), keep=True)


def recurrent_in_graph(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute it in operators of torch, where compiled programs have no kernel on integers."""
    return _computed(RecurrentCall(*arguments).checked(), keep=False)


def _computed(call: RecurrentCall, *, keep: bool) -> tuple[Tensor, ...]:
    rest = (call.num_layers, call.bidirectional, call.batch_first)
    return computed_in_float(call.input, call.states, call.cells(), *rest, keep=keep)


def recurrent_fake(*arguments: Any) -> tuple[Tensor, ...]:
    """Return its results without values."""
    call = RecurrentCall(*arguments).checked()
    hidden = call.states[0]
    out = call.input.new_empty((*call.input.shape[:2], hidden.shape[2] * call.directions))
    return (out, *(state.new_empty(state.shape) for state in call.states))


register(NAMESPACE, SCHEMAS, dict.fromkeys(SCHEMAS, (recurrent, recurrent_fake)))
