# SPDX-License-Identifier: Apache-2.0
"""Products that code of ours makes in compiled programs, in the place of oneDNN.

Through torch, a call of oneDNN takes about 17 microseconds before any arithmetic, in packages too: torch
makes descriptors, attributes and memory objects anew each time, and keeps oneDNN's own interface to itself.
The C++ in ``native/`` takes none of them, and sums at the same rate. It is for AVX-512 with VNNI; with AMX,
oneDNN is faster than it could be, and without VNNI sums need care that oneDNN takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from qompose_x86_inductor import isa, vnni_ops
from qompose_x86_inductor.arguments import NAMESPACE, flip_sign_bit
from qompose_x86_inductor.vnni_ops import FUNCTIONS, KINDS, Ends, Sizes

_OPS: Final = getattr(torch.ops, NAMESPACE)
KERNELS: Final = tuple(
    getattr(_OPS, name).default for name in ("linear", "linear_add", "conv2d", "conv2d_add")
)

_QUANTIZE: Final = torch.ops.quantized_decomposed.quantize_per_tensor.default


@functools.cache
def available() -> bool:
    """Whether code of ours is compiled on this machine: it has AVX-512 and VNNI, may use them, and no AMX."""
    from torch._inductor.cpu_vec_isa import VecAVX512, pick_vec_isa

    features = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni")
    known = torch.cpu.get_capabilities()
    return (
        all(known.get(feature, False) for feature in features)
        and not known.get("amx_int8", False)
        and isinstance(pick_vec_isa(), VecAVX512)
        and isa.vnni_exact()
    )


def taken(node: fx.Node, arguments: Mapping[str, Any], weight: Tensor) -> bool:
    """Whether code of ours computes a call of an operator of ours, with arguments by name, by a weight."""
    x, other = (arguments.get(name) for name in ("x", "other"))
    dtypes = [_dtype(value) for value in (x, other) if value is not None]
    if node.target not in KERNELS or not available() or None in dtypes:
        return False
    groups = arguments.get("groups", 1)
    return groups == 1 or (_is_depthwise(arguments, weight) and other is None)


def put(
    node: fx.Node,
    arguments: Mapping[str, Any],
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    packed: dict[Hashable, str],
) -> None:
    """Let a call that is `taken` compute the same with an operator of `vnni_ops`, in place.

    What the operator reads of weight, scales and bias is made now, and becomes buffers of the graph's module.

    Args:
        packed: the names of packed weights that the module has already, by what was packed: calls that share
            a weight share what was made of it.
    """
    gm, depthwise = node.graph.owning_module, _is_depthwise(arguments, weight)
    assert gm is not None
    function, sizes, ends = _described(arguments, weight)
    kernel = weight if weight.dim() == 4 else weight[:, :, None, None]
    scale, shift = _linear_part(arguments, w_scale, bias, in_steps=function == 0)
    start = -sizes.x_zp * kernel.sum((1, 2, 3), dtype=torch.int32)
    key = (id(weight), depthwise, sizes.joined)
    if key not in packed:
        packed[key] = _registered(gm, vnni_ops.pack(kernel, sizes, depthwise=depthwise))
    others = (vnni_ops.per_channel(v, depthwise=depthwise) for v in (start, scale, shift))
    with node.graph.inserting_before(node):
        names = (packed[key], *(_registered(gm, value) for value in others))
        buffers = [node.graph.get_attr(name) for name in names]
    node.target = _matrix if weight.dim() == 2 else _image
    operator = vnni_ops.DEPTHWISE if depthwise else vnni_ops.PRODUCT
    node.args = (operator, arguments["x"], *buffers, arguments.get("other"), sizes.flat(), [*ends])
    node.kwargs = {}


def read_planes(gm: fx.GraphModule) -> None:
    """Let code of ours quantize images of few channels that arrive plane by plane, in place.

    Inductor's code reads such planes a value at a time, which is a tenth of MobileNet-V2.
    """
    if not _has_products(gm):
        return
    for node in gm.graph.nodes:
        if node.target is _QUANTIZE and len(node.args) == 6 and _arrives_in_planes(node.args[0]):
            x, scale, zero_point, low, high, dtype = node.args
            if dtype is torch.uint8:
                node.target, node.args = _quantized_planes, (x, scale, zero_point, low, high)


def _arrives_in_planes(x: Any) -> bool:
    value = x.meta.get("val") if isinstance(x, fx.Node) and x.op == "placeholder" else None
    if not isinstance(value, Tensor) or value.dim() != 4 or value.dtype != torch.float32:
        return False
    channels = value.shape[1]
    return type(channels) is int and 1 < channels <= vnni_ops.MOST_PLANES and value.is_contiguous()


def _quantized_planes(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> Tensor:
    """Quantize an image (N, C, H, W); the result is channels_last."""
    quantized: Tensor = vnni_ops.PLANES(x, scale, zero_point, low, high)
    return quantized.permute(0, 3, 1, 2)


def options(graph: fx.GraphModule) -> Mapping[str, Any]:
    """Return options of Inductor that compile the operators of `vnni_ops`, where a graph may get some."""
    if not _has_products(graph):
        return {}
    return {"cpp_wrapper": True, "aot_inductor.custom_ops_to_c_shims": vnni_ops.shims()}


def _has_products(graph: fx.GraphModule) -> bool:
    """Whether some of a graph's products may be computed by code of ours."""
    return any(node.target in KERNELS for node in graph.graph.nodes) and available()


def _matrix(operator: Any, x: Tensor, *arguments: Any) -> Tensor:
    """Compute rows (..., in) by a weight."""
    *constants, other, sizes, ends = arguments
    rows = _unsigned(x).reshape(1, 1, -1, x.shape[-1])
    summand = None if other is None else other.reshape(1, 1, -1, other.shape[-1])
    result: Tensor = operator(rows.contiguous(), *constants, summand, sizes, ends)
    return result.reshape(*x.shape[:-1], result.shape[-1])


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


def _described(arguments: Mapping[str, Any], weight: Tensor) -> tuple[int, Sizes, Ends]:
    """Return the number of the function behind the sums, and what the operators are told."""
    name, args = arguments["post_op"], arguments.get("post_op_args") or []
    algorithm = arguments.get("algorithm", "none") if name == "gelu" else "none"
    function = FUNCTIONS.index((name, algorithm)) if (name, algorithm) in FUNCTIONS else 0
    out_dtype = arguments["out_dtype"] or torch.float32
    step, zero_point = arguments["out_scale"], arguments["out_zp"]
    shift = 128 if _dtype(arguments["x"]) == torch.int8 else 0
    rest = (arguments["x_zp"] + shift, function, zero_point, KINDS.index(out_dtype))
    sizes = Sizes(*(*_geometry(arguments, weight), *rest))
    low, high = _bounds(name, args, step, zero_point, out_dtype)
    ends = Ends(
        other_scale=arguments.get("other_scale", 1.0) / (1.0 if function else step),
        other_zp=float(arguments.get("other_zp", 0)),
        slope=float(args[0]) if name == "leaky_relu" else 0.0,
        per_step=1.0 / step,
        low=low,
        high=high,
    )
    return function, sizes, ends


def _geometry(arguments: Mapping[str, Any], weight: Tensor) -> Any:
    """Return what `Sizes` begin with; a matrix is an image of one line, and a window of one pixel."""
    if weight.dim() == 2:
        return weight.shape[0], (1, 1), (1, 1), (0, 0), (1, 1)
    given = (tuple(arguments[name]) for name in ("stride", "padding", "dilation"))
    return weight.shape[0], tuple(weight.shape[2:]), *given


def _bounds(
    name: str, args: Sequence[float], step: float, zero_point: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Return what values are kept in, in steps of the result: a function's bounds, then those of integers."""
    bounds = (0.0, math.inf) if name == "relu" else (-math.inf, math.inf)
    low, high = (bound / step for bound in (args if name == "hardtanh" else bounds))
    if dtype == torch.float32:
        return low, high
    limits = torch.iinfo(dtype)
    first, last = float(limits.min - zero_point), float(limits.max - zero_point)
    return min(max(low, first), last), min(max(high, first), last)


def _linear_part(
    arguments: Mapping[str, Any], w_scale: Tensor, bias: Tensor | None, *, in_steps: bool
) -> tuple[Tensor, Tensor]:
    """Return what sums are multiplied by, and what is added, by channel: in units or steps of the result."""
    step = arguments["out_scale"] if in_steps else 1.0
    scale = w_scale.double() * arguments["x_scale"] / step
    shift = torch.zeros_like(scale) if bias is None else bias.double() / step
    return scale.float(), shift.float()


def _is_depthwise(arguments: Mapping[str, Any], weight: Tensor) -> bool:
    groups: int = arguments.get("groups", 1)
    return groups > 1 and groups == weight.shape[0] and weight.shape[1] == 1


def _registered(gm: fx.GraphModule, value: Tensor) -> str:
    """Return the name of a new buffer."""
    name = f"_qompose_x86_vnni_{sum(1 for _ in gm.buffers())}"
    gm.register_buffer(name, value, persistent=False)
    return name


def _dtype(value: Any) -> torch.dtype | None:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found.dtype if isinstance(found, Tensor) else None
