# SPDX-License-Identifier: Apache-2.0
"""Files whose sums may saturate: programs that are called on a processor without VNNI warn of it.

Whoever lowers for a runtime is told by what the model was quantized with (`qompose_onnx.machine`). A file may
be made for another device, such as TensorRT's, or on another machine; what the runtime executes of it counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from qompose.errors import RequirementWarning

from qompose_onnx.fused_graph import Executed, multiplies_integers, origins_of
from qompose_onnx.runtimes import Session, sums_are_exact

LARGEST: Final = 64
"""Of a weight: two products of it and 255 fit into 16 bits."""
PRODUCTS: Final = ("Conv", "MatMul", "Gemm")
OF_INTEGERS: Final = ("MatMulInteger", "ConvInteger")
_MOVES: Final = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_EIGHT_BITS: Final = (ir.DataType.UINT8, ir.DataType.INT8)


def warn_where_sums_saturate(
    model: ir.Model, session: Session, executed: Callable[[], Executed]
) -> None:
    """Warn of a program that the processor may compute wrongly in a session's runtime.

    Args:
        executed: returns what the runtime executes; it is asked only where that matters.
    """
    wide = [] if sums_are_exact(session.package) else [*wide_products(model)]
    names = [node.name or node.op_type for node in _in_integers(wide, model, executed)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        message = (
            f"results may be wrong on this processor because it has no VNNI: {session.runtime} adds "
            f"products of 8-bit activations and weights in 16 bits, and the sums of {names[0]}{more} "
            "saturate. Run the file on the device that it is for, or quantize "
            "the model again with 7-bit weights: get_onnx_quantization_config(bits=7)"
        )
        warnings.warn(message, RequirementWarning, stacklevel=4)


def wide_products(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the products of integers whose int8 weights are larger than those of seven bits."""
    for node in model.graph.all_nodes():
        if node.op_type in OF_INTEGERS:
            x, weight = node.inputs[:2]
        elif node.op_type in PRODUCTS:
            x, weight = (_integers(value) for value in node.inputs[:2])
        else:
            continue
        if x is not None and x.dtype in _EIGHT_BITS and _is_wide(weight):
            yield node


def _in_integers(
    products: list[ir.Node], model: ir.Model, executed: Callable[[], Executed]
) -> Iterator[ir.Node]:
    """Yield the products that a runtime computes in integers, and those of which nothing is known."""
    if not products:
        return
    found, origins = executed(), origins_of(model)
    for node in products:
        left = found.by_node.get(origins.get(str(node.name), ""), ())
        if not left or any(multiplies_integers(name, reads=reads) for name, reads in left):
            yield node


def _integers(value: ir.Value | None) -> ir.Value | None:
    """Return the integers that a value is dequantized from, None of one that is computed in float."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node.inputs[0] if node is not None and node.op_type == "DequantizeLinear" else None


def _is_wide(weight: ir.Value | None) -> bool:
    held: Any = None if weight is None else ir.convenience.get_const_tensor(weight)
    if held is None or held.dtype is not ir.DataType.INT8:
        return False
    return bool(np.abs(held.numpy().astype(np.int16)).max(initial=0) > LARGEST)
