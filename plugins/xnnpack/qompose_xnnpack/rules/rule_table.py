# SPDX-License-Identifier: Apache-2.0
"""The rule table of the XNNPACK backend, from the longest fusion to operators that only move values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from qompose.backend import Guard, Kernel, Region, Rule, TensorConstraint, kit
from torch.fx import Node

from qompose_xnnpack.executorch_target import kernels as on_executorch
from qompose_xnnpack.executorch_target.kernels import DELEGATE
from qompose_xnnpack.kernels import in_process
from qompose_xnnpack.rules import guards
from qompose_xnnpack.rules.constraints import (
    GROUPS,
    PER_CHANNEL,
    PER_TENSOR,
    WEIGHT,
    dynamic,
    static,
)

aten = torch.ops.aten

BOUNDED = kit.any_of("hardtanh", kit.HARDTANH, kit.RELU6, kit.CLAMP)
"""The activations that become bounds of an output, a relu aside."""
BEHIND = ((kit.RELU,), (BOUNDED,), ())

_BY_IMAGE = {"block_size": (-1, -1, -1)}
_ACROSS = {"weight": {"ch_axis": 1}}


def _kernels(emit: Callable[[Region], Node], name: str) -> dict[str, Kernel]:
    return {"torch": Kernel(f"qompose_xnnpack.{name}", emit), "executorch": DELEGATE}


def _weighted(
    operator: str,
    after: Sequence[kit.Step],
    *guard: Guard,
    weight: TensorConstraint = WEIGHT,
    padded: bool = False,
    **fields: Any,
) -> Rule:
    """Return the rule of a static linear or convolution, with the padding and activation around it."""
    delegated = on_executorch.padded if padded else None
    if BOUNDED in after:
        delegated = on_executorch.Bounded(delegated)
    transposed = (guards.output_padding_below_stride,) if "transpose" in operator else ()
    return kit.product_rule(
        operator,
        before=(kit.PAD,) * padded,
        after=after,
        integer_bias=True,
        accepts=static(weight),
        guard=(*guard, *transposed),
        kernels={
            **_kernels(in_process.Weighted(operator), operator),
            "executorch": Kernel(DELEGATE.name, delegated),
        },
        **fields,
    )


def _grouped_transposed(operator: str, after: Sequence[kit.Step]) -> Rule:
    """Return the rule of a transposed convolution in groups, whose weight has one scale."""
    return _weighted(
        operator,
        after,
        kit.several_groups(),
        weight=PER_TENSOR,
        groups=2,
        name="_".join((operator, "grouped", *(step.name for step in after))),
        drawing=" -> ".join((f"{operator} in groups", *(step.name for step in after))),
    )


CONVOLUTIONS = ("conv2d", "conv1d")
OPERATORS = ("linear", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d")


def _fusions() -> Iterator[Rule]:
    """Yield the static linears and convolutions: first with padding, then with an activation or alone."""
    for after, operator in product(BEHIND, CONVOLUTIONS):
        yield _weighted(operator, after, padded=True)
    for after, operator in product(BEHIND, OPERATORS):
        transposed = "transpose" in operator
        yield _weighted(operator, after, *([kit.one_group()] if transposed else []))
        if transposed:
            yield _grouped_transposed(operator, after)


def _float_kernel(name: str, emit: Callable[[Region], Node]) -> Kernel:
    return Kernel(f"qompose_xnnpack.{name}", emit, float_output=True)


def _dynamic(operator: str, weight: TensorConstraint, *extra: Guard, **name: Any) -> Rule:
    image = operator != "linear"
    layout: dict[str, Any] = {"activation": _BY_IMAGE} if image else {}
    emit = in_process.DynamicConvolution(operator) if image else in_process.dynamic_linear
    return kit.product_rule(
        operator,
        mode="dynamic",
        layout={**layout, **_ACROSS} if "transpose" in operator else layout,
        accepts=dynamic(weight, dims=3 if image else 1),
        guard=extra,
        kernels={
            "torch": _float_kernel(f"{operator}_dynamic", emit),
            "executorch": Kernel(
                DELEGATE.name,
                on_executorch.dynamic_convolution if image else None,
                float_output=True,
            ),
        },
        **name,
    )


_WEIGHT_ONLY = kit.product_rule(
    "linear",
    mode="weight-only",
    accepts={"weight": replace(WEIGHT, blocks=True)},
    guard=(kit.float32,),
    kernels={
        "torch": Kernel(
            "qompose_xnnpack.linear_weight_only", in_process.weight_only_linear, True, True
        ),
        "executorch": Kernel("ExecuTorch's mixed_linear", on_executorch.mixed_linear, True, True),
    },
)


def _binary(operator: str, *after: kit.Step) -> Rule:
    return kit.binary_rule(
        operator,
        after=after,
        accepts=static(),
        guard=(guards.not_scalar,),
        carries=True,
        kernels=_kernels(in_process.Binary(operator), operator),
    )


def _pooled(
    name: str,
    *guard: Guard,
    delegated: Callable[[Region], Node | None] | None = None,
    **fields: Any,
) -> Rule:
    return kit.pool_rule(
        name,
        accepts=static(),
        guard=guard,
        kernels={
            "torch": Kernel(f"qompose_xnnpack.{name}", in_process.Pooling(name)),
            "executorch": Kernel(DELEGATE.name, delegated),
        },
        **fields,
    )


# Raise `NotLowerable` if XNNPACK does not take the operator, and may rewrite it into the form that it takes.
# A portable kernel moves the integers then, and those of operators that it never takes.
_DELEGATED: dict[str, Callable[[Region], None]] = {
    "cat": on_executorch.cat,
    "view": on_executorch.view,
    "slice": on_executorch.slice_of_known_size,
}
_NEVER = ("squeeze", "unsqueeze", "select", "expand")
_UNMOVED = ("copy", "dropout")


def _move_kernels(name: str, kernel: Kernel) -> dict[str, Kernel]:
    """Return the kernels of an operator that only moves values."""
    on_integers = in_process.CLAMP if kernel is kit.CLAMP_ON_INTEGERS else kernel
    if name in _DELEGATED:
        return {
            "torch": on_integers,
            "executorch": Kernel(DELEGATE.name, _DELEGATED[name], otherwise=on_integers),
        }
    itself = name in (*_NEVER, *_UNMOVED)
    return {"torch": on_integers, "executorch": on_integers if itself else DELEGATE}


RULES: tuple[Rule, ...] = (
    *_fusions(),
    _dynamic("linear", PER_CHANNEL),
    _dynamic("linear", GROUPS, name="linear_dynamic_groups"),
    replace(
        _dynamic("linear", PER_CHANNEL, name="linear_dynamic_per_tensor"),
        accepts=dynamic(PER_CHANNEL, dims=None),
        # XNNPACK would quantize each row by itself: see `graph_passes.keep_per_tensor_scales`.
        kernels={"torch": _float_kernel("linear_dynamic", in_process.dynamic_linear)},
    ),
    _dynamic("conv2d", PER_CHANNEL, guards.not_depthwise, guards.not_pointwise),
    _dynamic(
        "conv_transpose2d",
        PER_CHANNEL,
        kit.one_group(),
        guards.not_depthwise,
        guards.output_padding_below_stride,
    ),
    _WEIGHT_ONLY,
    _binary("add", kit.RELU),
    *map(_binary, kit.BINARY),
    _pooled("adaptive_avg_pool2d", guards.to_one_pixel),
    _pooled(
        "avg_pool2d",
        guards.global_average,
        delegated=on_executorch.mean_of_window,
        patterns=(kit.one(aten.avg_pool2d.default, [4, 4]),),
        drawing="avg_pool2d over the image",
    ),
    _pooled("mean", kit.rank("self", 4), guards.mean_over_image, delegated=on_executorch.mean),
    _pooled("max_pool2d", guards.pooling_window),
    *kit.move_rules(static(), kernels=_move_kernels, carries=_UNMOVED),
)
