# SPDX-License-Identifier: Apache-2.0
"""Engines in a process each that run in turn, round after round, so that a slow minute is slow for all."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from statistics import median, quantiles
from typing import Any

WARM_UP = 3
FEWEST_RUNS = 3
"""In a round; of a model whose single run takes longer than a round is to, one of each is enough."""
SET_UP_TOGETHER = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
"""Processes that are set up at a time: nothing is measured meanwhile."""

Call = Callable[[], Any]


def serve(make: Callable[[], tuple[Call, dict[str, Any]]], seconds: float) -> None:
    """Be the process of one engine: set up, say what there is, then a round for each line of input.

    Args:
        make: returns what is timed, and JSON-able facts about it. Whatever it raises is the engine's result.
        seconds: how long a round takes, about.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # runtimes print; the channel is for answers alone
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=channel, flush=True)

    try:
        run, found = make()
        run()  # the first time, when compilers compile
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        answer({"error": reason, "traceback": traceback.format_exc()})
        return
    answer(found)
    gc.collect()
    gc.disable()  # or it would run inside some of the rounds
    for _ in sys.stdin:
        answer(_one_round(run, seconds))


def _one_round(run: Call, seconds: float) -> list[float]:
    """Seconds of each run, for about so many seconds."""
    slow = any(
        _seconds_of(run) > seconds for _ in range(WARM_UP)
    )  # and ends with the first that is
    taken = [_seconds_of(run)]
    while (len(taken) < FEWEST_RUNS and not slow) or sum(taken) < seconds:
        taken.append(_seconds_of(run))
    return taken


def _seconds_of(run: Call) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@dataclass
class Row:
    """The results of one engine on one model; `rounds_ms` has the median of each round."""

    model: str
    engine: str
    error: str = ""
    rounds_ms: list[float] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def quantile(self, tenth: int) -> float:
        """The milliseconds that so many tenths of the rounds stay under."""
        if len(self.rounds_ms) < 2:
            return self.rounds_ms[0]
        return quantiles(self.rounds_ms, n=10, method="inclusive")[tenth - 1]

    def ratio(self, other: Row | None) -> float | None:
        """Time as a part of that of `other`: the median over rounds, each compared with its neighbour."""
        if other is None or self.error or other.error:
            return None
        pairs = zip(self.rounds_ms, other.rounds_ms, strict=True)
        return median(mine / theirs for mine, theirs in pairs)

    def times(self) -> list[str]:
        """The median and the tenth and ninetieth percentile of the rounds, in milliseconds."""
        return [f"{self.quantile(tenth):.3f}" for tenth in (5, 1, 9)]

    def ratios(self, rows: Iterable[Row], names: Iterable[str]) -> list[str]:
        """The time as a part of that of the named engines on the same model, where they ran."""
        found = self.siblings(rows)
        parts = (self.ratio(found.get(name)) for name in names)
        return ["" if part is None else f"{part:.3f}" for part in parts]

    def siblings(self, rows: Iterable[Row]) -> dict[str, Row]:
        """The engines on the same model."""
        return {other.engine: other for other in rows if other.model == self.model}

    def to_dict(self, rows: Iterable[Row], names: Iterable[str]) -> dict[str, Any]:
        """Everything as JSON-able data, with the ratios to the named engines."""
        data = asdict(self)
        if self.rounds_ms and not self.error:
            others = self.siblings(rows)
            data |= {"ms": self.quantile(5), "p10_ms": self.quantile(1), "p90_ms": self.quantile(9)}
            data |= {f"of_{name}": self.ratio(others.get(name)) for name in names}
        return data


class Worker:
    """The process of one engine, as seen from outside. Its failure ends up in `row.error`.

    It sets itself up from its start on; `ready` waits for that.
    """

    def __init__(self, engine: str, model: str, arguments: Sequence[str]) -> None:
        self.row = Row(model, engine)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, sys.argv[0], *arguments, "--work", engine, "--models", model]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, text=True
        )

    def ready(self) -> None:
        """Wait until there is something to measure, or a reason why there is not."""
        found = self._answer()
        self.row.error = self.row.error or found.pop("error", "")
        self.row.found = found

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-1:]
        self.row.error = f"its process ended with {self._process.wait()}: {' '.join(last)}"
        return {}

    def one_round(self) -> None:
        """Run for a while; a process that has ended says so to whoever reads its answer."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
        taken = self._answer()
        if not self.row.error:
            self.row.rounds_ms.append(median(taken) * 1e3)

    def close(self) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._log.close()


def measure(model: str, engines: Iterable[str], rounds: int, arguments: Sequence[str]) -> list[Row]:
    """Set the engines up, as many at a time as there are cores, then run them in turn.

    Args:
        arguments: the command line of this script, which the processes get too.
    """
    workers: list[Worker] = []
    for engine in engines:
        if len(workers) >= SET_UP_TOGETHER:
            workers[-SET_UP_TOGETHER].ready()
        print(f"{model}: {engine}", file=sys.stderr, flush=True)
        workers.append(Worker(engine, model, arguments))
    for worker in workers[-SET_UP_TOGETHER:]:
        worker.ready()
    for _ in range(rounds):
        for worker in workers:
            if not worker.row.error:
                worker.one_round()
    for worker in workers:
        worker.close()
    return [worker.row for worker in workers]


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The installed versions of packages."""
    return {name: version(name) for name in packages}
