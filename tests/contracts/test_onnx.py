# SPDX-License-Identifier: Apache-2.0
"""The ONNX backend keeps the contract of every backend, on ONNX Runtime and OpenVINO."""

from __future__ import annotations

from qompose.testing import BackendContract


class TestONNX(BackendContract):
    backend = "onnx"
