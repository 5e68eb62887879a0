# SPDX-License-Identifier: Apache-2.0
"""Products of few rows, which Inductor's own int8 code makes faster than a call of oneDNN.

A call of ``onednn::qlinear_pointwise`` takes about 20 microseconds before any arithmetic (torch 2.13), as
long as a product of one row by 1024 x 1024 weights takes twice over. Inductor has a template of int8 products
too, which becomes a part of the compiled code. It is no slower up to some dozens of rows, but for gelu, of
which its polynomial is slow. Where both come into question it can try them out, which takes seconds for
each shape: `ADVICE` decides without. Where the scale is computed as well, the template is not used (see
`run_time_ops.linear_in_graph`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose_x86_inductor import ops, run_time_ops, weight_only_ops

MOST_ROWS: Final = 64
"""Up to here, four layers of 1024 x 1024 took 0.42 (1 row) to 1.02 (64) of the time with oneDNN."""

ADVICE: Final[Mapping[str, Any]] = MappingProxyType(
    {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
)

_OPS: Final = getattr(torch.ops, ops.NAMESPACE)
_OURS: Final = (_OPS.linear, _OPS.linear_add, run_time_ops.PER_TOKEN)
_aten: Final = torch.ops.aten
_OTHERS: Final = [
    *(getattr(_OPS, name) for name in weight_only_ops.SCHEMAS),
    _aten.linear, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.matmul, _aten.mv,
    _aten.addmv, _aten.dot, _aten.inner, _aten.tensordot, _aten.einsum, _aten.bilinear, _aten.chain_matmul,
    _aten._weight_int8pack_mm, _aten._weight_int4pack_mm_for_cpu,
]  # fmt: skip
"""What the same options of Inductor would change as well."""


def advice(graph: GraphModule) -> Mapping[str, Any]:
    """Return options for a lowered graph: `ADVICE` where all of its products are int8 ones of few rows."""
    calls = [node for module in _graphs(graph) for node in module.graph.nodes]
    ours = [node for node in calls if _packet(node) in _OURS]
    if any(_packet(node) in _OTHERS for node in calls) or not all(map(_has_few_rows, ours)):
        return {}
    return ADVICE if ours else {}


def _graphs(graph: GraphModule) -> Iterator[GraphModule]:
    """Yield a graph and the bodies of its control flow."""
    return (module for module in graph.modules() if isinstance(module, GraphModule))


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def _has_few_rows(node: Node) -> bool:
    x = node.args[0]
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(value, Tensor) or "gelu" in (*node.args, *node.kwargs.values()):
        return False
    sizes = value.shape[:-1]
    return all(type(size) is int for size in sizes) and 0 < math.prod(sizes) <= MOST_ROWS
