# SPDX-License-Identifier: Apache-2.0
"""Selectors that leave exactly some operators in float, found for one program, set on any quantizer."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable

import torch
from torch.fx import GraphModule

from qompose.composition import ComposableQuantizer
from qompose.graph import module_path
from qompose.places import Program, calls_of
from qompose.plan import Operator, Plan
from qompose.quantizer import Quantizer
from qompose.restraining import Restrained
from qompose.rule_quantizer import RuleQuantizer
from qompose.selectors import CALL, SUBGRAPH, Call, Setting, for_call, for_name, kind_of


def origin(operator: Operator) -> str:
    """Return the exported operator's name of what reports list, also of a piece of one."""
    return operator.name.partition("/")[0]


def territory(plan: Plan, claims: Collection[int]) -> set[str]:
    """Return the names of the exported operators that claims cover."""
    return {origin(operator) for operator in plan.operators if operator.claim in claims}


class Picker:
    """Finds the setting that picks one operator of a program and none that anybody else quantizes.

    Args:
        exported: the program, as it is when quantizers are asked.
        plan: what they made of it.
        by_call: name single calls, because a module's name would not win over the settings there are.
    """

    def __init__(self, exported: GraphModule, plan: Plan, *, by_call: bool) -> None:
        self._program, self._by_call = Program(exported), by_call
        self._claimed = {origin(o) for o in plan.operators if o.claim is not None}

    def setting(self, name: str, wanted: Collection[str]) -> Setting | None:
        """Return the setting for an operator; None where the program has none of that name.

        Args:
            wanted: all operators that are to stay in float: a module that holds no others is named.
        """
        node = self._program.by_name.get(name)
        if node is None or not isinstance(node.target, torch._ops.OpOverload):
            return None
        path = module_path(node)
        inside = self._program.inside.get(path, [])
        others = {n.name for n in inside if n.name in self._claimed}.difference(wanted)
        if path and not others and not self._by_call:
            return for_name(path, None)
        kind = kind_of(node.target)
        calls = calls_of(Call(path, kind, 0), inside)
        return for_call(path, kind, calls.index([node]), None)


def names_single_calls(quantizer: Quantizer) -> bool:
    """Tell whether a quantizer has settings that win over those of modules."""
    return any(
        setting.level in (SUBGRAPH, CALL)
        for member in quantizer.members
        if isinstance(member, RuleQuantizer)
        for setting in member.selectors.settings
    )


def excluding(quantizer: Quantizer, settings: Iterable[Setting]) -> Quantizer:
    """Return a quantizer with more settings, set on every member; the quantizer stays as it is.

    All members get them: what one leaves in float, the next would take. One that has no selectors, because
    it is code or of another engine, is not heard there (`qompose.restraining`).
    """
    listed = list(settings)
    if isinstance(quantizer, ComposableQuantizer):
        composed = copy.copy(quantizer)
        composed.quantizers = tuple(excluding(member, listed) for member in quantizer.quantizers)
        return composed
    if not listed:
        return quantizer
    if isinstance(quantizer, Restrained):
        return quantizer.also(listed)
    if not isinstance(quantizer, RuleQuantizer):
        return Restrained(quantizer, listed)
    selectors = quantizer.selectors
    for setting in listed:
        selectors.set(setting)
    return quantizer.with_selectors(selectors)
