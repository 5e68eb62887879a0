# SPDX-License-Identifier: Apache-2.0
"""qompose backend for ONNX: files that ONNX Runtime and OpenVINO read and run in int8."""

from __future__ import annotations

import qompose

from qompose_onnx.backend import ONNXBackend, ONNXQuantizer
from qompose_onnx.configs import get_onnx_quantization_config
from qompose_onnx.program import ONNXProgram

__all__ = [
    "ONNXBackend",
    "ONNXProgram",
    "ONNXQuantizer",
    "get_onnx_quantization_config",
    "qompose_backend",
]


@qompose.backend.hookimpl
def qompose_backend() -> qompose.backend.Backend:
    """Return the backend that the entry point `onnx` names."""
    return ONNXBackend()
