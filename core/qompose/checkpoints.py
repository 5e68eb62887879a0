# SPDX-License-Identifier: Apache-2.0
"""A calibration's statistics on the way, in a file, so that one that was stopped can go on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from torch.fx import GraphModule

from qompose.collecting import Statistics, statistics
from qompose.errors import StatisticsError
from qompose.ranks import Ranks
from qompose.statistics_files import check_kind

EVERY = 30.0
"""Seconds between two writes: what is lost at most."""


class Kept:
    """The file of one process; with several, each has its own, with its rank in the name.

    Raises:
        StatisticsError: there can be no such file, or observers cannot be given what it holds.

    """

    def __init__(self, path: Path, ranks: Ranks, prepared: GraphModule) -> None:
        left_out = statistics(prepared).left_out
        if left_out:
            raise StatisticsError(
                f"resume= needs observers that give their statistics away, and {'; '.join(left_out)} are of "
                "other packages"
            )
        check_kind(path)
        if not path.parent.is_dir():
            raise StatisticsError(f"resume={str(path)!r}: there is no folder {path.parent}")
        if ranks.count > 1:
            path = path.with_name(f"{path.stem}.rank{ranks.rank}of{ranks.count}{path.suffix}")
        self.path = path
        self._last, self._written = 0, time.monotonic()

    def restore(self, prepared: GraphModule) -> int:
        """Give the observers what the file has, and return how many batches that was; 0 without a file.

        Raises:
            StatisticsError: it is not of this model and its observers, or not of a calibration on the way.
        """
        if not self.path.exists():
            return 0
        found = Statistics.load(self.path)
        if not found.batches:
            raise StatisticsError(
                f"{self.path} holds no calibration on the way; to use its statistics, pass them for batches"
            )
        found.apply(prepared)
        self._last = found.batches
        return found.batches

    def note(self, prepared: GraphModule, number: int) -> None:
        """Remember that a batch was run, and write the file when it is time."""
        self._last = number
        if time.monotonic() - self._written >= EVERY:
            self.close(prepared)

    def close(self, prepared: GraphModule) -> None:
        """Write the file."""
        replace(statistics(prepared), batches=self._last).save(self.path)
        self._written = time.monotonic()
