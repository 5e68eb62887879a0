# SPDX-License-Identifier: Apache-2.0
"""The last step of the ``executorch`` target, as core asks for it: a program, and what became of what."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from qompose import CallSignature, Finished
from torch.fx import GraphModule

from qompose_xnnpack.delegation import Delegation
from qompose_xnnpack.executorch_target import FORWARD, ExecutorchProgram, lower_methods
from qompose_xnnpack.program import ExecutorchMethod
from qompose_xnnpack.rules import DELEGATE

GONE = "nothing of it is left in the program: it computes nothing, or nothing reads it"


def finish(module: GraphModule, signature: CallSignature) -> Finished:
    """Export, delegate to XNNPACK, and say of every claim and operator what became of it."""
    program = lower_methods({FORWARD: (module, signature)})
    return _finished(program, program.methods[FORWARD], module)


def finish_methods(
    methods: Mapping[str, tuple[GraphModule, CallSignature]],
) -> tuple[ExecutorchProgram, Mapping[str, Finished]]:
    """Do the same for several graphs, which become the methods of one program."""
    program = lower_methods(methods)
    return program, {
        name: _finished(method, method, methods[name][0])
        for name, method in program.methods.items()
    }


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
        notes=(*method.interface.notes(method.name), *strays),
    )


def _operators(module: GraphModule) -> list[str]:
    """Return the operators of the exported program that a graph has something of, by name."""
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    facts = (node.meta.get("custom") or {} for part in parts for node in part.graph.nodes)
    names = (fact.get("qompose", {}).get("operator") for fact in facts)
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
