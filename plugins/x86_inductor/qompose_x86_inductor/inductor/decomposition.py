# SPDX-License-Identifier: Apache-2.0
"""The decomposition of our operators into oneDNN's for Inductor, with the packing of weights in the graph.

``torch.compile`` and ``torch.export`` accept a lowered graph as it is, its operators opaque. With the
packing in the graph, where freezing folds it, Inductor sees oneDNN's operators, knows their layouts and
fuses what is around them, and AOTInductor's packages need torch alone. `qompose.compile_lowered` calls it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from qompose.backend import arguments_of
from torch import Tensor, fx

from qompose_x86_inductor.inductor import (
    buffers,
    gemm_template,
    joined_linears,
    late_operators,
    native_attention,
    native_calls,
    native_float_attention,
    native_recurrent,
)
from qompose_x86_inductor.native import cache_attention, processor
from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.onednn.arguments import NAMESPACE, ProductCall
from qompose_x86_inductor.operators import (
    attention,
    conv2d,
    elementwise,
    linear,
    linear_dynamic,
    linear_float8,
    linear_packed,
    linear_weight_only,
    pooling,
    recurrent,
)


def with_prepack_in_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return the graph with ``onednn.*_prepack`` and ``onednn.*_pointwise`` for ``qompose_x86::*``.

    A product that our own C++ computes becomes a call of that, with its weight packed (`native_calls`). Each
    other call becomes one of a function ``*_in_graph``, which the next tracer (Dynamo, ``torch.export``)
    resolves into those operators; run eagerly, it packs on every call. ``gm`` stays as it is and its tensors
    are shared. A call stays as it is where its weight is not an attribute of ``gm``, or oneDNN would not be
    exact for it on this machine (`exactness`).
    """
    _register_prepack_fakes()
    result = _shallow_copy(gm)
    kept = gemm_template.kept_from_template(result)
    native_calls.quantize_planes(result)
    if processor.wanted():
        joined_linears.join(result)
    packed: dict[Hashable, str] = {}
    for node in result.graph.nodes:
        if node.target is cache_attention.ATTENTION and processor.isa() is None:
            node.target = cache_attention.reference
        elif attention_found := native_float_attention.found(node):
            native_float_attention.replace(node, attention_found)
        elif _is_ours(node) and not _calls_native(result, node, packed):
            _decompose(result, node, templated=node not in kept)
    result.graph.lint()
    result.recompile()
    return result


_OPS: Final = getattr(torch.ops, NAMESPACE)
_DECOMPOSITIONS: Final[dict[Any, Callable[..., Any]]] = {
    _OPS.linear.default: linear.linear_in_graph,
    _OPS.linear_add.default: linear.linear_add_in_graph,
    _OPS.quantize_dynamic.default: linear_dynamic.quantize_in_graph,
    _OPS.linear_dynamic.default: linear_dynamic.linear_in_graph,
    _OPS.linear_float8.default: linear_float8.float8_in_graph,
    _OPS.linear_packed.default: linear_packed.reference,
    _OPS.linear_float16_weight.default: linear_weight_only.float16_weight_in_graph,
    _OPS.conv2d.default: conv2d.conv2d_in_graph,
    _OPS.conv2d_add.default: conv2d.conv2d_add_in_graph,
    _OPS.max_pool2d.default: pooling.max_pool2d_in_float,
    _OPS.avg_pool2d.default: pooling.avg_pool2d_in_graph,
    _OPS.adaptive_avg_pool2d.default: pooling.adaptive_avg_pool2d_in_graph,
    _OPS.mean.default: pooling.mean_in_graph,
    _OPS.mul.default: elementwise.mul_in_graph,
    _OPS.attention.default: attention.attention_in_graph,
    **dict.fromkeys(native_recurrent.OPERATORS, recurrent.recurrent_in_graph),
}


def _is_ours(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _DECOMPOSITIONS


def _shallow_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph over the same tensors."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    # Names and nesting of inputs and outputs; copying a graph the usual way copies them with a
    # warning (torch 2.13).
    graph.set_codegen(gm.graph._codegen)
    result = fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def _decompose(gm: fx.GraphModule, node: fx.Node, *, templated: bool) -> None:
    """Retarget one call of ours, in place; Inductor's own template may compute it if `templated`."""
    arguments, decomposition = arguments_of(node), _DECOMPOSITIONS[node.target]
    parameters = inspect.signature(decomposition).parameters
    extra: dict[str, Any] = {}
    if "zero_points" in parameters:  # it multiplies integers
        weight = buffers.constant(gm, arguments["weight"])
        if weight is None or not exactness.admits(weight):
            return
        with gm.graph.inserting_before(node):
            zeros = gm.graph.get_attr(_zero_points(gm, weight.shape[0]))
            if not templated:
                zeros = gm.graph.call_function(gemm_template.computed_zeros, (zeros,))
            extra["zero_points"] = zeros
    if "scaled_mm" in parameters:
        extra["scaled_mm"] = linear_float8.has_scaled_mm()
    if "pack_shape" in parameters:
        extra["pack_shape"] = _pack_shape(arguments["x"])
    node.target, node.args, node.kwargs = decomposition, (*arguments.values(),), extra
    if "zero_points" in parameters and late_operators.needs_barrier(arguments):
        late_operators.put_barrier(node)


def _calls_native(gm: fx.GraphModule, node: fx.Node, packed: dict[Hashable, str]) -> bool:
    """Return whether our own C++ computes a call, which then calls that."""
    if node.target is linear_packed.OPERATOR:
        return processor.wanted()
    if node.target is native_attention.OPERATOR:
        return native_attention.replace(node, [*arguments_of(node).values()])
    if node.target in native_recurrent.OPERATORS:
        arguments = [*arguments_of(node).values()]
        return native_recurrent.replace(node, arguments, functools.partial(buffers.constant, gm))
    name = native_calls.PRODUCTS.get(node.target)
    if name is None:
        return False
    call = ProductCall.read(name, (*arguments_of(node).values(),))
    weight, w_scale, bias = (buffers.constant(gm, given) for given in call.product[3:])
    if weight is None or w_scale is None or (bias is None) != (call.product.bias is None):
        return False
    if not native_calls.applies(call, weight):
        return False
    native_calls.replace(node, call, weight, w_scale, bias, packed)
    return True


def _zero_points(gm: fx.GraphModule, channels: int) -> str:
    """Return the name of a buffer of int32 zeros (channels,), one per length."""
    name = f"_qompose_x86_zero_points_{channels}"
    if not hasattr(gm, name):
        zeros = torch.zeros(channels, dtype=torch.int32, device="cpu")
        gm.register_buffer(name, zeros, persistent=False)
    return name


def _pack_shape(image: Any) -> list[int] | None:
    """Return (1, C, H, W) where the graph knows it without symbols: a hint for packing."""
    value = image.meta.get("val") if isinstance(image, fx.Node) else None
    if not isinstance(value, Tensor) or any(type(size) is not int for size in value.shape[1:]):
        return None
    return [1, *value.shape[1:]]


@functools.cache
def _register_prepack_fakes() -> None:
    """Register fakes of operators that torch 2.13 cannot trace without."""
    fakes: dict[str, Callable[..., Tensor]] = {
        "onednn::qconv_prepack": lambda weight, *unused: torch.empty_like(weight),
        "onednn::qlinear_prepack": lambda weight, x_shape: torch.empty_like(weight.t()),
        "onednn::linear_prepack_fp16": lambda weight, x_shape: torch.empty_like(weight.t()),
    }
    for name, fake in fakes.items():
        entry = torch._library.simple_registry.singleton.find(name)
        if entry.fake_impl.kernel or torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            continue
        torch.library.register_fake(name, fake)
