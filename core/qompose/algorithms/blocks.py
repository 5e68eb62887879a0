# SPDX-License-Identifier: Apache-2.0
"""Parts of a program that algorithms learn from one after another, and what they learned of weights.

`qompose.calibrate` runs the float program and the quantized one beside each other, on all batches, from one
part to the next. Before each part the quantized one has the integers that were learned so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.algorithms.channel_factors import without_factors
from qompose.algorithms.interface import NotChanged
from qompose.algorithms.product_inputs import (
    InputMoments,
    Inputs,
    Symmetric,
    check_seen,
    in_stripes,
    normalized_moments,
)
from qompose.algorithms.products import Operands, columns_of
from qompose.observers.auto_range import in_unit, unit_of
from qompose.observers.input_sums import Columns, MomentObserver, examples_in_parts
from qompose.observers.row_sample import example_hashes
from qompose.program.aliasing import written_values
from qompose.program.decompositions import routed
from qompose.program.graph import constant_of, copies_of, value_of
from qompose.program.meta import LEARNED_KEY
from qompose.program.stepping import last_reads, repeatable, run_call, run_part
from qompose.spec import qdq
from qompose.spec.qdq import QParams

Weights = Mapping[str, Tensor]
"""Values of weights, by the names of the products that read them."""
Exchange = Callable[[Any], "list[Any]"]
"""Gives something to the other processes of a calibration, and returns what each gave, by rank."""


@dataclass(frozen=True, eq=False)
class LearnedWeight:
    """What an algorithm learned of a weight.

    Attributes:
        path: of the parameter.
        algorithm: which learned it, with its options.
        inputs: how the inputs of its product were quantized, which what was learned made up for.
        line: what the report says of it.
        scale_before, zero_point_before: the parameters it was learned with; not valid for others.
        scale, zero_point: those that it has now.
        integers: in the shape of the weight.
    """

    path: str
    algorithm: str
    inputs: str
    line: str
    scale_before: Tensor
    zero_point_before: Tensor
    scale: Tensor
    zero_point: Tensor
    integers: Tensor

    def applied(self, q: QParams) -> tuple[QParams, Tensor] | None:
        """Return parameters and integers in the place of `q`; None if they were learned from others.

        They are copies: each program that is converted has its own.
        """
        before = (self.scale_before, q.scale), (self.zero_point_before, q.zero_point)
        if not all(one.shape == other.shape for one, other in before):
            return None
        if not all(torch.equal(one.to(other), other) for one, other in before):
            return None
        scale, zero_point = (
            self.scale.to(q.scale, copy=True),
            self.zero_point.to(q.zero_point, copy=True),
        )
        now = replace(q, scale=scale, zero_point=zero_point)
        return now, self.integers.to(q.dtype, copy=True)


@dataclass(frozen=True, eq=False)
class Learned:
    """What algorithms learned of a calibrated program.

    Attributes:
        weights: those that have integers now.
        refused: a line for each product that was asked for and was not changed, with the reason.
        whole: whether all that ask had their turn.
    """

    weights: tuple[LearnedWeight, ...] = ()
    refused: tuple[str, ...] = ()
    whole: bool = False


def learned_of(model: GraphModule) -> Learned | None:
    """Return what was learned of a prepared program, None where nothing was to be learned yet."""
    found: Learned | None = model.meta.get(LEARNED_KEY)
    return found


def set_learned(model: GraphModule, learned: Learned | None) -> None:
    """Keep in a prepared program what was learned of it."""
    model.meta.pop(LEARNED_KEY, None)
    if learned is not None:
        model.meta[LEARNED_KEY] = learned


class PartlyRun:
    """A program that is run on several batches at once, from one part to the next.

    Args:
        graph: the program, which writes to no buffer.
        inputs: of each batch, one value for each placeholder. The program may write to them.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Sequence[Any]]) -> None:
        self.nodes: list[Node] = list(graph.graph.nodes)
        self.place = {node.name: number for number, node in enumerate(self.nodes)}
        self.at = 0
        self.given: dict[Node, Any] = {}
        self._done = last_reads(graph.graph)
        self._writes = bool(written_values(graph.graph))
        self._constant = _of_constants(self.nodes)
        self._folded: dict[Node, Any] = {}
        self._before: dict[Node, Tensor] = {}
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self._values = [dict(zip(placeholders, batch, strict=True)) for batch in inputs]
        self._rest = set(self.nodes) - set(placeholders)

    def node(self, name: str) -> Node:
        """Return a node by its name."""
        return self.nodes[self.place[name]]

    def advance(self, stop: int) -> None:
        """Run all batches up to the node of a number, which is not run."""
        nodes = [node for node in self.nodes[self.at : stop] if node in self._rest]
        for values in self._values:
            run_part(nodes, values, self._call, self._done)
        self.at = stop
        self._folded.clear()
        self.given.clear()

    def ahead(self, batch: int, stop: int, read: Sequence[Node]) -> list[Any]:
        """Return values that a batch has once it is run up to a node, and leave it where it is."""
        values = self._held(batch)
        run_part(self._needed(stop, read), values, self._call, self._done)
        self._before.clear()
        return [values[node] for node in read]

    def _needed(self, stop: int, read: Sequence[Node]) -> list[Node]:
        """Return the nodes to run up to a node for some values: all, if any of them writes to others."""
        nodes = [node for node in self.nodes[self.at : stop] if node in self._rest]
        if self._writes:
            return nodes
        needed = set(read)
        for node in reversed(nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        return [node for node in nodes if node in needed]

    def _held(self, batch: int) -> dict[Node, Any]:
        """Return what is held of a batch; in copies if an operator might write to it."""
        values = dict(self._values[batch])
        if self._writes:
            computed = {
                n.name: v for n, v in values.items() if isinstance(v, Tensor) and n.op != "get_attr"
            }
            copies = copies_of(computed)
            values |= {node: copies[node.name] for node in values if node.name in copies}
        return values

    def _call(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node in self.given:
            return self.given[node]
        if node.op == "call_module":  # an observer, which is not to look
            return args[0]
        if node in self._constant:
            if node not in self._folded:
                with torch.no_grad():
                    self._folded[node] = run_call(node, args, kwargs)
            return self._folded[node]
        if torch.is_grad_enabled() and node.target in _ROUNDING:
            return self._straight_through(node, args, kwargs)
        with repeatable(node, 1):
            return run_call(node, args, kwargs)

    def _straight_through(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Round a value, and let gradients pass as if it had not been rounded."""
        with torch.no_grad():
            result = run_call(node, args, kwargs)
        if node.target in qdq.QUANTIZE:
            self._before[node] = args[0]
        elif node.target in qdq.DEQUANTIZE:
            before = self._before.get(node.args[0])  # type: ignore[arg-type]
            if before is not None and before.requires_grad:
                return before + (result - before).detach()
        return result


_ROUNDING = qdq.QUANTIZE | qdq.DEQUANTIZE | qdq.CHOOSE
_CONVERSIONS = qdq.QUANTIZE | qdq.DEQUANTIZE


def _of_constants(nodes: Sequence[Node]) -> set[Node]:
    """Return the operators that quantize and dequantize parameters."""
    found = {node for node in nodes if constant_of(node) is not None}
    parameters = set(found)
    for node in nodes:
        if node.target in _CONVERSIONS and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found - parameters


@dataclass(frozen=True)
class Block:
    """A part of a program, and what it makes of calibration data in float and quantized.

    Attributes:
        name: path of the module, or the name of the product.
        products: those that ask for the algorithm, in the order of the program.
        outputs: names of the float tensors of it that operators behind it read.
        batches: how many this process has.
        rank: which of the processes it is.
        exchange: gives something to all other processes, and returns what each gave, by rank; the processes
            have to call it equally often.
    """

    name: str
    products: tuple[Operands, ...]
    outputs: tuple[str, ...]
    batches: int
    rank: int
    exchange: Exchange
    _float: PartlyRun = field(repr=False)
    _quantized: PartlyRun = field(repr=False)
    _end: str = ""

    def inputs(
        self, product: Operands, weights: Weights | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what a product reads of each batch: in the float program, and in the quantized one.

        Both have the shape that the product's input has in the program; of an expert there are the rows that
        the quantized program routes to it.

        Args:
            weights: as for `given`.
        """
        sides = self._float, self._quantized
        for batch in range(self.batches):
            with self._with(weights):
                exact, found = (_input(side, batch, product.node.name) for side in sides)
                own = _own(self._quantized, batch, product.node)
            yield exact[own], found[own]

    def moments(self, product: Operands, weights: Weights | None = None) -> InputMoments:
        """Return second moments of what a product reads in the quantized program, `(2, groups, K, K)`.

        They are of the batches of all processes, and K is the number of columns of a group of the weight.

        Each example is of the half that its float values say, whatever became of them.

        Args:
            weights: as for `given`.

        Raises:
            NotChanged: the input never saw data, all data is alike, or values are not finite.
        """
        observer = MomentObserver(*columns_of(product))
        for exact, found in self.inputs(product, weights):
            observer.add(found, example_hashes(exact, observer.columns.dim))
        parts = self.exchange((observer.total, observer.count))
        total, count = (sum(sums[1:], sums[0]) for sums in zip(*parts, strict=True))  # by rank
        return normalized_moments(total, count)

    def read_by(
        self, product: Operands, weights: Weights | None = None, *, also: Sequence[Operands] = ()
    ) -> Inputs:
        """Return what a product reads in the quantized program, as `moments` does, without holding it.

        The batches are run once more for whatever is asked of it, and what is held are the columns asked for.

        Args:
            weights: as for `given`.
            also: others that read its weight, in or behind the block. Their inputs count as its own; weights
                in front of those that are not decided yet are the nearest integers.

        Raises:
            NotChanged: as for `moments`; or one of the others cannot be run.
        """
        return _Rerun.of(self, (product, *also), weights)

    def wanted(self, batch: int) -> tuple[Tensor, ...]:
        """Return the outputs that the float program has of a batch, in the shapes of the program."""
        return self._run(self._float, batch)

    def given(self, batch: int, weights: Weights | None = None) -> tuple[Tensor, ...]:
        """Return the outputs that the quantized program has of a batch, in the shapes of the program.

        Where gradients are recorded they pass through all that rounds activations as if it did not.

        Args:
            weights: by the products' names, values in the place of their weights', in the same shape.
        """
        with self._with(weights):
            return self._run(self._quantized, batch)

    @contextmanager
    def _with(self, weights: Weights | None) -> Iterator[None]:
        side, before = self._quantized, self._quantized.given
        side.given = dict(before)
        for name, values in (weights or {}).items():
            side.given |= weight_values(side, name, values)
        try:
            yield
        finally:
            side.given = before

    def _run(self, side: PartlyRun, batch: int) -> tuple[Tensor, ...]:
        read = [side.node(name) for name in self.outputs]
        values = side.ahead(batch, side.place[self._end] + 1, read)
        return tuple(map(without_factors, read, values))

    @cached_property
    def hashes(self) -> list[Tensor]:
        """Of each batch, a hash of each example of the first output in float, `(N,)`: equal ones are equal.

        An example is what one index of the first dimension has; of outputs of one dimension there is one.
        """
        return [
            example_hashes(_in_rows(self.wanted(batch)[0]), -1) for batch in range(self.batches)
        ]


@dataclass(frozen=True)
class _Rerun(Inputs):
    """What products with one weight read, of which nothing is held but a hash of each example.

    Attributes:
        hashes: by product, of the examples of each batch of this process, `(N,)`.
        count: how many rows each half of the examples has, in all processes.
        unit: what squares are divided by, so that they are near 1.
        half: the half of the examples that counts; None for all.
    """

    block: Block
    products: tuple[Operands, ...]
    weights: Weights | None
    hashes: Sequence[Sequence[Tensor]]
    count: Tensor
    unit: float
    half: int | None = None

    @classmethod
    def of(cls, block: Block, products: tuple[Operands, ...], weights: Weights | None) -> _Rerun:
        columns, width = columns_of(products[0])
        hashes, found = list[list[Tensor]](), list[Tensor]()
        for product in products:
            hashes.append([])
            for of_batch, sums in _squares_read(block, product, weights):
                hashes[-1].append(of_batch)
                found.append(sums)
        own = torch.stack(found).sum(0) if found else None
        parts = [part for part in block.exchange(own) if part is not None]  # in the order of ranks
        total = sum(parts[1:], parts[0])
        counts, squares = total[:, 0], float(total[:, 1].sum())
        check_seen(counts, squares)
        unit = squares / (2 * columns.groups * width)
        return cls(block, products, weights, hashes, counts.long(), unit)

    @property
    def number(self) -> int:
        return int(self.count.sum())

    @property
    def channels(self) -> int:
        return columns_of(self.products[0])[1]

    def halves(self) -> tuple[Inputs, Inputs]:
        return replace(self, half=0), replace(self, half=1)

    def _rows(self) -> Iterator[Tensor]:
        """Yield columns of some rows after another, `(groups, N, K)`."""
        halves = (0, 1) if self.half is None else (self.half,)
        for product, batches in zip(self.products, self.hashes, strict=True):
            columns = columns_of(product)[0]
            for batch, hashes in enumerate(batches):
                values = self._values(batch, product)
                for half in halves:
                    yield from map(columns.of, examples_in_parts(values, hashes, columns, half))

    def _values(self, batch: int, product: Operands) -> Tensor:
        side = self.block._quantized
        with self.block._with(self.weights):
            return _input(side, batch, product.node.name)[_own(side, batch, product.node)]

    def symmetric(self, columns: slice) -> Symmetric:
        groups, width = columns_of(self.products[0])[0].groups, len(range(self.channels)[columns])
        stripes = {
            (first, last): torch.zeros(groups, last - first, last, dtype=torch.float64)
            for first, last in in_stripes(width)
        }
        for rows in self._rows():
            some = rows[..., columns].double()
            for (first, last), stripe in stripes.items():
                of_rows = some[..., first:last].transpose(1, 2)
                stripes[first, last] = stripe.to(some.device).baddbmm_(of_rows, some[..., :last])
        for where, stripe in stripes.items():  # each in the place of twice as many bytes
            stripes[where] = self._of_all(stripe).div_(self.unit).float()
        return Symmetric(stripes)

    def errors(self, differences: Sequence[Tensor]) -> list[float]:
        unit = unit_of(torch.tensor(math.sqrt(self.unit)))
        units = [unit_of(off) for off in differences]
        offs = [in_unit(off, own) for off, own in zip(differences, units, strict=True)]
        found = torch.zeros(len(differences), dtype=torch.float64)
        for rows in self._rows():
            given = in_unit(rows.float(), unit)
            for at, off in enumerate(offs):
                found[at] += (given @ off.transpose(1, 2)).square_().sum().double().cpu()
        back = torch.tensor([(unit * own) ** -2 for own in units], dtype=torch.float64)
        return (self._of_all(found) * back / self.unit).tolist()

    def _of_all(self, own: Tensor) -> Tensor:
        """Return sums over all processes, in the order of their ranks."""
        parts: list[Tensor] = self.block.exchange(own)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def _squares_read(
    block: Block, product: Operands, weights: Weights | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, of each batch, hashes of its examples, `(N,)`, and `_squares` of both halves, `(2, 2)`.

    Raises:
        NotChanged: the product cannot be run.
    """
    if product.node.name not in block._quantized.place:
        raise NotChanged(
            f"{product.node.name}, which reads its weight too, is in a control-flow subgraph"
        )
    columns, _ = columns_of(product)
    for exact, values in block.inputs(product, weights):
        hashes = example_hashes(exact, columns.dim)
        of_halves = (examples_in_parts(values, hashes, columns, half) for half in (0, 1))
        yield hashes, torch.stack([_squares(parts, columns) for parts in of_halves])


def _squares(parts: Iterable[Tensor], columns: Columns) -> Tensor:
    """Return how many rows of columns there are, and the sum of their squares, `(2,)` in float64."""
    found = torch.zeros(2, dtype=torch.float64)
    for part in parts:
        rows = columns.of(part)
        found += torch.stack(
            [torch.tensor(float(rows.shape[1])), rows.double().square().sum().cpu()]
        )
    return found


def _input(side: PartlyRun, batch: int, product: str) -> Tensor:
    """Return what a product reads of a batch."""
    node = side.node(product)
    source = node.args[0]
    assert isinstance(source, Node)
    (value,) = side.ahead(batch, side.place[product], [source])
    assert isinstance(value, Tensor)
    return value


def _own(side: PartlyRun, batch: int, product: Node) -> Any:
    """Return the index of the rows that a product is for: `(rows,)` of an expert, `...` for all."""
    if (route := routed(product)) is None:
        return ...
    (own,) = side.ahead(batch, side.place[product.name], [side.node(route.own.name)])
    return own.flatten()


def _in_rows(value: Tensor) -> Tensor:
    return value.flatten(1).unsqueeze(1) if value.dim() > 1 else value.reshape(1, 1, -1)


def weight_values(side: PartlyRun, product: str, values: Tensor) -> dict[Node, Any]:
    """Return by node what a product has to read to have other values of its weight."""
    read: Any = side.node(product).args[1]
    found: dict[Node, Any] = {read: values.to(value_of(read).dtype)}
    # What they are made of in the program is not computed then.
    while read.all_input_nodes and (read := read.all_input_nodes[0]).op == "call_function":
        if len(read.users) > 1:
            break
        found[read] = None
    return found
