# SPDX-License-Identifier: Apache-2.0
"""Values as JSON and back: what arguments of operators and fields of records are made of.

JSON's own types stand for themselves. Everything else is an object with one key, its tag, so that a file
can name nothing but what the tables of its reader list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

Decoders = Mapping[str, Callable[[Any], Any]]


class NotStorable(Exception):  # noqa: N818 - it says what the value is
    """Raised by whatever turns a model into data, with what cannot be stored and where."""


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """Return a value as JSON data. `other` encodes what is not known here, inside containers too.

    Raises:
        NotStorable: it has no such form.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):  # fx has a class of its own
        return [encode(item, other) for item in value]
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return {kind.__name__: [encode(part, other) for part in parts(value)]}
    for kind in (torch.device, *_CONSTANTS):
        if isinstance(value, kind):
            return {kind.__name__: _short(value)}
    if other is None:
        raise NotStorable(f"a value of type {type(value).__module__}.{type(value).__qualname__}")
    return other(value)


def decode(data: Any, others: Decoders | None = None) -> Any:
    """Return the value that `encode` made data of. `others` are further tags.

    Raises:
        ValueError, TypeError, LookupError: the data is of no such form.
    """
    if isinstance(data, list):
        return [decode(item, others) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    if others is not None and tag in others:
        return others[tag](inner)
    if tag in _PLAIN:
        return _PLAIN[tag](inner)
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([decode(item, others) for item in inner])
    return _constants(tag)[inner]


_CONSTANTS: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter,
    dict: lambda value: map(list, value.items()),
    slice: lambda value: (value.start, value.stop, value.step),
    complex: lambda value: (value.real, value.imag),
}
_PLAIN: Decoders = {"float": float, "device": torch.device}
_CONTAINERS: Decoders = {
    "tuple": tuple,
    "dict": dict,
    "slice": lambda parts: slice(*parts),
    "complex": lambda parts: complex(*parts),
}


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


@cache
def _constants(kind: str) -> dict[str, Any]:
    """Return torch's constants of a kind by name: a table, so that no other attribute can be named."""
    kinds = {k.__name__: k for k in _CONSTANTS}
    return {_short(v): v for v in vars(torch).values() if isinstance(v, kinds[kind])}
