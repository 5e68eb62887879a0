# SPDX-License-Identifier: Apache-2.0
"""What code of a quantizer lets torch assume of symbolic sizes, taken back.

All copies of an exported program have the symbols of the user's own, and one environment that knows about
them. A pass that asks whether two sizes are equal makes them equal there: the user's program would from then
on refuse the inputs for which they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from qompose.graph import value_of
from qompose.nested import nodes_in

_KNOWLEDGE = (
    "guards",
    "axioms",
    "var_to_range",
    "var_to_range_sloc",
    "replacements",
    "replacements_slocs",
    "unbacked_renamings",
    "divisible",
    "size_like",
    "deferred_runtime_asserts",
    "num_deferred_runtime_asserts",
    "symbol_guard_counter",
    "exclusion_constraints",
    "specializations",
    "_equality_graph",
    "_unbacked_replacements",
)
"""Attributes of torch's ShapeEnv that say what holds for symbols. It has no public way to take it back."""

_VERSIONS = ("_version_counter", "_replacements_version_counter")


@contextmanager
def sizes_kept(model: GraphModule) -> Iterator[list[str]]:
    """Take back what a block lets torch assume of a program's symbolic sizes. Symbols that it makes stay.

    Yields:
        a list that is empty, and once the block is left has a text for each assumption that does not
        follow from what was known before: "Eq(L['x'].size()[2], L['x'].size()[3])".
    """
    assumed: list[str] = []
    with ExitStack() as stack:
        for environment in _environments(model):
            known = _Knowledge(environment)
            stack.callback(lambda known=known: assumed.extend(known.restore()))  # type: ignore[misc]
        yield assumed


def _environments(model: GraphModule) -> list[Any]:
    """Return the environments whose symbols occur in what export recorded of values."""
    found: dict[int, Any] = {}
    for node in nodes_in(model):
        for value in pytree.tree_leaves(value_of(node)):
            environment = _environment(value)
            if environment is not None:
                found[id(environment)] = environment
    return list(found.values())


def _environment(value: object) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return getattr(value.node, "shape_env", None)
    return getattr(getattr(value, "fake_mode", None), "shape_env", None)


class _Knowledge:
    """What an environment knew when this was made."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.symbols = frozenset(environment.var_to_range)
        self.facts = _facts(environment)

    def restore(self) -> list[str]:
        """Put it back, and describe what was assumed since then of the symbols that there were."""
        environment = self.environment
        if _facts(environment) == self.facts:
            return []
        added = list(dict.fromkeys(self._added()))
        for name, fact in self.facts.items():
            setattr(environment, name, self._before(fact, getattr(environment, name)))
        _forget(environment)
        return [
            _in_words(expression, environment)
            for expression in added
            if expression.free_symbols <= self.symbols
            and environment._maybe_evaluate_static(expression) != True  # noqa: E712 (sympy's)
        ]

    def _added(self) -> Iterator[Any]:
        """Yield what holds now by guards, by assertions at run time, and by symbols that became others."""
        environment = self.environment
        yield from (guard.expr for guard in environment.guards[len(self.facts["guards"]) :])
        for symbol, asserted in environment.deferred_runtime_asserts.items():
            known = len(self.facts["deferred_runtime_asserts"].get(symbol, ()))
            yield from (one.expr for one in asserted[known:])
        for symbol in environment.replacements.keys() - self.facts["replacements"].keys():
            yield sympy.Eq(symbol, environment.replacements[symbol])

    def _before(self, fact: Any, now: Any) -> Any:
        """Return a fact as it was, with what is now said of symbols that were made since."""
        if not isinstance(fact, Mapping):
            return fact
        new = {key: value for key, value in now.items() if self._is_new(key)}
        result: Any = _copied(fact)
        result.update(new)
        return result

    def _is_new(self, key: object) -> bool:
        return getattr(key, "is_Symbol", False) and key not in self.symbols


def _forget(environment: Any) -> None:
    """Let caches of an environment's answers go, with which it would answer without a guard."""
    for name in _VERSIONS:  # never back: an equal version is taken for an equal state
        if hasattr(environment, name):
            setattr(environment, name, getattr(environment, name) + 1)
    if hasattr(environment, "_prev_cache_key"):  # what a version is compared by: how much is known
        environment._prev_cache_key = environment._get_key()
    for method in vars(type(environment)).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def _facts(environment: Any) -> dict[str, Any]:
    present = (name for name in _KNOWLEDGE if hasattr(environment, name))
    return {name: _copied(getattr(environment, name)) for name in present}


def _copied(fact: Any) -> Any:
    copied = fact.copy() if hasattr(fact, "copy") else fact
    if isinstance(copied, dict):
        for key, value in copied.items():
            if isinstance(value, list):
                copied[key] = list(value)
    return copied


def _in_words(expression: Any, environment: Any) -> str:
    """Return an expression with the inputs' sizes for symbols, where they are known."""
    text = str(expression)
    for symbol in expression.free_symbols:
        sources = environment.var_to_sources.get(symbol)
        if sources:
            name = sources[0].name
            text = text.replace(str(symbol), name() if callable(name) else name)
    return text
