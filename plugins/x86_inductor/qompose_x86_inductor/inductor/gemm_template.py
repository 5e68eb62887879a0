# SPDX-License-Identifier: Apache-2.0
"""The choice of products that Inductor's own int8 template computes, faster than a call of oneDNN.

A call of ``onednn::qlinear_pointwise`` takes about 20 microseconds before any arithmetic (torch 2.13), twice
as long as a product of one row by 1024 x 1024 weights. Inductor has a template of int8 products too, which
becomes a part of the compiled code. It could try both out, some seconds for each shape; `is_faster` decides
without, from what was measured on a processor with AVX-512 and VNNI, one thread, four layers in a package
(time with the template, of that with oneDNN; 1024 inputs and outputs):

=========  ====  ====  ====  ====  ====  =====
rows          1     4    16    32   128   1024
=========  ====  ====  ====  ====  ====  =====
relu       0.42  0.73  0.72  0.91  0.95   1.03
=========  ====  ====  ====  ====  ====  =====

For gelu and tanh Inductor's polynomials are slower: 0.72 at 16 rows of 768, 1.10 and 1.35 at 128. Where
our own C++ is used (`native.products`), this concerns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from qompose.backend import nodes_in
from torch import DispatchKey, Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.inductor import native_attention
from qompose_x86_inductor.native import processor
from qompose_x86_inductor.onednn.arguments import NAMESPACE

MOST_ROWS: Final = 256
SLOW_FUNCTIONS: Final = ("gelu", "tanh")
MOST_ROWS_OF_THEM: Final = 64

OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
)

_OPS: Final = getattr(torch.ops, NAMESPACE)
_OURS: Final = (_OPS.linear, _OPS.linear_add)
_LAYERS: Final = (_OPS.lstm, _OPS.gru)
_WRONG: Final = _OPS.linear_dynamic
_aten: Final = torch.ops.aten
_OTHER_PRODUCTS: Final = frozenset(
    {
        _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.mv, _aten.addmv, _aten.dot,
        _aten._trilinear, _aten._weight_int8pack_mm, _aten._weight_int4pack_mm_for_cpu,
        _aten._scaled_mm, _OPS.linear_float8, _OPS.linear_packed, _OPS.linear_float16_weight,
    }
)  # fmt: skip
"""Other products: `OPTIONS` would change their code, or Inductor would find no template for them and fail."""


def options(graph: GraphModule) -> Mapping[str, Any]:
    """Return options for a lowered graph: `OPTIONS` where a product gets faster and none in float changes."""
    calls = [*nodes_in(graph)]
    products = () if processor.isa() is not None else _OURS
    ours = (node for node in calls if _packet(node) in products)
    return OPTIONS if any(map(is_faster, ours)) and not any(map(_multiplies, calls)) else {}


def is_faster(call: Node) -> bool:
    """Return whether Inductor's code of a product by int8 weights is faster than oneDNN's, by its shapes.

    Any number of rows counts as few: what one row gains is more than what thousands lose.
    """
    x = call.args[0]
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(value, Tensor):
        return False
    slow = any(name in (*call.args, *call.kwargs.values()) for name in SLOW_FUNCTIONS)
    rows: Any = math.prod(value.shape[:-1])
    if type(rows) is not int:
        return not slow
    return 0 < rows <= (MOST_ROWS_OF_THEM if slow else MOST_ROWS)


def _multiplies(node: Node) -> bool:
    """Return whether a node computes a product that is not ours, itself or in what it consists of, as a GRU.

    What an operator consists of depends on its arguments, so it runs on fake tensors of their sizes, outside
    inference mode, in which operators stay whole.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if not target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        # Torch's operators in float, without our C++.
        if target.overloadpacket is _OPS.attention:
            return not native_attention.applies()
        if target.overloadpacket in _LAYERS:
            return processor.isa() is None
        return target.overloadpacket in _OTHER_PRODUCTS
    examples = {each: each.meta.get("val") for each in node.all_input_nodes}
    if any(example is None for example in examples.values()):
        return True  # unknown: stay on the safe side
    mode = detect_fake_mode([*examples.values()]) or FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), mode, _Seen() as seen:
        target(*map_arg(node.args, examples.get), **map_arg(node.kwargs, examples.get))
    return not seen.packets.isdisjoint(_OTHER_PRODUCTS)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.packets: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.packets.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def kept_from_template(graph: GraphModule) -> set[Node]:
    """Return the products that must be kept from the template, in a graph before it is rewritten.

    With a scale that is computed, the template gives wrong sums of two products (torch 2.13), whoever turns
    it on. Others are slower with it, where `options` turns it on.
    """
    chosen = bool(options(graph))
    return {
        node
        for node in graph.graph.nodes
        if (packet := _packet(node)) is _WRONG
        or (chosen and packet in _OURS and not is_faster(node))
    }


def computed_zeros(zero_points: Tensor) -> Tensor:
    """Return the same zeros, computed: the template is for weights whose zero points are constants."""
    return torch.zeros_like(zero_points)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None
