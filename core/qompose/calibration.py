# SPDX-License-Identifier: Apache-2.0
"""Calibrate: run batches through a prepared model, so that its observers see the data."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from qompose.batches import check_limit, iterated, run_batch
from qompose.checkpoints import Kept
from qompose.collecting import Statistics, order_dependent, prepared_record, statistics
from qompose.errors import CalibrationError, QomposeWarning, UserError
from qompose.linting import lint
from qompose.progress import on_terminal, progress_bar
from qompose.ranks import Ranks
from qompose.restoring import restore, states_of
from qompose.training import is_trained


def calibrate(
    prepared: GraphModule,
    batches: Iterable[Any] | Statistics,
    *,
    transform: Callable[[Any], Any] | None = None,
    limit: int | None = None,
    progress: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    sharded: bool = False,
    timeout: float = 600.0,
) -> GraphModule:
    """Run batches through a prepared model, without gradients, and return the model.

    Where `torch.distributed` is initialised, each process runs its share of the batches, every so many-th
    of them, and all end with the statistics of all: bit by bit those that one process would have.

    Args:
        batches: tensors, tuples of positional arguments or dicts of keyword arguments; a DataLoader fits.
            Or `Statistics` of an earlier calibration, which take the place of data.
        transform: turns what `batches` yields into the model's inputs, as `lambda batch: batch[0]`.
        limit: how many batches to take at most, over all processes; not with `sharded`.
        progress: whether to show a progress bar; None shows it on a terminal.
        resume: a file in which statistics are kept on the way (`Statistics.save`): a calibration that
            was stopped goes on behind the batches that it has, which have to come in the same order.
        sharded: each process was given batches of its own.
        timeout: seconds after which a process that does not answer is an error.

    Raises:
        StageError: the model was not prepared.
        UserError: `batches` cannot be iterated, or an option is none, or is for batches and these are
            statistics.
        CalibrationError: there was no batch, or one does not fit the model (its number is named), or has
            another value than the one with which the model was exported for what is no tensor; another
            process failed or died; there are several, and an observer depends on the order of batches, or
            has statistics already. Observers are then as they were before.
        StatisticsError: statistics do not fit the model, or a file of them cannot be read.
    """
    prepared_record(prepared, "calibrate")
    if isinstance(batches, Statistics):
        _check_unused(transform=transform, limit=limit, resume=resume, sharded=sharded or None)
        return batches.apply(prepared)
    _check_limit(limit, sharded)
    iterator = iterated(batches, "calibrate")
    ranks = _ranks(prepared, timeout)
    kept, start = _resumed(prepared, ranks, resume)
    share = _Share(1 if sharded else ranks.count, 0 if sharded else ranks.rank, start, limit)
    total = share.total(len(batches)) if isinstance(batches, Sized) else limit
    with (
        progress_bar(ranks.rank == 0 and on_terminal(progress)) as bar,
        _looking(prepared),
        _all_or_none(prepared, ranks, start) as done,
    ):
        task = bar.add_task("calibrating", total=total)
        for number, batch in share.of(iterator):
            run_batch(prepared, batch, transform, number)
            done.append(number)
            bar.update(task, completed=number)
            if kept is not None:
                kept.note(prepared, number)
        if kept is not None:
            kept.close(prepared)  # what this process saw alone
    if ranks.rank == 0 and (found := lint(prepared)):
        lines = "".join(f"\n  - {line}" for line in found)
        warnings.warn(f"After calibration these look wrong:{lines}", QomposeWarning, stacklevel=2)
    return prepared


def _check_limit(limit: object, sharded: bool) -> None:
    check_limit(limit)
    if limit is not None and sharded:
        raise UserError(
            "limit= counts batches over all processes, and with sharded=True each has its own: shorten "
            "what each is given"
        )


def _ranks(prepared: GraphModule, timeout: float) -> Ranks:
    """Return which process this is, of those that calibrate.

    Raises:
        CalibrationError: there are several, and an observer depends on the order of batches.
    """
    ranks = Ranks.here(timeout)
    if ranks.count > 1 and (named := order_dependent(prepared)):
        raise CalibrationError(
            f"{ranks.count} processes cannot calibrate together what depends on the order of batches: "
            f'{"; ".join(named)}. Use range="minmax" or range="histogram".'
        )
    return ranks


def _resumed(
    prepared: GraphModule, ranks: Ranks, resume: str | os.PathLike[str] | None
) -> tuple[Kept | None, int]:
    """Return the file for what is seen, and how many batches this process has seen already.

    Raises:
        CalibrationError: there are several processes, and statistics that are from no such file.
    """
    kept = None if resume is None else Kept(Path(resume), ranks, prepared)
    start = 0 if kept is None else kept.restore(prepared)
    if ranks.count > 1 and not start and len(statistics(prepared)):
        raise CalibrationError(
            "these observers have statistics already, which each of the processes would add again: prepare "
            "the model once more, and put what both calibrations saw together with Statistics.merged"
        )
    return kept, start


@contextmanager
def _looking(prepared: GraphModule) -> Iterator[None]:
    """Run a model without gradients and, if it is one to be trained, without training batch norms.

    Whatever is raised, observers are then as they were before.
    """
    training, before = prepared.training, states_of(prepared)
    if is_trained(prepared):
        prepared.eval()
    try:
        with torch.no_grad():
            yield
    except Exception:
        restore(before)
        raise
    finally:
        prepared.train(training)


def _check_unused(**options: object) -> None:
    """Refuse what says how to take batches where there are none."""
    given = [f"{name}=" for name, value in options.items() if value is not None]
    if given:
        raise UserError(
            f"{', '.join(given)} is for batches, and calibrate was given the statistics of an earlier "
            "calibration: leave it out"
        )


@dataclass(frozen=True)
class _Share:
    """Which batches are run here: one of `count`, from that number `start` on, of at most `limit`."""

    count: int
    rank: int
    start: int
    limit: int | None

    def total(self, length: int) -> int:
        return length if self.limit is None else min(length, self.limit)

    def of(self, iterator: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the batches with their numbers, from 1 on, in the whole of them."""
        for number, batch in enumerate(islice(iterator, self.limit), start=1):
            if number > self.start and (number - 1) % self.count == self.rank:
                yield number, batch


@contextmanager
def _all_or_none(prepared: GraphModule, ranks: Ranks, start: int) -> Iterator[list[int]]:
    """Put the statistics of all processes together, or fail in all of them, whichever failed.

    Yields a list for the numbers of the batches that were run here.
    """
    done: list[int] = []
    try:
        yield done
    except Exception as error:
        # The others may have failed too; this is the error to show.
        with suppress(CalibrationError):
            ranks.exchange(f"{type(error).__name__}: {error}")
        raise
    parts = ranks.exchange((start + len(done), statistics(prepared) if ranks.count > 1 else None))
    failed = [f"rank {rank}: {part}" for rank, part in enumerate(parts) if isinstance(part, str)]
    if failed:
        raise CalibrationError(f"another process failed: {'; '.join(failed)}")
    if not any(count for count, _ in parts):
        raise CalibrationError(
            "calibrate got no batches: the iterable was empty (or used up before)"
        )
    if ranks.count > 1:
        first, *others = (found for _, found in parts)
        first.merged(*others).apply(prepared, partial=True)
