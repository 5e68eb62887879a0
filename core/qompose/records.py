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
_FACTS = tuple(f.name for f in fields(Record) if f.name not in ("backends", "state"))


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
    return lambda data: _CLASSES[kind](**{k: decode(v, _DECODERS) for k, v in data.items()})


_DECODERS: Decoders = {"callable": _Spent, **{kind: _decoder(kind) for kind in _CLASSES}}


def decode_record(data: Mapping[str, Any]) -> Record:
    """Return the record that data stands for, without backends and state.

    Raises:
        ValueError, TypeError, LookupError: the data is malformed.
    """
    facts = {name: decode(data[name], _DECODERS) for name in _FACTS if name in data}
    stored = facts.get("stage") in ("converted", "reference")
    if not isinstance(facts.get("plan"), Plan) or not stored:
        raise ValueError("it has no plan of a converted model")
    asked = facts.get("requirements", {}).values()
    if not all(isinstance(text, str) for a in asked for item in a.items() for text in item):
        raise ValueError("what it requires of a machine is no text")
    return Record(**facts)
