# SPDX-License-Identifier: Apache-2.0
"""What tests patch in torch makes them quicker, and changes nothing that they see."""

from __future__ import annotations

from tests.processes import python

TABLE = "print(*sorted(map(str, torch.export.default_decompositions())), sep='\\n')"


def test_programs_are_decomposed_as_without_tests() -> None:
    """Also where the table of decompositions is the first that looks for operators."""
    found = python("-c", f"import tests.conftest, torch; {TABLE}")
    assert found == python("-c", f"import torch; {TABLE}")
