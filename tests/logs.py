# SPDX-License-Identifier: Apache-2.0
"""What is logged, kept for the test that asks: pytest's own plugin slows every export by a quarter."""

from __future__ import annotations

import logging
from typing import Protocol


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        """The messages, a line each."""
        return "\n".join(record.getMessage() for record in self.records)


class Listen(Protocol):
    """The fixture ``logged``: what a logger and those below it log from the call to the test's end."""

    def __call__(self, level: int, name: str = "") -> Records: ...
