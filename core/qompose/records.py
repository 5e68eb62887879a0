# SPDX-License-Identifier: Apache-2.0
"""The record of a converted model as JSON and back: all that `report` and `lower` read, without live objects.

Callables of specifications (observer factories, functions that derive parameters) have done their work
when a model is converted. They are stored by name; what comes back has that name, and raises when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from qompose.balancing import Balance
from qompose.bounds import Bounds
from qompose.claims import AddedBias, Claim, Conflict, Operand, Point, PointSpec, Product
from qompose.conformity import check_fields
from qompose.errors import UserError
from qompose.plan import Group, Operator, Plan, Record, Rewrite
from qompose.specs import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    SharedQuantizationSpec,
    spec_to_dict,
)
from qompose.values import Decoders, NotStorable, decode, encode

_CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Plan, Claim, Point, PointSpec, Bounds, Operand, AddedBias, Product, Conflict),
        *(Group, Balance, Operator, Rewrite),
        *(QuantizationSpec, FixedQParamsQuantizationSpec),
        *(SharedQuantizationSpec, DerivedQuantizationSpec),
    )
}
_FACTS = tuple(f.name for f in fields(Record) if f.name not in ("backends", "state", "source"))


class _Spent:
    """Stands for a callable that a stored specification had."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError(
            f"{self.__name__} is not stored with a converted model; prepare the float program again"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spent) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)


def encode_record(record: Record) -> Any:
    """Return the lasting part of a converted model's record as data.

    Raises:
        NotStorable: a specification of a class that core does not know.
    """
    return {name: encode(getattr(record, name), _encode) for name in _FACTS}


def _encode(value: Any) -> Any:
    kind = type(value).__name__
    if _CLASSES.get(kind) is type(value):
        data = {f.name: encode(getattr(value, f.name), _encode) for f in fields(value)}
        if isinstance(value, QuantizationSpec):  # it may be wrapped, with its arguments
            data["observer_or_fake_quant_ctr"] = {
                "callable": (spec_to_dict(value) or {})["observer"]
            }
        return {kind: data}
    if isinstance(value, Mapping):  # of another class than dict
        return encode(dict(value), _encode)
    if callable(value):
        return {"callable": getattr(value, "__name__", type(value).__name__)}
    raise NotStorable(f"a {type(value).__module__}.{type(value).__qualname__} in the record")


def _decoder(kind: str) -> Callable[[Any], Any]:
    def make(data: Any) -> Any:
        made = _CLASSES[kind](**{k: decode(v, _DECODERS) for k, v in data.items()})
        check_fields(made)
        return made

    return make


_DECODERS: Decoders = {"callable": _Spent, **{kind: _decoder(kind) for kind in _CLASSES}}


def changes_of(before: Any, after: Any) -> Any:
    """Return what makes `after` of `before`, both by `encode_record`: fields that differ, and theirs."""
    if not (isinstance(before, dict) and isinstance(after, dict) and set(before) == set(after)):
        return {"is": after}
    return {k: changes_of(before[k], after[k]) for k in after if before[k] != after[k]}


def _changed(before: Any, changes: Any) -> Any:
    if set(changes) == {"is"}:
        return changes["is"]
    return {**before, **{k: _changed(before[k], change) for k, change in changes.items()}}


def decode_changed(before: Mapping[str, Any], changes: Any) -> Record:
    """Return the record of a lowered model, from that of the converted one and `changes_of`.

    Raises:
        ValueError, TypeError, LookupError: the data is malformed.
    """
    return decode_record(_changed(before, changes), stages=("lowered",))


def decode_record(
    data: Mapping[str, Any], stages: tuple[str, ...] = ("converted", "reference")
) -> Record:
    """Return the record that data stands for, without backends and state.

    Raises:
        ValueError, TypeError, LookupError: the data is malformed.
    """
    facts = {name: decode(data[name], _DECODERS) for name in _FACTS if name in data}
    if not isinstance(facts.get("plan"), Plan) or facts.get("stage") not in stages:
        raise ValueError(f"it has no plan of a {' or '.join(stages)} model")
    record = Record(**facts)
    check_fields(record, only=_FACTS)
    _check_references(record)
    return record


def _check_references(record: Record) -> None:
    """Check that claims, groups and the groups of points are there where they are referred to."""
    plan = record.plan
    grouped = {point for group in plan.groups for point in group.points}
    if not grouped >= {spec.point for claim in plan.claims for spec in claim.specs}:
        raise ValueError("a point of a claim is in no group")
    claims = {
        *(*record.dropped, *record.kernels, *record.fallbacks),
        *(number for group in plan.groups for number in group.claims),
        *(operator.claim for operator in plan.operators if operator.claim is not None),
    }
    groups = {number for group in plan.groups for number in group.depends_on}
    for name, found, number in (("claim", claims, plan.claims), ("group", groups, plan.groups)):
        if not found <= set(range(len(number))):
            raise ValueError(f"it refers to a {name} that it has not")
