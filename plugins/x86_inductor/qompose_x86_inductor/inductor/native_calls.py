# SPDX-License-Identifier: Apache-2.0
"""The replacement of int8 products by calls of our own C++ (`native.products`), before Inductor compiles.

Through torch, a call of oneDNN takes about 17 microseconds before any arithmetic, in packages too: torch
makes descriptors, attributes and memory objects anew each time, and does not expose oneDNN's own interface.
The C++ in ``native/`` needs none of them, and sums at the same rate, with every set of `native.processor`.
Without VNNI that goes for weights of seven bits; others are multiplied as `onednn.exactness` says.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Final

import torch
from qompose.backend import arguments_of, nodes_in
from torch import Tensor, fx

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.inductor import (
    channel_factors,
    native_attention,
    native_float_attention,
    native_recurrent,
)
from qompose_x86_inductor.inductor.buffers import registered
from qompose_x86_inductor.native import (
    attention,
    cache_attention,
    float_attention,
    packed_linear,
    processor,
    products,
    recurrent,
)
from qompose_x86_inductor.native.processor import Isa
from qompose_x86_inductor.native.products import FUNCTIONS, KINDS, ProductEnds, ProductSizes
from qompose_x86_inductor.onednn.arguments import (
    NAMESPACE,
    Output,
    ProductCall,
    flip_sign_bit,
)
from qompose_x86_inductor.operators import linear_packed

_OPS: Final = getattr(torch.ops, NAMESPACE)
PRODUCTS: Final = {
    getattr(_OPS, name).default: name for name in ("linear", "linear_add", "conv2d", "conv2d_add")
}
"""By operator, the name of an int8 product."""

METADATA: Final = "qompose_x86.isa"
"""The name under which a package says what its C++ was compiled for."""
_OPTION: Final = "aot_inductor.custom_ops_to_c_shims"
_BOUNDS: Final = ("relu", "hardtanh")
"""Post-ops that bound values, as results in integers are bounded anyway."""


def applies(call: ProductCall, weight: Tensor) -> bool:
    """Return whether our C++ computes a product by a weight; the arguments of the call are nodes."""
    isa, summand = processor.isa(), call.summand
    values = (call.product.x,) if summand is None else (call.product.x, summand.tensor)
    if isa is None or any(_dtype(value) not in KINDS for value in values):
        return False
    if not isa.admits(weight):
        return False
    return (call.out.dtype or torch.float32) in KINDS and _function(call.out) is not None


def replace(
    node: fx.Node,
    call: ProductCall,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    packed: dict[Hashable, str],
) -> None:
    """Let a call that `applies` compute the same with an operator of `products`, in place.

    What the operator reads of weight, scales and bias is made now, and becomes buffers of the graph's module.
    What `channel_factors` finds behind it joins it.

    Args:
        packed: the names of packed weights that the module has already, by what was packed: calls that share
            a weight share what was made of it.
    """
    gm, depthwise, isa = node.graph.owning_module, _is_depthwise(call, weight), processor.isa()
    assert gm is not None
    assert isa is not None  # it applies
    factors = None
    if _function(call.out):
        call, factors = channel_factors.take(node, call)
    function, sizes, ends = _described(call, weight, isa)
    kernel = weight if weight.dim() == 4 else weight[:, :, None, None]
    if call.geometry.groups > 1 and not depthwise:
        kernel, sizes = products.in_groups(kernel, call.geometry.groups, sizes)
    scale, shift = _linear_part(call, w_scale, bias, in_steps=function == 0)
    start = -sizes.x_zp * kernel.sum((1, 2, 3), dtype=torch.int32)
    key = (id(weight), depthwise, sizes.joined, call.geometry.groups)
    if key not in packed:
        packed[key] = registered(gm, products.pack(kernel, sizes, depthwise=depthwise))
    vectors = [start, scale, shift]
    if function:
        steps = torch.full_like(scale, 1 / call.out.scale)
        vectors.append(steps if factors is None else steps * factors)
    others = (products.per_channel(v, isa.lanes, depthwise=depthwise) for v in vectors)
    with node.graph.inserting_before(node):
        names = (packed[key], *(registered(gm, value) for value in others))
        buffers: list[fx.Node | None] = [node.graph.get_attr(name) for name in names]
    node.target = _matrix if weight.dim() == 2 else _image
    operator = products.DEPTHWISE if depthwise else products.PRODUCT
    other: Any = None if call.summand is None else call.summand.tensor
    x: Any = call.product.x
    node.args = (operator, x, *buffers, *[None] * (not function), other, sizes.flat(), [*ends])
    node.kwargs = {}


def quantize_planes(gm: fx.GraphModule) -> None:
    """Let our C++ quantize images of few channels that arrive plane by plane, in place.

    Inductor's code reads such planes a value at a time, which takes a tenth of MobileNet-V2's time.
    """
    if not _has_products(gm):
        return
    for node in gm.graph.nodes:
        if (
            node.target is channel_factors.QUANTIZE
            and len(node.args) == 6
            and _arrives_in_planes(node.args[0])
        ):
            x, scale, zero_point, low, high, dtype = node.args
            if dtype is torch.uint8:
                node.target, node.args = _quantized_planes, (x, scale, zero_point, low, high)


def _arrives_in_planes(x: Any) -> bool:
    value = x.meta.get("val") if isinstance(x, fx.Node) and x.op == "placeholder" else None
    if not isinstance(value, Tensor) or value.dim() != 4 or value.dtype != torch.float32:
        return False
    channels = value.shape[1]
    return type(channels) is int and 1 < channels <= products.MOST_PLANES and value.is_contiguous()


def _quantized_planes(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> Tensor:
    """Quantize an image (N, C, H, W); the result is channels_last."""
    quantized: Tensor = products.PLANES(x, scale, zero_point, low, high)
    return quantized.permute(0, 3, 1, 2)


def options(graph: fx.GraphModule) -> Mapping[str, Any]:
    """Return options of Inductor that compile the operators of `native`, where a graph may get some."""
    nodes = [*nodes_in(graph)]
    isa, shims, metadata = processor.isa(), dict[Any, list[str]](), {}
    layers = _layers(nodes)
    if isa is not None and (layers or _has_products(graph)):
        shims = products.shims(isa, _functions(nodes), alone=not layers)
        shims |= {operator: [text] for operator, text in layers.items()}
        metadata = {METADATA: isa.name}
    if processor.wanted() and any(n.target is linear_packed.OPERATOR for n in graph.graph.nodes):
        texts = packed_linear.shims()
        shims[linear_packed.OPERATOR] = [texts["linear_packed"]]
        shims[linear_packed.SEVERAL] = [texts["linears_packed"]]
    if not shims:
        return {}
    from torch._inductor.cpp_builder import is_gcc

    found = {"cpp_wrapper": True, _OPTION: shims, "aot_inductor.metadata": metadata}
    # The file with the kernels gets -O1. Its headers ask GCC for more; with -O3, GCC 12 may crash.
    return found if is_gcc() else {**found, "aot_inductor.compile_wrapper_opt_level": "O3"}


def _layers(nodes: Iterable[fx.Node]) -> dict[Any, str]:
    """Return the declarations of all of `native` but products, where some of it may be called."""
    targets = {*native_recurrent.OPERATORS, cache_attention.ATTENTION}
    if native_attention.applies():
        targets.add(native_attention.OPERATOR)
    if not any(n.target in targets or native_float_attention.found(n) for n in nodes):
        return {}
    found = {
        **recurrent.DECLARATIONS, float_attention.ATTENTION: float_attention.DECLARATION,
        cache_attention.ATTENTION: cache_attention.DECLARATION,
    }  # fmt: skip
    if native_attention.applies():
        found[attention.ATTENTION] = attention.DECLARATION
    return found


def _functions(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the numbers of the functions that products may be followed by."""
    found = set[int | None]()
    for node in nodes:
        name = PRODUCTS.get(node.target)
        if name is not None:
            call = ProductCall.read(name, (*arguments_of(node).values(),))
            found.add(_function(call.out))
    return {number for number in found if number is not None}


def _has_products(graph: fx.GraphModule) -> bool:
    """Return whether some of a graph's products may be computed by our C++."""
    return (
        any(node.target in PRODUCTS for node in graph.graph.nodes) and processor.isa() is not None
    )


def _matrix(operator: Any, x: Tensor, *arguments: Any) -> Tensor:
    """Compute rows (..., in) by a weight."""
    *constants, other, sizes, ends = arguments
    summand = None if other is None else _one_line(other)
    result: Tensor = operator(_one_line(_unsigned(x)), *constants, summand, sizes, ends)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def _one_line(rows: Tensor) -> Tensor:
    """Return (..., C) as (1, 1, W, C)."""
    return rows.reshape(1, 1, -1, rows.shape[-1]).contiguous()


def _image(operator: Any, x: Tensor, *arguments: Any) -> Tensor:
    """Compute an image (N, in, H, W) by a weight; the result is channels_last."""
    *constants, other, sizes, ends = arguments
    summand = None if other is None else _channels_last(other)
    result: Tensor = operator(_channels_last(_unsigned(x)), *constants, summand, sizes, ends)
    return result.permute(0, 3, 1, 2)


def _channels_last(image: Tensor) -> Tensor:
    """Return (N, C, H, W) as (N, H, W, C)."""
    return image.permute(0, 2, 3, 1).contiguous()


def _unsigned(x: Tensor) -> Tensor:
    return x if x.dtype == torch.uint8 else flip_sign_bit(x)


def _described(
    call: ProductCall, weight: Tensor, isa: Isa
) -> tuple[int, ProductSizes, ProductEnds]:
    """Return the number of the post-op among `FUNCTIONS`, and the numbers that the operators read."""
    out, summand = call.out, call.summand
    function = _function(out)
    assert function is not None  # it applies
    out_dtype = out.dtype or torch.float32
    shift = 128 if _dtype(call.product.x) == torch.int8 else 0
    sizes = ProductSizes(
        weight.shape[0],
        _pair(weight.shape[2:] or (1, 1)),
        _pair(call.geometry.stride),
        _pair(call.geometry.padding),
        _pair(call.geometry.dilation),
        x_zp=call.product.x_zp + shift,
        function=function,
        zero_point=out.zero_point,
        kind=KINDS.index(out_dtype),
        lanes=isa.lanes,
    )
    low, high = _bounds(out, out_dtype)
    ends = ProductEnds(
        other_scale=(1.0 if summand is None else summand.scale) / (1.0 if function else out.scale),
        other_zp=0.0 if summand is None else float(summand.zero_point),
        slope=float(out.args[0]) if out.post_op == "leaky_relu" else 0.0,
        low=low,
        high=high,
    )
    return function, sizes, ends


def _function(out: Output) -> int | None:
    """Return the number of a post-op among `FUNCTIONS`, None for one that the C++ has not got."""
    if out.post_op in _BOUNDS:
        return 0
    algorithm = out.algorithm if out.post_op == "gelu" else "none"
    known = (out.post_op, algorithm)
    return FUNCTIONS.index(known) if known in FUNCTIONS else None


def _pair(sizes: Any) -> tuple[int, int]:
    height, width = sizes
    return height, width


def _bounds(out: Output, dtype: torch.dtype) -> tuple[float, float]:
    """Return the bounds of values, in steps of the result: a function's bounds, then those of integers."""
    bounds = (0.0, math.inf) if out.post_op == "relu" else (-math.inf, math.inf)
    low, high = (bound / out.scale for bound in (out.args if out.post_op == "hardtanh" else bounds))
    if dtype == torch.float32:
        return low, high
    limits = torch.iinfo(dtype)
    first, last = float(limits.min - out.zero_point), float(limits.max - out.zero_point)
    return min(max(low, first), last), min(max(high, first), last)


def _linear_part(
    call: ProductCall, w_scale: Tensor, bias: Tensor | None, *, in_steps: bool
) -> tuple[Tensor, Tensor]:
    """Return factor and shift of sums, by channel: in units or steps of the result."""
    step = call.out.scale if in_steps else 1.0
    scale = w_scale.double() * call.product.x_scale / step
    shift = torch.zeros_like(scale) if bias is None else bias.double() / step
    return scale.float(), shift.float()


def _is_depthwise(call: ProductCall, weight: Tensor) -> bool:
    groups, alone = call.geometry.groups, call.summand is None
    return alone and groups > 1 and groups == weight.shape[0] and weight.shape[1] == 1


def _dtype(value: Any) -> torch.dtype | None:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found.dtype if isinstance(found, Tensor) else None
