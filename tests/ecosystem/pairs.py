# SPDX-License-Identifier: Apache-2.0
"""Two quantizers of other packages as one composition, and what may be wrong with what comes of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import qompose
import torch
from qompose.plan import Plan
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from tests.core.toy import sqnr
from tests.ecosystem.catalogue import BY_NAME, CATALOGUE
from tests.ecosystem.models import sample

MEMBERS = tuple(entry.name for entry in CATALOGUE if entry.pairs)
MARGIN = 6.0
"""dB that a pair may be worse than the worse of its members alone.

Two noises of the same power that know nothing of one another are 3 dB worse than one; a tensor that is
quantized again where owners meet adds a third.
"""


LEAST = {("encoder", "NXP", "TOSA"): 12.0}
"""dB of pairs that are worse than that, by model: there the first member takes, in 8 bits, each piece of the
layer norms and of the attention that the transform of the second took apart."""


@dataclass(frozen=True)
class Result:
    """A converted model, what its report says, and how it does on the held-out input."""

    model: GraphModule
    report: Any
    output: Tensor
    sqnr: float
    labels: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        return self.model.meta["qompose"].plan  # type: ignore[no-any-return]

    @property
    def owners(self) -> dict[str, str]:
        """Who claims each operator that is claimed, pieces that a transform made included."""
        return {row.name: row.owner for row in self.report.rows if row.owner}


@functools.cache
def program(kind: str) -> ExportedProgram:
    """One program for all compositions: none of them may change it."""
    return sample(kind).export()


def composed(kind: str, *names: str) -> Result:
    """The model of a kind, quantized by a composition of catalogue quantizers."""
    given = sample(kind)
    quantizer = qompose.compose(*(BY_NAME[name].make() for name in names))
    with torch.no_grad():
        prepared = qompose.prepare_pt2e(program(kind), quantizer)
        for batch in given.batches:
            prepared(*batch)
        model = qompose.convert_pt2e(prepared)
        output = model(*given.held_out)
    found = sqnr(given.expected, output)
    labels = tuple(label for label, _ in quantizer.labelled_members)
    return Result(model, qompose.report(model), output, found, labels)


@functools.cache
def alone(kind: str, name: str) -> Result | qompose.QomposeError:
    """What a member makes of a model by itself, or the error it ends in."""
    try:
        return composed(kind, name)
    except qompose.QomposeError as error:
        return error


@dataclass(frozen=True)
class Outcome:
    """What became of an ordered pair, and what is wrong with that."""

    problems: tuple[str, ...]
    result: Result | None = None


def outcome(kind: str, first: str, second: str) -> Outcome:
    """Compose an ordered pair, and check what comes of it; errors of others than qompose are raised."""
    try:
        result = composed(kind, first, second)
    except qompose.QomposeError as error:
        return Outcome(tuple(_wrong_with_error(error, first, second)))
    return Outcome(tuple(_wrong_with_result(result, kind, (first, second))), result)


def _wrong_with_error(error: qompose.QomposeError, first: str, second: str) -> Iterator[str]:
    """A refusal names both members."""
    for name in (first, second):
        if type(BY_NAME[name].make()).__name__ not in str(error):
            yield f"{type(error).__name__} does not name {name}: {error}"


def _wrong_with_result(result: Result, kind: str, names: tuple[str, str]) -> Iterator[str]:
    parts = [alone(kind, name) for name in names]
    if not bool(result.output.isfinite().all()):
        yield "the output is not finite"
    usual = min(part.sqnr for part in parts if isinstance(part, Result)) - MARGIN
    bound = LEAST.get((kind, *names), usual)
    if result.sqnr < bound:
        yield f"{result.sqnr:.1f} dB, less than {bound:.1f}"
    yield from _unclaimed(result, kind, parts)
    yield from _unlisted_chains(result)
    yield from _silent(result)


def _unclaimed(
    result: Result, kind: str, parts: list[Result | qompose.QomposeError]
) -> Iterator[str]:
    """Operators that only one member wants and does not have, of which nothing says who took them."""
    exported = {node.name for node in program(kind).graph.nodes}
    wanted = [exported & set(part.owners) if isinstance(part, Result) else set() for part in parts]
    rows = {row.name: row for row in result.report.rows}
    rewrites = result.plan.rewrites
    pairs = zip(result.labels, reversed(result.labels), wanted, reversed(wanted), strict=True)
    for label, winner, own, other in pairs:
        changed = {name for rewrite in rewrites for name in rewrite.nodes}
        for name in sorted(own - other - changed):
            row = rows.get(name)
            if row is None:
                yield f"{name}, which only {label} wants, is gone, and no rewrite lists it"
                continue
            lost = not row.owner and label in row.reason and winner in row.reason
            if row.owner != label and not lost:
                yield f"{name}, which only {label} wants, is {row.owner or 'float'}: {row.reason}"


def _unlisted_chains(result: Result) -> Iterator[str]:
    """A tensor that is quantized, dequantized and quantized again is in the report."""
    chains = [node.name for node in result.model.graph.nodes if _requantizes(node)]
    listed = result.report.requantizations
    if len(chains) > len(listed):
        yield f"{len(chains)} tensors are requantized ({', '.join(chains)}), {len(listed)} are listed"


def _requantizes(node: Node) -> bool:
    if not _is(node, "quantize_per_"):
        return False
    source = node.args[0]
    return isinstance(source, Node) and _is(source, "dequantize_per_") and _is_computed(source)


def _is(node: Node, operator: str) -> bool:
    return f".{operator}" in f".{str(node.target).partition('.')[2]}"


def _is_computed(dequantize: Node) -> bool:
    source = dequantize.args[0]
    return isinstance(source, Node) and source.op == "call_function"


def _silent(result: Result) -> Iterator[str]:
    """A member without operators is named in the notes, and nothing is requantized on its account."""
    idle = set(result.labels) - set(result.owners.values())
    for label in sorted(idle):
        if not any(label in note and "claims no operator" in note for note in result.report.notes):
            yield f"{label} has no operator, and no note says so"
        for place in result.report.requantizations:
            if label in (place.from_owner, place.to_owner):
                yield f"{place.tensor} is requantized on account of {label}, which has no operator"


def problems_of_orders(kind: str, first: str, second: str) -> list[str]:
    """What is wrong with either order of a pair, or between the two."""
    outcomes = {pair: outcome(kind, *pair) for pair in ((first, second), (second, first))}
    found = [f"{' + '.join(p)}: {text}" for p, o in outcomes.items() for text in o.problems]
    results = [o.result for o in outcomes.values()]
    parts = [alone(kind, name) for name in (first, second)]
    if all(isinstance(part, Result) for part in parts) and all(results):
        one, other = ({*part.owners} for part in parts)  # type: ignore[union-attr]
        if not one & other and len({str(result.model.graph) for result in results}) > 1:  # type: ignore[union-attr]
            found.append("they want different operators, and their order changes the graph")
    return found
