# SPDX-License-Identifier: Apache-2.0
"""The processor that a quantized model requires: without VNNI, sums of products saturate."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from qompose.backend import RuleUse

from qompose_onnx.configs import NARROW, TENSORRT
from qompose_onnx.runtimes import ONNXRUNTIME, missing

ISA: Final = "isa"
EXACT: Final = "vnni"
ANY: Final = "any"
ELSEWHERE: Final = (f"_{TENSORRT}", "_16_bits")
"""The ends of the names of rules for accelerators."""


def requirements(uses: Sequence[RuleUse]) -> dict[str, str]:
    """Return what `Backend.requirements` does: {"isa": "vnni"} or {"isa": "any"}, nothing without products.

    Weight-only products are computed in float, and others are not for processors: they require nothing.
    """
    weights: list[Any] = [
        use.specs["weight"]
        for use in uses
        if use.mode != "weight-only" and "weight" in use.specs and not use.rule.endswith(ELSEWHERE)
    ]
    if not weights:
        return {}
    narrow = all(NARROW[0] <= w.quant_min and w.quant_max <= NARROW[1] for w in weights)
    return {ISA: ANY if narrow else EXACT}


def objection(required: Mapping[str, str]) -> str | None:
    """Return what `Backend.objection` does: why sums saturate on this processor, or None."""
    if required.get(ISA) != EXACT or missing(ONNXRUNTIME) is not None or sums_are_exact():
        return None
    return (
        "ONNX Runtime's sums of products of uint8 and int8 saturate on this processor, which has no VNNI. "
        "Run the model on one that has, or quantize again with weights of seven bits: "
        "get_onnx_quantization_config(bits=7)"
    )


@functools.cache
def sums_are_exact() -> bool:
    """Return whether ONNX Runtime adds products of 255 and 127 exactly here, by one product."""
    import onnxruntime
    from onnx import TensorProto, helper

    depth, width = 64, 16
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "sums",
        [
            helper.make_tensor_value_info("x", TensorProto.UINT8, [1, depth]),
            helper.make_tensor_value_info("w", TensorProto.INT8, [depth, width]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [1, width])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x, w = np.full((1, depth), 255, np.uint8), np.full((depth, width), 127, np.int8)
    (y,) = session.run(None, {"x": x, "w": w})
    return bool((y == 255 * 127 * depth).all())
