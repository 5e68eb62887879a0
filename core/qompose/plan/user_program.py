# SPDX-License-Identifier: Apache-2.0
"""An exported program as users hand it in, brought into one form: parts that were quantized before it too."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputSpec, OutputKind, OutputSpec
from torch.fx import GraphModule, Node

from qompose.errors import NotExportedError, StageError
from qompose.program.call_signature import check_calls
from qompose.program.control_flow import nodes_in
from qompose.program.graph import (
    copy_graph_module,
    module_path,
    module_stack,
    replace_nested,
    set_attribute,
)
from qompose.program.meta import (
    CLAIM_TAG,
    FACTORS_TAG,
    INTEGERS_TAG,
    KERNELS_TAG,
    OPERATOR_TAG,
    PARAMETER,
    REGION_TAG,
    STAGE_KEY,
    VALUE_TAG,
    tag_of,
    untag,
    values_of,
)
from qompose.spec.qdq import is_of_quantization

Spec = TypeVar("Spec", InputSpec, OutputSpec)
_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


def as_graph_module(model: object, function: str) -> GraphModule:
    """Return a copy of the GraphModule of an exported program, sharing its parameters.

    Raises:
        NotExportedError: `model` is neither an ExportedProgram nor a GraphModule of aten operators.
        StageError: it went through qompose already, unless parts of it were converted and it was exported.
    """
    if isinstance(model, GraphModule) and STAGE_KEY in model.meta:
        stage = getattr(model.meta[STAGE_KEY], "stage", "quantized")
        raise StageError(f"{function} expects an exported program, got a {stage} model")
    if (earlier := earlier_stage(model)) is not None:
        done, name = earlier
        raise StageError(
            f"{function} expects a program without prepared or lowered parts, but {name} was "
            f"{done} before the export; export the model that convert_pt2e returns instead, with "
            "quantize and dequantize operators"
        )
    if isinstance(model, ExportedProgram):
        return _with_parts(unlifted(model))
    if isinstance(model, GraphModule) and any("val" in node.meta for node in model.graph.nodes):
        return _with_parts(check_calls(copy_graph_module(model)))
    raise NotExportedError(model, function)


def earlier_stage(model: object) -> tuple[str, str] | None:
    """Return "prepared" or "lowered" and a node that was so before the export; None if it can be prepared."""
    nodes = model.graph.nodes if isinstance(model, (ExportedProgram, GraphModule)) else ()
    earlier = [node for node in nodes if tag_of(node, CLAIM_TAG) is not None]
    lowered = next((node.name for node in earlier if tag_of(node, KERNELS_TAG) is not None), None)
    if lowered is not None:
        return "lowered", lowered
    converted = any(tag_of(node, REGION_TAG) is not None for node in earlier)
    return ("prepared", earlier[0].name) if earlier and not converted else None


def _with_parts(program: GraphModule) -> GraphModule:
    """Let what an earlier quantization says of parts of a program hold in the whole, in place."""
    for number, part in enumerate(_parts(program)):
        for node in part.nodes if part.place else ():
            stack = zip(node.meta.get("nn_module_stack", ()), module_stack(node), strict=True)
            node.meta["nn_module_stack"] = {
                f"part {number}: {key}": (f"{part.place}.{path}".rstrip("."), kind)
                for key, (path, kind) in stack
            }
    _forget(program)
    return program


@dataclass
class _Part:
    """Operators of one call of a part that was quantized before.

    Attributes:
        nodes: in a row, as export found them.
        values: those that they give, by the ids that they have in the part.
        quantized: the identity of the program that was quantized.
        place: path of the part.
    """

    nodes: list[Node] = field(default_factory=list)
    values: set[str] = field(default_factory=set)
    quantized: str | None = None
    place: str | None = None

    def begins_anew_with(self, node: Node) -> bool:
        """Tell whether an operator is of another part, or of another call of this one."""
        # Export may take an operator apart, whose pieces give its value one behind the other.
        last = set(_computed(self.nodes[-1])) if self.nodes else set[str]()
        again = not (self.values - last).isdisjoint(_computed(node))
        others = (self.quantized, _quantized(node)), (self.place, _place_seen_by(node))
        return again or any(None not in pair and pair[0] != pair[1] for pair in others)

    def take(self, node: Node) -> None:
        """Add an operator."""
        self.nodes.append(node)
        self.values.update(_computed(node))
        self.quantized = self.quantized or _quantized(node)
        if self.place is None:
            self.place = _place_seen_by(node)


def _parts(program: GraphModule) -> list[_Part]:
    """Return the parts that were quantized before a strict export: their operators say what they give."""
    parts, between = [_Part()], list[Node]()
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if not values_of(node):
            between.append(node)
            continue
        last = parts[-1]
        if last.begins_anew_with(node):
            parts.append(_Part())
        _share(between, last, parts[-1], module_path(node))
        parts[-1].take(node)
        between = []
    _share(between, parts[-1], parts[-1], None)
    return parts


def _share(nodes: list[Node], before: _Part, behind: _Part, path: str | None) -> None:
    """Add the quantize and dequantize operators between two operators of parts to those, by their paths.

    Args:
        path: of the second operator, in its part; None where the program has none.
    """
    known = module_path(before.nodes[-1]) if before.nodes else None
    for node in filter(is_of_quantization, nodes):
        if module_path(node) == path:
            behind.take(node)
        elif module_path(node) == known:
            before.take(node)


def _computed(node: Node) -> list[str]:
    """Return the values that one node of a part gives alone: not parameters, nor what outputs are of."""
    values = values_of(node) if _maker(node) is node else []
    return [value for value in values if not value.endswith(PARAMETER)]


def _quantized(node: Node) -> str | None:
    region = tag_of(node, REGION_TAG)
    return region["of"].rpartition("/")[0] if region else None


def _place_seen_by(node: Node) -> str | None:
    """Return the path of the part that a node is of, from a parameter's path in the part and in the whole."""
    weights = [_owner(value) for value in values_of(node) if value.endswith(PARAMETER)]
    # A function that a module calls itself may read parameters of another.
    inside = weights or list(filter(None, [module_path(node)]))
    read = [_owner(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    for known, whole in product(inside, read):
        if f".{whole}".endswith(f".{known}" if known else ""):
            return whole.removesuffix(known).rstrip(".")
    return None


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def has_quantized_parts(program: ExportedProgram | GraphModule) -> bool:
    """Tell whether a program or parts of it were prepared, converted or lowered before it was exported."""
    return any(tag_of(node, CLAIM_TAG) is not None for node in program.graph.nodes)


def was_quantized_as_a_whole(program: GraphModule) -> bool:
    """Tell whether a program with quantized parts is one that was quantized, with ids of its own.

    Those of a part are of its place in the part, and another may have them too.
    """
    parts = _parts(program)
    programs = {part.quantized for part in parts if part.quantized is not None}
    return len(programs) <= 1 and not any(part.place for part in parts)


def _forget(program: GraphModule) -> None:
    """Remove, in place, what an earlier quantization of parts of a program says in its own numbers."""
    for node in nodes_in(program):
        facts = [CLAIM_TAG, OPERATOR_TAG, VALUE_TAG, INTEGERS_TAG, FACTORS_TAG]
        # Export says of each output what is said of its operator, as if it were another of those.
        if (maker := _maker(node)) is not node and tag_of(node, REGION_TAG) == tag_of(
            maker, REGION_TAG
        ):
            facts.append(REGION_TAG)
        for fact in facts:
            if tag_of(node, fact) is not None:
                untag(node, fact)


def _maker(node: Node) -> Node:
    """Return the operator of which a node is an output; the node itself where it is none."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def unlifted(program: ExportedProgram) -> GraphModule:
    """Return `program.module()`, in a time that is linear in the number of parameters.

    For every parameter, torch 2.13 looks through all modules that stand beside the parameter's own: 5 s
    for a chain of 2,000. So it is given names without modules in them, which are put right afterwards.
    """
    targets = [spec.target for spec in program.graph_signature.input_specs if spec.target]
    flat = {target: f"_qompose_{number}" for number, target in enumerate(dict.fromkeys(targets))}
    module = _renamed(program, flat).module(check_guards=False)
    assert isinstance(module, GraphModule)
    originals = {short: target for target, short in flat.items()}
    values = {short: getattr(module, short) for short in originals if hasattr(module, short)}
    for short in values:  # all of them first: a model's own name may look like a short one
        delattr(module, short)
    for short, value in values.items():
        set_attribute(module, originals[short], value)
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in originals:
            node.target = originals[node.target]
            node._rename(node.target.replace(".", "_"))
    replace_nested(module, copy_graph_module)  # bodies are the program's own until here
    return check_calls(module)


def _renamed(program: ExportedProgram, names: Mapping[str, str]) -> ExportedProgram:
    """Return a program with other names for its parameters and buffers, sharing graph and tensors."""
    signature = program.graph_signature
    outputs = [_with_target(s, names) if s.kind in _WRITES else s for s in signature.output_specs]
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=ExportGraphSignature(
            [_with_target(spec, names) for spec in signature.input_specs], outputs
        ),
        state_dict=_rekeyed(program.state_dict, names),
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        constants=_rekeyed(program.constants, names),
        verifiers=program.verifiers,
    )


def _with_target(spec: Spec, names: Mapping[str, str]) -> Spec:
    return replace(spec, target=names.get(spec.target, spec.target)) if spec.target else spec


def _rekeyed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}
