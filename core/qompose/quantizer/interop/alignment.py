# SPDX-License-Identifier: Apache-2.0
"""What a foreign `transform_for_annotation` changed, place by place.

A transform may return a program in which no node of the old one survives, and other names. Each member
makes its transform on a copy of its own; the places that its chosen claims stand on are then made in the
common program, and the others are not.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping

from torch.fx import GraphModule, Node

from qompose.errors import InternalError, UserError
from qompose.program.control_flow import nodes_in
from qompose.program.graph import copy_graph_module
from qompose.program.meta import ANNOTATION_KEY, CUSTOM_KEY
from qompose.quantizer.interop.bodies import check_bodies, restore_bodies
from qompose.quantizer.interop.correspondence import STAMP, Correspondence, returned, stamp
from qompose.quantizer.interop.examples import Examples
from qompose.quantizer.interop.naming import give_names
from qompose.quantizer.interop.pairing import correspond
from qompose.quantizer.interop.regions import Region
from qompose.quantizer.interop.settling import settle
from qompose.quantizer.interop.splicing import Place, put_in_order, splice
from qompose.spec.claim import Change

__all__ = ["Alignment", "Change", "align", "stamp"]


class Alignment:
    """The places where a transform changed a program, each of which can be made alone.

    Attributes:
        changes: the places, in the order of the program.
        unproven: those whose pieces do not give what the operators gave that they replace, by more than
            rounding, or could not be run. They can be made like the others, as the transform wants it.
    """

    def __init__(
        self, source: GraphModule | None, places: Iterable[Place], unproven: Collection[Change]
    ) -> None:
        self._source = source
        self._places = {place.change: place for place in places}
        self.changes = tuple(self._places)
        self.unproven = tuple(unproven)

    def apply(
        self,
        working: GraphModule,
        changes: Collection[Change],
        called: Mapping[str, str] | None = None,
    ) -> None:
        """Make changes, in place, in a program that has the operators that they change.

        The rest of that program may be different from the one that was transformed; `called` is how it calls
        values that have another name there.

        Raises:
            InternalError: a change is none of this alignment, or the program has not its operators.
            UserError: a piece needs a size that no value of the program has.
        """
        unknown = [change for change in changes if change not in self._places]
        if unknown:
            raise InternalError(f"{unknown[0]} is no change of this transform")
        for change, place in self._places.items():
            if change in changes and self._source is not None:
                splice(working, self._source, place, called or {})
        if changes:
            put_in_order(working)
            working.recompile()


def align(before: GraphModule, after: GraphModule) -> Alignment:
    """Find what a transform changed between a program and what it made of a stamped copy of it.

    Nodes of `after` are renamed in place. What did not change has the name that it has in `before`, and so
    has a value that stands for the value of an operator that did; what is new is called after the operator
    that it is a piece of. So a place is the same by name in `after` and in the program in which the changes
    are made. Stamps are removed from `after`.

    What the transform did inside bodies is not followed (`qompose.quantizer.interop.bodies`).

    Two forward passes of what changed are made, on random inputs.

    Raises:
        UserError: the transform changed the program's inputs or outputs, put modules into it, or did more to
            operators with bodies than to change these.
    """
    restore_bodies(before, after)
    found = correspond(before, after)
    regions, unproven = settle(found)
    check_bodies(found, regions)
    owners = give_names(found, regions)
    for node in nodes_in(after):
        _remove_stamp(node)
    after.recompile()
    places = {region: _place(region, found, owners) for region in regions}
    source = _source(found, owners) if places else None
    return Alignment(source, places.values(), [places[region].change for region in unproven])


def _place(region: Region, found: Correspondence, owners: dict[Node, str]) -> Place:
    results = returned(found.after)
    if not region.before and not region.after:
        position = region.returned[0]
        raise UserError(
            f"it changed what the program returns: output {position} is {results[position].name} now, which "
            "is another value. A transform for annotation keeps inputs and outputs."
        )
    read = [operand for node in region.after for operand in node.all_input_nodes]
    read += [results[position] for position in region.returned]
    constants = dict.fromkeys(n for n in read if n.op == "get_attr" and n in owners)
    made = [*constants, *region.after]
    gone = {*region.before}
    return Place(
        change=Change(
            tuple(n.name for n in region.before),
            tuple(n.name for n in region.after),
            brought=tuple(n.name for n in made if n not in found.before_of),
        ),
        pieces=tuple(node.name for node in made),
        owners=tuple(owners[node] for node in made),
        results=tuple(one.name for one, _ in region.pairs if not one.users.keys() <= gone),
        returned=tuple((position, results[position].name) for position in region.returned),
    )


def _source(found: Correspondence, owners: dict[Node, str]) -> GraphModule:
    """Return a copy of the transformed program that later edits of it do not reach."""
    with warnings.catch_warnings():  # of symbols among arguments; no piece has any in a program
        warnings.simplefilter("ignore")
        source, examples = copy_graph_module(found.after), Examples(found.before)
    values = {node.name: found.values[node] for node in owners if node in found.values}
    for node in source.graph.nodes:
        node.meta.pop(ANNOTATION_KEY, None)  # it names nodes, and so keeps all of them
        if node.op == "get_attr":
            node.meta["val"] = examples.of_constant(node)
        elif node.name in values:
            node.meta["val"] = values[node.name]
    return source


def _remove_stamp(node: Node) -> None:
    custom = node.meta.get("custom") or {}
    ours = {key: value for key, value in custom.get(CUSTOM_KEY, {}).items() if key != STAMP}
    if STAMP in custom.get(CUSTOM_KEY, {}):
        custom = {key: value for key, value in custom.items() if key != CUSTOM_KEY}
        node.meta["custom"] = {**custom, CUSTOM_KEY: ours} if ours else custom
