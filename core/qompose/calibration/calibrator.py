# SPDX-License-Identifier: Apache-2.0
"""`calibrate`: batches through a prepared model, on one process or several, so that observers see data."""

from __future__ import annotations

import copy
import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

from qompose.algorithms.blocks import learned_of, set_learned
from qompose.calibration.sequential import learn, learns
from qompose.calibration.statistics_data import (
    Statistics,
    order_dependent,
    prepared_record,
    statistics,
    watched,
)
from qompose.calibration.statistics_file import check_kind
from qompose.console import on_terminal, progress_bar
from qompose.errors import CalibrationError, QomposeWarning, StatisticsError, UserError
from qompose.observers.channel_ranges import base_observer, screen_of
from qompose.observers.fake_quantize import FakeQuantize
from qompose.observers.foreign_observer import guard_of
from qompose.observers.input_sums import SumObserver, input_observers
from qompose.observers.make_observer import DerivedObserver, observer_nodes, observers_of
from qompose.observers.min_max import Observer
from qompose.observers.value_screening import FAR_FROM_TYPICAL, Screen
from qompose.plan.methods import check_methods, in_method
from qompose.program.aliasing import inputs_written, written_buffers
from qompose.program.batches import KeptBatches, check_limit, iterated, run_batch, sparing
from qompose.program.control_flow import graphs_in
from qompose.program.graph import copies_of, get_attribute, undo_writes
from qompose.program.meta import BEGAN_KEY, META_KEY, RAN_KEY
from qompose.training.train_eval import is_trained


@overload
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
) -> GraphModule: ...


@overload
def calibrate(
    prepared: Mapping[str, GraphModule],
    batches: Mapping[str, Iterable[Any] | Statistics],
    *,
    transform: Callable[[Any], Any] | None = None,
    limit: int | None = None,
    progress: bool | None = None,
    resume: None = None,
    sharded: bool = False,
    timeout: float = 600.0,
) -> dict[str, GraphModule]: ...


def calibrate(
    prepared: GraphModule | Mapping[str, GraphModule],
    batches: Iterable[Any] | Statistics | Mapping[str, Iterable[Any] | Statistics],
    *,
    transform: Callable[[Any], Any] | None = None,
    limit: int | None = None,
    progress: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    sharded: bool = False,
    timeout: float = 600.0,
) -> GraphModule | dict[str, GraphModule]:
    """Run batches through a prepared model, without gradients, and return the model.

    The methods of one program may be calibrated together, with batches for some or all of them. All methods
    then go by what those saw together, so that weights that they share get the same integers.

    Algorithms that learn from data, such as "gptq_sequential", run after the last batch: the program is run
    once more on all batches, part by part, and batches are kept in memory until then. The integers that they
    choose lie in temporary files (`TMPDIR`), a byte for each weight, as long as models use them.

    If `torch.distributed` is initialized, each process runs its share of the batches, and all end with the
    statistics of all data, bit for bit those of a single process, but for the rounding of second moments.

    Args:
        prepared: a prepared model, or a dict of the methods of one program.
        batches: tensors, tuples of positional arguments or dicts of keyword arguments, such as a DataLoader;
            or `Statistics` of an earlier calibration instead of data. For methods a dict of such, by name.
        transform: turns what `batches` yields into the model's inputs, as `lambda batch: batch[0]`.
        limit: how many batches to use at most, over all processes; not with `sharded`.
        progress: whether to show a progress bar; None shows it on a terminal.
        resume: a file in which statistics are saved on the way (`Statistics.save`). A calibration that
            was stopped continues after the batches in it, which must come in the same order. Where the
            program writes to inputs or buffers, such as a cache, the batches before are run again, since
            later ones read what they wrote.
        sharded: each process was given its own batches.
        timeout: seconds after which a process that does not answer is an error.

    Raises:
        StageError: the model was not prepared.
        UserError: `batches` cannot be iterated, or an option is invalid or does not apply to statistics.
        CalibrationError: there was no batch; one does not fit the model (its number is named) or has
            another value than the exported one for an argument that is not a tensor; another process
            failed or died; or there are several, and an observer depends on the order of batches or has
            statistics already. Observers and buffers are then as they were before.
        StatisticsError: statistics do not fit the model, or a file of them cannot be read; or `resume` with
            fake quantizers in a program that writes to inputs or buffers.
    """
    options = (transform, limit, progress, resume, sharded, timeout)
    if not isinstance(prepared, Mapping):
        prepared_record(prepared, "calibrate")
        with _undone_on_failure([prepared]):
            return _calibrated(prepared, batches, *options)
    given = _by_method(prepared, batches, resume)
    with _undone_on_failure(prepared.values()):
        for name, own in given.items():
            with in_method(name):
                _calibrated(prepared[name], own, *options)
        return _going_by_all(prepared, [*given])


@contextmanager
def _undone_on_failure(models: Collection[GraphModule]) -> Iterator[None]:
    """Whatever is raised, let models be as before: what they saw, learned and wrote to buffers."""
    undo = [undo_writes(value for model in models for value in _state(model).values())]
    for model in models:
        undo += [partial(set_learned, model, learned_of(model)), _undo(model)]
        idle = [body for body in graphs_in(model) if RAN_KEY not in body.meta]
        undo += [partial(body.meta.pop, RAN_KEY, None) for body in idle]
    try:
        yield
    except BaseException:  # a key that was pressed, too
        for step in undo:
            step()
        raise


def _state(prepared: GraphModule) -> dict[str, Tensor]:
    """Return the buffers that a program writes to, by path."""
    return {path: get_attribute(prepared, path) for path in prepared.meta[META_KEY].state}


def _calibrated(
    prepared: GraphModule,
    batches: Iterable[Any] | Statistics,
    transform: Callable[[Any], Any] | None,
    limit: int | None,
    progress: bool | None,
    resume: str | os.PathLike[str] | None,
    sharded: bool,
    timeout: float,
) -> GraphModule:
    """Calibrate one model; see `calibrate`."""
    record = prepared_record(prepared, "calibrate")
    if isinstance(batches, Statistics):
        _check_unused(transform=transform, limit=limit, resume=resume, sharded=sharded or None)
        return batches.apply(prepared)
    _check_limit(limit, sharded)
    iterator = iterated(batches, "calibrate")
    ranks = _ranks(prepared, timeout)
    kept, start = _resumed(prepared, ranks, resume)
    share = _Share(1 if sharded else ranks.count, 0 if sharded else ranks.rank, limit)
    total = share.total(len(batches)) if isinstance(batches, Sized) else limit
    held = KeptBatches(prepared) if learns(record.plan) else None
    with progress_bar(ranks.rank == 0 and on_terminal(progress)) as bar, _looking(prepared):
        with _all_or_none(prepared, ranks, start) as done:
            task = bar.add_task("calibrating", total=total)
            for number in _ran(prepared, share.of(iterator), transform, held, start, kept):
                done.append(number)
                bar.update(task, completed=number)
        if held is not None:
            if start and done:
                set_learned(prepared, None)  # the file has what was learned of fewer batches
            with _failing_together(ranks):
                # With several, it would have what all saw, which a resumed run counts once for each.
                alone = None if ranks.several else kept
                note = partial(alone.note, prepared) if alone is not None else _nothing
                exchange = partial(_exchanged, ranks)
                learn(prepared, held, ranks.rank, exchange, bar, note)
            if alone is not None:
                alone.write(prepared)  # with all that was learned
    if ranks.rank == 0 and (found := lint(prepared)):
        lines = "".join(f"\n  - {line}" for line in found)
        warnings.warn(f"Suspicious calibration statistics:{lines}", QomposeWarning, stacklevel=2)
    return prepared


def _by_method(
    methods: Mapping[str, GraphModule], batches: object, resume: object
) -> Mapping[str, Iterable[Any] | Statistics]:
    """Return the batches of each method that has some.

    Raises:
        UserError, CalibrationError, StageError: methods cannot be calibrated together with these.
    """
    check_methods(methods, "calibrate")
    if not isinstance(batches, Mapping) or not batches or not batches.keys() <= methods.keys():
        raise UserError(
            "calibrate(methods, batches) expects a dict from method names to batches, for "
            f"example {{{next(iter(methods))!r}: batches}}. Methods: {', '.join(methods)}"
        )
    if resume is not None:
        raise UserError("resume= supports a single model only; calibrate each method separately")
    for name in methods:
        with in_method(name):
            record = prepared_record(methods[name], "calibrate")
        if len(batches) == 1 or name not in batches:
            continue
        if _has_seen(methods[name]):
            raise CalibrationError(
                f"the observers of method {name!r} already have statistics, which would be "
                "counted once per method. Prepare the methods again, or pass batches for one "
                "method only"
            )
        if (named := order_dependent(methods[name])) or learns(record.plan):
            what = "; ".join(named) or "an algorithm that learns from all calibration data"
            raise CalibrationError(
                f"statistics of several methods cannot be merged for {what} (method {name!r}). "
                "Pass batches for one method only"
            )
    return batches


def _going_by_all(methods: Mapping[str, GraphModule], ran: list[str]) -> dict[str, GraphModule]:
    """Let the observers of all methods go by what those that ran saw together."""
    first, *others = (statistics(methods[name]) for name in ran)
    try:
        # Methods may leave out parts of the model, with parameters that others have.
        seen = first.merged(*(replace(o, fingerprint=first.fingerprint) for o in others))
    except StatisticsError as error:
        raise CalibrationError(
            f"statistics of the methods {', '.join(ran)} cannot be merged: {error}. Pass batches "
            "for one of them only"
        ) from error
    for name, method in methods.items():
        with in_method(name):
            seen.apply(method, partial=True, another_model=True)
    return dict(methods)


def _ran(
    prepared: GraphModule,
    batches: Iterable[tuple[int, Any]],
    transform: Callable[[Any], Any] | None,
    held: KeptBatches | None,
    start: int,
    kept: _ResumeFile | None,
) -> Iterator[int]:
    """Run numbered batches, those behind `start`, and yield the number of each that went through.

    All of them are put into `held`, where there is one.
    """
    run = sparing(prepared) if held is None else held
    again: Callable[..., Any] | None = None if held is None else held.keep
    undo = _nothing
    if kept is not None and not (start and BEGAN_KEY in prepared.meta):
        prepared.meta[BEGAN_KEY] = copies_of(_state(prepared))
    if start and _writes(prepared):
        again, undo = run, _undo(prepared)
        for path, value in prepared.meta[BEGAN_KEY].items():
            get_attribute(prepared, path).copy_(value)  # in place, as methods share it
    number = 0
    for number, batch in batches:
        if number <= start:
            if again is not None:
                run_batch(again, batch, transform, number)
            continue
        undo()  # as the file has it
        undo = _nothing
        run_batch(run, batch, transform, number)
        yield number
        if kept is not None:
            kept.note(prepared, number)
    undo()
    if number < start and kept is not None:
        raise CalibrationError(
            f"{kept.path} has statistics of {start} batches, but calibrate got {number}. Pass all batches "
            "of the run that is resumed, or another file"
        )
    if kept is not None:
        kept.write(prepared)  # what this process saw alone


def _writes(prepared: GraphModule) -> bool:
    """Tell whether a program leaves anything behind that the next call may read."""
    return bool(inputs_written(prepared.graph) or written_buffers(prepared.graph))


def _check_limit(limit: object, sharded: bool) -> None:
    check_limit(limit)
    if limit is not None and sharded:
        raise UserError(
            "limit= counts batches across all processes, so it cannot be combined with "
            "sharded=True. Pass fewer batches to each process"
        )


def _ranks(prepared: GraphModule, timeout: float) -> Ranks:
    """Return which process this is, of those that calibrate.

    Raises:
        CalibrationError: there are several, and an observer depends on the order of batches.
    """
    ranks = Ranks.here(timeout)
    if ranks.several and (named := order_dependent(prepared)):
        raise CalibrationError(
            f"calibration in {ranks.count} processes does not support observers that depend on "
            f'batch order: {"; ".join(named)}. Use range="minmax" or range="histogram"'
        )
    return ranks


def _resumed(
    prepared: GraphModule, ranks: Ranks, resume: str | os.PathLike[str] | None
) -> tuple[_ResumeFile | None, int]:
    """Return the file for what is seen, and how many batches this process has seen already.

    Raises:
        CalibrationError: there are several processes, and statistics that are from no such file; or
            algorithms have learned of other batches.
    """
    kept = None if resume is None else _ResumeFile(Path(resume), ranks, prepared)
    start = 0 if kept is None else kept.restore(prepared)
    learned = learned_of(prepared)
    if not start and learned is not None and learned.whole and learned.weights:
        raise CalibrationError(
            f"algorithms have rounded {learned.weights[0].path} by the batches of an earlier calibration, "
            "and these would change nothing. Prepare the model again, and pass all batches at once"
        )
    if ranks.several and not start and _has_seen(prepared):
        raise CalibrationError(
            "the observers already have statistics, which would be counted once per process. To "
            "add data, calibrate a newly prepared model and merge its statistics with the existing "
            "ones (Statistics.merged)"
        )
    return kept, start


def _has_seen(prepared: GraphModule) -> bool:
    """Tell whether observers have statistics of any kind: those of weights alone have no entries."""
    found = statistics(prepared)
    return bool(found.entries or found.means or found.moments)


@contextmanager
def _looking(prepared: GraphModule) -> Iterator[None]:
    """Run a model without gradients and, if it is one to be trained, without training batch norms."""
    training = prepared.training
    if is_trained(prepared):
        prepared.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        prepared.train(training)


def _check_unused(**options: object) -> None:
    """Refuse what says how to take batches where there are none."""
    given = [f"{name}=" for name, value in options.items() if value is not None]
    if given:
        raise UserError(
            f"{', '.join(given)} can only be used with batches, but calibrate got saved "
            f"statistics; remove {', '.join(given)}"
        )


@dataclass(frozen=True)
class _Share:
    """Which batches belong here: one of `count`, of at most `limit`."""

    count: int
    rank: int
    limit: int | None

    def total(self, length: int) -> int:
        return length if self.limit is None else min(length, self.limit)

    def of(self, iterator: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the batches with their numbers, from 1 on, in the whole of them."""
        for number, batch in enumerate(islice(iterator, self.limit), start=1):
            if (number - 1) % self.count == self.rank:
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
    parts = ranks.exchange((bool(start or done), statistics(prepared) if ranks.several else None))
    failed = [f"rank {rank}: {part}" for rank, part in enumerate(parts) if isinstance(part, str)]
    if failed:
        raise CalibrationError(f"another process failed: {'; '.join(failed)}")
    if not any(ran for ran, _ in parts):
        raise CalibrationError(
            "calibrate got no batches: the iterable is empty or already consumed"
        )
    if ranks.several:
        first, *others = (found for _, found in parts)
        first.merged(*others).apply(prepared, partial=True)


@dataclass(frozen=True)
class _Failed:
    """What a process gives to the others where it cannot go on."""

    reason: str


@contextmanager
def _failing_together(ranks: Ranks) -> Iterator[None]:
    """Let the other processes know of an error, which wait for what this one is to give."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _OtherFailedError):
            with suppress(CalibrationError):
                ranks.exchange(_Failed(f"rank {ranks.rank}: {type(error).__name__}: {error}"))
        raise


class _OtherFailedError(CalibrationError):
    """Raised where another process cannot go on."""


def _exchanged(ranks: Ranks, part: Any) -> list[Any]:
    """Return what each process gave.

    Raises:
        CalibrationError: one of them failed, or has died.
    """
    parts = ranks.exchange(part)
    if failed := [part.reason for part in parts if isinstance(part, _Failed)]:
        raise _OtherFailedError(f"another process failed: {'; '.join(failed)}")
    return parts


def _nothing() -> None:
    """Do nothing."""


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

    @property
    def several(self) -> bool:
        """Tell whether there are others."""
        return self.count > 1

    def exchange(self, part: Any) -> list[Any]:
        """Return what each process gave, by rank. Only processes of one group send it to one another.

        Raises:
            CalibrationError: one did not answer in time, or has died.
        """
        if not self.several:
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
        f"another process died or did not respond within {timeout:g} seconds "
        f"({first}). Check its output; if it is only slow, pass a larger timeout="
    )


EVERY = 30.0
"""Seconds between two writes: what is lost at most."""


class _ResumeFile:
    """A file with the statistics of a calibration on the way; of several processes each has its own.

    Raises:
        StatisticsError: there can be no such file, or observers keep their statistics to themselves.
    """

    def __init__(self, path: Path, ranks: Ranks, prepared: GraphModule) -> None:
        if left_out := statistics(prepared).left_out:
            raise StatisticsError(
                "resume= requires observers whose statistics can be saved. Observers from other "
                f"packages are not supported: {'; '.join(left_out)}"
            )
        observers = observers_of(observer_nodes(prepared)).values()
        if any(isinstance(o, FakeQuantize) for o in observers) and _writes(prepared):
            raise StatisticsError(
                "resume= does not support fake quantizers in a program that writes to its inputs or buffers: "
                "what it writes depends on the ranges so far. Calibrate without resume="
            )
        check_kind(path)
        if not path.parent.is_dir():
            raise StatisticsError(f"resume={str(path)!r}: directory {path.parent} does not exist")
        rank = f".rank{ranks.rank}of{ranks.count}" if ranks.several else ""
        self.path = path.with_name(f"{path.stem}{rank}{path.suffix}")
        self._batches, self._written = 0, time.monotonic()

    def restore(self, prepared: GraphModule) -> int:
        """Give the observers what the file has, and return of how many batches that is; 0 without a file.

        Raises:
            StatisticsError: it is of another model or other observers, or of a whole calibration.
        """
        if self.path.exists():
            found = Statistics.load(self.path)
            if not found.batches:
                raise StatisticsError(
                    f"{self.path} holds a finished calibration, which cannot be resumed. To use "
                    "its statistics, pass Statistics.load(file) instead of batches, without resume="
                )
            found.apply(prepared, partial=False, to_go_on=True)
            self._batches = found.batches
        return self._batches

    def note(self, prepared: GraphModule, number: int | None = None) -> None:
        """Remember that a batch was run, or more was learned, and write the file when it is time."""
        self._batches = self._batches if number is None else number
        if time.monotonic() - self._written >= EVERY:
            self.write(prepared)

    def write(self, prepared: GraphModule) -> None:
        """Write what this process has seen."""
        replace(statistics(prepared), batches=self._batches).save(self.path)
        self._written = time.monotonic()


def _undo(model: GraphModule) -> Callable[[], None]:
    """Return what makes the observers of a prepared model forget all that they see from now on.

    Sums that are still zero are not copied: they may be as large as the model.
    """
    steps = list[Callable[[], None]]()
    observers = [*observers_of(observer_nodes(model)).values()]
    observers += [observer for _, _, observer in input_observers(model)]
    for observer in {id(o): o for o in observers}.values():
        if isinstance(observer, SumObserver) and not bool(observer.count.any()):
            steps.append(observer.clear)
        elif not isinstance(observer, DerivedObserver):  # which has seen nothing, and knows others
            guard = guard_of(observer)
            state = {k: copy.deepcopy(v) for k, v in vars(observer).items() if k != "forward"}
            screen = None if guard is None else copy.deepcopy(guard.screen)
            steps.append(partial(_put_back, observer, state, screen))

    def undo() -> None:
        for step in steps:
            step()

    return undo


def _put_back(observer: Any, state: dict[str, Any], screen: Screen | None) -> None:
    observer.__dict__.update(state)
    guard = guard_of(observer)
    if guard is not None and screen is not None:
        guard.screen = screen


def lint(prepared: GraphModule) -> list[str]:
    """Return a line for each tensor whose statistics look wrong; none where all is well.

    Those are: tensors that no batch came to, with mask values, with a single value throughout, or whose
    largest magnitude is a thousand times the median one.

    Raises:
        StageError: the model was not prepared.
    """
    record = prepared_record(prepared, "lint")
    seen = [
        (observer, screen)
        for observer, _ in watched(prepared, record)
        if (screen := screen_of(observer))
    ]
    known = [size for _, screen in seen if (size := _magnitude(screen))]
    typical = median(known) if known else 0.0
    return [
        f"{_subject(observer)} {problem}"
        for observer, screen in seen
        for problem in _problems(observer, screen, typical)
    ]


def _problems(observer: nn.Module, screen: Screen, typical: float) -> Iterator[str]:
    size = _magnitude(screen)
    if not screen.values:
        yield "never saw data because no batch reached it"
    elif screen.mask is not None:
        yield f"has {screen.mask}; it stays in float"
    elif (value := _only_value(observer)) is not None:
        yield f"was constant ({value:g})"
    elif size > FAR_FROM_TYPICAL * typical:
        yield (
            f"reaches {size:g}, while the median over all tensors is {typical:g} (an outlier or a "
            "mask?)"
        )


def _magnitude(screen: Screen) -> float:
    """Return the largest magnitude that was seen, as far as a screen knows it."""
    return max(screen.bulk, -screen.far if math.isfinite(screen.far) else 0.0)


def _only_value(observer: nn.Module) -> float | None:
    inner = base_observer(observer)
    if not isinstance(inner, Observer):
        return None
    facts = inner.facts()
    several = facts.values > 1 and facts.minimum is not None and facts.minimum == facts.maximum
    return facts.minimum if several else None


def _subject(observer: nn.Module) -> str:
    inner = base_observer(observer)
    guard = guard_of(inner)
    return (
        guard.subject if guard is not None else str(getattr(inner, "subject", type(inner).__name__))
    )
