# SPDX-License-Identifier: Apache-2.0
"""Values, pytrees and symbolic sizes as JSON.

Values as JSON and back: what arguments of operators and fields of records are made of.

JSON's own types stand for themselves. Everything else is an object with one key, its tag, so that a file
can name nothing but what the tables of its reader list.

Whether values have the types that a dataclass declares: what is read from a file may be anything.

Argument trees as JSON and back.

torch's own reader imports modules that the text names, for default factories and enumerations; this one
makes containers, and types that somebody registered in this process under the stored name.

Symbolic sizes as JSON and back: expressions as trees of names from a table, and a ShapeEnv of its own.

torch's serializer stores expressions as text and reads them with `sympy.sympify`, which evaluates it as
Python: a file could run anything. Here a tree is built from the functions listed below.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo

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
    if tag in _DECODERS:
        return _DECODERS[tag]([decode(item, others) for item in inner])
    return _constants(tag)[inner]


_CONSTANTS: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter,
    dict: lambda value: map(list, value.items()),
    slice: lambda value: (value.start, value.stop, value.step),
    complex: lambda value: (value.real, value.imag),
}
_PLAIN: Decoders = {"float": float, "device": torch.device}
_DECODERS: Decoders = {
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


_FROM_SYMPY = "Add Mul Pow Rational Eq Ne Lt Le Gt Ge And Or Not Abs"
_FROM_TORCH = (
    "FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift Max "
    "Min PowByNatural FloatPow FloatTrueDiv IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal "
    "ToFloat Identity"
)
_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in _FROM_SYMPY.split()},
    **{name: getattr(functions, name) for name in _FROM_TORCH.split()},
}
FUNCTION_NAMES = frozenset(_FUNCTIONS)
"""What sizes may be computed with."""
_RELATIONS = {  # sympy's classes are called otherwise than their constructors
    "Equality": "Eq",
    "Unequality": "Ne",
    "StrictLessThan": "Lt",
    "LessThan": "Le",
    "StrictGreaterThan": "Gt",
    "GreaterThan": "Ge",
}
_BITS = 128
"""Of the largest number in an expression: products of sizes, and no more."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_UNBACKED = {"u": "unbacked_symint_counter", "zuf": "unbacked_symfloat_counter"}
Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SymbolWriter:
    """Turns symbolic numbers into data and remembers the symbols that occur in them."""

    def __init__(self) -> None:
        self.symbols: dict[str, Any] = {}

    def encode(self, value: Any) -> Any:
        """Return a symbolic number as data.

        Raises:
            NotStorable: it is computed by a function that is not listed here.
        """
        kind = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}[type(value)]
        return [kind, self._tree(value.node.expr, value.node.shape_env)]

    def _tree(self, expr: Any, env: ShapeEnv) -> Any:
        if expr.is_Symbol:
            self._note(expr, env)
            return str(expr)
        if expr in (sympy.true, sympy.false):
            return bool(expr)
        if expr.is_Integer:
            return int(expr)
        if expr.is_Rational:
            return ["Rational", int(expr.p), int(expr.q)]
        if expr.is_Float:
            return float(expr)
        name = type(expr).__name__
        name = _RELATIONS.get(name, name)
        if name not in _FUNCTIONS:
            raise NotStorable(f"the size {expr}, computed by {name}")
        return [name, *(self._tree(argument, env) for argument in expr.args)]

    def _note(self, symbol: Any, env: ShapeEnv) -> None:
        if str(symbol) in self.symbols:
            return
        hint = env.backed_var_to_val.get(symbol)
        bounds = env.var_to_range.get(symbol)
        ends: list[Any] = [None, None] if bounds is None else [bounds.lower, bounds.upper]
        assumed = {k: v for k, v in symbol._assumptions_orig.items() if isinstance(v, bool)}
        self.symbols[str(symbol)] = {
            "hint": None if hint is None else float(hint) if hint.is_Float else int(hint),
            "range": [int(e) if e is not None and e.is_Integer else None for e in ends],
            "assumptions": assumed,
        }


class SymbolReader:
    """Makes a ShapeEnv that knows the stored symbols, and symbolic numbers in it."""

    def __init__(self, symbols: dict[str, Any]) -> None:
        self.env = ShapeEnv(assume_static_by_default=True)
        self._symbols: dict[str, Any] = {}
        for name, facts in symbols.items():
            self._add(name, facts)

    def _add(self, name: str, facts: dict[str, Any]) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a symbol")
        assumed = {str(k): bool(v) for k, v in facts["assumptions"].items()}
        symbol = self._symbols[name] = sympy.Symbol(name, **assumed)
        if facts["hint"] is not None:
            self.env.add_backed_var_to_val(symbol, facts["hint"])
        low, high = facts["range"]
        low, high = (-int_oo if low is None else low), (int_oo if high is None else high)
        self.env.constrain_symbol_range(symbol, compiler_min=low, compiler_max=high)
        # A fresh symbol must not get the name of one of these.
        prefix, number = name.rstrip("0123456789"), len(name.rstrip("0123456789"))
        counter = _UNBACKED.get(prefix)
        if counter is not None and name[number:]:
            setattr(self.env, counter, max(getattr(self.env, counter), int(name[number:]) + 1))

    def decode(self, data: Any) -> Any:
        """Return the symbolic number that data stands for."""
        kind, tree = data
        expr = self._expression(tree)
        if kind == "bool":
            return self.env.create_symboolnode(expr)
        make = {"int": self.env.create_symintnode, "float": self.env.create_symfloatnode}[kind]
        hint = expr.xreplace(self.env.backed_var_to_val)
        if not hint.is_number:
            return make(expr, hint=None)
        return make(expr, hint=int(hint) if kind == "int" else float(hint))

    def _expression(self, tree: Any) -> Any:
        if isinstance(tree, str):
            return self._symbols[tree]
        if isinstance(tree, list):
            name, *arguments = tree
            return self._computed(name, [self._expression(argument) for argument in arguments])
        if isinstance(tree, bool):
            return sympy.true if tree else sympy.false
        return sympy.Integer(tree) if isinstance(tree, int) else sympy.Float(tree)

    def _computed(self, name: str, arguments: list[Any]) -> Any:
        """Return a function of expressions; numbers stay as small as sizes are, and so do their hints.

        Raises:
            ValueError: they would not.
        """
        if "Pow" in name or "Shift" in name:
            self._check_exponent(arguments[1])
        found = _FUNCTIONS[name](*arguments)
        if found.is_Pow:  # powers of powers become one
            self._check_exponent(found.exp)
        for number in (found, found.xreplace(self.env.backed_var_to_val)):
            if number.is_Rational and max(abs(number.p), number.q).bit_length() > _BITS:
                raise ValueError(f"a size of more than {_BITS} bits")
        return found

    def _check_exponent(self, exponent: Any) -> None:
        value = exponent.xreplace(self.env.backed_var_to_val)
        if value.is_number and not abs(value) <= _BITS:
            raise ValueError(f"a power or shift by more than {_BITS}")
