# SPDX-License-Identifier: Apache-2.0
"""The processor that a quantized model requires: without VNNI, sums of products saturate."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper, save
from qompose.backend import RuleUse

from qompose_onnx.configs import NARROW, TENSORRT
from qompose_onnx.runtimes import (
    ONNXRUNTIME,
    OPENVINO,
    OnnxRuntimeSession,
    OpenVinoSession,
    Session,
    missing,
)

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
    runtime = next((name for name in _SESSIONS if missing(name) is None), None)
    if required.get(ISA) != EXACT or runtime is None or sums_are_exact(runtime):
        return None
    return (
        "results are wrong on this processor, which has no VNNI: ONNX Runtime and OpenVINO add products of "
        "uint8 and int8 in 16 bits there, and the sums saturate. Run the model on a processor with VNNI, or "
        "quantize again with weights of seven bits: get_onnx_quantization_config(bits=7)"
    )


_SESSIONS: Final[Mapping[str, Callable[[Path], Session]]] = MappingProxyType(
    {ONNXRUNTIME: OnnxRuntimeSession, OPENVINO: OpenVinoSession}
)


@functools.cache
def sums_are_exact(runtime: str) -> bool:
    """Return whether a runtime adds products of 255 and 127 exactly on this processor, by one linear."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "linear.onnx"
        save(_linear(), path)
        found = _SESSIONS[runtime](path).run({"x": torch.ones(1, _DEPTH)})["y"]
    return bool((found - _DEPTH).abs().max() < 0.5)


_DEPTH, _WIDTH = 64, 16


def _linear() -> ModelProto:
    """Return a model of one linear, whose weights are as large as integers of eight bits can be."""

    def constant(name: str, value: Any, dtype: Any) -> TensorProto:
        return numpy_helper.from_array(np.asarray(value, dtype), name)

    def value(name: str, width: int) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width])

    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_q"]),
        helper.make_node("DequantizeLinear", ["x_q", "x_scale", "x_zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["w_dq"]),
        helper.make_node("MatMul", ["x_dq", "w_dq"], ["y"]),
    ]
    constants = [
        constant("x_scale", 1 / 255, np.float32),
        constant("x_zero", 0, np.uint8),
        constant("w", np.full((_DEPTH, _WIDTH), 127), np.int8),
        constant("w_scale", 1 / 127, np.float32),
        constant("w_zero", 0, np.int8),
    ]
    graph = helper.make_graph(
        nodes, "linear", [value("x", _DEPTH)], [value("y", _WIDTH)], constants
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
