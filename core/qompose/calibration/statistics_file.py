# SPDX-License-Identifier: Apache-2.0
"""Statistics as files, of tensors or of text, which run no code and are checked as a whole."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qompose.algorithms.blocks import LearnedWeight
from qompose.errors import StatisticsError
from qompose.files import draft_of
from qompose.json_codec import FLOAT, INTEGER, Codec, check_keys, check_mapping, of_type
from qompose.observers.histogram import CHANNEL_BINS, ChannelHistograms, Histogram
from qompose.observers.input_sums import Means, Moments
from qompose.observers.row_sample import FrequentRows, RowSample
from qompose.observers.tensor_statistics import Channels, Facts
from qompose.observers.value_screening import Screen
from qompose.plan.operator_ids import Site

FORMAT_VERSION = 4
_KEY = "qompose_statistics"
_FARTHEST = 200
"""The exponent of a bin's width is between -112 and 118 in float32."""
_BINARY, _TEXT = ".safetensors", ".json"
Put = Callable[[Tensor], Any]
Get = Callable[[Any], Tensor]
Data = TypeVar("Data")


@dataclass(frozen=True)
class Entry:
    """What was seen of the tensors of some sites, which share a range."""

    sites: tuple[Site, ...]
    facts: Facts


SiteMeans = tuple[tuple[Site, Means], ...]
"""The means of the channels of some tensors, by their sites."""
SiteMoments = tuple[tuple[Site, Moments], ...]
"""The second moments of some tensors, by their sites."""


def write(path: Path, statistics: Any) -> None:
    """Write a file of the kind that its name says; one that exists is replaced at once, or not at all.

    Args:
        statistics: a dataclass whose fields are entries, means, moments and JSON's own types.

    Raises:
        StatisticsError: the name says no kind.
        OSError: it cannot be written.
    """
    kind = check_kind(path)
    tensors: dict[str, Tensor] = {}

    def put(tensor: Tensor) -> Any:
        if kind == _TEXT:
            return tensor.tolist()
        tensors[str(len(tensors))] = tensor.detach().cpu().contiguous().clone()
        return str(len(tensors) - 1)

    described = of_type(type(statistics), _types(put, torch.tensor)).write(statistics, "statistics")
    data = {"format_version": FORMAT_VERSION, **described}
    if kind == _BINARY:
        data["digest"] = _digest(tensors)
    text = json.dumps(data, allow_nan=False, indent=1 if kind == _TEXT else None)
    with draft_of(path) as draft:
        if kind == _TEXT:
            draft.write_text(text + "\n", encoding="utf-8")
            return
        try:
            save_file(tensors, draft, {_KEY: text})
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(f"{path} cannot be written: {error}") from error


def read(path: Path, kind: type[Data]) -> Data:
    """Return the statistics in a file, of the class that was written.

    Raises:
        StatisticsError: it is not such a file, damaged, or of another version.
        OSError: it cannot be read.
    """
    suffix = check_kind(path)
    with path.open("rb"):
        pass  # says of what is no file what it is
    try:
        text, tensors = (path.read_text("utf-8"), {}) if suffix == _TEXT else _opened(path)
        data = json.loads(text)
        if (version := data.pop("format_version")) != FORMAT_VERSION:
            raise ValueError(f"unsupported format version {version} (expected {FORMAT_VERSION})")
        if suffix == _BINARY and data.pop("digest") != _digest(tensors):
            raise ValueError("checksum mismatch, the file is damaged")
        get: Get = torch.tensor if suffix == _TEXT else tensors.__getitem__
        found: Any = of_type(kind, _types(torch.Tensor.tolist, get)).read(data, "statistics")
        _check_whole(found.entries, found.batches)
    except (
        SafetensorError, ValueError, TypeError, LookupError, AttributeError, OverflowError,
        RecursionError, RuntimeError,
    ) as error:  # fmt: skip
        raise StatisticsError(f"{path} is not a valid statistics file: {error!r}") from error
    made: Data = found
    return made


def _opened(path: Path) -> tuple[str, dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return file.metadata()[_KEY], {name: file.get_tensor(name) for name in names}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].numpy().tobytes())
    return found.hexdigest()


def check_kind(path: Path) -> str:
    """Return the ending that says of which kind a file is.

    Raises:
        StatisticsError: it says none.
    """
    if path.suffix not in (_BINARY, _TEXT):
        raise StatisticsError(
            f"the name of a statistics file must end in {_BINARY} or {_TEXT}, got {path}"
        )
    return path.suffix


def same(one: Facts, other: Facts) -> bool:
    """Tell whether two facts are the same to the bit."""
    return _equal(_WITH_TENSORS.write(one, ""), _WITH_TENSORS.write(other, ""))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _types(put: Put, get: Get) -> dict[Any, Codec]:
    """Return the codecs of what statistics consist of; what becomes of tensors is the caller's."""
    tensor = Codec(lambda value, path: put(value), lambda data, path: get(data))
    types: dict[Any, Codec] = {Tensor: tensor, float: FLOAT}
    types[Screen] = _object(
        {"masked": INTEGER, "values": INTEGER, "bulk": FLOAT, "far": FLOAT}, vars, _screen
    )
    types[RowSample] = _object(
        dict.fromkeys(("strata", "counts", "rows", "order", "frequent", "times"), tensor),
        _parts_of_sample,
        _sample,
    )
    types[Histogram] = _object(
        {"exponent": INTEGER, "bins": tensor, "counts": tensor}, _bins_of, _histogram
    )
    types[ChannelHistograms] = _object(
        {"values": INTEGER, **dict.fromkeys(("exponents", "channels", "bins", "counts"), tensor)},
        _channel_bins_of,
        _channel_histograms,
    )
    types[Means] = _checked(of_type(Means, types), _check_means)
    types[Moments] = _checked(of_type(Moments, {**types, Tensor: _exact(tensor)}), _check_moments)
    exact = {**types, Tensor: _exact(tensor)}
    types[LearnedWeight] = _checked(of_type(LearnedWeight, exact), _check_learned)
    types[Facts] = _checked(of_type(Facts, types), _check_facts)
    return types


def _exact(tensor: Codec) -> Codec:
    """Return the codec of tensors of float64 and of integers, whose numbers have no type in text."""

    def read(data: Any, path: str) -> Tensor:
        if isinstance(data, str):  # the name of a tensor in a file of tensors
            found: Tensor = tensor.read(data, path)
            return found
        numbers = torch.tensor(data)
        return torch.tensor(data, dtype=torch.float64) if numbers.is_floating_point() else numbers

    return Codec(tensor.write, read)


def _object(
    codecs: Mapping[str, Codec],
    parts: Callable[[Any], Mapping[str, Any]],
    make: Callable[..., Any],
) -> Codec:
    """Return the codec of a value that is stored by its `parts`, of which `make` makes it again."""

    def read(data: Any, path: str) -> Any:
        check_mapping(data, path)
        check_keys(data, codecs, path)
        return make(**{name: codecs[name].read(item, path) for name, item in data.items()})

    return Codec(
        lambda value, path: {name: codecs[name].write(v, path) for name, v in parts(value).items()},
        read,
    )


def _checked(codec: Codec, check: Callable[[Any], None]) -> Codec:
    def read(data: Any, path: str) -> Any:
        value = codec.read(data, path)
        check(value)
        return value

    return Codec(codec.write, read)


def _check_whole(entries: tuple[Entry, ...], batches: int) -> None:
    """Check what one entry does not show.

    Raises:
        ValueError: a tensor has two entries, or an entry no tensor.
    """
    sites = [site for entry in entries for site in entry.sites]
    if len(sites) != len(set(sites)) or not all(entry.sites for entry in entries):
        raise ValueError("each tensor needs exactly one entry, and each entry at least one tensor")
    if batches < 0:
        raise ValueError(f"batches must not be negative, got {batches}")


def range_of(low: Any, high: Any) -> tuple[float, float]:
    """Return the bounds of a range, as float32 has them.

    Raises:
        StatisticsError: they are not bounds of a range.
    """
    ends = torch.tensor([float(low), float(high)], dtype=torch.float32)
    if not bool(torch.isfinite(ends).all() & (ends[0] < ends[1])):
        raise StatisticsError(
            f"a range must be two numbers, finite and increasing in float32, got [{low}, {high}]"
        )
    return float(low), float(high)


def _check_facts(facts: Facts) -> None:
    """Check ranges, and give the histograms those that stand beside them."""
    if facts.set_range is not None:
        range_of(*facts.set_range)
    low, high = facts.minimum, facts.maximum
    if low is not None and high is not None:
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(
                f"the range must be finite, with minimum <= maximum, got [{low}, {high}]"
            )
        if facts.histogram is not None:
            facts.histogram.minimum, facts.histogram.maximum = low, high
    if (low is None) is not (high is None):
        raise ValueError("a range has only one bound")
    if facts.channels is not None:
        _check_channels(facts.channels)


def _check_channels(seen: Channels) -> None:
    if not (seen.low.is_floating_point() and seen.high.is_floating_point()):
        raise ValueError("channel ranges must be floats")
    if seen.low.shape != seen.high.shape or not bool(
        (seen.low <= seen.high).all() & torch.isfinite(seen.high - seen.low).all()
    ):
        raise ValueError("channel ranges are invalid")
    if seen.histograms is not None:
        if seen.histograms.exponents.shape != seen.low.shape:
            raise ValueError("channel histograms must have one exponent for each channel range")
        seen.histograms.low, seen.histograms.high = seen.low, seen.high


def _check_means(means: Means) -> None:
    total = means.total
    if total.dim() != 1 or total.is_floating_point() or means.count < 1 or means.largest < 0:
        raise ValueError("the sums or counts of means are invalid")


def _check_moments(moments: Moments) -> None:
    total, count = moments.total, moments.count
    shape = tuple(total.shape)
    width = moments.columns.rows(shape[-1])
    if len(shape) != 4 or shape[0] != 2 or shape[2] != width:
        raise ValueError("second moments have an invalid shape")
    if total.dtype != torch.float64 or count.shape != (2,) or count.is_floating_point():
        raise ValueError("the sums or counts of second moments are invalid")


def _check_learned(weight: LearnedWeight) -> None:
    if not bool((weight.scale.isfinite() & (weight.scale > 0)).all()):
        raise ValueError("the scales of a weight must be positive and finite")
    if weight.integers.is_floating_point():
        raise ValueError("the quantized values of a weight must be integers")


def _bins_of(histogram: Histogram) -> dict[str, Any]:
    bins = histogram.counts.nonzero().flatten()
    return {"exponent": histogram.exponent, "bins": bins, "counts": histogram.counts[bins]}


def _histogram(exponent: int, bins: Tensor, counts: Tensor) -> Histogram:
    if bins.shape != counts.shape or bool((bins < 0).any() | (counts < 0).any()):
        raise ValueError("the bins or counts of a histogram are invalid")
    whole = not (counts.is_floating_point() or bins.is_floating_point())
    if len(bins) and not (whole and len(set(bins.tolist())) == len(bins)):
        raise ValueError("a histogram must have distinct integer bins and integer counts")
    if abs(exponent) > _FARTHEST:
        raise ValueError(f"a histogram exponent must be within +/-{_FARTHEST}, got {exponent}")
    found = Histogram()
    found.counts[bins.long()] = counts.long()
    found.exponent = exponent
    return found


def _channel_bins_of(found: ChannelHistograms) -> dict[str, Any]:
    channels, bins = found.counts.nonzero(as_tuple=True)
    return {
        "values": found.values,
        "exponents": found.exponents,
        "channels": channels.to(torch.int32),
        "bins": bins.to(torch.int16),
        "counts": found.counts[channels, bins],
    }


def _channel_histograms(
    values: int, exponents: Tensor, channels: Tensor, bins: Tensor, counts: Tensor
) -> ChannelHistograms:
    found = ChannelHistograms()
    found.values, found.exponents = values, exponents.long()
    where = channels.long(), bins.long()
    dense = torch.zeros(len(exponents), CHANNEL_BINS, dtype=torch.int64)
    dense.index_put_(where, counts.long())
    if bool((torch.stack(where) < 0).any() | (dense < 0).any() | (dense.sum(1) != values).any()):
        raise ValueError("the bins or counts of a channel's histogram are invalid")
    found.counts = dense.to(found.counts_dtype)
    return found


def _parts_of_sample(kept: RowSample) -> dict[str, Tensor]:
    counts = kept.counts
    numbers = {"strata": [*counts], "counts": [*counts.values()]}
    parts = {name: torch.tensor(v, dtype=torch.int64) for name, v in numbers.items()}
    often = {"frequent": kept.frequent.rows, "times": kept.frequent.numbers}
    return {**parts, **often, "rows": kept.rows, "order": kept.order}


def _sample(
    strata: Tensor, counts: Tensor, rows: Tensor, order: Tensor, frequent: Tensor, times: Tensor
) -> RowSample:
    if not (rows.numel() or order.numel() or strata.numel()):  # as text they have no shape
        return RowSample()
    if rows.dim() != 2 or order.shape != (len(rows), 3):
        raise ValueError("the rows of a sample must be sorted")
    seen = dict(zip(strata.long().tolist(), counts.long().tolist(), strict=True))
    if not {*order[:, 0].tolist()} <= {stratum for stratum, count in seen.items() if count > 0}:
        raise ValueError("a sample has rows in an empty stratum")
    return RowSample(rows.float(), order.long(), seen, _frequent(frequent, times, rows.shape[1]))


def _frequent(rows: Tensor, times: Tensor, channels: int) -> FrequentRows:
    if not (rows.numel() or times.numel()):
        return FrequentRows()
    hashes, counts = times.long().unbind(1)
    sorted_once = bool((hashes.diff() > 0).all()) and bool((counts > 0).all())
    if rows.shape != (len(times), channels) or not sorted_once:
        raise ValueError("the frequent rows of a sample must be sorted, and each must be counted")
    return FrequentRows(rows.float(), times.long())


def _screen(masked: int, values: int, bulk: float, far: float) -> Screen:
    screen = Screen()
    screen.masked, screen.values, screen.bulk, screen.far = masked, values, bulk, far
    return screen


_WITH_TENSORS = _types(lambda tensor: tensor, torch.tensor)[Facts]
"""What `same` compares."""
