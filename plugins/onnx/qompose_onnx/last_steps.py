# SPDX-License-Identifier: Apache-2.0
"""The last steps of lowering: a file, and what a runtime makes of each region in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from qompose.backend import (
    CallInterface,
    CallSignature,
    Finished,
    claim_of,
    nodes_in,
    operator_of,
)
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from qompose_onnx import openvino_defects, tensorrt
from qompose_onnx.attention_graph import up_to_softmax
from qompose_onnx.errors import ONNXRefusalError, ONNXTargetError
from qompose_onnx.export import SIXTEEN, export
from qompose_onnx.fused_graph import (
    COMPRESSED,
    CONVERSIONS,
    PRODUCTS,
    SUBGRAPH,
    Executed,
    in_onnx_runtime,
    in_openvino,
    is_fused,
    multiplies_integers,
    origins_of,
)
from qompose_onnx.names import (
    MOVED,
    ONNXRUNTIME,
    OPENVINO,
    OPENVINO_INT8,
    OPENVINO_LOOP,
    OPENVINO_WEIGHTS,
    SIXTEEN_BITS,
    TENSORRT,
    TENSORRT_INT8,
)
from qompose_onnx.program import INTERFACE, ONNXProgram
from qompose_onnx.refusals import placed
from qompose_onnx.runtimes import OpenVinoSession, Session, missing

Claims: TypeAlias = "Mapping[int, list[Node]]"
"""By claim, its nodes in the exported program; none where the exporter left an operator out."""


@dataclass(frozen=True)
class _Made:
    """A program, what it was exported from, and the claims in it."""

    program: ONNXProgram
    exported: ExportedProgram
    claims: Claims


def _program(module: GraphModule, signature: CallSignature, runtime: str) -> _Made:
    model, exported = export(module, signature)
    model.metadata_props[INTERFACE] = json.dumps(_interface(exported).to_dict())
    claims = {**{claim: [] for claim in _claims(module)}, **_claims(exported.graph_module)}
    return _Made(ONNXProgram(model, runtime), exported, claims)


def _interface(exported: ExportedProgram) -> CallInterface:
    interface = CallInterface.of(exported)
    for leaf in (*interface.arguments, *interface.results):
        if leaf.dtype == "bfloat16":
            raise ONNXTargetError(
                f"{leaf.name} is bfloat16, which ONNX Runtime and OpenVINO cannot exchange with "
                "torch. Make the model accept and return float32, or lower it for the target "
                "'torch'"
            )
    return interface


def _claims(module: GraphModule) -> Claims:
    found: dict[int, list[Node]] = {}
    for node in nodes_in(module):
        claim = claim_of(node)
        if claim is not None and node.op == "call_function":
            found.setdefault(claim, []).append(node)
    return found


def _finish_onnx(module: GraphModule, signature: CallSignature) -> Finished:
    """Make the file; where ONNX Runtime is installed, say what it fuses."""
    made, lacking = _program(module, signature, ""), missing(ONNXRUNTIME)
    if lacking is None:
        return _loaded(made, in_onnx_runtime)
    reason = f"the runtime that loads the file decides. To see what it fuses: {lacking}"
    return Finished(made.program, fallbacks=dict.fromkeys(made.claims, reason))


def _finish_onnx_runtime(module: GraphModule, signature: CallSignature) -> Finished:
    """Make the file, load it, and say what ONNX Runtime executes."""
    return _loaded(_program(module, signature, ONNXRUNTIME), in_onnx_runtime)


def _finish_openvino(module: GraphModule, signature: CallSignature) -> Finished:
    """Make the file, load it, and say what OpenVINO executes."""
    made = _program(module, signature, OPENVINO)
    openvino_defects.settle(made.program.model)
    return _loaded(made, in_openvino, OPENVINO_INT8)


def _loaded(
    made: _Made, load: Callable[..., tuple[Session, Executed]], kernel: str = ""
) -> Finished:
    """Load the file, and report what is executed.

    Args:
        load: into a runtime.
        kernel: the runtime's name for all that reads integers, "": their own.
    """
    with made.program.written() as path:
        origins = origins_of(made.program.model)
        try:
            session, found = load(path, origins)
        except ONNXRefusalError as error:
            raise placed(error, origins, made.exported) from error.__cause__
    made.program.use(session, found)
    return _finished(made, found, session.runtime, kernel)


def _finish_tensorrt(module: GraphModule, signature: CallSignature) -> Finished:
    """Make the file, and check it against what TensorRT documents; it runs in whichever runtime is installed.

    Raises:
        ONNXTargetError: TensorRT would refuse the file.
    """
    made = _program(module, signature, "")
    origins = origins_of(made.program.model)
    for node, reason in tensorrt.faults(made.program.model):
        name = origins.get(node.name or "", node.name)
        raise ONNXTargetError(
            f"{name}: {reason}, so TensorRT would reject the file. {tensorrt.REMEDY}"
        )
    note = "the file follows TensorRT's documented rules for Q/DQ, but TensorRT has not loaded it"
    return Finished(made.program, dict.fromkeys(made.claims, TENSORRT_INT8), notes=(note,))


def _finished(made: _Made, found: Executed, runtime: str, kernel: str) -> Finished:
    kernels, fallbacks = {}, {}
    for claim, nodes in made.claims.items():
        own = _left_of(nodes, found) or _left_of(_scaled(nodes), found)
        fused = kernel if kernel and any(map(_is_of_integers, own)) else _fused(own, nodes)
        if kernel and any(map(_is_attention, nodes)):
            fused = kernel if any(reads for _, reads in own) else None
        if any(map(_reads_sixteen_bits, nodes)) and runtime == OpenVinoSession.runtime:
            fallbacks[claim] = f"{runtime} computes in float, and leaves out rounding to 16 bits"
        elif any(map(_reads_sixteen_bits, nodes)):
            kernels[claim] = SIXTEEN_BITS
        elif not own and any(map(_multiplies, nodes)):
            fallbacks[claim] = f"{runtime} does not report how it runs this operator"
        elif fused is not None:
            kernels[claim] = fused if fused in _IN_FLOAT else kernel or fused
        else:
            operators = ", ".join(dict.fromkeys(name for name, _ in own))
            fallbacks[claim] = f"{runtime} computes {operators} in float"
    operators = ", ".join(f"{count} {name}" for name, count in sorted(found.counts.items()))
    note = f"{runtime} executes {operators}"
    remarks = _remarks(made.exported, found, runtime)
    return Finished(made.program, kernels, fallbacks, remarks, (note,))


_IN_FLOAT: Final = (OPENVINO_WEIGHTS, OPENVINO_LOOP)


def _left_of(nodes: Iterable[Node], found: Executed) -> list[tuple[str, bool]]:
    """Return the operators that are left of nodes, besides conversions; see `Executed.by_node`."""
    left = (op for node in nodes for op in found.by_node.get(node.name, ()))
    return [(name, reads) for name, reads in left if name not in CONVERSIONS]


def _scaled(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield what scales queries times keys, up to the softmax: OpenVINO may name their product after that."""
    for node in nodes:
        if _is_attention(node):
            yield from up_to_softmax(node)


def _is_of_integers(left: tuple[str, bool]) -> bool:
    """Tell whether OpenVINO computes what is left as a product of integers, scaled behind it or not."""
    name, reads = left
    return multiplies_integers(name, reads=reads)


def _fused(own: list[tuple[str, bool]], nodes: list[Node]) -> str | None:
    """Return the kernel of the operators that are left of nodes, None where they compute in float."""
    for name, _ in own:
        if is_fused(name):
            return name
    if own and all(name == SUBGRAPH for name, _ in own):
        return None if any(map(_multiplies, nodes)) else OPENVINO_LOOP
    if all(reads and name not in PRODUCTS for name, reads in own):
        return MOVED
    compressed = any(name.endswith(COMPRESSED) for name, _ in own)
    return OPENVINO_WEIGHTS if compressed and not any(map(_reads_integers, nodes)) else None


def _multiplies(node: Node) -> bool:
    """Tell whether an operator is a product, of which something must be left."""
    return _is_attention(node) or any(name in str(node.target) for name in ("linear", "conv"))


def _is_attention(node: Node) -> bool:
    """Tell whether a claimed node is attention or its first product: OpenVINO makes one loop of it all."""
    return any(name in str(node.target) for name in ("scaled_dot_product_attention", "matmul"))


def _reads_integers(node: Node) -> bool:
    """Tell whether the first input of an operator is dequantized: its weight is not all that is quantized."""
    first = node.args[0] if node.args else None
    return isinstance(first, Node) and "dequantize" in str(first.target)


def _reads_sixteen_bits(node: Node) -> bool:
    """Tell whether the first input of an operator is dequantized of 16 bits."""
    return _reads_integers(node) and not {*node.all_input_nodes[0].args}.isdisjoint(SIXTEEN)


def _remarks(exported: ExportedProgram, found: Executed, runtime: str) -> dict[str, str]:
    """Return what operators that nobody claimed are executed as."""
    remarks: dict[str, list[str]] = {}
    for node in exported.graph.nodes:
        name = operator_of(node)
        if name and claim_of(node) is None and node.name in found.by_node:
            remarks.setdefault(name, []).extend(op for op, _ in found.by_node[node.name])
    return {name: f"{runtime}: {', '.join(dict.fromkeys(ops))}" for name, ops in remarks.items()}


STEPS: Final[Mapping[str, Callable[[GraphModule, CallSignature], Finished]]] = {
    "onnx": _finish_onnx,
    "onnxruntime": _finish_onnx_runtime,
    TENSORRT: _finish_tensorrt,
    "openvino": _finish_openvino,
}
"""By the name of a target."""
