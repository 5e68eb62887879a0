# SPDX-License-Identifier: Apache-2.0
"""The operators ``qompose_embedding::*_bag``: rows of a quantized table, reduced in bags.

====================  ======================================================================
operator              table
====================  ======================================================================
packed_bag            uint8 (rows, bytes), scale and offset in each row (`table_format`)
plain_bag             integers (rows, bytes), with `scale` and `offset` (rows, groups)
====================  ======================================================================

Both have, of `torch.nn.functional.embedding_bag`: ``indices`` (n,), ``offsets`` (bags,), or (bags + 1,) with
``include_last_offset``, ``mode`` (0 sum, 1 mean, 2 max), ``per_sample_weights`` (n,) and ``padding_idx``, -1
for none. They return float32 (bags, width). An index out of range is an IndexError.

Offsets begin with 0, never decrease and end within the indices; others are a RuntimeError. torch's kernels
for packed rows check only the sum of lengths: where offsets decrease they return uninitialized memory, and
for those below 0 they read before the table.

Compilers get the same functions in operators of torch alone (`IN_GRAPH`); there, an index out of range is a
RuntimeError, as torch's kernels raise it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from qompose.backend import kit
from torch import Tensor

from qompose_embedding.lookup import compute, from_packed, from_plain
from qompose_embedding.table_format import TableFormat

NAMESPACE: Final = "qompose_embedding"
SUM, MEAN, MAX = range(3)

_SUMS: Final = {
    8: torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default,
    4: torch.ops.quantized.embedding_bag_4bit_rowwise_offsets.default,
    2: torch.ops.quantized.embedding_bag_2bit_rowwise_offsets.default,
}
"""By bits, the operator that sums packed rows, whatever its argument `mode` says (torch 2.13)."""

_HOW: Final = (
    "Tensor indices, Tensor offsets, int mode, Tensor? per_sample_weights, bool include_last_offset, "
    "int padding_idx"
)
SCHEMAS: Final = {
    "packed_bag": f"(Tensor rows, int bits, int width, {_HOW}) -> Tensor",
    "plain_bag": (
        f"(Tensor table, Tensor scale, Tensor? offset, int bits, int width, {_HOW}) -> Tensor"
    ),
}

_ORDER: Final = "offsets must start with 0, not decrease, and not exceed the number of indices"


class Bags(NamedTuple):
    """Which rows make up each bag, and how: the last arguments of the operators, in their order."""

    indices: Tensor
    offsets: Tensor
    mode: int
    per_sample_weights: Tensor | None
    include_last_offset: bool
    padding_idx: int

    @classmethod
    def of(cls, *arguments: Any) -> Bags:
        """Return bags that lie in order in memory, and float32 weights: torch's kernels read them so.

        Raises:
            RuntimeError: the number of weights is not that of indices; torch's kernels do not check.
        """
        bags = cls(*arguments)
        weights = bags.per_sample_weights
        if weights is not None:
            torch._check(  # type: ignore[no-untyped-call]
                weights.shape == bags.indices.shape,
                lambda: "per_sample_weights must have one weight per index",
            )
            weights = weights.to(torch.float32).contiguous()
        return bags._replace(
            indices=bags.indices.contiguous(),
            offsets=bags.offsets.contiguous(),
            per_sample_weights=weights,
        )

    def kept(self) -> Tensor | None:
        """Return which indices count, None where all do."""
        return None if self.padding_idx < 0 else self.indices != self.padding_idx

    def weights(self) -> Tensor | None:
        """Return float32 factors of the rows, None where all are 1."""
        kept, weights = self.kept(), self.per_sample_weights
        if kept is None:
            return weights
        if weights is None:
            return kept.to(torch.float32)
        return torch.where(kept, weights, 0.0)  # an infinite weight that does not count stays out

    def counts(self) -> Tensor:
        """Return how many rows count in each bag, at least 1: float32 (bags, 1)."""
        kept = self.kept()
        ends = self.offsets.new_full((1,), self.indices.shape[0])
        borders = self.offsets if self.include_last_offset else torch.cat([self.offsets, ends])
        if kept is not None:
            before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
            borders = before.index_select(0, borders)
        return borders.diff().clamp(min=1).to(torch.float32).unsqueeze(1)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Put float rows (n, width) together, one for each index."""
        number = self.indices.shape[0]
        places = torch.arange(number, dtype=self.offsets.dtype, device=rows.device)
        padding = -1
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # torch refuses an empty table
        if self.padding_idx >= 0:
            places = torch.where(self.indices == self.padding_idx, number, places)
            padding = number
        pooled = torch.ops.aten._embedding_bag_forward_only.default
        how = (False, self.mode, False, self.per_sample_weights, self.include_last_offset, padding)
        result: Tensor = pooled(rows, places.to(self.offsets.dtype), self.offsets, *how)[0]
        return result


def packed_bag_in_graph(rows: Tensor, bits: int, width: int, *how: Any) -> Tensor:
    """Compute ``packed_bag``."""
    bags, form = Bags.of(*how), TableFormat(bits, 0, width)
    if bags.mode == MAX:
        indices = bags.indices
        return bags.of_rows(from_packed(compute, form, rows, indices, indices.shape))
    total: Tensor = _SUMS[bits](
        rows,
        bags.indices,
        bags.offsets,
        False,
        SUM,
        False,
        bags.weights(),
        None,
        bags.include_last_offset,
    )
    total = total[:, :width] if form.padding else total
    return total / bags.counts() if bags.mode == MEAN else total


def lookup_in_graph(rows: Tensor, indices: Tensor, bits: int) -> Tensor:
    """Return float32 rows (n, width) for indices (n,): each a bag of its own.

    A compiler gathers bytes one by one, which takes ten times as long as torch's kernel for bags.
    """
    indices = indices.contiguous()
    number = torch.arange(indices.shape[0], dtype=indices.dtype, device=indices.device)
    found: Tensor = _SUMS[bits](rows, indices, number, False, SUM, False, None, None, False)
    return found


def plain_bag_in_graph(
    table: Tensor, scale: Tensor, offset: Tensor | None, bits: int, width: int, *how: Any
) -> Tensor:
    """Compute ``plain_bag``."""
    bags = Bags.of(*how)
    form = TableFormat(bits, 0, width)
    return bags.of_rows(from_plain(compute, form, table, scale, offset, bags.indices))


def _in_order(in_graph: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function for offsets that come from a caller: those out of order are refused."""

    def checked(*arguments: Any) -> Tensor:
        _require_order(Bags(*arguments[-len(Bags._fields) :]))
        return in_graph(*arguments)

    return checked


def _require_order(bags: Bags) -> None:
    """Insert a check that raises a RuntimeError where offsets are out of order."""
    ends = bags.offsets.new_full((1,), bags.indices.shape[0])
    growing = (torch.cat([bags.offsets, ends]).diff() >= 0).all()
    torch.ops.aten._assert_async.msg(growing & (bags.offsets[:1] == 0).all(), _ORDER)


def _packed_bag(rows: Tensor, bits: int, width: int, *how: Any) -> Tensor:
    bags = Bags(*how)
    _check(bags)
    try:
        return packed_bag_in_graph(rows, bits, width, *how).contiguous()
    except RuntimeError:
        outside = (bags.indices < 0) | (bags.indices >= len(rows))
        if not outside.any():
            raise
        wrong = int(bags.indices[outside][0])
        message = f"index {wrong} is out of range for a table with {len(rows)} rows"
        raise IndexError(message) from None


def _plain_bag(table: Tensor, scale: Tensor, offset: Tensor | None, *rest: Any) -> Tensor:
    _check(Bags(*rest[2:]))
    return plain_bag_in_graph(table, scale, offset, *rest).contiguous()


def _check(bags: Bags) -> None:
    """Refuse bags that torch refuses, but its kernels for packed rows would misread."""
    if not len(bags.offsets):
        return
    first, last = int(bags.offsets[0]), int(bags.offsets[-1])
    if first != 0 or last > len(bags.indices) or bool((bags.offsets.diff() < 0).any()):
        raise RuntimeError(f"{_ORDER} ({len(bags.indices)}), got {bags.offsets}")


def _fake(table: Tensor, *arguments: Any) -> Tensor:
    """Make the result of either operator without data."""
    bags = Bags(*arguments[-len(Bags._fields) :])
    width = arguments[-len(Bags._fields) - 1]
    number = bags.offsets.shape[0] - (1 if bags.include_last_offset else 0)
    return table.new_empty((number, width), dtype=torch.float32)


_FUNCTIONS: Final[dict[str, tuple[Any, Sequence[str], Any]]] = {
    "packed_bag": (_packed_bag, ("CPU",), packed_bag_in_graph),
    "plain_bag": (_plain_bag, (), plain_bag_in_graph),
}
IN_GRAPH: Final[dict[Any, tuple[Any, Any]]] = {
    kit.register_operator(
        f"{NAMESPACE}::{name}", SCHEMAS[name], function, fake=_fake, devices=devices
    ): (in_graph, _in_order(in_graph))
    for name, (function, devices, in_graph) in _FUNCTIONS.items()
}
"""By operator, its functions for compilers: for offsets known to be in order, and for others."""
