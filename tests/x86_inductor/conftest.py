# SPDX-License-Identifier: Apache-2.0
"""What tests of compiled programs share."""

from __future__ import annotations

import pytest
from qompose_x86_inductor.native import vnni


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as on a processor that our C++ is not for."""
    monkeypatch.setattr(vnni, "available", lambda: False)
