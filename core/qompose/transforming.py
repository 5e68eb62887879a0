# SPDX-License-Identifier: Apache-2.0
"""Run every member's `transform_for_annotation`, and tell from the program what each did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qompose.composition import ComposableQuantizer
from qompose.errors import UserError, blaming
from qompose.graph import replace_nested
from qompose.nested import graphs_in, name_apart, nodes_in
from qompose.plan import TRANSFORM, Rewrite
from qompose.quantizer import Quantizer, labelled


def transformed(
    model: GraphModule, quantizer: Quantizer
) -> tuple[GraphModule, tuple[Rewrite, ...], tuple[str, ...]]:
    """Let every member in turn rewrite a program and its bodies, in place or as new modules.

    Returns:
        the program; of each member that changed operators a `Rewrite` with those that it removed or
        changed, and those that it made; and a note of each member that changed anything.

    Raises:
        MemberError: a transform raised; the message names the member.
        UserError: a transform returned no program.
    """
    rewrites, notes = [], []
    name_apart(model)
    for label, member in _steps(quantizer):
        if type(member).transform_for_annotation is Quantizer.transform_for_annotation:
            continue
        before = _calls(model)
        model = _run(label, member, model)
        name_apart(model)
        after = _calls(model)
        if _alike(before, after):
            continue
        notes.append(f"{label}: transform_for_annotation rewrote the program")
        changed, made = _differences(before, after)
        if changed or made:
            rewrites.append(Rewrite(f"{label}{TRANSFORM}", changed, made))
    return model, tuple(rewrites), tuple(notes)


def _steps(quantizer: Quantizer) -> Iterator[tuple[str, Quantizer]]:
    """Yield (label, member); a kind of composition that has a transform of its own is one step."""
    labels = iter([label for label, _ in labelled(quantizer)])

    def walk(part: Quantizer) -> Iterator[tuple[str, Quantizer]]:
        if isinstance(part, ComposableQuantizer) and _forwards(part):
            for member in part.quantizers:
                yield from walk(member)
        else:
            yield "+".join(next(labels) for _ in part.members), part

    yield from walk(quantizer)


def _forwards(composition: ComposableQuantizer) -> bool:
    own = type(composition).transform_for_annotation
    return own is ComposableQuantizer.transform_for_annotation


def _run(label: str, member: Quantizer, model: GraphModule) -> GraphModule:
    """Let one member rewrite a program, bodies first."""

    def transform(part: GraphModule) -> GraphModule:
        with blaming(f"{label}: transform_for_annotation"):
            result = member.transform_for_annotation(part)
        if not isinstance(result, GraphModule):
            raise UserError(
                f"{label}: transform_for_annotation returned {result!r}, not a GraphModule"
            )
        return result

    for part in graphs_in(model):
        replace_nested(part, transform)
    return transform(model)


@dataclass(frozen=True)
class _Reference:
    """An argument that is a node, by its name."""

    name: str


@dataclass(frozen=True)
class _Call:
    """What a node does, as values that compare across graphs."""

    op: str
    target: object
    arguments: Any


def _calls(model: GraphModule) -> dict[str, _Call]:
    return {node.name: _Call(node.op, node.target, _arguments(node)) for node in nodes_in(model)}


def _arguments(node: Node) -> Any:
    return map_arg((node.args, dict(node.kwargs)), lambda argument: _Reference(argument.name))  # type: ignore[arg-type, return-value]


def _differences(
    before: Mapping[str, _Call], after: Mapping[str, _Call]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the operators that are gone or differ, and those that are new or differ, in graph order.

    An operator that reads something else where it read one that is gone does not differ by that.
    """
    gone = before.keys() - after.keys()
    differing = {
        name
        for name, call in before.items()
        if name in after and not _same_call(call, after[name], gone)
    }
    changed = [n for n, c in before.items() if n in gone | differing and c.op == "call_function"]
    new = (after.keys() - before.keys()) | differing
    made = [n for n, c in after.items() if n in new and c.op == "call_function"]
    return tuple(changed), tuple(made)


def _alike(before: Mapping[str, _Call], after: Mapping[str, _Call]) -> bool:
    same_names = before.keys() == after.keys()
    return same_names and all(_same_call(c, after[n], set()) for n, c in before.items())


def _same_call(before: _Call, after: _Call, gone: set[str]) -> bool:
    same = (before.op, before.target) == (after.op, after.target)
    return same and _same(before.arguments, after.arguments, gone)


def _same(before: Any, after: Any, gone: set[str]) -> bool:
    if isinstance(before, _Reference):
        return before.name in gone or before == after
    if isinstance(before, (tuple, list)):
        alike = isinstance(after, (tuple, list)) and len(before) == len(after)
        return alike and all(_same(b, a, gone) for b, a in zip(before, after, strict=True))
    if isinstance(before, Mapping):
        alike = isinstance(after, Mapping) and before.keys() == after.keys()
        return alike and all(_same(before[key], after[key], gone) for key in before)
    return repr(before) == repr(after)
