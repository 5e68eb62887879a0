# SPDX-License-Identifier: Apache-2.0
"""Sums over the inputs of products that algorithms go by: means of channels, and second moments.

Means are sums of integers, since a sum of floats depends on the order: values are rounded to a grid of
2**-24. The rounding averages out far below any quantization step. Second moments are sums of float64, which
agree to about 1e-14 of their size whatever the order.

Where second moments `X' X` of K columns would be too many, a sketch `S X` of some rows is kept, each a sum of
all rows with signs of chance: `|S X e|^2` is `|X e|^2` on average for any error `e` (Alon, Matias and Szegedy
1996). Signs come from the values of an example and the place in it, so that sketches can be added.

The observers read the values themselves, and nothing reads them: what other observers are asked does not
change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.errors import StatisticsError
from qompose.observers.min_max import PlaceholderObserver
from qompose.observers.row_sample import ODD, example_hashes, examples_of, scrambled
from qompose.program.control_flow import nodes_in
from qompose.program.decompositions import Routed, routed
from qompose.program.graph import (
    behind_modules,
    free_attribute,
    get_attribute,
    owner_of,
    value_of,
)
from qompose.program.meta import tag, tag_of

_STEPS = 2.0**24
_ROOM = 2.0**62
"""What the sum of a channel may reach, in steps: the integers have 63 bits."""
_FEWEST = 256
"""How many steps the largest value needs to have: of smaller ones the grid would be what the means say."""


@dataclass(frozen=True, eq=False)
class Means:
    """The sum of each channel in steps of the grid, `(C,)` integers; how many values it is of.

    Attributes:
        largest: the largest magnitude of them all.
        dim: the dimension of the channels; None in files that do not say.
    """

    total: Tensor
    count: int
    largest: float
    dim: int | None = None

    @property
    def along(self) -> int | None:
        """Return what tells these sums of a tensor from others."""
        return self.dim

    def merged(self, other: Means) -> Means:
        """Return the means of both.

        Raises:
            StatisticsError: they are not of the same channels.
        """
        if (self.dim, self.total.shape) != (other.dim, other.total.shape):
            raise StatisticsError(
                f"means of {len(self.total)} channels and of {len(other.total)} channels, in "
                f"dimensions {self.dim} and {other.dim}, cannot belong to the same tensor"
            )
        largest = max(self.largest, other.largest, key=lambda x: math.inf if math.isnan(x) else x)
        return Means(self.total + other.total, self.count + other.count, largest, self.dim)

    def values(self) -> Tensor | str:
        """Return the mean of each channel, `(C,)` in float64, or the reason why they are not known."""
        if not self.count:
            return "no calibration data"
        if not self.largest * _STEPS * self.count < _ROOM:
            return f"values reach {self.largest:g}, too large to be summed exactly"
        if 0 < self.largest * _STEPS < _FEWEST:
            return f"values reach only {self.largest:g}, too small to be summed in steps of 2**-24"
        return self.total.double() / (_STEPS * self.count)

    def same(self, other: Means) -> bool:
        """Tell whether both are the same to the bit."""
        facts = (self.count, self.largest, self.dim) == (other.count, other.largest, other.dim)
        return facts and torch.equal(self.total, other.total)


class SumObserver(nn.Module):
    """An observer that adds up what it sees, on the device where that is."""

    _is_impure = True  # nothing reads its result, and it is called for its effect
    what: ClassVar[str]
    """What the sums are called in messages."""
    asked = True
    """Whether somebody wants it by word, and not only where it is known."""
    total: Tensor
    count: Tensor

    @property
    def along(self) -> Columns | int:
        """Return what tells these sums of a tensor from others: columns, or the dimension of means."""
        raise NotImplementedError

    def forward(self, x: Tensor, own: Tensor | None = None) -> Tensor:
        """Observe `x` and return it; with `own`, `(rows, 1)`, observe and return its rows alone."""
        x = x if own is None else x[own.flatten()]
        if x.numel():
            if self.total.device != x.device:
                self.to(x.device)
            self._add(x.detach())
        return x

    def _add(self, x: Tensor) -> None:
        raise NotImplementedError

    def clear(self) -> None:
        """Forget what was seen."""
        for sums in self.buffers():
            sums.zero_()


class MeanObserver(SumObserver):
    """Adds up each channel of what it sees.

    Args:
        channels: how many there are.
        dim: their dimension.
    """

    what = "means"
    largest: Tensor

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("total", torch.zeros(channels, dtype=torch.int64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def _add(self, x: Tensor) -> None:
        x = x.float() if x.dtype == torch.bool else x
        inner = [d for d in range(x.dim()) if d != self.dim % x.dim()]
        self.largest = torch.maximum(self.largest, x.abs().amax().double())
        limit = _ROOM / _STEPS / max(1, x.numel())
        exact = x.to(torch.float64, copy=True).nan_to_num_(0.0).clamp_(-limit, limit)
        steps = exact.mul_(_STEPS).round_().to(torch.int64)
        self.total = self.total + (steps.sum(inner) if inner else steps)
        self.count = self.count + x.numel() // len(self.total)

    @property
    def along(self) -> int:
        return self.dim

    def seen(self) -> Means:
        """Return what was seen."""
        return Means(self.total.cpu().clone(), int(self.count), float(self.largest), self.dim)

    def nothing(self) -> Means:
        """Return what is seen of no data."""
        return Means(torch.zeros_like(self.total), 0, 0.0, self.dim)

    def take(self, means: Means) -> None:
        """Go by means that were found elsewhere.

        Raises:
            StatisticsError: they are of other channels.
        """
        if means.total.shape != self.total.shape:
            raise StatisticsError(
                f"the statistics have means of {len(means.total)} channels, expected "
                f"{len(self.total)}"
            )
        self.total = means.total.clone()
        self.count = torch.tensor(means.count)
        self.largest = torch.tensor(means.largest, dtype=torch.float64)


_OF_ORDER = 1e-10
"""The part of what a sum could be that its order changes at most: rounding of some million terms."""
SKETCHED = 32
"""Sums of rows with signs; what they say of an error is off by the root of 2/32, of many errors by less."""


@dataclass(frozen=True)
class Window:
    """The spatial geometry of a convolution, a number for each dimension of the image.

    `padding` is that before and behind the image, which a string stands for in `torch.nn.functional`.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True)
class Columns:
    """Which values of its input a product multiplies by one row of its weight.

    Attributes:
        dim: the dimension of the channels, counted from the front.
        groups: of a convolution.
        window: of a convolution that is not transposed: its columns are the taps of each channel. Else None,
            and the columns are the channels.
        correlated: whether products of two columns are kept. Else there are sums of each channel and of its
            squares, and a sketch; equal rows of one example, as padding is, count once.
        expert: number of the expert whose rows alone are looked at (`qompose.program.decompositions.routed`);
            None for all rows.
    """

    dim: int
    groups: int = 1
    window: Window | None = None
    correlated: bool = True
    expert: int | None = None

    @property
    def of_all(self) -> Columns:
        """The same values of all rows, whichever expert they are for."""
        return replace(self, expert=None)

    def rows(self, width: int) -> int:
        """Return how many numbers are kept of each of so many columns."""
        return width if self.correlated else 2 + SKETCHED

    def of(self, x: Tensor) -> Tensor:
        """Return the columns of an input for every row of the product, `(groups, N, C / groups * taps)`."""
        if self.window is None:
            rows = x.movedim(self.dim, -1).reshape(-1, x.shape[self.dim])
        else:
            rows = _unfolded(x, self.dim, self.window)
        return rows.reshape(len(rows), self.groups, -1).transpose(0, 1)


def _unfolded(x: Tensor, dim: int, window: Window) -> Tensor:
    """Return what a convolution's window sees at each place, `(N, C * taps)`, a channel's taps together."""
    x = x.flatten(0, dim - 1) if dim > 1 else x.unsqueeze(0) if dim == 0 else x
    rank = len(window.size)
    pads = [side for pair in reversed(window.padding) for side in pair]
    x = nn.functional.pad(x, pads)
    for at, (size, stride, dilation) in enumerate(
        zip(window.size, window.stride, window.dilation, strict=True)
    ):
        x = x.unfold(2 + at, (size - 1) * dilation + 1, stride)[..., ::dilation]
    places = range(2, 2 + rank)
    return x.permute(0, *places, 1, *range(2 + rank, 2 + 2 * rank)).flatten(0, rank).flatten(1)


@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments of the columns of a product's input, of each half of the examples.

    An example belongs to a half by its hash, as in `qompose.observers.row_sample`.

    Attributes:
        columns: which values they are of.
        total: sums of products over rows, `(2, groups, K, K)` in float64, K = C / groups * taps; of columns
            that are not correlated, sums of them, of their squares, and with signs, `(2, groups, 2 + 32, K)`.
        count: how many rows each half has, `(2,)` integers.
    """

    columns: Columns
    total: Tensor
    count: Tensor

    @property
    def along(self) -> Columns:
        """Return what tells these sums of a tensor from others."""
        return self.columns

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both.

        Raises:
            StatisticsError: they are not of the same columns.
        """
        if (self.columns, self.total.shape) != (other.columns, other.total.shape):
            raise StatisticsError(
                "second moments can only be merged if they are of the same columns"
            )
        return Moments(self.columns, self.total + other.total, self.count + other.count)

    def same(self, other: Moments) -> bool:
        """Tell whether both are sums of the same data, in whatever order it was added up."""
        if not torch.equal(self.count, other.count):
            return False
        sizes = torch.maximum(self._sizes(), other._sizes())
        return bool(((self.total - other.total).abs() <= _OF_ORDER * sizes).all())

    def _sizes(self) -> Tensor:
        """Return what no sum can exceed, by the squares of columns, in the shape of `total`."""
        if self.columns.correlated:
            roots = self.total.diagonal(dim1=2, dim2=3).sqrt()
            return roots[..., None] * roots[..., None, :]
        squares = self.total[:, :, 1:2]
        sizes = (squares * self.count.view(2, 1, 1, 1)).sqrt().expand_as(self.total).clone()
        sizes[:, :, 1:2] = squares
        return sizes


class MomentObserver(SumObserver):
    """Adds up products of the columns of what it sees.

    Args:
        columns: which values.
        width: how many columns each group has.
    """

    what = "second moments"

    def __init__(self, columns: Columns, width: int) -> None:
        super().__init__()
        self.columns = columns
        self.asked = columns.correlated  # the others are for what can do without
        shape = 2, columns.groups, columns.rows(width), width
        self.register_buffer("total", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def _add(self, x: Tensor) -> None:
        self.add(x, example_hashes(x, self.columns.dim))

    def add(self, x: Tensor, hashes: Tensor) -> None:
        """Add up columns of examples, each to the half that its hash, `(N,)`, says; in place, being large."""
        if not x.numel():
            return
        total, count = self.total, self.count
        for half in (0, 1):
            for some in examples_in_parts(x, hashes, self.columns, half):
                if self.columns.correlated:
                    rows = self.columns.of(some.double())
                    total[half].baddbmm_(rows.transpose(1, 2), rows)
                    count[half] += rows.shape[1]
                else:
                    rows, signs = distinct_rows(some, self.columns.dim)
                    sums = [rows.sum(0, keepdim=True), rows.square().sum(0, keepdim=True)]
                    total[half] += torch.cat([*sums, signs.T @ rows])
                    count[half] += len(rows)

    @property
    def along(self) -> Columns:
        return self.columns

    def seen(self) -> Moments:
        """Return what was seen."""
        return Moments(self.columns, self.total.cpu().clone(), self.count.cpu().clone())

    def nothing(self) -> Moments:
        """Return what is seen of no data."""
        return Moments(self.columns, torch.zeros_like(self.total), torch.zeros_like(self.count))

    def take(self, moments: Moments) -> None:
        """Go by moments that were found elsewhere.

        Raises:
            StatisticsError: they are of other columns.
        """
        if moments.total.shape != self.total.shape:
            raise StatisticsError("the second moments in the statistics do not fit this tensor")
        self.total, self.count = moments.total.clone(), moments.count.clone()


def examples_in_parts(x: Tensor, hashes: Tensor, columns: Columns, half: int) -> Iterable[Tensor]:
    """Return the examples of a half, as many at a time as have few columns together.

    Args:
        hashes: of the examples, `(N,)`, which say in which half they are.
    """
    if not x.numel():
        return []
    which = (hashes & 1 == 1) == bool(half)
    if len(which) == 1:  # the one example may have no dimension of its own
        return [x] if bool(which) else []
    some = x[which.to(x.device)]
    taps = 1 if columns.window is None else math.prod(columns.window.size)
    most = max(1, _TOGETHER // max(1, taps * x[0].numel()))
    return [some[first : first + most] for first in range(0, len(some), most)]


def distinct_rows(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return different rows of each example in float64, `(N, C)`, and the signs of each, `(N, 32)`.

    Rows are the channels along `dim`.
    """
    rows = examples_of(x.double(), dim)
    rows = rows.reshape(len(rows), -1, rows.shape[-1])
    # Different rows have different products with numbers that are no multiples of one another.
    numbers = torch.linspace(1.0, 2.0, rows.shape[-1], dtype=rows.dtype, device=rows.device).sin()
    keys, order = (rows * numbers).sum(-1).sort(dim=1, stable=True)
    new = torch.ones_like(keys, dtype=torch.bool)
    new[:, 1:] = keys[:, 1:] != keys[:, :-1]
    examples, places = torch.zeros_like(new).scatter_(1, order, new).nonzero(as_tuple=True)
    signs = _signs(example_hashes(x, dim).to(x.device)[examples], places)
    return rows[examples, places], signs.to(rows.dtype)


def _signs(hashes: Tensor, places: Tensor) -> Tensor:
    """Return signs for rows of examples, `(N, 32)`: bits of a mixture of the example's hash and the place."""
    mixed = scrambled((hashes + (places + 1) * ODD) * ODD) * ODD
    bits = torch.arange(24, 24 + SKETCHED, device=mixed.device)
    return 1 - 2 * (mixed[:, None] >> bits & 1)


_TOGETHER = 2**20
"""How many values of columns are held at a time, unless one example has more."""
_TAG = "input_of"
_PREFIX = "sums_"


def watch_means(wanted: Iterable[tuple[Node, int, bool]]) -> None:
    """Insert observers of means, each once, for values and the dimensions of their channels.

    What somebody asked for by word, the last of the three, has to be in statistics too, and comes first where
    a value has channels in two dimensions. A value whose number of channels is open has none.
    """
    places: dict[Node, tuple[int, bool]] = {}
    for value, dim, asked in wanted:
        if value not in places or asked > places[value][1]:
            places[value] = dim, asked
    for value, (dim, asked) in places.items():
        channels = value_of(value).shape[dim]
        if isinstance(channels, int):
            observer = MeanObserver(channels, dim)
            observer.asked = asked
            _insert(value, observer)


def watch_moments(wanted: Iterable[tuple[Node, Columns, int]]) -> None:
    """Insert observers of second moments, each once, for values, their columns, and how many of them."""
    for value, columns, width in dict.fromkeys(wanted):
        own = None if columns.expert is None else _experts_of(value)[columns.expert].own
        _insert(value, MomentObserver(columns, width), own)


def watch_routing(products: Iterable[tuple[Node, bool]]) -> None:
    """Insert observers of how many rows each expert gets, where data decides anything of its product.

    Args:
        products: each with whether algorithms are asked for, which may not show in observers.
    """
    for product, asked in products:
        route = routed(product)
        if route is None or any(tag_of(user, _TAG) is not None for user in route.behind.users):
            continue
        if asked or any(map(_decides, behind_modules(product.args[0]).users)):
            observer = MeanObserver(value_of(route.behind).shape[1], 1)
            observer.asked = False
            _insert(route.behind, observer)


def _decides(reader: Node) -> bool:
    """Tell whether a reader is an observer that goes by what it sees."""
    if reader.op != "call_module":
        return False
    observer = get_attribute(owner_of(reader), str(reader.target))
    return not isinstance(observer, PlaceholderObserver)


def without_rows(model: GraphModule) -> Iterator[tuple[dict[int, str], list[int]]]:
    """Yield, of sets of experts to some of which calibration routed nothing, all sites, and those experts."""
    for _, value, observer in input_observers(model):
        if isinstance(observer, MeanObserver) and int(observer.count):
            linears = value.graph.find_nodes(
                op="call_function", target=torch.ops.aten.linear.default
            )
            sites = {r.expert: r.site for r in map(routed, linears) if r and r.behind is value}
            past = [int(observer.count), *(int(n / _STEPS) for n in observer.total)]
            idle = [n for n in sorted(sites) if past[n] == past[n + 1]]
            if idle:
                yield sites, idle


def _experts_of(value: Node) -> dict[int, Routed]:
    """Return the experts whose products read a value, behind observers."""
    readers = list(value.users)
    for reader in readers:
        if reader.op == "call_module":
            readers.extend(reader.users)
    return {route.expert: route for route in map(routed, readers) if route is not None}


def _insert(value: Node, observer: nn.Module, own: Node | None = None) -> None:
    owner, graph = owner_of(value), value.graph
    name = free_attribute(owner, f"{_PREFIX}0")
    owner.add_module(name, observer)
    place = value if own is None else own
    while place.next.op == "placeholder":
        place = place.next
    with graph.inserting_after(place):
        node = graph.create_node(
            "call_module", name, (value, *([] if own is None else [own])), {}, name
        )
    node.meta["val"] = value_of(value)
    tag(node, **{_TAG: value.name})


def input_observers(
    model: GraphModule,
) -> Iterator[tuple[Node, Node, MeanObserver | MomentObserver]]:
    """Yield each node that observes the input of a product, that input, and the observer."""
    for node in list(nodes_in(model)):
        if node.op == "call_module" and tag_of(node, _TAG) is not None:
            value: Any = node.args[0]
            yield node, value, get_attribute(owner_of(node), str(node.target))
