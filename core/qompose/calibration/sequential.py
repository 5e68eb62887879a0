# SPDX-License-Identifier: Apache-2.0
"""Algorithms that learn from data have their turn, from one part of a program to the next.

The float program and the quantized one are run beside each other on all batches, part by part
(`qompose.algorithms.blocks`): a part's inputs are those that quantizing all parts before it gives. What is
held at a time is what the operators behind still read of each batch; what was learned lies on disk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.progress import Progress
from torch.fx import GraphModule, Node

from qompose.algorithms import algorithms_of
from qompose.algorithms.blocks import (
    Block,
    Exchange,
    Learned,
    LearnedWeight,
    PartlyRun,
    learned_of,
    set_learned,
    weight_values,
)
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import UNREPORTED, Algorithm, Algorithms, NotChanged, Part
from qompose.algorithms.products import Operands, noted, operands_of, product_node, weight_group
from qompose.conversion.convert import quantized_draft
from qompose.errors import CalibrationError, first_of
from qompose.plan.plan import Plan
from qompose.program.aliasing import written_buffers
from qompose.program.batches import KeptBatches
from qompose.program.control_flow import nodes_in
from qompose.program.disk import Pages
from qompose.program.graph import (
    constant_of,
    describe,
    is_float_tensor,
    layout_of,
    module_path,
    module_stack,
)
from qompose.program.meta import META_KEY
from qompose.spec.claim import Claim
from qompose.spec.qdq import integers_of, values_of_integers
from qompose.spec.quantization_spec import describe_spec


def learns(plan: Plan) -> bool:
    """Tell whether algorithms that claims ask for learn from data."""
    return any(True for _ in algorithms_of(plan.claims).learning(plan.claims))


def usable(learned: Learned | None, prepared: GraphModule) -> tuple[Learned | None, list[str]]:
    """Return what a program's claims ask for of what was learned elsewhere, and lines of what that lacks.

    What another algorithm learned of a weight, or the same with other options or for inputs quantized in
    another way, does not stand in for it.
    """
    plan: Plan = prepared.meta[META_KEY].plan
    if learned is None:
        return None, [_lacking("weights")] if learns(plan) else []
    wanted = dict(_wanted(prepared, plan))
    tensors = {str(node.target): _tensor(node) for node in nodes_in(prepared)}
    kept, idle = dict[_Wish, LearnedWeight](), Counter[str]()
    for weight in learned.weights:
        wish = weight.algorithm, weight.inputs, tensors.get(weight.path)
        if wish in wanted:
            kept[wish] = weight
        else:
            idle[wish[0]] += 1
    heads = tuple({f"{algorithm} was not applied to " for algorithm, *_ in wanted})
    refused = [line for line in learned.refused if line.startswith(heads)]
    lacking = [
        describe(node)
        for wish, node in wanted.items()
        if wish not in kept
        and not any(f" not applied to {describe(node)}:" in line for line in refused)
    ]
    refused += [
        f"what {algorithm} learned of {number} weights in another calibration was not used: "
        "no configuration that applies there requests it"
        for algorithm, number in idle.items()
    ]
    lines = [_lacking(first_of(lacking, 3))] if lacking else []
    lines += [] if learned.whole or lines or not wanted else [_lacking("weights")]
    return Learned(tuple(kept.values()), tuple(refused), learned.whole), lines


_Wish = tuple[str, str, Any]
"""An algorithm that is to learn of a weight, with options, how inputs are quantized, and where that is."""


def _wanted(prepared: GraphModule, plan: Plan) -> Iterator[tuple[_Wish, Node]]:
    """Yield which algorithms are to learn of which weights, each with its product."""
    nodes = {node.name: node for node in nodes_in(prepared)}
    for algorithm, number, _ in algorithms_of(plan.claims).learning(plan.claims):
        claim = plan.claims[number]
        node = product_node(claim, nodes)
        product = None if node is None else Operands.of(node)
        tensor = None if product is None else _tensor(product.weight)
        if product is not None and tensor is not None:
            yield (str(algorithm), _inputs_of(claim, product), tensor), product.node


def _inputs_of(claim: Claim, product: Operands) -> str:
    """Return how the inputs of a product are quantized, as text."""
    points = (product.source.name, None), (product.source.name, product.node.name)
    specs = [spec.spec for spec in claim.specs if (spec.point.source, spec.point.user) in points]
    return f"{claim.mode}, {', '.join(map(describe_spec, specs)) or 'float'}"


def _tensor(node: Node) -> tuple[object, ...] | None:
    """Return where the values of a parameter are, None of other nodes."""
    constant = constant_of(node)
    return None if constant is None else layout_of(constant)


def _lacking(what: str) -> str:
    return (
        f"{what}: an algorithm must learn from all calibration data in one run, and these statistics "
        "contain no results of it with the same options"
    )


@dataclass(frozen=True)
class _Asked:
    """A product that an algorithm is to learn of."""

    algorithm: Algorithm
    part: Part
    product: Operands
    inputs: str

    @property
    def path(self) -> str:
        """Return the path of the weight."""
        return str(self.product.weight.target)

    def is_learned_in(self, known: Mapping[str, LearnedWeight]) -> bool:
        """Tell whether its algorithm decided on the weight for such inputs, and no other did."""
        weight = known.get(self.path)
        found = None if weight is None else (weight.algorithm, weight.inputs)
        return found == (str(self.algorithm), self.inputs)


@dataclass(frozen=True)
class _Unit:
    """Operators that follow one another, from `first` to `last` in the float program, and what is learned."""

    name: str
    first: int
    last: int
    asked: tuple[_Asked, ...]


def learn(
    prepared: GraphModule,
    batches: KeptBatches,
    rank: int,
    exchange: Exchange,
    bar: Progress,
    note: Callable[[], None],
) -> None:
    """Let algorithms learn of a calibrated program, in place, what they have not learned yet.

    Args:
        batches: those of this process, which are taken.
        rank: which of the processes this is.
        exchange: gives something to the other processes, and returns what each gave, by rank.
        note: called whenever there is more to be kept.

    Raises:
        CalibrationError: the program writes to its buffers; another process failed.
        UncalibratedError: as for `convert_pt2e`.
        MemberError: an algorithm raised an error of its own.
    """
    plan: Plan = prepared.meta[META_KEY].plan
    if written := sorted(written_buffers(prepared.graph)):
        learning = algorithms_of(plan.claims).learning(plan.claims)
        words = ", ".join(dict.fromkeys(algorithm.word for algorithm, *_ in learning))
        raise CalibrationError(
            f"{words} cannot be applied: the program writes to its buffers "
            f"({', '.join(written)}), so the result for a batch depends on earlier batches. "
            f"Remove {words} from algorithms="
        )
    found, draft = quantized_draft(prepared)
    said, algorithms = len(found.refused), algorithms_of(plan.claims)
    exact, quantized = batches.take()
    sides = PartlyRun(prepared, exact), PartlyRun(draft, quantized)
    walk = _Walk(found, algorithms, *sides, len(exact), rank, exchange)
    del exact, quantized
    asked = list(walk.asked())
    units, pages = walk.units(asked), Pages(_sizes(found, asked))
    before = learned_of(prepared) or Learned()
    known = {weight.path: weight for weight in before.weights}

    def keep(*, whole: bool) -> None:
        # What was refused before is learned of once more, and refused again if it has to be.
        refused = dict.fromkeys(found.refused[said:])
        set_learned(prepared, Learned(tuple(known.values()), tuple(refused), whole))

    task = bar.add_task("learning", total=len(units))
    for number, unit in enumerate(units, start=1):
        bar.update(task, description=f"learning {unit.name}")
        walk.learn(unit, known, pages)
        keep(whole=False)
        note()
        bar.update(task, completed=number)
    keep(whole=True)


def _sizes(found: Calibrated, asked: Sequence[_Asked]) -> Iterator[int]:
    """Yield the bytes of the integers of each weight that is asked for."""
    weights = {weight_group(found, one.product)[0]: one.product.weight for one in asked}
    for number, weight in weights.items():
        count = found.factors.constant(weight.name).numel()
        yield count * found.qparams[number].dtype.itemsize


@dataclass(frozen=True)
class _Walk:
    """A float program and the quantized one, on the way from one part to the next."""

    found: Calibrated
    algorithms: Algorithms
    exact: PartlyRun
    quantized: PartlyRun
    batches: int
    rank: int
    exchange: Exchange
    _first: dict[tuple[int, int], _Asked] = field(default_factory=dict)
    """By algorithm and group of a weight, the product that was the first to come."""

    def asked(self) -> Iterator[_Asked]:
        """Yield the products that algorithms can learn of, and note why they cannot of others."""
        found = self.found
        for algorithm, number, part in self.algorithms.learning(found.plan.claims):
            claim = found.plan.claims[number]
            node = product_node(claim, found.nodes) or found.nodes[claim.anchor]
            with noted(found, algorithm, node):
                product = operands_of(found, number)
                weight_group(found, product)
                if product.node.graph is not found.model.graph:
                    raise NotChanged(
                        "it is in a control-flow subgraph (torch.cond, while_loop), which can "
                        "only run as a whole"
                    )
                if product.node.name not in self.quantized.place:
                    raise NotChanged("an observer from another package replaces it in conversion")
                yield _Asked(algorithm, part, product, _inputs_of(claim, product))

    def units(self, asked: Sequence[_Asked]) -> list[_Unit]:
        """Return the parts to learn of, in the order of the program; parts that overlap are one."""
        modules = _repeated(self.exact.nodes)
        spans: list[_Unit] = []
        for one in sorted(asked, key=lambda a: self.exact.place[a.product.node.name]):
            spans.append(self._span(one, modules))
        units: list[_Unit] = []
        for span in sorted(spans, key=lambda unit: (unit.first, -unit.last)):
            if units and span.first <= units[-1].last:
                whole = units.pop()
                last = max(whole.last, span.last)
                span = replace(whole, last=last, asked=(*whole.asked, *span.asked))
            units.append(span)
        return units

    def _span(self, one: _Asked, modules: Mapping[str, tuple[int, int]]) -> _Unit:
        node = self.exact.node(one.product.node.name)
        inside = [path for path, _ in module_stack(node) if path in modules]
        if one.part == "product" or not inside:
            at = self.exact.place[node.name]
            return _Unit(module_path(node) or node.name, at, at, (one,))
        return _Unit(inside[-1], *modules[inside[-1]], (one,))

    def learn(self, unit: _Unit, known: dict[str, LearnedWeight], pages: Pages) -> None:
        """Come to a part, and let algorithms decide on those of its weights that are not known."""
        self.exact.advance(unit.first)
        self.quantized.advance(self._start(unit.first))
        for algorithm, asked in _by_algorithm(unit.asked):
            firsts = [self._first_of(one) for one in asked]
            pairs = list(zip(asked, firsts, strict=True))
            waiting = [one for one, first in pairs if first is one and not one.is_learned_in(known)]
            self._give(asked)
            if waiting:
                known |= {
                    weight.path: weight for weight in self._learned(unit, algorithm, waiting, pages)
                }
            self._give(waiting)
            for one, first in pairs:
                if first is not one and not first.is_learned_in(known):
                    with noted(self.found, algorithm, one.product):
                        raise NotChanged(f"it has the weight of {describe(first.product.node)}")

    def _first_of(self, one: _Asked) -> _Asked:
        """Return the first product of those with the weight of one: what is learned of it holds for all."""
        number, _ = weight_group(self.found, one.product)
        return self._first.setdefault((id(one.algorithm), number), one)  # not all can be hashed

    def _give(self, asked: Sequence[_Asked]) -> None:
        """Let the quantized program go by the integers that are known of weights."""
        for product in (one.product for one in asked):
            number, q = weight_group(self.found, product)
            if (integers := self.found.integers.get(number)) is not None:
                values = values_of_integers(integers, q)
                given = weight_values(self.quantized, product.node.name, values)
                self.quantized.given |= given

    def _start(self, first: int) -> int:
        """Return the place in the quantized program behind the last operator before a place in the other."""
        places = self.quantized.place
        before = (n.name for n in reversed(self.exact.nodes[:first]) if n.op == "call_function")
        return next((places[name] + 1 for name in before if name in places), 0)

    def _learned(
        self, unit: _Unit, algorithm: Algorithm, asked: Sequence[_Asked], pages: Pages
    ) -> Iterator[LearnedWeight]:
        """Let one algorithm learn, and yield what it decided."""
        found, products = self.found, tuple(one.product for one in asked)
        before = [weight_group(found, product) for product in products]
        taken = {number for number, _ in before if number in found.integers}
        outputs = tuple(_outputs(self.exact.nodes, unit))
        end = self.exact.nodes[unit.last].name
        block = Block(
            unit.name, products, outputs, self.batches, self.rank, self.exchange,
            self.exact, self.quantized, end,
        )  # fmt: skip
        made, refused = len(found.made), len(found.refused)
        self.algorithms.learn(algorithm, found, block)
        for one, (number, q) in zip(asked, before, strict=True):
            where, now = describe(one.product.node), found.qparams[number]
            if now is not q and number not in found.integers:  # scales alone
                weight = found.factors.constant(one.product.weight.name)
                found.integers[number] = integers_of(weight, now)
            if number in found.integers and number not in taken:
                found.integers[number] = pages.moved(found.integers[number])
                begins = f"{algorithm} on {where}"
                said = (line for line in found.made[made:] if line.startswith(begins))
                line = "; ".join([next(said, begins), *self._sharing(one.product, number)])
                yield LearnedWeight(
                    one.path, str(algorithm), one.inputs, line,
                    q.scale, q.zero_point, now.scale, now.zero_point, found.integers[number],
                )  # fmt: skip
            elif not any(where in line for line in found.refused[refused:]):
                with noted(found, algorithm, one.product):
                    raise NotChanged(f"it {UNREPORTED}, or changed neither scales nor integers")

    def _sharing(self, product: Operands, number: int) -> Iterator[str]:
        """Yield that what was learned of a weight holds for each other product that reads it."""
        plan, nodes = self.found.plan, self.found.nodes
        readers = (product_node(plan.claims[n], nodes) for n in plan.groups[number].claims)
        for reader in dict.fromkeys(readers):
            if reader is not None and reader is not product.node:
                yield f"for {describe(reader)} too, which shares it"


def _by_algorithm(asked: Sequence[_Asked]) -> Iterator[tuple[Algorithm, list[_Asked]]]:
    """Yield what each algorithm is to learn of together, in the order of the program."""
    waiting = list(asked)
    while waiting:
        algorithm = waiting[0].algorithm
        yield algorithm, [one for one in waiting if one.algorithm is algorithm]
        waiting = [one for one in waiting if one.algorithm is not algorithm]


def _outputs(nodes: Sequence[Node], unit: _Unit) -> Iterator[str]:
    """Yield the float tensors of a part that operators behind it read."""
    inside = set(nodes[unit.first : unit.last + 1])
    for node in nodes[unit.first : unit.last + 1]:
        if node.op != "call_function" or not is_float_tensor(node):
            continue
        if any(reader not in inside for reader in _readers(node)):
            yield node.name


def _readers(node: Node) -> Iterator[Node]:
    """Yield the operators that read a value, behind observers."""
    for user in node.users:
        if user.op == "call_module":
            yield from _readers(user)
        else:
            yield user


def _repeated(nodes: Sequence[Node]) -> dict[str, tuple[int, int]]:
    """Return the modules of several operators beside which others of their class have other numbers.

    Each with the places of its first and last operator.
    """
    places: dict[str, list[int]] = defaultdict(list)
    siblings: dict[tuple[str, str], set[str]] = defaultdict(set)
    family: dict[str, tuple[str, str]] = {}
    for at, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        for path, kind in dict(module_stack(node)).items():
            parent, _, name = path.rpartition(".")
            if name.isdecimal():
                places[path].append(at)
                family[path] = parent, kind
                siblings[parent, kind].add(path)
    return {
        path: (found[0], found[-1])
        for path, found in places.items()
        if len(found) > 1 and len(siblings[family[path]]) > 1
    }
