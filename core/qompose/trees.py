# SPDX-License-Identifier: Apache-2.0
"""Argument trees as JSON and back.

torch's own reader imports modules that the text names, for default factories and enumerations; this one
makes containers, and types that somebody registered in this process under the stored name.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

from torch.utils import _pytree as pytree

from qompose.values import NotStorable, decode, encode

_LEAF = "*"
_CONTAINERS: dict[str, type] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "deque": deque,
}
_NAMES = {kind: name for name, kind in _CONTAINERS.items()}


class UnknownType(LookupError):  # noqa: N818 - it says what the type is
    """A stored type of arguments or results is not registered in this process."""


def encode_tree(spec: Any) -> Any:
    """Return a TreeSpec as data; a leaf is a star.

    Raises:
        NotStorable: it has a type that nobody registered with a name for files.
    """
    if spec.is_leaf():
        return _LEAF
    children = [encode_tree(child) for child in spec.children()]
    if spec.type is defaultdict:
        raise NotStorable("a defaultdict among arguments or results: its factory is code")
    if spec.type in _NAMES:
        return {"type": _NAMES[spec.type], "context": encode(spec.context), "children": children}
    named = spec.type is namedtuple  # of any class, which is the context
    kind = spec.context if named else spec.type
    definition = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    name = getattr(definition, "serialized_type_name", pytree.NO_SERIALIZED_TYPE_NAME_FOUND)
    if not isinstance(name, str) or name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        raise NotStorable(
            f"arguments or results of type {kind.__module__}.{kind.__qualname__}, which is registered "
            "with no serialized_type_name: see torch.export.register_dataclass"
        )
    return {
        "registered": name,
        "module": kind.__module__,
        "context": None if named else _dumpable(spec, definition),
        "children": children,
    }


def _dumpable(spec: Any, definition: Any) -> Any:
    if definition.to_dumpable_context is not None:
        return encode(definition.to_dumpable_context(spec.context))
    try:
        return json.loads(json.dumps(spec.context))
    except TypeError:
        kind = f"{spec.type.__module__}.{spec.type.__qualname__}"
        raise NotStorable(f"the context of a {kind}: {spec.context!r}") from None


def decode_tree(data: Any) -> Any:
    """Return the TreeSpec that data stands for.

    Raises:
        UnknownType: it has a type that is not registered in this process.
        ValueError, TypeError, LookupError: the data is malformed.
    """
    if data == _LEAF:
        return pytree.treespec_leaf()
    children = [decode_tree(child) for child in data["children"]]
    if "type" in data:
        kind, context = _CONTAINERS[data["type"]], decode(data["context"])
        _check(kind, context, len(children))
        return pytree.TreeSpec(kind, context, children)
    name = data["registered"]
    found: Any = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if found is None or found in (defaultdict, namedtuple):
        raise UnknownType(
            f"its arguments or results have the type {name}, which is not registered in this process: "
            f"import {data['module']}, or what registers it, before"
        )
    if pytree.is_namedtuple_class(found):
        return pytree.TreeSpec(namedtuple, found, children)
    definition = pytree.SUPPORTED_SERIALIZED_TYPES[found]
    context = data["context"]
    if definition.from_dumpable_context is not None:
        context = definition.from_dumpable_context(decode(context))
    return pytree.TreeSpec(found, context, children)


def _check(kind: type, context: Any, children: int) -> None:
    """Check that a container's context is what its type wants: its keys, or its greatest length."""
    keyed = kind in (dict, OrderedDict)
    fits = len(context) == children if keyed else context is None or isinstance(context, int)
    if not fits:
        raise ValueError(f"{context!r} does not belong to a {kind.__name__} of {children}")
