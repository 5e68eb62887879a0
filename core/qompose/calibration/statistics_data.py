# SPDX-License-Identifier: Apache-2.0
"""What calibration saw, as a value that merges.

They are kept by the tensors' places in the model (`qompose.plan.operator_ids`), not by those of one
quantizer's observers, so that one calibration serves several backends and bit-widths.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule

from qompose.algorithms.blocks import Learned, learned_of, set_learned
from qompose.calibration.sequential import usable
from qompose.calibration.statistics_file import (
    Entry,
    SiteMeans,
    SiteMoments,
    range_of,
    read,
    same,
    write,
)
from qompose.errors import StatisticsError, near_names
from qompose.observers.channel_ranges import base_observer
from qompose.observers.input_sums import (
    Columns,
    MeanObserver,
    Means,
    MomentObserver,
    Moments,
    input_observers,
)
from qompose.observers.make_observer import observer_nodes, observers_of
from qompose.observers.min_max import Observer
from qompose.observers.tensor_statistics import Facts
from qompose.plan.operator_ids import Site, sites_of
from qompose.plan.plan import Record, record_of
from qompose.program.control_flow import body_of, graphs_in, nodes_in, references_of
from qompose.program.graph import constant_of
from qompose.program.meta import RAN_KEY

SiteSums = tuple[tuple[Site, Any], ...]
_Place = tuple[Site, Columns | int | None]
"""Of which tensor sums are, and of which of its columns; means are of its channels."""


@dataclass(frozen=True)
class Difference:
    """What two statistics say of one tensor; "" is nothing."""

    site: Site
    one: str
    other: str

    def __str__(self) -> str:
        return f"{self.site}: {self.one or 'nothing'} != {self.other or 'nothing'}"


@dataclass(frozen=True)
class Statistics:
    """The result of calibration, by tensor. Immutable: methods return new objects.

    Attributes:
        entries: the tensors that share a range, with what their observer saw.
        fingerprint: a hash of the model (`qompose.plan.operator_ids`).
        batches: the number of batches that a resumable calibration has seen, else 0.
        left_out: tensors with observers of other packages, whose statistics cannot be read.
        means: channel means of inputs, for bias correction, by site.
        moments: second moments of inputs, for rounding, by site; a site may have several, for different
            columns.
        learned: what algorithms learned about the weights from all data; it cannot be merged.
    """

    entries: tuple[Entry, ...]
    fingerprint: str = ""
    batches: int = 0
    left_out: tuple[str, ...] = ()
    means: SiteMeans = ()
    moments: SiteMoments = ()
    learned: Learned | None = None

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __str__(self) -> str:
        lines = [f"{entry.sites[0]}: {described(entry.facts)}" for entry in self.entries]
        return "\n".join([*lines, *(f"no statistics: {name}" for name in self.left_out)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `.safetensors` file, or a `.json` file, which is larger and can be edited.

        Raises:
            StatisticsError: the path ends in neither.
            OSError: it cannot be written.
        """
        write(Path(path), self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read a file of `save`. Nothing in it is executed.

        Raises:
            StatisticsError: the file is of another kind or version, or damaged.
            OSError: it cannot be read.
        """
        return read(Path(path), cls)

    def merged(self, *others: Statistics) -> Statistics:
        """Return the statistics of all data together, exactly, whatever the order and grouping.

        Only the rounding of second moments depends on the order, and `diff` does not count it.
        `learned` is dropped, since it depends on all data at once.

        Raises:
            StatisticsError: the models differ, or observers depend on the order of batches.
        """
        result = self
        for other in others:
            result = result._merged(other)
        return result

    def _merged(self, other: Statistics) -> Statistics:
        self._check_model(other.fingerprint, "the other statistics belong to one with")
        found = {entry.sites: entry.facts for entry in self.entries}
        groups = {site: entry.sites for entry in self.entries for site in entry.sites}
        for entry in other.entries:
            for site in entry.sites:
                if groups.get(site, entry.sites) != entry.sites:
                    raise StatisticsError(
                        f"these statistics come from different quantizers: {site} is grouped with "
                        "different tensors. Use the same quantizer in both calibrations"
                    )
            mine = found.get(entry.sites)
            try:
                found[entry.sites] = entry.facts if mine is None else mine.merged(entry.facts)
            except StatisticsError as error:
                raise StatisticsError(f"{entry.sites[0]}: {error}") from error
        return Statistics(
            _ordered(found),
            self.fingerprint,
            self.batches + other.batches,
            tuple(dict.fromkeys([*self.left_out, *other.left_out])),
            self._merged_sums(other, self.means, other.means),
            self._merged_sums(other, self.moments, other.moments),
        )

    def _merged_sums(self, other: Statistics, mine: SiteSums, theirs: SiteSums) -> SiteSums:
        """Return the sums of all data; those of a tensor that one of both saw without them are lost."""
        one, another = _by_place(mine), _by_place(theirs)
        seen = self._by_site().keys(), other._by_site().keys()
        found = {}
        for place in _in_order({*one, *another}):
            if place in one and place in another:
                found[place] = one[place].merged(another[place])
            elif place[0] not in seen[place in one]:
                found[place] = (one if place in one else another)[place]
        return tuple((site, sums) for (site, _), sums in found.items())

    def _check_model(self, fingerprint: str, whose: str) -> None:
        if self.fingerprint != fingerprint:
            raise StatisticsError(
                f"these statistics belong to a model with hash {self.fingerprint[:12]}, but "
                f"{whose} {fingerprint[:12]}: parameters or buffers differ"
            )

    def diff(self, other: Statistics) -> tuple[Difference, ...]:
        """Return the tensors whose statistics differ."""
        mine, theirs = self._by_site(), other._by_site()
        sums, others = (_by_place((*o.means, *o.moments)) for o in (self, other))
        apart = {key[0] for key in sums if key in others and not sums[key].same(others[key])}
        alone = dict.fromkeys(apart, "channel sums")  # no range is kept beside them
        one, another = (
            {**alone, **{site: described(facts) for site, facts in by_site.items()}}
            for by_site in (mine, theirs)
        )
        said = (
            Difference(site, one.get(site, ""), another.get(site, ""))
            for site in sorted({*one, *another})
            if not (site in mine and site in theirs and same(mine[site], theirs[site]))
            or site in apart
        )
        return tuple(
            difference
            if difference.one != difference.other
            else replace(difference, other=f"{difference.other} (with other values)")
            for difference in said
        )

    def _by_site(self) -> dict[Site, Facts]:
        return {site: entry.facts for entry in self.entries for site in entry.sites}

    def with_range(self, site: Site | str, low: float, high: float) -> Statistics:
        """Return statistics in which a tensor has the given bounds instead of those observed.

        Args:
            site: the tensor, as it is printed; or the path of a module with one tensor.

        Raises:
            StatisticsError: there is no such tensor, or several; or the bounds are invalid.
        """
        chosen = range_of(low, high)
        known = {str(one): one for entry in self.entries for one in entry.sites}
        named = [o for text, o in known.items() if str(site) in (text, o.module)]
        if len(named) != 1:
            found = "; ".join(map(str, named)) or f"none{near_names(str(site), known)}"
            raise StatisticsError(f"{str(site)!r} must name exactly one tensor, found {found}")
        entries = tuple(
            replace(e, facts=replace(e.facts, set_range=chosen)) if named[0] in e.sites else e
            for e in self.entries
        )
        return replace(self, entries=entries)

    def apply(
        self,
        prepared: GraphModule,
        *,
        partial: bool = False,
        another_model: bool = False,
        complete: bool = False,
        to_go_on: bool = False,
    ) -> GraphModule:
        """Load these statistics into the observers of a prepared model, in place, and return the model.

        Args:
            partial: leave observers unchanged that these statistics do not cover.
            complete: also raise an error for missing channel ranges and means that the configuration does not
                request by name but that default algorithms use.
            to_go_on: accept statistics of an unfinished calibration, in which algorithms have not seen
                all weights.
            another_model: accept statistics of a model with other parameters.

        Raises:
            StageError: the model was not prepared.
            StatisticsError: the model is a different one, or an observer needs statistics that are missing.
                No observer is changed then.
        """
        record = prepared_record(prepared, "Statistics.apply")
        if not another_model:
            self._check_model(record.fingerprint, "this model has")
        found, lacking = self._matched(prepared, record, complete)
        sums = self._matched_sums(prepared, lacking, complete)
        learned, unlearned = usable(self.learned, prepared)
        lacking += [] if to_go_on else unlearned
        if lacking and not partial:
            raise StatisticsError(
                "these statistics lack data that observers or algorithms require:\n"
                + "\n".join(f"  - {line}" for line in lacking)
                + "\nCalibrate with data, or skip these with Statistics.apply(model, partial=True)."
            )
        for observer, facts in found:
            _take(observer, facts)
        for watching, seen in sums:
            watching.take(seen)
        set_learned(prepared, learned)
        _note_what_ran(prepared, record, {id(observer) for observer, _ in found})
        return prepared

    def _matched_sums(
        self, prepared: GraphModule, lacking: list[str], complete: bool
    ) -> list[tuple[Any, Any]]:
        """Return each observer of sums with what it is to go by; add what is lacking to the others."""
        known, found = _by_place((*self.means, *self.moments)), []
        for (site, columns), observer in _watching(prepared):
            seen, what = known.get((site, columns)), observer.what
            if seen is None and not (observer.asked or complete):
                found.append((observer, observer.nothing()))
            elif seen is None:
                lacking.append(f"{site}: channel {what}, required by an algorithm, are missing")
            elif seen.total.shape != observer.total.shape:
                lacking.append(f"{site}: {what} are for different channels")
            else:
                found.append((observer, seen))
        return found

    def _matched(
        self, prepared: GraphModule, record: Record, complete: bool
    ) -> tuple[list[tuple[nn.Module, Facts]], list[str]]:
        """Return each observer with what it is to go by, and what is lacking; on copies, nothing changes."""
        known = {site: entry for entry in self.entries for site in entry.sites}
        found, lacking = [], []
        for observer, sites in watched(prepared, record):
            entries = {id(known[site]): known[site] for site in sites if site in known}
            absent = [str(site) for site in sites if site not in known]
            if absent:
                lacking.append(f"{'; '.join(absent)}: not in these statistics")
                continue
            try:
                facts = _together([entry.facts for entry in entries.values()])
                trial = copy.deepcopy(observer)
                _take(trial, facts)
                if complete and not getattr(trial, "knows_channels", True):
                    raise StatisticsError("channel ranges are missing")
                found.append((observer, facts))
            except StatisticsError as error:
                kind = type(base_observer(observer)).__name__
                lacking.append(f"{sites[0]}: {kind} cannot use its statistics: {error}")
        return found, lacking


def statistics(prepared: GraphModule) -> Statistics:
    """Return what the observers of a prepared model have seen.

    Raises:
        StageError: the model was not prepared.
    """
    record = prepared_record(prepared, "statistics")
    entries, left_out = {}, []
    for observer, sites in watched(prepared, record):
        if not isinstance(base_observer(observer), Observer):
            left_out.append(f"{sites[0]} ({type(base_observer(observer)).__name__})")
            continue
        facts: Facts = observer.facts()
        if facts.values or facts.set_range is not None:
            entries[sites] = copy.deepcopy(facts)  # the observers may go on
    seen = _sums_seen(prepared)
    sums = [(place[0], seen[place]) for place in _in_order(seen)]
    means = tuple((site, s) for site, s in sums if isinstance(s, Means))
    moments = tuple((site, s) for site, s in sums if isinstance(s, Moments))
    fingerprint, learned = record.fingerprint, learned_of(prepared)
    return Statistics(_ordered(entries), fingerprint, 0, tuple(left_out), means, moments, learned)


def _sums_seen(prepared: GraphModule) -> dict[_Place, Any]:
    """Return the sums of what saw data: those of an expert without rows too, where others had some."""
    watching = [
        (s, c, c.of_all if isinstance(c, Columns) else c, observer)
        for (s, c), observer in _watching(prepared)
    ]
    ran = {(site, whole) for site, _, whole, observer in watching if bool(observer.count.any())}
    return {(s, c): observer.seen() for s, c, whole, observer in watching if (s, whole) in ran}


def _watching(prepared: GraphModule) -> Iterator[tuple[_Place, MeanObserver | MomentObserver]]:
    sites = sites_of(prepared)
    for _, value, observer in input_observers(prepared):
        if value in sites:
            yield (sites[value], observer.along), observer


def _by_place(sums: SiteSums) -> dict[_Place, Any]:
    return {(site, seen.along): seen for site, seen in sums}


def _in_order(places: Iterable[_Place]) -> list[_Place]:
    return sorted(places, key=lambda place: (place[0], str(place[1])))


def order_dependent(prepared: GraphModule) -> list[str]:
    """Name the tensors whose observers give statistics that cannot be merged, with the observers' classes."""
    record = prepared_record(prepared, "calibrate")
    return [
        f"{sites[0]} ({type(base_observer(observer)).__name__})"
        for observer, sites in watched(prepared, record)
        if not getattr(base_observer(observer), "mergeable", False)
    ]


def described(facts: Facts) -> str:
    """Return the range of a tensor and how many values were seen, for people."""
    if facts.set_range is not None:
        return f"[{facts.set_range[0]:g}, {facts.set_range[1]:g}], set manually"
    low, high = facts.minimum, facts.maximum
    if facts.channels is not None and (low is None or high is None):
        low, high = float(facts.channels.low.min()), float(facts.channels.high.max())
    span = "no range" if low is None or high is None else f"[{low:g}, {high:g}]"
    return f"{span}, {facts.values} values"


def _ordered(facts: Mapping[tuple[Site, ...], Facts]) -> tuple[Entry, ...]:
    """Return entries in an order that does not depend on who saw what first."""
    return tuple(Entry(sites, facts[sites]) for sites in sorted(facts))


def prepared_record(model: GraphModule, function: str) -> Record:
    """Return the record of a prepared model.

    Raises:
        StageError: it was not prepared.
    """
    return record_of(
        model,
        stages=("prepared",),
        function=function,
        remedy="Call qompose.prepare_pt2e first.",
    )


def watched(prepared: GraphModule, record: Record) -> Iterator[tuple[Any, tuple[Site, ...]]]:
    """Yield each observer that estimates what is computed, and the sites of what it observes."""
    sites, by_name = sites_of(prepared), {node.name: node for node in nodes_in(prepared)}
    observers = observers_of(observer_nodes(prepared))
    for number, group in enumerate(record.plan.groups):
        observer = observers.get(number)
        sources = dict.fromkeys(by_name[point.source] for point in group.points)
        computed = [node for node in sources if constant_of(node) is None and node in sites]
        if observer is not None and computed and _estimates(observer):
            yield observer, tuple(sites[node] for node in computed)


def _note_what_ran(prepared: GraphModule, record: Record, taken: Collection[int]) -> None:
    """Note of each body that it ran, as running it does, if some of its ranges are among those taken.

    A range that tensors outside of the body share tells nothing of it, unless the body has no other.
    """
    nodes = {node.name: node for node in nodes_in(prepared)}
    observers = observers_of(observer_nodes(prepared))
    estimating = {id(observer) for observer, _ in watched(prepared, record)}
    own: dict[Graph, list[bool]] = defaultdict(list)
    shared: dict[Graph, list[bool]] = defaultdict(list)
    for number, group in enumerate(record.plan.groups):
        key = id(observers.get(number))
        graphs = {nodes[point.source].graph for point in group.points}
        for graph in graphs if key in estimating else ():
            (own if len(graphs) == 1 else shared)[graph].append(key in taken)
    for part in reversed(list(graphs_in(prepared))):  # the innermost first
        inside = (b for call in part.graph.nodes for b in map(body_of, references_of(call)))
        ran = any(own[part.graph] or shared[part.graph]) or any(RAN_KEY in b.meta for b in inside)
        if ran and part is not prepared:
            part.meta[RAN_KEY] = True


def _estimates(observer: nn.Module) -> bool:
    """Tell whether an observer keeps statistics: not if parameters are known, derived, or of run time."""
    inner = base_observer(observer)
    if isinstance(inner, Observer):
        return inner.estimates and not inner.is_dynamic
    return not getattr(inner, "is_dynamic", False)


def _take(observer: Any, facts: Facts) -> None:
    if not isinstance(base_observer(observer), Observer):
        raise StatisticsError("the observer does not accept statistics")
    observer.take(facts)


def _together(facts: Sequence[Facts]) -> Facts:
    """Return what was seen of tensors that one observer sees together."""
    first, *others = facts
    for other in others:
        first = first.merged(other)
    return first
