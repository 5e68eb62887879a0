# SPDX-License-Identifier: Apache-2.0
"""Statistics in files.

Neither runs code when it is read. What is read is checked as a whole before any of it is returned.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qompose.errors import StatisticsError
from qompose.files import draft_of
from qompose.json_codec import jsonable
from qompose.observers.histogram import BINS, CHANNEL_BINS, ChannelHistograms, Histogram
from qompose.observers.tensor_statistics import Channels, Facts, Means, RowSample
from qompose.observers.value_screening import Screen
from qompose.plan.operator_ids import Site

FORMAT_VERSION = 1
_KEY = "qompose_statistics"
_FARTHEST = 200
"""The exponent of a bin's width is between -112 and 118 in float32."""
_BINARY, _TEXT = ".safetensors", ".json"
Put = Callable[[Tensor], Any]
Get = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Entry:
    """What was seen of the tensors of some sites, which share a range."""

    sites: tuple[Site, ...]
    facts: Facts


SiteMeans = tuple[tuple[Site, Means], ...]
"""The means of the channels of some tensors, by their sites."""


def write(
    path: Path, entries: Sequence[Entry], facts: Mapping[str, Any], means: SiteMeans = ()
) -> None:
    """Write a file of the kind that its name says; one that exists is replaced at once, or not at all.

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

    data = {
        "format_version": FORMAT_VERSION,
        **facts,
        "entries": [
            {"sites": [vars(site) for site in entry.sites], **_facts_to_data(entry.facts, put)}
            for entry in entries
        ],
    }
    if means:
        data["means"] = [_means_to_data(site, found, put) for site, found in means]
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


def read(path: Path) -> tuple[tuple[Entry, ...], dict[str, Any]]:
    """Return the entries of a file and the facts beside them, `means` among these.

    Raises:
        StatisticsError: it is no such file, damaged, or of a newer version.
        OSError: it cannot be read.
    """
    kind = check_kind(path)
    with path.open("rb"):
        pass  # says of what is no file what it is
    try:
        text, tensors = (path.read_text("utf-8"), {}) if kind == _TEXT else _opened(path)
        data = json.loads(text)
        if data["format_version"] > FORMAT_VERSION:
            raise StatisticsError(
                f"{path} is of format {data['format_version']}, and this qompose reads {FORMAT_VERSION}"
            )
        if kind == _BINARY and data.pop("digest") != _digest(tensors):
            raise ValueError("its numbers are not those that were written")
        get: Get = torch.tensor if kind == _TEXT else tensors.__getitem__
        entries = tuple(_entry(item, get) for item in data.pop("entries"))
        data["means"] = tuple(_means(item, get) for item in data.get("means", ()))
        _check_whole(entries, data)
    except (
        SafetensorError, ValueError, TypeError, LookupError, AttributeError, OverflowError,
        RecursionError,
    ) as error:  # fmt: skip
        if isinstance(error, StatisticsError):
            raise
        raise StatisticsError(f"{path} holds no sound statistics of qompose: {error!r}") from error
    return entries, data


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].numpy().tobytes())
    return found.hexdigest()


def _check_whole(entries: Sequence[Entry], facts: Mapping[str, Any]) -> None:
    """Check what one entry does not show.

    Raises:
        ValueError: a tensor has two entries, or what stands beside them is not what `write` is given.
    """
    sites = [site for entry in entries for site in entry.sites]
    if len(sites) != len(set(sites)):
        raise ValueError("a tensor has two entries")
    batches, left_out = facts.get("batches", 0), facts.get("left_out", [])
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 0:
        raise ValueError(f"batches is {batches!r}")
    if not isinstance(left_out, list) or not all(isinstance(name, str) for name in left_out):
        raise ValueError(f"left_out is {left_out!r}")


def same(one: Facts, other: Facts) -> bool:
    """Tell whether two facts are the same to the bit."""
    return _equal(_facts_to_data(one, lambda t: t), _facts_to_data(other, lambda t: t))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _opened(path: Path) -> tuple[str, dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return file.metadata()[_KEY], {name: file.get_tensor(name) for name in names}


def check_kind(path: Path) -> str:
    """Return the ending that says of which kind a file is.

    Raises:
        StatisticsError: it says none.
    """
    if path.suffix not in (_BINARY, _TEXT):
        raise StatisticsError(
            f"{path} ends in neither {_BINARY} nor {_TEXT}, which say the kind of file"
        )
    return path.suffix


def _facts_to_data(facts: Facts, put: Put) -> dict[str, Any]:
    data: dict[str, Any] = {"minimum": jsonable(facts.minimum), "maximum": jsonable(facts.maximum)}
    if facts.set_range is not None:
        data["set_range"] = jsonable(facts.set_range)
    if facts.averaged:
        data["averaged"] = facts.averaged
    if facts.histogram is not None:
        bins = facts.histogram.counts.nonzero().flatten()
        data["histogram"] = {
            "exponent": facts.histogram.exponent,
            "bins": put(bins),
            "counts": put(facts.histogram.counts[bins]),
        }
    if facts.channels is not None:
        data["channels"] = _channels_to_data(facts.channels, put)
    if facts.sample is not None:
        kept = facts.sample
        data["sample"] = {"seen": kept.seen, "rows": put(kept.rows), "order": put(kept.order)}
    if facts.screen is not None:
        data["screen"] = jsonable(vars(facts.screen))
    return data


def _channels_to_data(seen: Channels, put: Put) -> dict[str, Any]:
    data: dict[str, Any] = {"axis": seen.axis, "low": put(seen.low), "high": put(seen.high)}
    if seen.histograms is not None:
        found = seen.histograms
        channels, bins = found.counts.nonzero(as_tuple=True)
        data["histograms"] = {
            "exponents": put(found.exponents),
            "values": found.values,
            "channels": put(channels.to(torch.int32)),
            "bins": put(bins.to(torch.int16)),
            "counts": put(found.counts[channels, bins]),
        }
    return data


def _means_to_data(site: Site, found: Means, put: Put) -> dict[str, Any]:
    largest = jsonable(found.largest)
    return {"site": vars(site), "total": put(found.total), "count": found.count, "largest": largest}


def _means(data: Mapping[str, Any], get: Get) -> tuple[Site, Means]:
    total, count, largest = get(data["total"]), int(data["count"]), float(data["largest"])
    if total.dim() != 1 or total.is_floating_point() or count < 1 or largest < 0:
        raise ValueError("means have sums or counts that are none")
    return Site(**data["site"]), Means(total.long(), count, largest)


def _entry(data: Mapping[str, Any], get: Get) -> Entry:
    sites = tuple(Site(**site) for site in data["sites"])
    if not sites:
        raise ValueError("an entry has no site")
    chosen = data.get("set_range")
    minimum, maximum = _ends(data["minimum"], data["maximum"])
    return Entry(
        sites,
        Facts(
            minimum=minimum,
            maximum=maximum,
            histogram=_histogram(data, get) if "histogram" in data else None,
            channels=_channels(data["channels"], get) if "channels" in data else None,
            sample=_sample(data["sample"], get) if "sample" in data else None,
            screen=_screen(data["screen"]) if "screen" in data else None,
            averaged=str(data.get("averaged", "")),
            set_range=None if chosen is None else range_of(*chosen),
        ),
    )


def range_of(low: Any, high: Any) -> tuple[float, float]:
    """Return the bounds of a range, as float32 has them.

    Raises:
        StatisticsError: they are none.
    """
    ends = torch.tensor([float(low), float(high)], dtype=torch.float32)
    if not bool(torch.isfinite(ends).all() & (ends[0] < ends[1])):
        raise StatisticsError(f"[{low}, {high}] is no range")
    return float(low), float(high)


def _ends(low: Any, high: Any) -> tuple[float | None, float | None]:
    if low is None or high is None:
        return None, None
    low, high = float(low), float(high)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"[{low}, {high}] is not the least and the largest of any values")
    return low, high


def _histogram(data: Mapping[str, Any], get: Get) -> Histogram:
    part, found = data["histogram"], Histogram()
    bins, counts = get(part["bins"]), get(part["counts"])
    if bins.shape != counts.shape or bool(
        (bins < 0).any() | (bins >= BINS).any() | (counts < 0).any()
    ):
        raise ValueError("a histogram has bins or counts that are none")
    whole = not (counts.is_floating_point() or bins.is_floating_point())
    if len(bins) and not (whole and len(set(bins.tolist())) == len(bins)):
        raise ValueError("a histogram has a bin twice, or a part of a count")
    if not -_FARTHEST <= int(part["exponent"]) <= _FARTHEST:
        raise ValueError(f"a histogram has the exponent {part['exponent']}")
    found.counts[bins.long()] = counts.long()
    found.exponent = int(part["exponent"])
    found.minimum, found.maximum = float(data["minimum"]), float(data["maximum"])
    return found


def _channels(data: Mapping[str, Any], get: Get) -> Channels:
    low, high = get(data["low"]).float(), get(data["high"]).float()
    if low.shape != high.shape or not bool((low <= high).all() & torch.isfinite(high - low).all()):
        raise ValueError("channels have ranges that are none")
    part = data.get("histograms")
    histograms = None if part is None else _histograms(part, low, high, get)
    return Channels(int(data["axis"]), low, high, histograms)


def _histograms(data: Mapping[str, Any], low: Tensor, high: Tensor, get: Get) -> ChannelHistograms:
    found = ChannelHistograms()
    found.low, found.high, found.values = low, high, int(data["values"])
    found.exponents = get(data["exponents"]).long()
    where = get(data["channels"]).long(), get(data["bins"]).long()
    dense = torch.zeros(len(low), CHANNEL_BINS, dtype=torch.int64)
    dense.index_put_(where, get(data["counts"]).long())
    if bool(
        (torch.stack(where) < 0).any() | (dense < 0).any() | (dense.sum(1) != found.values).any()
    ):
        raise ValueError("a channel's histogram has bins or counts that are none")
    if not low.shape == high.shape == found.exponents.shape:
        raise ValueError("not each channel has a range and an exponent")
    found.counts = dense.to(found.counts_dtype)
    return found


def _sample(data: Mapping[str, Any], get: Get) -> RowSample:
    rows, order = get(data["rows"]).float(), get(data["order"]).long()
    if rows.dim() != 2 or order.shape != (len(rows), 3):
        raise ValueError("a sample has rows without an order")
    return RowSample(rows, order, int(data["seen"]))


def _screen(data: Mapping[str, Any]) -> Screen:
    screen = Screen()
    screen.masked, screen.values = int(data["masked"]), int(data["values"])
    screen.bulk, screen.far = float(data["bulk"]), float(data["far"])
    return screen
