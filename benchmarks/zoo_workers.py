# SPDX-License-Identifier: Apache-2.0
"""Processes that runs go to: one that crashes, hangs or takes too much memory costs its run, and no other."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo_flows import Flow

MOST_RUNS = 80
"""Of one process: torch keeps a little of every program."""
LOOK = 0.1
"""Seconds between two looks at the memory of a run."""
STARTING = 120.0
"""Seconds in which a process has to begin with a run, besides those of the run."""


@dataclass(frozen=True)
class Limits:
    """Of one run: seconds, and the bytes that its process may hold. Memory is looked up on Linux alone."""

    seconds: float
    bytes: int


def serve(zoo: str) -> None:
    """Be a process that runs what each line of input asks for, and answers in lines of JSON."""
    from zoo_run import run

    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # runtimes print; the channel is for answers alone
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()

    def answer(value: Any) -> None:
        print(json.dumps(value, allow_nan=False), file=channel, flush=True)

    for line in sys.stdin:
        task = json.loads(line)
        flow = Flow.from_dict(task["flow"])
        answer({"row": run(zoo, task["model"], flow, lambda stage: answer({"stage": stage}))})


def end_with(parent: int) -> None:
    """End with the parent, even out of a run that hangs."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class Worker:
    """A process for runs, as seen from outside; started when needed, and again after it was lost."""

    def __init__(self, command: list[str], limits: Limits) -> None:
        self._command, self._limits = command, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._runs, self._stage, self._kind = 0, "", ""

    def run(self, model: str, flow: Flow) -> dict[str, Any]:
        """The row of a run, whatever becomes of the process. Peers change their process: each has its own."""
        if self._runs >= MOST_RUNS or flow.peer != self._kind:
            self._end()
        self._runs, self._stage, self._kind = self._runs + 1, "start", flow.peer
        start = time.monotonic()
        process = self._started()
        assert process.stdin
        with suppress(BrokenPipeError):
            task = {"model": model, "flow": flow.to_dict()}
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
        row, why = self._answer(process)
        if row is None:
            self._end()
            return {
                "works": False,
                "stage": self._stage,
                "error": f"{why}: {self._last_line()}".rstrip(": "),
                "seconds": {self._stage: round(time.monotonic() - start, 4)},
            }
        return row

    def interrupt(self) -> None:
        """End what the process does now, from another thread: `run` then returns a row that says so."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process, in whatever it does, for good."""
        self._end()
        self._log.close()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process, self._runs = None, 0

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._log.seek(0)
            self._log.truncate()
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=self._log
            )
        return self._process

    def _answer(self, process: subprocess.Popen[bytes]) -> tuple[dict[str, Any] | None, str]:
        """The row, or None and why there is none."""
        assert process.stdout
        buffer, limit = b"", time.monotonic() + self._limits.seconds + STARTING
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(LOOK):
                    part = os.read(process.stdout.fileno(), 1 << 16)
                    if not part:
                        return None, _ended(process.wait())
                    *lines, buffer = (buffer + part).split(b"\n")
                    for said in map(json.loads, lines):
                        if "row" in said:
                            return said["row"], ""
                        if self._stage == "start":
                            limit = time.monotonic() + self._limits.seconds
                        self._stage = said["stage"]
                if time.monotonic() > limit:
                    return None, f"it took more than {self._limits.seconds:g} s"
                if (held := _held(process.pid)) > self._limits.bytes:
                    return (
                        None,
                        f"it held {held >> 20} MiB of the {self._limits.bytes >> 20} allowed",
                    )

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


def _ended(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with {status}"


def _held(pid: int) -> int:
    """Bytes of memory of a process; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


Settled = Callable[[str, Flow], dict[str, Any] | None]
Begun = Callable[[str, Flow], None]
Done = Callable[[str, Flow, dict[str, Any]], None]
Tasks = list[tuple[str, list[Flow]]]


class Crew:
    """Threads with a worker each; a model's flows stay with one. What a thread raises ends them all.

    Args:
        settled: returns the row of a run that need not be made, else None.
        begun, done: called before and after each run, one call at a time.
    """

    def __init__(self, tasks: Tasks, settled: Settled, begun: Begun, done: Done) -> None:
        self._waiting = [(model, flows) for model, flows in reversed(tasks)]
        self._lock = threading.Lock()
        self._faults: list[BaseException] = []
        self._settled, self._begun, self._done = settled, begun, done

    def run(self, make: Callable[[], Worker], jobs: int) -> None:
        """Run all tasks, so many at a time. Raises what a thread or the user's interrupt raised."""
        workers = [make() for _ in range(jobs)]
        threads = [threading.Thread(target=self._work, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                threads[0].join(0.2)
                time.sleep(0.05)
        except KeyboardInterrupt as interrupt:
            self._faults.append(interrupt)
            for worker in workers:
                worker.interrupt()
        for thread in threads:
            thread.join()
        if self._faults:
            raise self._faults[0]

    def _work(self, worker: Worker) -> None:
        try:
            while (task := self._next()) is not None:
                for flow in task[1]:
                    self._one(worker, task[0], flow)
        except BaseException as error:  # raised in the main thread
            self._faults.append(error)
        finally:
            worker.close()

    def _next(self) -> tuple[str, list[Flow]] | None:
        with self._lock:
            return self._waiting.pop() if self._waiting and not self._faults else None

    def _one(self, worker: Worker, model: str, flow: Flow) -> None:
        if self._faults:
            return
        with self._lock:
            self._begun(model, flow)
            row = self._settled(model, flow)
        row = row or worker.run(model, flow)
        with self._lock:
            if not self._faults:
                self._done(model, flow, row)
