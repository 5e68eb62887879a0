# SPDX-License-Identifier: Apache-2.0
"""An exported program as a graph module of our own, which no edit leaks out of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputSpec, OutputKind, OutputSpec
from torch.fx import GraphModule

from qompose.errors import NotExportedError, StageError
from qompose.program.call_signature import check_calls
from qompose.program.graph import copy_graph_module, replace_nested, set_attribute
from qompose.program.meta import STAGE_KEY, tag_of

Spec = TypeVar("Spec", InputSpec, OutputSpec)
_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


def as_graph_module(model: object, function: str) -> GraphModule:
    """Return a copy of the GraphModule of an exported program, sharing its parameters.

    Raises:
        NotExportedError: `model` is neither an ExportedProgram nor a GraphModule of aten operators.
        StageError: it went through qompose already.
    """
    if isinstance(model, GraphModule) and STAGE_KEY in model.meta:
        stage = getattr(model.meta[STAGE_KEY], "stage", "quantized")
        raise StageError(f"{function} takes an exported program, and got a {stage} model")
    nodes = model.graph.nodes if isinstance(model, (ExportedProgram, GraphModule)) else ()
    claimed = next((node.name for node in nodes if tag_of(node, "claim") is not None), None)
    if claimed is not None:
        raise StageError(
            f"{function} takes a float program, and {claimed} was quantized before this was exported"
        )
    if isinstance(model, ExportedProgram):
        return unlifted(model)
    if isinstance(model, GraphModule) and any("val" in node.meta for node in model.graph.nodes):
        return check_calls(copy_graph_module(model))
    raise NotExportedError(model, function)


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
