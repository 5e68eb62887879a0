# SPDX-License-Identifier: Apache-2.0
"""Convolutions of which something reads the size at run time: only the compiled graph tells of them.

Of one that it quantizes by itself, OpenVINO 2026.4 then takes the bias of one channel for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qompose_onnx.compiled_nodes import EIGHT_BITS, facts_of, origins_among
from qompose_onnx.errors import ONNXTargetError


def check(node: Any, origins: Mapping[str, str]) -> None:
    """Raise ONNXTargetError, naming the convolution, at a node that asks for its size; see `Defect.check`."""
    if facts_of(node).kind != "ShapeOf":
        return
    product = node.input_value(0).get_node()
    kind, precision, names = facts_of(product)
    readers = [facts_of(each.get_node()).kind for each in product.output(0).get_target_inputs()]
    if kind == "Convolution" and precision in EIGHT_BITS and "FakeQuantize" in readers:
        found, *_ = [*origins_among(names, origins), names]
        raise ONNXTargetError(
            f"OpenVINO would compute {found} wrongly, because something reads its size while the program "
            "runs. Export with fewer dynamic dimensions or none, or lower the model for the target "
            "'onnxruntime'"
        )
