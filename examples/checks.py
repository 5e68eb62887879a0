# SPDX-License-Identifier: Apache-2.0
"""Checks: what a demo promises of its figures, and the exit code that says whether they keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True, slots=True)
class Check:
    """`value` of `what` must be at least `low`, or at most `high`; `places` decimals are printed."""

    what: str
    value: float
    low: float = float("-inf")
    high: float = float("inf")
    places: int = 4

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high

    def __str__(self) -> str:
        above = self.value > self.high or self.low == float("-inf")
        relation, bound = ("at most", self.high) if above else ("at least", self.low)
        shown = f"{self.value:.{self.places}f}"
        return f"{self.what} is {shown}, and must be {relation} {bound:g}"


def verdict(checks: Sequence[Check], console: Console) -> int:
    """Print the checks that fail and return 1, or say that all hold and return 0."""
    failed = [check for check in checks if not check.holds]
    for check in failed:
        console.print(f"[bold red]FAILED[/] {check}", highlight=False, soft_wrap=True)
    if not failed:
        console.print(f"[bold green]All {len(checks)} checks hold.[/]", highlight=False)
    return int(bool(failed))


def wide_console() -> Console:
    """Standard output; 120 columns wide where it is no terminal that knows better."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
