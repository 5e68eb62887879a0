# SPDX-License-Identifier: Apache-2.0
"""Lowered graphs for Inductor: the packing of weights put into the graph, where freezing folds it.

``torch.compile`` and ``torch.export`` take a lowered graph as it is, its operators opaque. With the
packing in the graph, Inductor sees oneDNN's operators, knows their layouts and fuses what is around
them, and what AOTInductor packages then needs torch alone. `qompose.compile_lowered` asks for it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from torch import Tensor, fx

from qompose_x86_inductor import inlining, isa, ops, run_time_ops, shielding, vnni, weight_only_ops
from qompose_x86_inductor.packing import (
    Geometry,
    Packed,
    Product,
    dequantize,
    flip_sign_bit,
    prepack_convolution,
    prepack_linear,
    summand,
)
from qompose_x86_inductor.placing import placed
from qompose_x86_inductor.summing import conv2d_sum


def with_prepack_in_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph with ``onednn.*_prepack`` and ``onednn.*_pointwise`` for ``qompose_x86::*``.

    What `vnni` takes becomes a call of that, with its weight packed. Each other call becomes one to a
    function of this module, which whoever traces the graph next (Dynamo, ``torch.export``) resolves into
    those operators; run eagerly, it packs on every call. ``gm`` is left alone and its tensors are shared. A
    call stays as it is where its weight is no attribute of ``gm``, or oneDNN would not be exact for it on
    this machine (`isa`).
    """
    _register_prepack_fakes()
    result = _shallow_copy(gm)
    apart = inlining.left_to_onednn(result)
    vnni.read_planes(result)
    packed: dict[Hashable, str] = {}
    for node in result.graph.nodes:
        if _is_ours(node) and not _is_by_vnni(result, node, packed):
            _expand(result, node, apart=node in apart)
    result.graph.lint()
    result.recompile()
    return result


# -- expansions: an operator of ours in terms of torch's own -----------------------------------


def linear_in_graph(*arguments: Any, zero_points: Tensor) -> Tensor:
    """What `with_prepack_in_graph` puts for ``qompose_x86::linear``."""
    product = Product(*arguments[:6]).checked("linear")
    out = ops.Output(*arguments[6:]).checked("linear")
    packed = Packed(prepack_linear(product.weight), zero_points)
    inner = _typed_like(product.x, out)
    return _retyped(ops.linear_kernel(product, packed, inner), out)


def conv2d_in_graph(*arguments: Any, zero_points: Tensor, pack_shape: list[int] | None) -> Tensor:
    """What it puts for ``qompose_x86::conv2d``."""
    product, geometry = _unsigned_convolution(arguments, "conv2d")
    out = ops.Output(*arguments[10:]).checked("conv2d")
    packed = Packed(prepack_convolution(product, geometry, pack_shape), zero_points)
    inner = _typed_like(product.x, out)
    return _retyped(ops.conv2d_kernel(product, geometry, packed, inner), out)


def conv2d_add_in_graph(
    *arguments: Any, zero_points: Tensor, pack_shape: list[int] | None
) -> Tensor:
    """What it puts for ``qompose_x86::conv2d_add``."""
    product, geometry = _unsigned_convolution(arguments, "conv2d_add")
    other = summand(*arguments[10:13])
    out = ops.Output(*arguments[13:]).checked("conv2d_add")
    packed = Packed(prepack_convolution(product, geometry, pack_shape), zero_points)
    form, placing = placed(product, geometry)
    if other[0].dtype == out.dtype == torch.uint8 and form.x is product.x:
        return conv2d_sum(form, placing, packed, other, out)
    real = ops.conv2d_kernel(product, geometry, packed, ops.FLOAT32)
    return out.finish(real + dequantize(*other))


def _typed_like(x: Tensor, out: ops.Output) -> ops.Output:
    # Inductor takes integers that oneDNN makes for ones of the dtype of x, and misreads others
    # without a word (torch 2.13, `QConvPointWisePT2E.create`).
    if out.dtype == torch.float32 or out.dtype == x.dtype:
        return out
    shift = 128 if x.dtype == torch.uint8 else -128
    return out._replace(dtype=x.dtype, zero_point=out.zero_point + shift)


def _retyped(result: Tensor, out: ops.Output) -> Tensor:
    if result.dtype == out.dtype:
        return result
    flipped = flip_sign_bit(result)
    return flipped if out.dtype == torch.uint8 else flipped.view(torch.int8)


def _unsigned_convolution(arguments: tuple[Any, ...], operator: str) -> tuple[Product, Geometry]:
    product, geometry = ops.convolution(arguments, operator)
    return product.unsigned(), geometry


_OPS: Final = getattr(torch.ops, ops.NAMESPACE)
_EXPANSIONS: Final[dict[Any, Callable[..., Tensor]]] = {
    _OPS.linear.default: linear_in_graph,
    _OPS.linear_add.default: ops.linear_add_in_graph,
    _OPS.linear_dynamic.default: run_time_ops.linear_in_graph,
    _OPS.linear_dynamic_per_token.default: run_time_ops.linear_per_token_in_graph,
    _OPS.linear_int8_weight.default: weight_only_ops.int8_weight_in_graph,
    _OPS.linear_int4_weight.default: weight_only_ops.int4_weight_in_graph,
    _OPS.linear_float16_weight.default: weight_only_ops.float16_weight_in_graph,
    _OPS.conv2d.default: conv2d_in_graph,
    _OPS.conv2d_add.default: conv2d_add_in_graph,
    _OPS.max_pool2d.default: ops.max_pool2d_in_float,
    _OPS.avg_pool2d.default: ops.avg_pool2d_in_graph,
    _OPS.adaptive_avg_pool2d.default: ops.adaptive_avg_pool2d_in_graph,
    _OPS.mean.default: ops.mean_in_graph,
    _OPS.mul.default: ops.mul_in_graph,
}


def _is_ours(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _EXPANSIONS


def _shallow_copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same tensors."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    # Names and nesting of inputs and outputs; copying a graph the usual way copies them with a
    # warning (torch 2.13).
    graph.set_codegen(gm.graph._codegen)
    result = fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def _expand(gm: fx.GraphModule, node: fx.Node, *, apart: bool) -> None:
    """Retargets one call of ours, in place; `apart` from Inductor's own code of such products."""
    arguments, expansion = _arguments(node), _EXPANSIONS[node.target]
    wanted = inspect.signature(expansion).parameters
    extra: dict[str, Any] = {}
    if "zero_points" in wanted:  # it multiplies integers
        weight = _attribute(gm, arguments["weight"])
        if weight is None or not isa.admits(weight):
            return
        with gm.graph.inserting_before(node):
            zeros = gm.graph.get_attr(_zero_points(gm, weight.shape[0]))
            if apart:
                zeros = gm.graph.call_function(inlining.no_constant, (zeros,))
            extra["zero_points"] = zeros
    if "pack_shape" in wanted:
        extra["pack_shape"] = _pack_shape(arguments["x"])
    node.target, node.args, node.kwargs = expansion, (*arguments.values(),), extra
    if "zero_points" in wanted and shielding.needed(arguments):
        shielding.put_behind(node)


def _is_by_vnni(gm: fx.GraphModule, node: fx.Node, packed: dict[Hashable, str]) -> bool:
    """Whether code of our own computes a call, which then calls that."""
    arguments = _arguments(node)
    weight, w_scale, bias = (
        _attribute(gm, arguments.get(k)) for k in ("weight", "w_scale", "bias")
    )
    if weight is None or w_scale is None or (bias is None) != (arguments["bias"] is None):
        return False
    if not vnni.taken(node, arguments, weight):
        return False
    vnni.put(node, arguments, weight, w_scale, bias, packed)
    return True


def _arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, defaults included, in the order of the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _attribute(gm: fx.GraphModule, node: Any) -> Tensor | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = operator.attrgetter(str(node.target))(gm)
    return value if isinstance(value, Tensor) else None


def _zero_points(gm: fx.GraphModule, channels: int) -> str:
    """The name of a buffer of int32 zeros (channels,), one per length."""
    name = f"_qompose_x86_zero_points_{channels}"
    if not hasattr(gm, name):
        zeros = torch.zeros(channels, dtype=torch.int32, device="cpu")
        gm.register_buffer(name, zeros, persistent=False)
    return name


def _pack_shape(image: Any) -> list[int] | None:
    """(1, C, H, W) where the graph says so without symbols: a hint for packing, as in `packing`."""
    value = image.meta.get("val") if isinstance(image, fx.Node) else None
    if not isinstance(value, Tensor) or any(type(size) is not int for size in value.shape[1:]):
        return None
    return [1, *value.shape[1:]]


@functools.cache
def _register_prepack_fakes() -> None:
    """Shapes for operators that torch 2.13 cannot trace for want of them."""
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
