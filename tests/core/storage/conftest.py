# SPDX-License-Identifier: Apache-2.0
"""Where the tests of files write."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.qompose"
