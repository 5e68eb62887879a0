# SPDX-License-Identifier: Apache-2.0
"""What operators do to values, as far as quantization is concerned. Backends use the same table.

Where an operator only moves values, `op(quantize(x)) == quantize(op(x))` for any parameters: input and
output have one scale, and the operator may run on the integers. The same holds where it selects by
order. Any other operator makes values that no input had, and its output has a scale of its own.
"""

from __future__ import annotations

import operator

import torch

aten = torch.ops.aten

VALUE_PRESERVING = frozenset(
    {
        operator.getitem,
        aten.alias.default,
        aten.cat.default,
        aten.channel_shuffle.default,
        aten.chunk.default,
        aten.clone.default,
        aten.concat.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.expand_as.default,
        aten.flatten.using_ints,
        aten.flip.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.movedim.int,
        aten.movedim.intlist,
        aten.narrow.default,
        aten.permute.default,
        aten.pixel_shuffle.default,
        aten.pixel_unshuffle.default,
        aten.repeat.default,
        aten.repeat_interleave.self_int,
        aten.reshape.default,
        aten.reshape_as.default,
        aten.roll.default,
        aten.rot90.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.stack.default,
        aten.swapaxes.default,
        aten.t.default,
        aten.tile.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unflatten.int,
        aten.unfold.default,
        aten.unsqueeze.default,
        aten.upsample_nearest1d.vec,
        aten.upsample_nearest2d.vec,
        aten.view.default,
        aten.view_as.default,
    }
)
"""Operators whose output has no value that an input had not: they move, repeat or leave out values."""

ORDER_PRESERVING = frozenset(
    {
        aten.adaptive_max_pool2d.default,
        aten.amax.default,
        aten.amin.default,
        aten.max_pool1d.default,
        aten.max_pool2d.default,
        aten.max_pool3d.default,
        aten.maximum.default,
        aten.minimum.default,
        aten.relu.default,
        aten.relu_.default,
    }
)
"""Operators that choose among values (and zero) by their order, which quantization keeps."""

SCALE_PRESERVING = VALUE_PRESERVING | ORDER_PRESERVING
"""Operators whose inputs and output may have one scale and zero point."""

NOT_ON_INTEGERS: dict[object, frozenset[torch.dtype]] = {
    aten.adaptive_max_pool2d.default: frozenset({torch.int8, torch.uint8}),
    aten.max_pool1d.default: frozenset({torch.int8, torch.uint8}),
    aten.upsample_nearest1d.vec: frozenset({torch.int8}),
    aten.upsample_nearest2d.vec: frozenset({torch.int8}),
}
"""Those of them that torch 2.13 cannot compute on a CPU in some integer types."""
