# SPDX-License-Identifier: Apache-2.0
"""What a runtime made of a file: the graph that it executes, read back and traced to the program's nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir

from qompose_onnx import openvino_defects
from qompose_onnx.compiled_nodes import EIGHT_BITS, facts_of, origins_among, reads_integers
from qompose_onnx.names import ONNXRUNTIME, OPENVINO, WEIGHT_ONLY
from qompose_onnx.nested_names import FX_NODE
from qompose_onnx.runtimes import OnnxRuntimeSession, OpenVinoSession, Session

FUSED: Final = frozenset(
    {
        "QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "MatMulInteger",
        "DynamicQuantizeMatMul", WEIGHT_ONLY,
    }
)  # fmt: skip
"""The products that ONNX Runtime fuses; "QLinear" begins the names of all other operators."""
CONVERSIONS: Final = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear"})
"""What turns floats into integers and back, and is no operator of the model."""
PRODUCTS: Final = frozenset({"Conv", "MatMul", "Gemm", "FusedMatMul", "FusedGemm", "FusedConv"})
_FLOATS: Final = frozenset(
    {"DequantizeLinear", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", WEIGHT_ONLY}
)
_OPENVINO_PRODUCTS: Final = ("Convolution", "Deconvolution", "FullyConnected", "MatMul")
SUBGRAPH: Final = "Subgraph"
COMPRESSED: Final = " of compressed weights"
_COMPRESSED: Final = ("u4", "i4", *EIGHT_BITS)
_PRODUCT: Final = "FullyConnected"
_NO_WORK: Final = frozenset({"Const", "Input", "Output"})
_NUMBER: Final = re.compile(r"(_token_\d+|_nchwc|_nhwc)+$")


@dataclass(frozen=True)
class Executed:
    """The operators that a runtime executes.

    Attributes:
        by_node: by the name of a node of the program, the operators that are left of it, as (name,
            whether it reads integers).
        counts: how often each operator occurs.
    """

    by_node: Mapping[str, Sequence[tuple[str, bool]]]
    counts: Mapping[str, int]


def is_fused(name: str) -> bool:
    """Tell whether an operator is one of ONNX Runtime's that compute with integers."""
    return name in FUSED or name.startswith("QLinear")


def multiplies_integers(name: str, *, reads: bool) -> bool:
    """Tell whether a runtime computes a product in integers, by what is left of it (`Executed.by_node`)."""
    return is_fused(name) or (reads and name in _OPENVINO_PRODUCTS)


def in_onnx_runtime(path: Path, origins: Mapping[str, str]) -> tuple[Session, Executed]:
    """Load a file into ONNX Runtime, which writes the graph that it executes, and read that.

    Args:
        path: of the file.
        origins: by the name of a node in the file, that of the program's node (`origins_of`).

    Raises:
        ONNXTargetError: the runtime is broken, or refuses the file.
    """
    optimized = path.with_name("optimized.onnx")
    session = OnnxRuntimeSession(path, optimized=optimized)
    model = onnx.load(str(optimized), load_external_data=False)
    found: dict[str, list[tuple[str, bool]]] = {}
    counts: Counter[str] = Counter()
    for graph in _graphs(model.graph):
        integers = _integers(graph)
        for node in graph.node:
            counts[node.op_type] += 1
            origin = _origin(node, origins)
            if origin is not None:
                reads = bool(node.input) and node.input[0] in integers
                found.setdefault(origin, []).append((node.op_type, reads))
    return session, Executed(found, counts)


def _origin(node: onnx.NodeProto, origins: Mapping[str, str]) -> str | None:
    """Return the program's node that a node of ONNX Runtime's graph is of: by its name, else by its output's.

    Fusions put a word of their own behind the name, such as "/MatMulAddFusion"; outputs keep theirs.
    """
    name = _NUMBER.sub("", node.name)
    names = (name, name.partition("/")[0], *node.output)
    return next((origins[known] for known in names if known in origins), None)


def in_openvino(path: Path, origins: Mapping[str, str]) -> tuple[Session, Executed]:
    """Load a file into OpenVINO, and read the graph that it compiled; see `in_onnx_runtime`.

    Raises:
        ONNXTargetError: as there, or OpenVINO would compute wrong numbers.
    """
    session = OpenVinoSession(path)
    found: dict[str, list[tuple[str, bool]]] = {}
    counts: Counter[str] = Counter()
    for node in session.compiled.get_runtime_model().get_ordered_ops():
        kind, precision, names = facts_of(node)
        if kind in _NO_WORK:
            continue
        openvino_defects.check(node, origins)
        counts[f"{kind} {precision}"] += 1
        reads = precision in EIGHT_BITS
        if kind == _PRODUCT and precision in _COMPRESSED and not reads_integers(node):
            kind, reads = f"{kind}{COMPRESSED}", False
        for origin in origins_among(names, origins):
            found.setdefault(origin, []).append((kind, reads))
    return session, Executed(found, counts)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _integers(graph: onnx.GraphProto) -> set[str]:
    """Return the names of values that are integers: they come from a quantized operator through others."""
    found: set[str] = set()
    for node in graph.node:
        made = node.op_type.startswith("QLinear") or node.op_type in (
            "QuantizeLinear", "DynamicQuantizeLinear",
        )  # fmt: skip
        made = made or (node.op_type == "QGemm" and len(node.input) > 7)
        carried = node.op_type not in _FLOATS and any(name in found for name in node.input[:1])
        if made or carried:
            found.update(node.output)
    return found


READERS: Final[Mapping[str, Callable[..., tuple[Session, Executed]]]] = {
    ONNXRUNTIME: in_onnx_runtime,
    OPENVINO: in_openvino,
}
"""By the name of a package."""


def origins_of(model: ir.Model) -> dict[str, str]:
    """Return, by the names of nodes and values of a model, the name of the program's node they are of."""
    found = {}
    for node in model.graph.all_nodes():
        text = node.metadata_props.get(FX_NODE, "")
        match = re.match(r"%?(\w+)", text)
        names = (node.name, *(value.name for value in node.outputs)) if match else ()
        found.update({name: match[1] for name in names if match and name})
    return found
