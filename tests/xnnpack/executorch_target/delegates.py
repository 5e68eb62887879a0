# SPDX-License-Identifier: Apache-2.0
"""What XNNPACK itself is handed: the graphs in delegates, read from what ExecuTorch serializes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

STATIC = {"xnn_datatype_qint8", "xnn_datatype_quint8"}
FLOATS = {"xnn_datatype_fp32", "xnn_datatype_fp16"}


@contextmanager
def handed_over() -> Iterator[list[Any]]:
    """The graphs that become delegates in the meantime."""
    module = pytest.importorskip("executorch.backends.xnnpack.xnnpack_preprocess")
    graphs: list[Any] = []
    original = module.serialize_xnnpack_binary

    def serialize(graph: Any, *rest: Any, **options: Any) -> Any:
        graphs.append(graph)
        return original(graph, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "serialize_xnnpack_binary", serialize)
        yield graphs


def floats_between(graph: Any) -> list[str]:
    """Names of XNNPACK's operators that compute in float on what was int8 and becomes int8 again."""
    kinds = {value.id_out: value.datatype.name for value in map(_tensor, graph.xvalues)}
    readers: dict[int, list[Any]] = defaultdict(list)
    for node in _nodes(graph):
        for read in _inputs(node):
            readers[read].append(node)
    found: dict[int, str] = {}
    for node in _nodes(graph):
        if _converts(node, kinds, STATIC, FLOATS):
            for path in _paths(node.output_id, readers, kinds, ()):
                found.update({id(step): type(step).__name__ for step in path})
    return sorted(found.values())


def _paths(
    value: int, readers: dict[int, list[Any]], kinds: dict[int, str], path: tuple[Any, ...]
) -> Iterator[tuple[Any, ...]]:
    for node in readers[value]:
        if _converts(node, kinds, FLOATS, STATIC):
            yield path
        elif kinds.get(node.output_id) in FLOATS:
            yield from _paths(node.output_id, readers, kinds, (*path, node))


def _converts(node: Any, kinds: dict[int, str], source: set[str], result: set[str]) -> bool:
    if type(node).__name__ != "XNNConvert":
        return False
    return kinds[node.input_id] in source and kinds[node.output_id] in result


def _nodes(graph: Any) -> Iterator[Any]:
    return (node.xnode_union for node in graph.xnodes)


def _inputs(node: Any) -> list[int]:
    return [value for name, value in vars(node).items() if "input" in name and name.endswith("_id")]


def _tensor(value: Any) -> Any:
    return getattr(value.xvalue_union, "tensor_value", value.xvalue_union)
