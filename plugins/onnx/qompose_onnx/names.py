# SPDX-License-Identifier: Apache-2.0
"""What targets and runtimes are called, and what reports call the kernels that run a region."""

from __future__ import annotations

from typing import Final

ONNXRUNTIME: Final = "onnxruntime"
OPENVINO: Final = "openvino"
TENSORRT: Final = "tensorrt"
"""Also the option of the rules for TensorRT."""
ATTENTION: Final = "attention"
"""The option of the rule for attention."""

MOVED: Final = "moves integers"
"""What an operator does that is left as it is and reads integers."""
WEIGHT_ONLY: Final = "MatMulNBits"
SIXTEEN_BITS: Final = "float, between 16 bits"
"""What runtimes compute of integers of 16 bits, for which only accelerators have kernels."""
OPENVINO_INT8: Final = "OpenVINO int8"
OPENVINO_LOOP: Final = "OpenVINO Subgraph"
"""A loop over elements that OpenVINO compiles: it may read and write integers, and computes in float."""
OPENVINO_WEIGHTS: Final = "OpenVINO, compressed weights"
TENSORRT_INT8: Final = "TensorRT int8: structure checked, never run"
