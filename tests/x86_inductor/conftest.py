# SPDX-License-Identifier: Apache-2.0
"""What tests of compiled programs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from qompose_x86_inductor.native import vnni


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as on a processor that our C++ is not for."""
    monkeypatch.setattr(vnni, "available", lambda: False)


@pytest.fixture
def nothing_is_kept() -> Iterator[None]:
    """What torch compiled for a test goes with it."""
    yield
    torch._dynamo.reset()
