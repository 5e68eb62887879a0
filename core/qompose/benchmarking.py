# SPDX-License-Identifier: Apache-2.0
"""How long a quantized model takes beside the float one. Slower than float is said out loud."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from qompose.errors import QomposeWarning, UserError


@dataclass(frozen=True)
class Timing:
    """The median time of one call of a model, in seconds, and that over the float model's."""

    name: str
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Timings:
    """One row per model, the float one first; its fields are `name`, `seconds` and `ratio`, to the first."""

    rows: tuple[Timing, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows as JSON data."""
        return [dict(row.__dict__) for row in self.rows]

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        return "\n".join(
            f"{row.name:{width}} {row.seconds * 1e3:10.3f} ms  {row.ratio:6.2f} of float"
            for row in self.rows
        )


def bench(
    models: Mapping[str, Callable[..., Any]],
    *inputs: Any,
    rounds: int = 10,
    warmup: int = 2,
    stacklevel: int = 1,
) -> Timings:
    """Time models side by side, in turns, without gradients; warn of those slower than the first.

    Args:
        models: name -> what is called with `inputs`; the float model comes first.
        rounds: how often each is called; the median counts.
        warmup: how often each is called before, which does not count.
        stacklevel: whose line the warning names: 1 is the caller's, as in `warnings.warn`.

    Raises:
        UserError: there are no models, no rounds, or fewer than no calls to warm up.
    """
    if not models or rounds < 1 or warmup < 0:
        raise UserError(
            f"bench needs a model, a round and warmup >= 0, not {len(models)} models, rounds={rounds}, "
            f"warmup={warmup}"
        )
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad():
        for number in range(warmup + rounds):
            for name, model in models.items():
                start = time.perf_counter()
                model(*inputs)
                elapsed = time.perf_counter() - start
                if number >= warmup:
                    seconds[name].append(elapsed)
    first = median(next(iter(seconds.values())))
    rows = tuple(Timing(name, median(s), median(s) / first) for name, s in seconds.items())
    slower = [f"{row.name} ({row.ratio:.2f} times)" for row in rows if row.ratio > 1]
    if slower:
        message = f"slower than {rows[0].name}: {', '.join(slower)}"
        warnings.warn(message, QomposeWarning, stacklevel=stacklevel + 1)
    return Timings(rows)
