# SPDX-License-Identifier: Apache-2.0
"""The x86 backend keeps the contract of every backend."""

from __future__ import annotations

from qompose.testing import BackendContract


class TestX86Inductor(BackendContract):
    backend = "x86_inductor"
