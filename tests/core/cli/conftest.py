# SPDX-License-Identifier: Apache-2.0
"""The command in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from qompose.cli import main

Command = Callable[..., Any]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Call it with arguments, and the code that they are to end with, for what goes to `out` and to `err`."""

    def run(*arguments: str, code: int = 0) -> Any:
        assert main.main(arguments) == code
        return capsys.readouterr()

    return run
