# SPDX-License-Identifier: Apache-2.0
"""Named steps with elapsed times, on stderr: live bars on a terminal, elsewhere a line per step done.

With a number of steps, a bar over all of them comes first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

T = TypeVar("T")


class Track(Protocol):
    """Goes through a collection and counts."""

    def __call__(self, items: Collection[T], /) -> Iterable[T]: ...


class Steps:
    """`with Steps() as steps`, `with steps.step("embed") as track`, `for batch in track(batches)`."""

    def __init__(self, expected: int | None = None) -> None:
        self._console = Console(stderr=True)
        self._begun = time.perf_counter()
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
        )
        live = self._console.is_terminal
        self._progress = Progress(
            *columns, console=self._console, refresh_per_second=4, disable=not live
        )
        self._whole: TaskID | None = None
        if expected is not None:
            self._whole = self._progress.add_task("[bold]the whole demo[/]", total=expected)

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, name: str) -> Iterator[Track]:
        """Show a step while the block runs. What it yields counts what the block goes through."""
        task, done = self._progress.add_task(name, total=None), 0.0

        def track(items: Collection[T]) -> Iterable[T]:
            nonlocal done
            self._progress.update(task, total=len(items))
            for item in items:
                yield item
                self._progress.advance(task)
                self._advance(1 / len(items))
                done += 1 / len(items)

        begun = time.perf_counter()
        yield track
        self._progress.update(task, total=1, completed=1)
        self._advance(1 - done)
        if self._progress.disable:
            self._console.print(f"{name}: {time.perf_counter() - begun:.1f} s", highlight=False)

    def _advance(self, part: float) -> None:
        if self._whole is not None:
            self._progress.advance(self._whole, part)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        self._progress.console.print(f"{text} ({self.seconds:.0f} s)", highlight=False)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._begun
