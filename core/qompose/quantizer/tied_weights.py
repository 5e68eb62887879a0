# SPDX-License-Identifier: Apache-2.0
"""One specification for a weight that several layers share.

An embedding and the head that is tied to it are claimed by different rules, often of different backends,
with different specifications. Quantizing the table once for each would store it twice, and twice as two
different tables. So a specification of one of the readers is given to the others, if their rules take it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch.fx import GraphModule

from qompose.program.control_flow import nodes_in
from qompose.program.graph import constant_of, layout_of
from qompose.spec.claim import Claim, Point, PointSpec
from qompose.spec.quantization_spec import (
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    converts_itself,
    describe_spec,
    observer_name,
    sharing_key,
)

Spec: TypeAlias = "QuantizationSpec | FixedQParamsQuantizationSpec"
Objection: TypeAlias = "Callable[[Claim, Any], str | None]"
Reader: TypeAlias = "tuple[Claim, PointSpec, Spec]"
_OWN = (QuantizationSpec, FixedQParamsQuantizationSpec)
"""Specifications that do not refer to other points."""


def unify_specs(
    model: GraphModule, claims: Sequence[Claim], objection: Objection
) -> tuple[list[Claim], list[str]]:
    """Return the claims with one specification for each parameter, as far as they can have one.

    Args:
        objection: why a claim's rule cannot take a specification for its parameter, None where it can.

    Returns:
        the claims, and a note for every parameter whose readers wanted different specifications.
    """
    changed: dict[Point, Spec] = {}
    notes = []
    for name, readers in _tied(model, claims):
        chosen, objections = _choose(readers, objection)
        if chosen is None:
            reasons = "; ".join(dict.fromkeys(objections))
            notes.append(f"the tied weight {name} is stored more than once: {reasons}")
            continue
        changed.update({point.point: chosen for _, point, spec in readers if spec != chosen})
        who = " and ".join(dict.fromkeys(_who(claim) for claim, _, _ in readers))
        notes.append(f"the tied weight {name} is stored once for {who}: {describe_spec(chosen)}")
    return [_with_specs(claim, changed) for claim in claims], notes


def _tied(model: GraphModule, claims: Sequence[Claim]) -> list[tuple[str, list[Reader]]]:
    """Return the parameters that are wanted in more than one form, by path, with who reads them."""
    constants = {
        node.name: (str(node.target), layout_of(constant))
        for node in nodes_in(model)
        if (constant := constant_of(node)) is not None and constant.numel()
    }
    readers: dict[object, list[Reader]] = defaultdict(list)
    names: dict[object, str] = {}
    for claim in claims:
        for spec in claim.specs:
            if spec.point.source in constants and isinstance(spec.spec, _OWN):
                name, layout = constants[spec.point.source]
                readers[layout].append((claim, spec, spec.spec))
                names.setdefault(layout, name)
    return [
        (names[layout], found)
        for layout, found in readers.items()
        if len({sharing_key(spec) for _, _, spec in found}) > 1
    ]


def _choose(readers: Sequence[Reader], objection: Objection) -> tuple[Spec | None, list[str]]:
    """Return the first specification that all readers can take; else what is against each."""
    objections = []
    for _, _, wanted in readers:
        against = [_objection(reader, wanted, objection) for reader in readers]
        reasons = [reason for reason in against if reason is not None]
        if not reasons:
            return wanted, []
        objections += reasons
    return None, objections


def _objection(reader: Reader, wanted: Spec, objection: Objection) -> str | None:
    claim, _, own = reader
    if sharing_key(own) == sharing_key(wanted):
        return None
    axis, other = (getattr(spec, "ch_axis", None) for spec in (own, wanted))
    if axis != other:
        reason: str | None = f"its channels are along dimension {axis}, not {other}"
    elif converts_itself(getattr(wanted, "observer_or_fake_quant_ctr", None)):
        reason = f"{observer_name(wanted)} replaces it with something other readers cannot use"
    else:
        reason = objection(claim, wanted)
    return reason and f"{_who(claim)} does not support {describe_spec(wanted)}: {reason}"


def _who(claim: Claim) -> str:
    return f"{claim.anchor} ({claim.owner}, rule {claim.rule})"


def _with_specs(claim: Claim, changed: dict[Point, Spec]) -> Claim:
    if not any(spec.point in changed for spec in claim.specs):
        return claim
    specs = [replace(spec, spec=changed.get(spec.point, spec.spec)) for spec in claim.specs]
    return replace(claim, specs=tuple(specs))
