# SPDX-License-Identifier: Apache-2.0
"""The rule table: what ONNX Runtime fuses between DequantizeLinear and QuantizeLinear.

Regions keep their quantize and dequantize operators, which become the nodes of the file. What a runtime
then makes of each, its last step reports (`qompose_onnx.targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch
from qompose.backend import Guard, Kernel, Region, Rule, TensorConstraint, kit

from qompose_onnx import guards
from qompose_onnx.configs import GROUP_SIZES
from qompose_onnx.fused_graph import MOVED, WEIGHT_ONLY
from qompose_onnx.regions import for_runtimes, mean_over_image
from qompose_onnx.runtimes import OPENVINO, OPENVINO_INT8, OPENVINO_LOOP, OPENVINO_WEIGHTS

aten = torch.ops.aten

ACTIVATION: Final = TensorConstraint(
    dtypes=frozenset({torch.uint8, torch.int8}),
    qschemes=frozenset({torch.per_tensor_affine, torch.per_tensor_symmetric}),
)
WEIGHT: Final = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_symmetric, torch.per_tensor_symmetric}),
    ch_axis=0,
)
GROUPS: Final = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_symmetric, torch.per_channel_affine}),
    block_sizes=frozenset((size,) for size in GROUP_SIZES),
)
STATIC: Final = {"activation": ACTIVATION, "weight": WEIGHT, "output": ACTIVATION}
DYNAMIC: Final = {
    "activation": TensorConstraint(
        dtypes=frozenset({torch.uint8}),
        qschemes=frozenset({torch.per_tensor_affine}),
        quant_range=(0, 255),  # of DynamicQuantizeLinear
    ),
    "weight": WEIGHT,
}


def _kernels(
    *names: str,
    emit: Callable[[Region], None] | None = None,
    openvino: Sequence[str] = (OPENVINO_INT8, OPENVINO_LOOP),
    **facts: Any,
) -> dict[str, Kernel]:
    """Return the kernel on each target.

    Args:
        names: of what ONNX Runtime may make of a region.
        emit: rewrites the region in place for the runtimes to fuse.
        openvino: the same on OpenVINO; (): it computes in float. Without a product beside it, a loop.
        facts: of the kernels.
    """

    def chain(names: Sequence[str]) -> Kernel:
        first, *others = names
        kernel = Kernel(first, emit, **facts)
        kernel = replace(kernel, float_arithmetic=True) if first == OPENVINO_LOOP else kernel
        return replace(kernel, otherwise=chain(others)) if others else kernel

    found = dict.fromkeys(("onnx", "onnxruntime"), chain(names))
    return {**found, OPENVINO: chain(openvino)} if openvino else found


BOUNDED: Final = kit.any_of("hardtanh", kit.HARDTANH, kit.RELU6)
CONVOLUTIONS: Final = ("conv1d", "conv2d", "conv3d")


def _products() -> Iterator[Rule]:
    """Yield static products; a linear without an activation gives floats to those that read floats."""
    for after, operator in product(((kit.RELU,), (BOUNDED,), ()), ("linear", *CONVOLUTIONS)):
        linear = operator == "linear"
        names = ("QGemm", "QLinearMatMul", "MatMulIntegerToFloat") if linear else ("QLinearConv",)
        yield kit.product_rule(
            operator,
            after=after,
            output=bool(after) or not linear,
            integer_bias=True,
            accepts=STATIC,
            guard=(guards.matrix,) if linear else (),
            kernels=_kernels(*names, emit=for_runtimes, openvino=(OPENVINO_INT8,)),
        )


def _linear(name: str, mode: str, kernels: dict[str, Kernel], accepts: dict[str, Any]) -> Rule:
    """Return the rule of a linear that gives floats."""
    return kit.product_rule(
        "linear",
        name=name,
        output=False,
        modes=frozenset({mode}),
        accepts=accepts,
        shapes=((2, max(GROUP_SIZES)), (2, max(GROUP_SIZES)), (2,)),
        guard=(kit.float32, guards.matrix),
        kernels=kernels,
    )


_DYNAMIC: Final = _kernels(
    "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger", openvino=(), float_output=True
)
_WEIGHT_ONLY: Final = _kernels(
    WEIGHT_ONLY, openvino=(OPENVINO_WEIGHTS,), float_output=True, float_arithmetic=True
)


def _binary(name: str, after: Sequence[kit.Step] = ()) -> Rule:
    return kit.binary_rule(
        name,
        after=after,
        accepts=STATIC,
        guard=(kit.computed_factors, guards.not_after_linear),
        kernels=_kernels(
            f"QLinear{name.capitalize()}",
            emit=for_runtimes if after else None,
        ),
    )


def _rescaled(
    name: str,
    operator: str,
    *patterns: Any,
    guard: Sequence[Guard] = (),
    emit: Callable[[Region], None] | None = None,
) -> Rule:
    """Return a rule for a function with integers of its own on both sides."""
    kernels = _kernels(f"QLinear{operator}", emit=emit)
    return kit.unary_rule(name, *patterns, accepts=STATIC, guard=guard, kernels=kernels)


def _in_place(name: str) -> list[Any]:
    return [kit.one(getattr(aten, f"{name}{ending}").default) for ending in ("", "_")]


def _moves() -> Iterator[Rule]:
    """Yield the operators that only move integers; relus and clamps alone are computed in float."""
    only = {*kit.MOVES} - {"relu", "clamp"}
    for rule in kit.move_rules(
        STATIC, kernels=lambda name, kernel: _kernels(MOVED), only=only, carries=only - {"cat"}
    ):
        concatenates = rule.name == "cat"
        yield replace(rule, kernels=_kernels("QLinearConcat", MOVED)) if concatenates else rule


RULES: Final[tuple[Rule, ...]] = (
    *_products(),
    _linear("linear_dynamic", "dynamic", _DYNAMIC, DYNAMIC),
    _linear("linear_weight_only", "weight-only", _WEIGHT_ONLY, {"weight": WEIGHT}),
    _linear("linear_weight_only_groups", "weight-only", _WEIGHT_ONLY, {"weight": GROUPS}),
    *(_binary(name, after) for after in ((kit.RELU,), ()) for name in ("add", "mul")),
    kit.unary_rule(
        "max_pool2d",
        kit.one(aten.max_pool2d.default, [3, 3], [2, 2], [1, 1]),
        accepts=STATIC,
        guard=(kit.rank("self", 4),),
        shares=True,
        kernels=_kernels(MOVED),
    ),
    _rescaled(
        "avg_pool2d",
        "AveragePool",
        kit.one(aten.avg_pool2d.default, [2, 2]),
        guard=(kit.rank("self", 4), guards.plain_average),
    ),
    _rescaled(
        "adaptive_avg_pool2d",
        "GlobalAveragePool",
        kit.one(aten.adaptive_avg_pool2d.default, [1, 1]),
        guard=(kit.rank("self", 4), guards.to_one_pixel),
    ),
    _rescaled(
        "mean",
        "GlobalAveragePool",
        *(kit.one(aten.mean.dim, [2, 3], True), kit.one(aten.mean.dim, [2, 3])),
        guard=(kit.rank("self", 4), kit.over_dimensions, guards.over_image),
        emit=mean_over_image,
    ),
    _rescaled("leaky_relu", "LeakyRelu", *_in_place("leaky_relu")),
    _rescaled("sigmoid", "Sigmoid", *_in_place("sigmoid")),
    *_moves(),
)

_OPERATORS: Final[dict[str, tuple[Any, ...]]] = {
    "ONNX Runtime has no int8 kernel for it on processors": (
        *(aten.conv_transpose1d.default, aten.conv_transpose2d.input),
        *(aten.conv_transpose3d.input, aten.layer_norm.default, aten.group_norm.default),
        *(aten.gelu.default, aten.silu.default, aten.hardswish.default, aten.tanh.default),
        *(aten.sub.Tensor, aten.div.Tensor),
    ),
    "ONNX Runtime computes it in int8 only after a linear, a convolution or a sum": (
        *(aten.relu.default, aten.relu_.default, aten.hardtanh.default, aten.relu6.default),
    ),
    "a product of two activations stays in float: eight bits cost attention more than they gain": (
        *(aten.matmul.default, aten.bmm.default, aten.scaled_dot_product_attention.default),
    ),
}
LEFT_IN_FLOAT: Final = {operator: why for why, group in _OPERATORS.items() for operator in group}
"""By operator, why no rule takes it."""
