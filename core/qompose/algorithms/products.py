# SPDX-License-Identifier: Apache-2.0
"""The linears and convolutions of a program as algorithms see them: what they read, what may change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import (
    Algorithm,
    NotChanged,
    NotKnown,
    at,
    check_integers,
    check_qparams,
)
from qompose.algorithms.product_inputs import InputMoments, InputRows, normalized_moments
from qompose.observers.auto_range import (
    FEWEST_EXAMPLES,
    AutoRangeObserver,
    Reader,
    in_unit,
    measured_against,
    unit_of,
)
from qompose.observers.channel_ranges import INPUT, PerChannelRangeObserver, base_observer
from qompose.observers.input_sums import Columns, Window
from qompose.observers.min_max import MinMaxObserver, PerBlockMinMaxObserver
from qompose.observers.row_sample import RowSample
from qompose.program.batch_norm_folding import FOLDABLE, TRANSPOSED
from qompose.program.decompositions import routed
from qompose.program.graph import (
    address_of,
    arguments_of,
    behind_modules,
    constant_of,
    describe,
    layout_of,
    value_of,
)
from qompose.spec.claim import Claim, Point
from qompose.spec.qdq import QParams
from qompose.spec.qparams import along
from qompose.spec.quantization_spec import class_of

_LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True)
class Product:
    """A linear or a convolution of constants, whose parameters nothing else reads.

    Attributes:
        node: the operator.
        weight, bias: the nodes that read its parameters; a bias there need not be.
        groups: of a convolution.
    """

    node: Node
    weight: Node
    bias: Node | None
    groups: int

    @property
    def source(self) -> Node:
        """Return the value that is multiplied."""
        source = self.node.args[0]
        assert isinstance(source, Node)
        return source

    def taps(self, weight: Tensor) -> Tensor:
        """Return a view of a weight as `(groups, outputs of each, inputs of each, taps)`."""
        return taps_of(weight, self.groups, self.node.target in TRANSPOSED)

    def scaled(self, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return a weight whose output and input channels are multiplied by a number each, in its type."""
        result = weight.detach().double().clone(memory_format=torch.contiguous_format)
        taps = self.taps(result)
        taps *= rows.view(self.groups, -1, 1, 1) * columns.view(self.groups, 1, -1, 1)
        return result.to(weight.dtype)

    @property
    def channel_dim(self) -> int:
        """Return the dimension that has the channels of its output, and of its input."""
        return channel_dim(self.node, self.weight)


@dataclass(frozen=True)
class Operands:
    """What a linear or a convolution of a prepared program reads, behind the observers."""

    node: Node
    source: Node
    weight: Node
    bias: Node | None

    @classmethod
    def of(cls, node: Node) -> Operands:
        """Return those of a product."""
        bias = arguments_of(node)["bias"]
        return cls(
            node,
            behind_modules(node.args[0]),
            behind_modules(node.args[1]),
            None if bias is None else behind_modules(bias),
        )


NOTHING = 1e-30
"""In place of a zero in a unit that keeps numbers near 1, to divide by."""


def change_products(
    found: Calibrated, algorithm: Algorithm, change: Callable[[Operands, Claim], str]
) -> None:
    """Let an algorithm change each product that it is wanted for, and note what it did, or why not.

    Where nobody asked by word, only missing statistics are worth a line.

    Args:
        change: changes one product and says what that does, or raises `NotChanged`.

    Raises:
        TypeError: it says nothing.
    """
    unknown = list[str]()
    for number, claim in enumerate(found.plan.claims):
        if not algorithm.is_wanted(claim, found):
            continue
        where = product_node(claim, found.nodes) or found.nodes[claim.anchor]
        with noted(found, algorithm, where) as effect:
            try:
                effect.append(_said(change(operands_of(found, number), claim)))
            except NotChanged as reason:
                if algorithm.is_asked(claim):
                    raise
                unknown += [str(reason)] if isinstance(reason, NotKnown) else []
    if unknown:
        found.refused.append(
            f"{algorithm} was not applied to {len(unknown)} of the layers: {unknown[0]}"
        )


def _said(effect: object) -> str:
    """Return what a change says that it did."""
    if not isinstance(effect, str) or not effect:
        raise TypeError(
            f"`change` must return what it did, for the report, or raise NotChanged; got {effect!r}"
        )
    return effect


@contextmanager
def noted(found: Calibrated, algorithm: Algorithm, product: Operands | Node) -> Iterator[list[str]]:
    """Note what an algorithm does to a product: what is put into the list, if anything is.

    Or why it does nothing, where `NotChanged` is raised.
    """
    where = describe(product.node if isinstance(product, Operands) else product)
    effects = list[str]()
    try:
        yield effects
    except NotChanged as reason:
        found.refused.append(f"{algorithm} was not applied to {where}: {reason}")
    else:
        found.made.extend(f"{algorithm} on {where}: {effect}" for effect in effects)


def operands_of(found: Calibrated, number: int) -> Operands:
    """Return what the product of a claim reads.

    Raises:
        NotChanged: it is none, or stays in float.
    """
    node = product_node(found.plan.claims[number], found.nodes)
    if node is None:
        raise NotChanged("it is not a linear or convolution")
    if number in found.dropped:
        raise NotChanged(f"it stays in float: {found.dropped[number]}")
    return Operands.of(node)


def moments_asked(
    algorithm: Algorithm, claims: Sequence[Claim], nodes: Mapping[str, Node]
) -> Iterator[tuple[Node, Columns, int]]:
    """Yield what `Algorithm.watch_moments` does for the inputs of all products that ask for an algorithm."""
    for product in products_with_weights(filter(algorithm.is_asked, claims), nodes):
        yield product.source, *columns_of(product)


def products_with_weights(claims: Iterable[Claim], nodes: Mapping[str, Node]) -> Iterator[Operands]:
    """Yield the products of claims whose weights are parameters or buffers."""
    for claim in claims:
        node = product_node(claim, nodes)
        product = None if node is None else Operands.of(node)
        if product is not None and constant_of(product.weight) is not None:
            yield product


def taps_of(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """Return a view of a weight as `(groups, outputs of each, inputs of each, taps)`."""
    flat = weight.unsqueeze(-1).flatten(2)
    grouped = flat.view(groups, -1, *flat.shape[1:])
    return grouped.transpose(1, 2) if transposed else grouped


def channel_dim(product: Node, weight: Node) -> int:
    """Return the dimension that has the channels of a product's output, and of its input."""
    rank, constant = value_of(product).dim(), constant_of(weight)
    assert constant is not None
    return int(rank - 1 if product.target is _LINEAR else rank - (constant.dim() - 1))


def product_node(claim: Claim, nodes: Mapping[str, Node]) -> Node | None:
    """Return the one linear or convolution of a claim, None where it has none or several."""
    found = [nodes[name] for name in claim.nodes if nodes[name].target in FOLDABLE]
    return found[0] if len(found) == 1 else None


def product_of(node: Node, readers: Mapping[int, int], written: Iterable[str]) -> Product | str:
    """Return a product whose parameters may be changed, or the reason why they must not be.

    Args:
        readers: of each parameter, by address (`count_readers`).
        written: paths of the buffers that the program writes to.
    """
    weight, bias = node.args[1], arguments_of(node)["bias"]
    if not isinstance(weight, Node) or constant_of(weight) is None:
        return f"the weight of {describe(node)} is not a parameter"
    for parameter in filter(None, (weight, bias)):
        assert isinstance(parameter, Node)
        constant = constant_of(parameter)
        if constant is None:
            return f"{describe(parameter)}, the bias of {node.name}, is not a parameter"
        if readers.get(address_of(constant), 0) > 1:
            return f"{parameter.target} is also read by other operators"
        if str(parameter.target) in written:
            return f"the program writes to {parameter.target}"
    return Product(node, weight, bias if isinstance(bias, Node) else None, groups_of(node))


def groups_of(node: Node) -> int:
    """Return the groups of a convolution; a linear is one."""
    return int(arguments_of(node).get("groups", 1))


def times(value: Tensor, vector: Tensor) -> Tensor:
    """Return a parameter whose first dimension is multiplied by a number for each index, in its type."""
    return (value.detach().double() * along(vector, 0, value.dim())).to(value.dtype)


def columns_of(product: Operands) -> tuple[Columns, int]:
    """Return which values of its input a product multiplies, and how many in each group."""
    node, weight = product.node, constant_of(product.weight)
    assert weight is not None
    groups, transposed = groups_of(node), node.target in TRANSPOSED
    dim = channel_dim(node, product.weight)
    if node.target is _LINEAR or transposed:
        width = weight.shape[0 if transposed else 1]
        return Columns(dim, groups, expert=expert_of(node)), int(width) // (
            groups if transposed else 1
        )
    size = tuple(map(int, weight.shape[2:]))
    given = arguments_of(node)
    stride, dilation = (_for_each(given[name], len(size)) for name in ("stride", "dilation"))
    window = Window(size, stride, _padding(given["padding"], size, dilation), dilation)
    return Columns(dim, groups, window), int(weight.shape[1]) * math.prod(size)


def channels_of(product: Operands) -> tuple[Columns, int]:
    """Return the channels of a product's input, each for itself, and how many there are."""
    weight = constant_of(product.weight)
    assert weight is not None
    transposed = product.node.target in TRANSPOSED
    channels = weight.shape[0] if transposed else weight.shape[1] * groups_of(product.node)
    dim, expert = channel_dim(product.node, product.weight), expert_of(product.node)
    return Columns(dim, correlated=False, expert=expert), int(channels)


def expert_of(product: Node) -> int | None:
    """Return the number of the expert whose rows alone a product is for, None where it is for all rows."""
    return None if (route := routed(product)) is None else route.expert


def _for_each(value: Any, rank: int) -> tuple[int, ...]:
    given = [value] if isinstance(value, int) else list(value)
    return tuple(given * rank if len(given) == 1 else given)


def _padding(
    given: Any, size: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Return the padding before and behind each dimension; "same" puts the odd one behind."""
    if given == "valid":
        return ((0, 0),) * len(size)
    if given == "same":
        total = [d * (s - 1) for s, d in zip(size, dilation, strict=True)]
        return tuple((n // 2, n - n // 2) for n in total)
    return tuple((n, n) for n in _for_each(given, len(size)))


def moments_read(found: Calibrated, product: Operands) -> InputMoments:
    """Return second moments of the input of a product.

    Raises:
        NotChanged: none are kept, the input never saw data, all data is alike, or values are not finite.
    """
    columns, _ = columns_of(product)
    observer = found.sums.get((product.source, columns))
    if observer is None:
        raise NotKnown("no second moments of its input were recorded")
    unscaled = _unscaled(found, product, columns)
    return normalized_moments(observer.total, observer.count, unscaled, _noise(found, product))


def _unscaled(found: Calibrated, product: Operands, columns: Columns) -> Tensor | None:
    """Return what columns are multiplied by because the input is divided by factors of its channels."""
    values = factors_read(found, product)
    if values is None:
        return None
    taps = 1 if columns.window is None else math.prod(columns.window.size)
    return (1 / values.double()).repeat_interleave(taps).view(columns.groups, -1)


def factors_read(found: Calibrated, product: Operands) -> Tensor | None:
    """Return what the channels of the input of a product are divided by, None where they are not."""
    divided = found.factors.divided.get(product.source.name)
    if divided is not None and product.node.name in divided.users:
        return divided.values
    number = _group_read(found, product)
    factors = None if number is None else found.factors.factors.get(number)
    balance = None if number is None else found.plan.groups[number].balance
    reads = factors is not None and balance is not None and balance.side == INPUT
    return factors.values if factors is not None and reads else None


def _noise(found: Calibrated, product: Operands) -> float:
    """Return the mean square of what rounding adds to a value of the input; 0 where it is not known."""
    number = _group_read(found, product)
    q = None if number is None else found.qparams.get(number)
    return 0.0 if q is None or not q.per_tensor else float(q.scale) ** 2 / 12


def _group_read(found: Calibrated, product: Operands) -> int | None:
    """Return the group of the input of a product, None where it is float."""
    source, groups = product.source.name, found.plan.group_of
    return groups.get(Point(source, product.node.name), groups.get(Point(source)))


def weight_group(found: Calibrated, product: Operands) -> tuple[int, QParams]:
    """Return the group of a product's weight, and how it is quantized.

    Raises:
        NotChanged: it is not, or its parameters are not known here.
    """
    number = found.plan.group_of.get(Point(product.weight.name, product.node.name))
    q = None if number is None else found.qparams.get(number)
    if number is None or q is None:
        raise NotChanged(f"{product.weight.target} is not quantized, or its scales are unknown")
    return number, q


def sharing(
    found: Calibrated, product: Operands, wants: Callable[[Claim], bool]
) -> tuple[Operands, ...]:
    """Return all products that read a product's weight, which is it alone where no other does.

    Args:
        wants: tells whether a claim's product may have other integers.

    Raises:
        NotChanged: the weight is not quantized, or what else reads it may not have other integers, is no
            product of the same kind, or has a tensor of its own.
    """
    number, _ = weight_group(found, product)
    group, readers = found.plan.groups[number], dict[Point, Operands]()
    for claim in group.claims:
        node = product_node(found.plan.claims[claim], found.nodes)
        if node is not None and claim not in found.dropped and wants(found.plan.claims[claim]):
            reader = Operands.of(node)
            readers[Point(reader.weight.name, node.name)] = reader
    others = [point for point in group.points if point not in readers]
    others += [at for at, reader in readers.items() if not _reads_alike(product, reader)]
    if others:
        names = ", ".join(sorted({point.user or point.source for point in others}))
        raise NotChanged(
            f"{product.weight.target} is also used by {names}, which would have to be a layer of "
            "the same kind that asks for it too"
        )
    return tuple(readers.values())


def _reads_alike(one: Operands, other: Operands) -> bool:
    """Tell whether products multiply one tensor by columns of equal shapes."""
    first, second = constant_of(one.weight), constant_of(other.weight)
    kinds = {(p.node.target in TRANSPOSED, groups_of(p.node)) for p in (one, other)}
    if first is None or second is None or len(kinds) > 1:
        return False
    return layout_of(first) == layout_of(second)


def weight_of(found: Calibrated, product: Operands) -> Tensor:
    """Return a copy of a product's weight, in float, in its shape, with the factors decided so far."""
    return found.factors.constant(product.weight.name).clone()


def set_integers(
    found: Calibrated, product: Operands, integers: Tensor, *, shared: bool = False
) -> None:
    """Decide on the integers of a product's weight.

    Args:
        integers: in the shape of the weight, and in the type of its quantization parameters. They are copied.
        shared: whether all that read the weight are to have them, not only an operator that alone does.

    Raises:
        NotChanged: another algorithm has decided, or other operators read the weight too.
        TypeError: they are no tensor.
        ValueError: they are not of its shape and type, or are out of bounds.
    """
    check_own_integers(found, product, shared=shared)
    number, q = weight_group(found, product)
    shape = found.factors.constant(product.weight.name).shape
    with at(describe(product.node)):
        check_integers(integers, q, shape)
    found.integers[number] = integers.clone()


def check_own_integers(found: Calibrated, product: Operands, *, shared: bool = False) -> None:
    """Check that integers of a product's weight can be chosen, for it alone unless it is `shared`.

    Raises:
        NotChanged: it is not quantized, or to float8; another algorithm has decided, or other operators read
            it too.
    """
    number, q = weight_group(found, product)
    if q.dtype.is_floating_point:
        raise NotChanged(f"{product.weight.target} is stored as {q.dtype}, which has no integers")
    if number in found.integers:
        raise NotChanged("the integers of its weight have already been chosen")
    if len(found.plan.groups[number].points) > 1 and not shared:
        raise NotChanged(f"{product.weight.target} is read by other operators or shares scales")


def check_own_scales(found: Calibrated, number: int) -> None:
    """Check that the scales of a weight are those of its range, and that nothing else has them.

    Raises:
        NotChanged: an observer of its own estimates them, or other tensors share them or are derived from it.
    """
    plan, spec = found.plan, found.plan.groups[number].spec
    kind = class_of(getattr(spec, "observer_or_fake_quant_ctr", None))
    known = isinstance(kind, type) and issubclass(kind, (MinMaxObserver, PerBlockMinMaxObserver))
    if not known or type(found.observers[number]) is not kind:
        raise NotChanged("its observer does not use the min/max range")
    if any(number in group.depends_on for group in plan.groups):
        raise NotChanged("quantization parameters of other tensors are derived from its own")
    if not found.factors.constant(plan.groups[number].points[0].source).numel():
        raise NotChanged("it is empty")
    if len({point.source for point in plan.groups[number].points}) > 1:
        raise NotChanged("several tensors share its scale")


def scales_as_stored(found: Calibrated, number: int) -> torch.dtype | None:
    """Return the type to which the scales of a group are rounded, None where they are not."""
    stored = getattr(base_observer(found.observers[number]), "scale_dtype", None)
    return None if stored is torch.float32 else stored


def set_scales(found: Calibrated, product: Operands, scale: Tensor, zero_point: Tensor) -> None:
    """Decide on other scales and zero points of a product's weight, before its integers are.

    Args:
        scale, zero_point: in the shapes that they have (`weight_group`).

    Raises:
        NotChanged: the weight is not quantized, its parameters are not known here, or its integers have
            been chosen already.
        TypeError: they are no tensors, or integers in place of floats, or floats of integers.
        ValueError: they are of other shapes, a scale is not a positive, finite and normal number, a zero
            point is out of the integers' bounds, or one of a symmetric weight is not its scheme's.
    """
    number, q = weight_group(found, product)
    if number in found.integers:
        raise NotChanged(
            "its quantized values have already been chosen, so its scales can no longer change"
        )
    chosen = replace(q, scale=scale, zero_point=zero_point)
    with at(describe(product.node)):
        check_qparams(chosen, q, found.plan.groups[number].spec)
    found.qparams[number] = chosen


def reader_of(found: Calibrated, product: Operands) -> Reader:
    """Return a product as the reader of its input, its weight with the factors decided so far."""
    weight = found.factors.constant(product.weight.name)
    return Reader(weight, groups_of(product.node), product.node.target in TRANSPOSED)


def rows_read(found: Calibrated, product: Operands, reader: Reader) -> InputRows:
    """Return rows of the input of a product.

    Raises:
        NotChanged: too few are kept, or none.
    """
    source, number = product.source.name, _group_read(found, product)
    q = None if number is None else found.qparams.get(number)
    if number is None or q is None or not q.per_tensor or reader.weight is None:
        raise NotChanged(f"the scale of {source} is unknown")
    sample = _sample(found.observers[number], channel_dim(product.node, product.weight))
    if (got := sample.rows.shape[1]) != reader.channels:
        raise NotChanged(f"sampled rows of {source} have {got} channels, not {reader.channels}")
    rows = sample.rows.to(reader.weight.device)
    factors, balance = found.factors.factors.get(number), found.plan.groups[number].balance
    if factors is not None and balance is not None and balance.side == INPUT:
        rows = rows / factors.values.to(rows.device)
    unit = unit_of(rows)
    rows = in_unit(rows, unit)
    sizes = reader.in_unit().squared_sizes(rows)
    if not bool(sizes.isfinite().all()):
        raise NotChanged("its weight or its input has non-finite values")
    weights = sample.weights.to(rows.device, torch.float32)
    grouped = rows.reshape(len(rows), reader.groups, -1).transpose(0, 1)
    against, half = measured_against(sizes, weights), sample.half.to(rows.device)
    noise = (float(q.scale) * unit) ** 2 / 12
    return InputRows(grouped, weights / against, half, noise, unit)


def _sample(observer: Any, dim: int) -> RowSample:
    """Return rows that an observer keeps along a dimension, of enough examples."""
    inner = base_observer(observer)
    if isinstance(observer, PerChannelRangeObserver):
        sample, kept = observer.sample, observer.channel_observer.ch_axis
    elif isinstance(inner, AutoRangeObserver):
        sample, kept = inner.sample, inner.channel_dim
    else:
        raise NotChanged("its input has no sampled rows (range='auto' records them)")
    if isinstance(inner, AutoRangeObserver) and not inner.readers:
        raise NotChanged(
            "its input was not sampled: it shares a range or has a dynamic number of channels"
        )
    if kept != dim or not sample.seen:
        raise NotKnown("no rows of its input were sampled")
    if sample.examples < FEWEST_EXAMPLES or bool(sample.half.all()) or not bool(sample.half.any()):
        raise NotChanged(
            f"its input had too few distinct examples in calibration, {sample.examples}; at least "
            f"{FEWEST_EXAMPLES} are required, some to learn from and some to hold out"
        )
    return sample
