# SPDX-License-Identifier: Apache-2.0
"""Which checks of the contract are for the long run: those that show on other numbers what others show."""

from __future__ import annotations

import pytest

AGAIN = ("test_accepts", "test_leaves_inputs_alone")
"""Checks that lower the same operators as `test_lowers`, with other numbers: seconds on a runtime."""
WIDER = "static_per-tensor-executorch"
"""Products of a scale per channel are lowered each time; those of one scale differ in their constants."""
TWINS = ("static_per-tensor", "static,_activations_[0,_127]")
"""Configurations that differ from the default one in numbers alone: what claims and lowers them counts."""
TWINS_SHOW = ("test_annotates", "test_lowers", "test_matches_reference")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the long run what differs in numbers alone."""
    for item in items:
        check = getattr(item, "originalname", "")
        again = check in AGAIN and item.name.endswith("-executorch]")
        twin = check not in TWINS_SHOW and any(name in item.name for name in TWINS)
        other_half = check == "test_half_precision" and "float16" in item.name.replace(
            "bfloat16", ""
        )
        if again or twin or other_half or WIDER in item.name:
            item.add_marker(pytest.mark.long)
