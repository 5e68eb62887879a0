# SPDX-License-Identifier: Apache-2.0
"""The XNNPACK backend keeps the contract of every backend."""

from __future__ import annotations

from qompose.testing import BackendContract


class TestXNNPACK(BackendContract):
    backend = "xnnpack"
