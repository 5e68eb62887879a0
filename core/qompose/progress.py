# SPDX-License-Identifier: Apache-2.0
"""The progress bar of everything that takes long: on stderr, so that what a program prints stays its own."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def on_terminal(progress: bool | None) -> bool:
    """Return whether to show a bar; None leaves it to whether a person is looking."""
    return sys.stderr.isatty() if progress is None else progress


def progress_bar(shown: bool) -> Progress:
    """Return a bar that counts and says how long it will take; hidden, it does nothing."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not shown)
