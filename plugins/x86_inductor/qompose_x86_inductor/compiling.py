# SPDX-License-Identifier: Apache-2.0
"""Lowered graphs for Inductor: the packing of weights put into the graph, where freezing folds it.

``torch.compile`` and ``torch.export`` take a lowered graph as it is, its operators opaque. With the
packing in the graph, Inductor sees oneDNN's operators, knows their layouts and fuses what is around
them, and what AOTInductor packages then needs torch alone. Nothing here changes a global setting:
freezing is on for the duration of a call and, as torch's configuration is, for its thread only.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import Any, Final

import torch
from torch import Tensor, fx

from qompose_x86_inductor import isa, ops
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

_FREEZING: Final = {"freezing": True}


def with_prepack_in_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph with ``onednn.*_prepack`` and ``onednn.*_pointwise`` for ``qompose_x86::*``.

    Each call becomes one to a function of this module, which whoever traces the graph next (Dynamo,
    ``torch.export``) resolves into those operators; run eagerly, it packs on every call. ``gm`` is
    left alone and its tensors are shared. A call stays as it is where its weight is no attribute
    of ``gm``, or oneDNN would not be exact for it on this machine (`isa`).
    """
    _register_prepack_fakes()
    result = _shallow_copy(gm)
    for node in result.graph.nodes:
        if _is_ours(node):
            _expand(result, node)
    result.graph.lint()
    result.recompile()
    return result


def compile_lowered(
    gm: fx.GraphModule,
    example_inputs: tuple[Any, ...] | None = None,
    *,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile`` of `with_prepack_in_graph`, frozen: weights are constants from then on.

    It compiles on the first call, or now when given ``example_inputs``, and again for new shapes,
    as ``dynamic`` says; ``options`` are Inductor's. The result computes without gradients.
    """
    patches = {**(options or {}), **_FREEZING}
    compiled = torch.compile(with_prepack_in_graph(gm), dynamic=dynamic)

    @functools.wraps(gm.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Dynamo asks for freezing when it traces, which may be on any call; options reach only
        # Inductor, later (torch 2.13).
        with torch.no_grad(), torch._inductor.config.patch(patches):
            return compiled(*args, **kwargs)

    if example_inputs is not None:
        call(*example_inputs)
    return call


def package_lowered(
    gm: fx.GraphModule,
    example_inputs: tuple[Any, ...],
    path: str | PathLike[str],
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """An AOTInductor package (``.pt2``) of a lowered graph; returns its path.

    ``torch._inductor.aoti_load_package`` runs it in a process that imports torch alone. Weights are
    packed for this machine's instructions: where those lack VNNI on the machine that runs it, only
    weights in -64 .. 63 are multiplied exactly. ``dynamic_shapes`` is ``torch.export``'s.

    Raises ValueError where an operator of this plugin would remain, which the package could not
    find when it is loaded.
    """
    prepacked = with_prepack_in_graph(gm)
    left = [node.name for node in prepacked.graph.nodes if _is_ours(node)]
    if left:
        cause = isa.reason() or "their weights are no attributes of the graph"
        raise ValueError(f"cannot package {', '.join(left)} without qompose: {cause}")
    with torch.no_grad():
        program = torch.export.export(prepacked, example_inputs, dynamic_shapes=dynamic_shapes)
        packaged: str = torch._inductor.aoti_compile_and_package(
            program, package_path=fspath(path), inductor_configs={**(options or {}), **_FREEZING}
        )
    return packaged


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
    # oneDNN's own sum writes to its operand, which a functional graph cannot hold before Inductor
    # has planned its memory; a float32 result and pointwise code, which Inductor fuses, can.
    product, geometry = _unsigned_convolution(arguments, "conv2d_add")
    out = ops.Output(*arguments[13:]).checked("conv2d_add")
    packed = Packed(prepack_convolution(product, geometry, pack_shape), zero_points)
    real = ops.conv2d_kernel(product, geometry, packed, ops.Output().checked("conv2d"))
    return out.finish(real + dequantize(*summand(*arguments[10:13])))


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


_EXPANSIONS: Final[dict[Any, Callable[..., Tensor]]] = {
    torch.ops.qompose_x86.linear.default: linear_in_graph,
    torch.ops.qompose_x86.conv2d.default: conv2d_in_graph,
    torch.ops.qompose_x86.conv2d_add.default: conv2d_add_in_graph,
    torch.ops.qompose_x86.max_pool2d.default: ops.max_pool2d_in_float,
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


def _expand(gm: fx.GraphModule, node: fx.Node) -> None:
    """Retargets one call of ours, in place."""
    arguments = _arguments(node)
    extra: dict[str, Any] = {}
    if "weight" in arguments:
        weight = _attribute(gm, arguments["weight"])
        if weight is None or not isa.admits(weight):
            return
        with gm.graph.inserting_before(node):
            extra["zero_points"] = gm.graph.get_attr(_zero_points(gm, weight.shape[0]))
    if "groups" in arguments:
        extra["pack_shape"] = _pack_shape(arguments["x"])
    node.target, node.args, node.kwargs = _EXPANSIONS[node.target], (*arguments.values(),), extra


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
    """Shapes for two operators that torch 2.13 cannot trace for want of them."""
    fakes: dict[str, Callable[..., Tensor]] = {
        "onednn::qconv_prepack": lambda weight, *unused: torch.empty_like(weight),
        "onednn::qlinear_prepack": lambda weight, x_shape: torch.empty_like(weight.t()),
    }
    for name, fake in fakes.items():
        entry = torch._library.simple_registry.singleton.find(name)
        if entry.fake_impl.kernel or torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            continue
        torch.library.register_fake(name, fake)
