# SPDX-License-Identifier: Apache-2.0
"""Names of nodes in branches and loops, which are to be those of no other graph of the program.

Each graph of a program names its nodes by itself, so that a linear of a loop may be called like one outside.
What a runtime executes is traced by these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import onnx_ir as ir
from torch.export import ExportedProgram
from torch.fx import GraphModule

FX_NODE: Final = "pkg.torch.onnx.fx_node"
"""The metadata in which torch's exporter writes a node of the program, its name first."""


def settle(model: ir.Model, program: ExportedProgram) -> None:
    """Put the name of its graph before that of each node, in the model and in the program, in place."""
    names, first = dict[str, str](), dict[GraphModule, str]()
    for path, module in program.graph_module.named_modules(remove_duplicate=False):
        if path and isinstance(module, GraphModule):
            name = path.replace(".", "__")  # as torch's exporter calls it
            if module not in first:
                first[module] = name
                for inner in module.graph.nodes:
                    inner.name = _inside(name, inner.name)
            names[name] = first[module]
    _rename(model.graph, "", names)


def _inside(graph: str, node: str) -> str:
    return f"{graph}__in__{node}"


def _rename(graph: Iterable[ir.Node], name: str, names: Mapping[str, str]) -> None:
    """Rename nodes of a graph, and of those within, by its name in the program, the first of several.

    Others, such as the loop of an embedding bag, are of an operator of the graph around them.
    """
    for node in graph:
        text = node.metadata_props.get(FX_NODE, "").removeprefix("%")
        if text and name:
            node.metadata_props[FX_NODE] = f"%{_inside(name, text)}"
        for fact in node.attributes.values():
            if fact.type is ir.AttributeType.GRAPH:
                inner = fact.as_graph()
                _rename(inner, names.get(str(inner.name), name), names)
