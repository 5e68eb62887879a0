# SPDX-License-Identifier: Apache-2.0
"""The XNNPACK backend keeps the contract of every backend, and computes in int8 what it says it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from qompose.testing import BackendContract

from tests.xnnpack.executorch_target.delegates import floats_between, handed_over


class TestXNNPACK(BackendContract):
    backend = "xnnpack"

    @pytest.fixture(autouse=True)
    def no_float_between_integers(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Every row that is lowered for the runtime leaves nothing in float between its int8 tensors.

        What the delegates say of themselves is not asked: XNNPACK's own graphs are read.
        """
        with handed_over() as graphs:
            yield
        if request.node.originalname in ("test_lowers", "test_matches_reference"):
            found = [name for graph in graphs for name in floats_between(graph)]
            assert not found, f"{request.node.name} computes in float between int8 tensors: {found}"
