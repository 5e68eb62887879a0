# SPDX-License-Identifier: Apache-2.0
"""The rule table: what ONNX Runtime fuses between DequantizeLinear and QuantizeLinear.

Regions keep their quantize and dequantize operators, which become the nodes of the file. What a runtime
then makes of each, its last step reports (`qompose_onnx.targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch
from qompose.backend import Kernel, Region, Rule, TensorConstraint, kit

from qompose_onnx import attention, guards
from qompose_onnx.configs import GROUP_SIZES
from qompose_onnx.names import (
    MOVED,
    OPENVINO,
    OPENVINO_INT8,
    OPENVINO_LOOP,
    OPENVINO_WEIGHTS,
    SIXTEEN_BITS,
    TENSORRT,
    TENSORRT_INT8,
    WEIGHT_ONLY,
)
from qompose_onnx.regions import (
    for_openvino,
    for_runtimes,
    mean_over_image,
    of_weights_alone,
)
from qompose_onnx.transposed import as_convolution

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
_SYMMETRIC: Final = replace(ACTIVATION, dtypes=frozenset({torch.int8}), zero_point_exact_match=0)
_WIDE: Final = replace(ACTIVATION, dtypes=frozenset({torch.uint16, torch.int16}))
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

    def chain(names: Sequence[str], emit: Any) -> Kernel:
        first, *others = names
        kernel = Kernel(first, emit, **facts)
        kernel = replace(kernel, float_arithmetic=True) if first == OPENVINO_LOOP else kernel
        return replace(kernel, otherwise=chain(others, emit)) if others else kernel

    found = dict.fromkeys(("onnx", "onnxruntime"), chain(names, emit))
    return (
        {**found, OPENVINO: chain(openvino, _FOR_OPENVINO.get(emit, emit))} if openvino else found
    )


_FOR_OPENVINO: Final[Mapping[Any, Any]] = {for_runtimes: for_openvino, of_weights_alone: None}
"""What rewrites a region for OpenVINO, where that differs."""


BOUNDED: Final = kit.any_of("hardtanh", kit.HARDTANH, kit.RELU6)
CONVOLUTIONS: Final = ("conv1d", "conv2d", "conv3d")
TRANSPOSED: Final = tuple(name.replace("conv", "conv_transpose") for name in CONVOLUTIONS)


def _products() -> Iterator[Rule]:
    """Yield static products; a linear without an activation gives floats to those that read floats."""
    for after, operator in product(
        ((kit.RELU,), (BOUNDED,), ()), ("linear", *CONVOLUTIONS, *TRANSPOSED)
    ):
        linear = operator == "linear"
        names = ("QGemm", "QLinearMatMul", "MatMulIntegerToFloat") if linear else ("QLinearConv",)
        emit = as_convolution if operator in TRANSPOSED else for_runtimes
        yield kit.product_rule(
            operator,
            after=after,
            output=bool(after) or not linear,
            integer_bias=True,
            accepts=STATIC,
            guard=(guards.matrix,) if linear else (),
            kernels=_kernels(*names, emit=emit, openvino=(OPENVINO_INT8,)),
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
    WEIGHT_ONLY,
    emit=of_weights_alone,
    openvino=(OPENVINO_WEIGHTS,),
    float_output=True,
    float_arithmetic=True,
)


def _binary(name: str, after: Sequence[kit.Step] = ()) -> Rule:
    return kit.binary_rule(
        name,
        after=after,
        accepts=STATIC,
        guard=(kit.computed_factors, guards.not_after_linear),
        kernels=_kernels(f"QLinear{name.capitalize()}", emit=for_runtimes if after else None),
    )


def _pools() -> Iterator[Rule]:
    """Yield pools and means over images, which runtimes fuse as averages."""
    average = "QLinearGlobalAveragePool"
    yield kit.pool_rule("max_pool2d", accepts=STATIC, kernels=_kernels(MOVED))
    for name, operator, guard, emit in (
        ("avg_pool2d", "QLinearAveragePool", guards.plain_average, None),
        ("adaptive_avg_pool2d", average, guards.to_one_pixel, None),
        ("mean", average, kit.first_of(kit.rank("self", 4), guards.over_image), mean_over_image),
    ):
        kernels = _kernels(operator, emit=emit)
        yield kit.pool_rule(name, accepts=STATIC, guard=(guard,), kernels=kernels)


def _functions() -> Iterator[Rule]:
    """Yield functions with integers on both sides."""
    for step, operator in ((kit.LEAKY_RELU, "LeakyRelu"), (kit.SIGMOID, "Sigmoid")):
        patterns = [kit.one(form[1]) for form in step.forms if form is not None]
        kernels = _kernels(f"QLinear{operator}")
        yield kit.unary_rule(step.name, *patterns, accepts=STATIC, kernels=kernels)


def _moves() -> Iterator[Rule]:
    """Yield the operators that only move integers; relus and clamps alone are computed in float."""
    only = {*kit.MOVES} - {"relu", "clamp"}
    yield from kit.move_rules(
        STATIC,
        kernels=lambda name, _: _kernels(*(["QLinearConcat"] if name == "cat" else []), MOVED),
        only=only,
        carries=only - {"cat"},
        guard=dict.fromkeys(only, (guards.not_of_heads,)),
    )


_STATIC: Final[tuple[Rule, ...]] = (
    *_products(),
    *(_binary(name, after) for after in ((kit.RELU,), ()) for name in ("add", "mul")),
    *_pools(),
    *_functions(),
    *_moves(),
)


def _like(rule: Rule, name: str, constraint: TensorConstraint, **fields: Any) -> Rule:
    """Return a rule for other activations, of which ONNX Runtime's report is not asked."""
    accepts = {**rule.accepts, "activation": constraint, "output": constraint}
    told: dict[str, Any] = {"name": f"{rule.name}_{name}", "drawing": rule.drawing or rule.name}
    return replace(rule, accepts=accepts, **told, **fields)


_TENSORRT: Final = tuple(
    _like(
        rule, TENSORRT, _SYMMETRIC, option=TENSORRT, integer_bias=False,
        kernels={TENSORRT: Kernel(TENSORRT_INT8, unverified=True)},
    )
    for rule in _STATIC
)  # fmt: skip
"""They come first, since the others apply to configurations with the option, too."""
_SIXTEEN_BITS: Final = tuple(
    _like(
        rule, "16_bits", _WIDE,
        kernels=dict.fromkeys(("onnx", "onnxruntime"), Kernel(SIXTEEN_BITS, float_arithmetic=True)),
    )
    for rule in _STATIC if rule.weight or rule.condition == "no_float"
)  # fmt: skip

RULES: Final[tuple[Rule, ...]] = (
    *_TENSORRT,
    *_STATIC,
    *attention.RULES,
    *_SIXTEEN_BITS,
    _linear("linear_dynamic", "dynamic", _DYNAMIC, DYNAMIC),
    _linear("linear_weight_only", "weight-only", _WEIGHT_ONLY, {"weight": WEIGHT}),
    _linear("linear_weight_only_groups", "weight-only", _WEIGHT_ONLY, {"weight": GROUPS}),
)

_OPERATORS: Final[dict[str, tuple[Any, ...]]] = {
    "ONNX Runtime has no int8 CPU kernel for it": (
        *(aten.layer_norm.default, aten.group_norm.default),
        *(aten.gelu.default, aten.silu.default, aten.hardswish.default, aten.tanh.default),
        *(aten.sub.Tensor, aten.div.Tensor),
    ),
    "ONNX Runtime computes it in int8 only after a linear, a convolution or a sum": (
        *(aten.relu.default, aten.relu_.default, aten.hardtanh.default, aten.relu6.default),
    ),
    "it multiplies two activations: int8 attention loses more accuracy than it gains speed": (
        *(aten.matmul.default, aten.bmm.default, aten.scaled_dot_product_attention.default),
    ),
}
LEFT_IN_FLOAT: Final = {operator: why for why, group in _OPERATORS.items() for operator in group}
"""By operator, why no rule takes it."""
