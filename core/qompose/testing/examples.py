# SPDX-License-Identifier: Apache-2.0
"""Examples: from the patterns of a rule to functions of tensors in which the rule must apply.

A captured pattern is an example itself. An operator is one too where every argument that it requires is
a tensor; elsewhere the author gives one (`qompose.OperatorPattern`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from qompose import OperatorPattern, Pattern, Rule
from qompose.graph import operator_name
from qompose.patterns import Shape

ROWS_AND_COLUMNS = (8, 8)
"""The shape of tensors in examples that are derived from an operator's schema."""


@dataclass(frozen=True)
class Example:
    """One form of a rule's operation.

    Args:
        label: tells it from the rule's other examples.
        function: takes a tensor for each of `names` and returns the output.
        shapes: of those tensors.
        operators: operators that the function must call.
        alone: whether the function calls nothing else that a rule should take.
        captured: whether the rule's pattern is the function itself.
        problem: why there is no example, for the author of the rule.
    """

    label: str
    function: Callable[..., Tensor]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    operators: tuple[OpOverload, ...]
    alone: bool = True
    captured: bool = False
    problem: str = ""


def examples_of(rule: Rule) -> list[Example]:
    """Return an example for each variant of each pattern, and for each overload of an operator."""
    found: list[Example] = []
    for number, pattern in enumerate(rule.patterns):
        if isinstance(pattern, OperatorPattern):
            found += _of_operators(pattern)
        else:
            found.append(_of_pattern(str(number), pattern))
    return found


def covering_forms(examples: Sequence[Example]) -> set[int]:
    """Return the first form, and others until each operator in its place, and each arity, has occurred.

    A fusion of several operators, each in several forms, has the product of their numbers; a fault in one
    form of one operator shows in any fusion that has it.
    """
    parts = [{*enumerate(e.operators), (len(e.names), "tensors")} for e in examples]
    chosen, missing = set[int](), set[Any]().union(*parts)
    while missing:
        number = 0 if not chosen else max(range(len(parts)), key=lambda n: len(parts[n] & missing))
        chosen.add(number)
        missing -= parts[number]
    return chosen


def _of_pattern(label: str, pattern: Pattern) -> Example:
    operators = tuple(operator for _, operator in pattern.operators)
    return Example(
        label, pattern.function, pattern.parameters, pattern.shapes, operators, captured=True
    )


def _of_operators(pattern: OperatorPattern) -> Iterator[Example]:
    for number, target in enumerate(pattern.targets):
        if number == 0 and pattern.example is not None:
            names = tuple(inspect.signature(pattern.example).parameters)
            yield Example(
                str(target), pattern.example, names, pattern.shapes, (target,), alone=False
            )
        else:
            yield _derived(target, pattern.shapes)


def _derived(target: OpOverload, shapes: Sequence[Shape]) -> Example:
    """Return a call of an operator that requires nothing but tensors."""
    required = [a for a in target._schema.arguments if not a.has_default_value()]
    kinds = [str(argument.type) for argument in required]
    others = [a.name for a, kind in zip(required, kinds, strict=True) if kind not in _COUNTS]
    if others:
        return _missing(
            str(target), (target,),
            f"{operator_name(target)} needs {', '.join(others)} besides tensors: give the pattern an "
            "example, such as OperatorPattern((target,), example=lambda self: target(self, ...), "
            "shapes=((2, 8),)), and each operator with arguments of its own a pattern of its own",
        )  # fmt: skip
    counts = [_COUNTS[kind] for kind in kinds]
    names = tuple(
        name if count == 1 else f"{name}_{i}"
        for name, count in zip((a.name for a in required), counts, strict=True)
        for i in range(count)
    )

    def call(*tensors: Tensor) -> Tensor:
        rest, arguments = list(tensors), []
        for count in counts:
            taken, rest = rest[:count], rest[count:]
            arguments.append(taken[0] if count == 1 else taken)
        result: Tensor = target(*arguments)
        return result

    filled = tuple(shapes) if len(shapes) == len(names) else (ROWS_AND_COLUMNS,) * len(names)
    return Example(str(target), call, names, filled, (target,))


_COUNTS = {"Tensor": 1, "List[Tensor]": 2}
"""Types of arguments in schemas, and how many tensors of an example make one."""


def _missing(label: str, operators: tuple[OpOverload, ...], problem: str) -> Example:
    def refuse(*tensors: Any) -> Tensor:
        raise TypeError(problem)

    return Example(label, refuse, (), (), operators, problem=problem)
