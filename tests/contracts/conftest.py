# SPDX-License-Identifier: Apache-2.0
"""Which checks of the contract are for the long run: on a runtime whose lowering takes seconds."""

from __future__ import annotations

import pytest

AGAIN = ("test_accepts", "test_leaves_inputs_alone")
"""Checks that lower the same operators as `test_lowers`, with other numbers."""
WIDER = "static_per-tensor-executorch"
"""Products of a scale per channel are lowered each time; those of one scale differ in their constants."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the long run what differs on ExecuTorch in numbers alone."""
    for item in items:
        again = getattr(item, "originalname", "") in AGAIN and item.name.endswith("-executorch]")
        if again or WIDER in item.name:
            item.add_marker(pytest.mark.long)
