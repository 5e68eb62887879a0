# SPDX-License-Identifier: Apache-2.0
"""How property tests run: freely on a developer's machine, the same each time under tox."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("free", deadline=None, print_blob=True)
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("free")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="write the golden plans anew")


@pytest.fixture
def regen(request: pytest.FixtureRequest) -> bool:
    """Whether golden plans are written rather than compared."""
    return bool(request.config.getoption("--regen"))


@pytest.fixture(autouse=True, scope="module")
def seeded_module() -> None:
    """Fixtures of a module draw the same numbers, whichever modules ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or behind others."""
    torch.manual_seed(0)
