# SPDX-License-Identifier: Apache-2.0
"""The last step of the ``executorch`` target, as core asks for it: a program, and what became of what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from importlib.util import find_spec
from typing import Any

import torch
from qompose.backend import CallSignature, Finished, claim_of, operator_of
from torch.fx import Graph, GraphModule, Node

from qompose_xnnpack.delegation import Delegation
from qompose_xnnpack.executorch_target import FORWARD, ExecutorchProgram, lower_methods
from qompose_xnnpack.program import ExecutorchMethod
from qompose_xnnpack.rules import DELEGATE

_DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.tensor
GONE = "nothing of it is left in the program: it computes nothing, or nothing reads it"


def finish(module: GraphModule, signature: CallSignature) -> Finished:
    """Export, delegate to XNNPACK, and say of every claim and operator what became of it."""
    keep_one_scale(module.graph)
    program = lower_methods({FORWARD: (module, signature)})
    return _finished(program, program.methods[FORWARD], module)


def finish_methods(
    methods: Mapping[str, tuple[GraphModule, CallSignature]],
) -> tuple[ExecutorchProgram, Mapping[str, Finished]]:
    """Do the same for several graphs, which become the methods of one program."""
    for module, _ in methods.values():
        keep_one_scale(module.graph)
    program = lower_methods(methods)
    return program, {
        name: _finished(method, method, methods[name][0])
        for name, method in program.methods.items()
    }


def keep_one_scale(graph: Graph) -> None:
    """Hide from ExecuTorch's partitioner, in place, what one run-time scale for several rows is to have.

    It would take such a linear, and XNNPACK quantize each row by itself (executorch 1.5.1). With a view
    between the operator that computes a scale and those that read it, the graph is computed as it stands.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.linear.default:
            continue
        read: Any = node.args[0]
        if read.target is _DEQUANTIZE and any(size != 1 for size in read.meta["val"].shape[:-1]):
            scale = read.args[1]
            with graph.inserting_before(read.args[0]):
                seen = graph.call_function(torch.ops.aten.view.default, (scale, [1]))
            seen.meta = {"val": scale.meta["val"].view(1)}  # it belongs to no module's linear
            scale.replace_all_uses_with(
                seen, delete_user_cb=lambda user, seen=seen: user is not seen
            )


def _finished(
    model: ExecutorchProgram | ExecutorchMethod, method: ExecutorchMethod, module: GraphModule
) -> Finished:
    delegation = method.delegation
    taken = delegation.delegated_claims & delegation.int8_claims
    strays = [f"stray: {stray}" for stray in delegation.strays]
    return Finished(
        model,
        kernels=dict.fromkeys(taken, DELEGATE.name),
        fallbacks=_fallbacks(delegation),
        remarks={**dict.fromkeys(_operators(module), GONE), **delegation.remarks()},
        notes=(*method.interface.notes(method.name), *_stored_twice(module, delegation), *strays),
    )


def _stored_twice(module: GraphModule, delegation: Delegation) -> Iterator[str]:
    """Say which tables the program holds twice: delegates have constants of their own."""
    for node in module.graph.find_nodes(op="get_attr"):
        value: Any = reduce(getattr, str(node.target).split("."), module)
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            continue
        readers = [reader for user in node.users for reader in _reading(user)]
        inside = [reader for reader in readers if claim_of(reader) in delegation.delegated_claims]
        outside = [reader for reader in readers if reader not in inside]
        if inside and outside:
            yield (
                f"{node.target} ({value.nbytes:,} bytes) is in the program twice: XNNPACK keeps constants of "
                f"its own, here for {_named(inside)}, and {_named(outside)} runs outside of it"
            )


def _reading(user: Node) -> list[Node]:
    """Return who reads what a node makes of a constant: what is behind a dequantize operator, or itself."""
    return list(user.users) if "dequantize" in str(user.target) else [user]


def _named(nodes: list[Node]) -> str:
    return ", ".join(dict.fromkeys(node.name for node in nodes))


def _operators(module: GraphModule) -> list[str]:
    """Return the operators of the exported program that a graph has something of, by name."""
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    names = (operator_of(node) for part in parts for node in part.graph.nodes)
    return [name for name in names if name]


def _fallbacks(delegation: Delegation) -> dict[int, str]:
    """Return why claims have no int8 kernel: an operator is portable, or computes in float."""
    reasons = {
        op.claim: f"{op.name} computes in float in its delegate"
        for op in delegation.operators
        if op.claim is not None and not op.int8
    }
    return reasons | {
        op.claim: f"{op.name} stayed with ExecuTorch's portable kernels: {op.reason}"
        for op in delegation.portable
        if op.claim is not None
    }


def missing() -> str | None:
    """Return why the target cannot be used here, and the remedy; None where it can."""
    if find_spec("executorch") is None:
        return 'the package executorch is missing: pip install "qompose-xnnpack[executorch]"'
    return None
