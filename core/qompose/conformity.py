# SPDX-License-Identifier: Apache-2.0
"""Whether values have the types that a dataclass declares: what is read from a file may be anything."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch.fx import Node


def check_fields(made: Any, only: tuple[str, ...] | None = None) -> None:
    """Check the fields of a dataclass, whose values were checked themselves where they are dataclasses.

    Raises:
        TypeError: a field has a value of another type than it declares.
    """
    kind: Any = type(made)
    hints = _hints(kind)
    for field in fields(made):
        value = getattr(made, field.name)
        if (only is None or field.name in only) and not conforms(value, hints[field.name]):
            raise TypeError(f"{type(made).__name__}.{field.name} is {str(value)[:80]!r}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def conforms(value: Any, hint: Any) -> bool:
    """Tell whether a value is of a declared type. A bool is no number, and an int is a float."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(conforms(value, part) for part in parts)
    if origin is tuple and parts[-1:] == (...,):
        return isinstance(value, tuple) and all(conforms(item, parts[0]) for item in value)
    if origin is tuple:
        fits = isinstance(value, tuple) and len(value) == len(parts)
        return fits and all(map(conforms, value, parts))
    if origin is list:
        return isinstance(value, (list, tuple)) and all(conforms(item, parts[0]) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        fits = isinstance(value, Mapping)
        return fits and all(
            conforms(k, parts[0]) and conforms(v, parts[1]) for k, v in value.items()
        )
    if origin is Callable:
        return callable(value)
    return _is(value, hint)


def _is(value: Any, kind: Any) -> bool:
    if kind is Any or kind is Node:  # a record names nodes, and says nothing else of them
        return True
    if kind in (int, float):
        numbers = (int,) if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, kind)
