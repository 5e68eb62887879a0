# SPDX-License-Identifier: Apache-2.0
"""The calls that replace lookups and bags in an ONNX file: gathered integers are dequantized.

Bytes of several integers are taken apart by arithmetic: OpenVINO 2026.4 shifts bits of uint8 wrongly.
"""

from __future__ import annotations

from functools import partial

from qompose.backend import Region
from torch.fx import Node

from qompose_embedding.executorch_kernels import bag_of_rows
from qompose_embedding.torch_kernels import as_requested, plain_rows


def lookup(region: Region) -> Node:
    """Emit a gathering of integers, scales and offsets, and `integer * scale + offset`."""
    indices = region.argument("output", "indices")
    return as_requested(region, plain_rows(region, indices, in_float=True))


def bag(region: Region) -> Node:
    """Emit a lookup, and operators that put its rows together in bags of one length.

    Raises:
        NotLowerable: bags have several lengths, or unknown ones: ONNX has no bags.
    """
    return bag_of_rows(region, partial(plain_rows, region, in_float=True))
