# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes as JSON and back: expressions as trees of names from a table, and a ShapeEnv of its own.

torch's serializer stores expressions as text and reads them with `sympy.sympify`, which evaluates it as
Python: a file could run anything. Here a tree is built from the functions listed below.
"""

from __future__ import annotations

import re
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo

from qompose.values import NotStorable

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
