# SPDX-License-Identifier: Apache-2.0
"""Named steps with elapsed times, on stderr: live bars on a terminal, elsewhere a line per step done."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

T = TypeVar("T")


class Track(Protocol):
    """Goes through a collection and counts."""

    def __call__(self, items: Collection[T], /) -> Iterable[T]: ...


class Steps:
    """`with Steps() as steps`, `with steps.step("embed") as track`, `for batch in track(batches)`."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
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
        task = self._progress.add_task(name, total=None)

        def track(items: Collection[T]) -> Iterable[T]:
            self._progress.update(task, total=len(items))
            for item in items:
                yield item
                self._progress.advance(task)

        begun = time.perf_counter()
        yield track
        self._progress.update(task, total=1, completed=1)
        if self._progress.disable:
            self._console.print(f"{name}: {time.perf_counter() - begun:.1f} s", highlight=False)
