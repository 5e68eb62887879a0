# SPDX-License-Identifier: Apache-2.0
"""What ExecuTorch refuses, in the words of the model: which operators, in which modules, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose_xnnpack.executorch_api import ExecutorchTargetError
from qompose_xnnpack.partitioning import module_of

REMEDY = (
    "Lower the model for the target 'torch' instead, or rewrite that part of it with operators that the "
    "runtime has"
)
_MOST = 4


def cannot_lower(error: Exception, methods: Mapping[str, ExportedProgram]) -> ExecutorchTargetError:
    """Return the error for methods that ExecuTorch's passes refuse; `error` is to be its cause."""
    said = str(error).strip()
    first = said.partition("\n")[0]
    constants = _in_methods(methods, lambda exported: _constants(first, exported))
    operators = _in_methods(methods, lambda exported: _operators(first, exported))
    if constants:
        where = f" because of {_first_of(constants)}"
    elif operators:
        where = f": its runtime has no such operator as {_first_of(operators)}"
    else:
        where, first = "", said
    return ExecutorchTargetError(
        f"ExecuTorch cannot lower this graph{where}. {REMEDY}. It says: {type(error).__name__}: {first}"
    )


def cannot_load(error: Exception, unsure: Iterable[str]) -> ExecutorchTargetError:
    """Return the error for a program that the runtime refuses; `unsure` are operators that may be why."""
    found = _first_of(unsure)
    suspects = f" Operators in it that are not int8 kernels: {found}." if found else ""
    return ExecutorchTargetError(
        f"the ExecuTorch runtime cannot load this program ({error}); its reason is on the standard error "
        f"stream.{suspects} {REMEDY}"
    )


def _in_methods(
    methods: Mapping[str, ExportedProgram], find: Callable[[ExportedProgram], list[str]]
) -> list[str]:
    """Return what is found in methods, with the name of each where there are several."""
    found = {name: find(exported) for name, exported in methods.items()}
    one = len(methods) == 1
    return [
        place if one else f"{place} of method {name!r}"
        for name, places in found.items()
        for place in places
    ]


def _first_of(places: Iterable[str]) -> str:
    found = list(dict.fromkeys(places))
    rest = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + rest


def _constants(said: str, exported: ExportedProgram) -> list[str]:
    """Return the parameters and buffers that a message names."""
    signature = exported.graph_signature
    constants = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return [name for key, name in constants.items() if re.search(rf"\b{re.escape(key)}\b", said)]


def _operators(said: str, exported: ExportedProgram) -> list[str]:
    """Return the operators that a message names; those in bodies alone, if there are any.

    What XNNPACK takes outside, it leaves to the runtime in the bodies of conditions and loops.
    """
    root = exported.graph_module
    parts = [part for part in root.modules() if isinstance(part, GraphModule) and part is not root]
    inside = [place for part in parts for place in _calls(said, part)]
    return inside or list(_calls(said, root))


def _calls(said: str, part: GraphModule) -> Iterator[str]:
    for node in part.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        space, _, name = node.target._schema.name.partition("::")
        # a decomposition may have put another form in its place: _embedding_bag_forward_only
        if re.search(rf"\b{space}(?:\.|::)_?{name}(?:_forward_only)?(?![A-Za-z0-9_])", said):
            where = module_of(node)
            yield f"{node.name} ({space}.{name}{f' in {where}' if where else ''})"
