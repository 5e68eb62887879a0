# SPDX-License-Identifier: Apache-2.0
"""Processes that calibrate together: which of them this is, and an exchange that nobody waits for forever."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from qompose.errors import CalibrationError


@dataclass(frozen=True)
class Ranks:
    """The processes of `torch.distributed`, or this one alone.

    Attributes:
        rank, count: the number of this process, and how many there are.
    """

    rank: int = 0
    count: int = 1
    _group: Any = None
    _timeout: float = 0.0

    @classmethod
    def here(cls, timeout: float) -> Ranks:
        """Return the processes that were initialised, all of which have to call this.

        Statistics are small and on the CPU, so they go by gloo, whatever the processes use else.

        Args:
            timeout: seconds after which a process that does not answer is an error.

        Raises:
            CalibrationError: one did not come here in time.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        limit = timedelta(seconds=timeout)
        try:
            group = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            raise CalibrationError(_lost(timeout, error)) from error
        return cls(dist.get_rank(), dist.get_world_size(), group, timeout)

    def exchange(self, part: Any) -> list[Any]:
        """Return what each process gave, by rank. Only processes of one group send it to one another.

        Raises:
            CalibrationError: one did not answer in time, or has died.
        """
        if self.count == 1:
            return [part]
        parts: list[Any] = [None] * self.count
        try:
            dist.monitored_barrier(self._group, timedelta(seconds=self._timeout))
            dist.all_gather_object(parts, part, self._group)
        except RuntimeError as error:  # torch's DistBackendError is one
            raise CalibrationError(_lost(self._timeout, error)) from error
        return parts


def _lost(timeout: float, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return (
        f"a process that calibrates together with this one died, or did not answer within {timeout:g} "
        f"seconds ({first}). See what it printed; where a rank is only slow, pass a longer timeout="
    )
