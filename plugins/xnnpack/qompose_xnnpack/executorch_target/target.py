# SPDX-License-Identifier: Apache-2.0
"""The last step of lowering for the ``executorch`` target, as `qompose.backend.Target` asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from importlib.util import find_spec
from typing import Any

import torch
from qompose.backend import CallSignature, Finished, claim_of, nodes_in, operator_of
from torch.fx import GraphModule, Node

from qompose_xnnpack.executorch_target.delegation import Delegation
from qompose_xnnpack.executorch_target.graph_passes import keep_per_tensor_scales
from qompose_xnnpack.executorch_target.kernels import DELEGATE
from qompose_xnnpack.executorch_target.lowering import lower_methods
from qompose_xnnpack.executorch_target.program import (
    FORWARD,
    ExecutorchMethod,
    ExecutorchProgram,
)
from qompose_xnnpack.executorch_target.state import loading_note

_GONE = "it is not in the program, because it computes nothing or nothing reads it"


def finish(module: GraphModule, signature: CallSignature) -> Finished:
    """Make the program of one graph, and report what became of its claims and operators."""
    keep_per_tensor_scales(module.graph)
    program = lower_methods({FORWARD: (module, signature)})
    return _finished(program, program.methods[FORWARD], module)


def finish_methods(
    methods: Mapping[str, tuple[GraphModule, CallSignature]],
) -> tuple[ExecutorchProgram, Mapping[str, Finished]]:
    """Make one program of several graphs, which become its methods, and report the same of each."""
    for module, _ in methods.values():
        keep_per_tensor_scales(module.graph)
    program = lower_methods(methods)
    finished = {
        name: _finished(method, method, methods[name][0])
        for name, method in program.methods.items()
    }
    kept = loading_note({name: method.interface.writes for name, method in program.methods.items()})
    return program, {name: replace(f, notes=(*f.notes, *kept)) for name, f in finished.items()}


def _finished(
    model: ExecutorchProgram | ExecutorchMethod, method: ExecutorchMethod, module: GraphModule
) -> Finished:
    delegation = method.delegation
    lowered = delegation.delegated_claims & delegation.int8_claims
    strays = [f"stray: {stray}" for stray in delegation.strays]
    return Finished(
        model,
        kernels=dict.fromkeys(lowered, DELEGATE.name),
        fallbacks=_fallbacks(delegation),
        remarks={**dict.fromkeys(_operators(module), _GONE), **delegation.remarks()},
        notes=(*method.interface.notes(method.name), *_stored_twice(module, delegation), *strays),
    )


def _stored_twice(module: GraphModule, delegation: Delegation) -> Iterator[str]:
    """Yield a note for each table that the program holds twice, as delegates have their own constants."""
    for node in module.graph.find_nodes(op="get_attr"):
        value: Any = reduce(getattr, str(node.target).split("."), module)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        readers = [reader for user in node.users for reader in _reading(user)]
        inside = [reader for reader in readers if claim_of(reader) in delegation.delegated_claims]
        outside = [reader for reader in readers if reader not in inside]
        if inside and outside:
            yield (
                f"{node.target} ({value.nbytes:,} bytes) is stored twice in the program: "
                f"XNNPACK has its own copy for {_names(inside)}, but {_names(outside)} runs "
                "outside XNNPACK"
            )


def _reading(user: Node) -> list[Node]:
    """Return the readers of a constant: those behind a dequantize operator, or the node itself."""
    return list(user.users) if "dequantize" in str(user.target) else [user]


def _names(nodes: list[Node]) -> str:
    return ", ".join(dict.fromkeys(node.name for node in nodes))


def _operators(module: GraphModule) -> list[str]:
    """Return the names of the operators of the exported program that a graph has a part of."""
    names = map(operator_of, nodes_in(module))
    return [name for name in names if name]


def _fallbacks(delegation: Delegation) -> dict[int, str]:
    """Return why claims have no int8 kernel: an operator is portable, or computes in float."""
    reasons = {
        op.claim: f"{op.name} is computed in float in its delegate"
        for op in delegation.operators
        if op.claim is not None and not op.int8
    }
    return reasons | {
        op.claim: f"{op.name} uses ExecuTorch's portable kernel: {op.reason}"
        for op in delegation.portable
        if op.claim is not None
    }


def availability() -> str | None:
    """Return why the target cannot be used here, and the remedy; None where it can."""
    if find_spec("executorch") is None:
        return (
            'the package executorch is not installed; run pip install "qompose-xnnpack[executorch]"'
        )
    return None
