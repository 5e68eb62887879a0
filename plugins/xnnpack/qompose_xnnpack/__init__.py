# SPDX-License-Identifier: Apache-2.0
"""qompose backend for XNNPACK: on the ExecuTorch runtime, and in process with the same arithmetic."""

from __future__ import annotations

import qompose

from qompose_xnnpack.backend import XNNPACKBackend, XNNPACKQuantizer
from qompose_xnnpack.configs import get_symmetric_quantization_config
from qompose_xnnpack.executorch_target.program import ExecutorchProgram

__all__ = [
    "ExecutorchProgram",
    "XNNPACKBackend",
    "XNNPACKQuantizer",
    "get_symmetric_quantization_config",
    "qompose_backend",
]


@qompose.backend.hookimpl
def qompose_backend() -> qompose.backend.Backend:
    """Return the backend that the entry point `xnnpack` names."""
    return XNNPACKBackend()
