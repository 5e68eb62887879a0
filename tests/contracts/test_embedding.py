# SPDX-License-Identifier: Apache-2.0
"""The embedding backend keeps the contract of every backend."""

from __future__ import annotations

from qompose.testing import BackendContract


class TestEmbedding(BackendContract):
    backend = "embedding"
