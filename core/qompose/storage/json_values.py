# SPDX-License-Identifier: Apache-2.0
"""What nodes of a graph hold, as JSON: arguments, argument trees, symbolic sizes.

A file is data: it can name nothing but what the tables here list. torch's own readers evaluate sizes as
Python and import what argument trees name, so a size is read from its syntax tree, and a tree of arguments
is checked before torch reads it. Archives of torch.export are checked by the same functions.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from sympy.printing.repr import ReprPrinter  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo

Decoders = Mapping[str, Callable[[Any], Any]]


class NotStorable(Exception):  # noqa: N818 - it says what the value is
    """Raised by whatever turns a model into data, with what cannot be stored and where."""


def unknown(value: Any) -> Any:
    """Refuse a value of a type that files do not have."""
    raise NotStorable(f"a value of type {type(value).__module__}.{type(value).__qualname__}")


def encode(value: Any, other: Callable[[Any], Any] = unknown) -> Any:
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


class UnknownType(LookupError):  # noqa: N818 - it says what the type is
    """A stored type of arguments or results is not registered in this process."""


def unwritable(error: Exception) -> str:
    """Return why torch cannot write what a model takes or returns, with the remedy where it is known."""
    text = str(error).rstrip(".")
    if not isinstance(error, NotImplementedError):
        return text
    call = "torch.export.register_dataclass(..., serialized_type_name=...)"
    return f"{text}. Name the type for files where it is registered: {call} for a dataclass"


def encode_tree(spec: pytree.TreeSpec) -> str:
    """Return a TreeSpec as text, as torch writes it.

    Raises:
        NotStorable: it has a type without a name for files, or one that is code.
    """
    try:
        text = pytree.treespec_dumps(spec)
        if decode_tree(text) != spec:
            raise ValueError(f"{spec} does not survive a round trip")
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = unwritable(error)
        raise NotStorable(f"arguments or results that a file cannot hold: {reason}") from error
    return text


def decode_tree(text: str) -> pytree.TreeSpec:
    """Return the TreeSpec that text stands for.

    Raises:
        UnknownType: it has a type that is not registered in this process.
        ValueError, TypeError, LookupError: it is malformed, or names code.
    """
    check_tree(text)
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise UnknownType(
            f"its arguments or results have a type whose package must be imported first ({error})"
        ) from error


def check_tree(text: str) -> None:
    """Check that an argument tree is of containers and registered types.

    Raises:
        ValueError: it is not: torch would import the factory or the enumeration that it names.
    """
    waiting = [json.loads(text)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if "__enum__" in part or "default_factory_module" in part:
                raise ValueError("an argument type would make torch import code")
            if isinstance(part.get("context"), str):
                with contextlib.suppress(ValueError):  # text that only a type's own reader reads
                    waiting.append(json.loads(part["context"]))
        waiting += (
            part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        )


_FROM_SYMPY = (
    "Integer Rational Add Mul Pow Eq Ne Lt Le Gt Ge And Or Not Abs Equality Unequality StrictLessThan "
    "LessThan StrictGreaterThan GreaterThan"
)
_FROM_TORCH = (
    "FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift Max "
    "Min PowByNatural FloatPow FloatTrueDiv IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal "
    "ToFloat Identity IsNonOverlappingAndDenseIndicator"
)
_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in _FROM_SYMPY.split()},
    **{name: getattr(functions, name) for name in _FROM_TORCH.split()},
}
"""What sizes may be computed with."""
_BITS = 128
"""Of the largest number in an expression: products of sizes, and no more."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_UNBACKED = {"u": "unbacked_symint_counter", "zuf": "unbacked_symfloat_counter"}
Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
Expression = Any
"""Of sympy, which has no types."""


class _Printer(ReprPrinter):  # type: ignore[misc]
    """Writes an expression as calls of its functions on numbers and names of symbols."""

    def _print_Symbol(self, expr: Expression) -> str:  # noqa: N802 - sympy's name
        return str(expr.name)

    def _print_Integer(self, expr: Expression) -> str:  # noqa: N802
        return str(expr.p)

    def _print_Float(self, expr: Expression) -> str:  # noqa: N802
        return repr(float(expr))


def expression(
    text: str, symbols: Mapping[str, Expression], hints: Mapping[Expression, Expression]
) -> Expression:
    """Return the expression that a text stands for; it is built from its syntax tree, and not evaluated.

    Args:
        symbols: by name. A text of torch's declares symbols itself.
        hints: the numbers that symbols have as examples, by symbol.

    Raises:
        ValueError: it is more than a computation with these symbols, or has numbers larger than sizes are.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"invalid size {text[:80]!r}") from error
    return _Builder(text, symbols, hints).build(tree.body)


class _Builder:
    """Builds an expression from a syntax tree."""

    def __init__(
        self, text: str, symbols: Mapping[str, Expression], hints: Mapping[Expression, Expression]
    ) -> None:
        self._text, self._symbols, self._hints = text, symbols, hints

    def build(self, node: ast.AST) -> Expression:
        match node:
            case ast.Name(id="true" | "false" as name):
                return sympy.true if name == "true" else sympy.false
            case ast.Name(id=name) if name in self._symbols:
                return self._symbols[name]
            case ast.Constant(value=int() | float() as number):
                return self._small(sympy.sympify(number))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as operand):
                return -self.build(operand)
            case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(number))]):
                return sympy.Float(float(number))
            case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))]):
                if _NAME.fullmatch(name):
                    assumed = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
                    return sympy.Symbol(name, **{k: v is True for k, v in assumed.items()})
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                if name in _FUNCTIONS:
                    return self._computed(name, [self.build(part) for part in arguments])
        raise ValueError(f"invalid size {self._text[:80]!r}: only arithmetic on sizes is allowed")

    def _computed(self, name: str, arguments: list[Expression]) -> Expression:
        """Return a function of expressions; numbers stay as small as sizes are, and so do their hints."""
        if "Pow" in name or "Shift" in name:
            self._check_exponent(arguments[1])
        found = _FUNCTIONS[name](*arguments)
        if found.is_Pow:  # powers of powers become one
            self._check_exponent(found.exp)
        self._small(found.xreplace(self._hints))
        return self._small(found)

    def _small(self, number: Expression) -> Expression:
        if number.is_Rational and max(abs(number.p), number.q).bit_length() > _BITS:
            raise ValueError(f"invalid size {self._text[:80]!r}: a part exceeds {_BITS} bits")
        return number

    def _check_exponent(self, exponent: Expression) -> None:
        value = exponent.xreplace(self._hints)
        if value.is_number and not abs(value) <= _BITS:
            raise ValueError(
                f"invalid size {self._text[:80]!r}: an exponent or shift exceeds {_BITS}"
            )


class SymbolWriter:
    """Turns symbolic numbers into data and remembers the symbols that occur in them."""

    def __init__(self) -> None:
        self.symbols: dict[str, Any] = {}
        self._texts: dict[Expression, str] = {}

    def encode(self, value: Any) -> Any:
        """Return a symbolic number as data.

        Raises:
            NotStorable: it is computed by a function that is not listed here.
        """
        kind = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}[type(value)]
        expr, env = value.node.expr, value.node.shape_env
        if expr not in self._texts:  # the sizes of one batch occur at every node
            self._texts[expr] = self._text(expr, env)
        return [kind, self._texts[expr]]

    def _text(self, expr: Expression, env: ShapeEnv) -> str:
        for symbol in sorted(expr.free_symbols, key=str):
            self._note(symbol, env)
        text: str = _Printer().doprint(expr)
        try:
            symbols = {symbol.name: symbol for symbol in expr.free_symbols}
            expression(text, symbols, env.backed_var_to_val)
        except ValueError as error:
            raise NotStorable(f"the size {expr}: {error}") from error
        return text

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
        self._symbols: dict[str, Expression] = {}
        self._known: dict[str, Expression] = {}
        for name, facts in symbols.items():
            self._add(name, facts)

    def _add(self, name: str, facts: dict[str, Any]) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"invalid symbol name {name!r}")
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
        kind, text = data
        if text not in self._known:
            self._known[text] = expression(text, self._symbols, self.env.backed_var_to_val)
        expr = self._known[text]
        if kind == "bool":
            return self.env.create_symboolnode(expr)
        make = {"int": self.env.create_symintnode, "float": self.env.create_symfloatnode}[kind]
        hint = expr.xreplace(self.env.backed_var_to_val)
        if not hint.is_number:
            return make(expr, hint=None)
        return make(expr, hint=int(hint) if kind == "int" else float(hint))
