# SPDX-License-Identifier: Apache-2.0
"""The rule table of the XNNPACK backend, from the longest fusion to operators that only move values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from qompose.backend import (
    Guard,
    Kernel,
    OperatorPattern,
    Region,
    Rule,
    TensorConstraint,
    on_integers,
)
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
from qompose_xnnpack.rules.patterns import BINARY, WEIGHTED, binary, weighted

aten = torch.ops.aten

CLAMP = Kernel("clamp on integers", in_process.clamp)
IDENTITY = Kernel("no operator", in_process.identity)

_OUTPUT_CHANNELS_SECOND = {"weight": {"ch_axis": 1}}
_BY_IMAGE = {"activation": {"block_size": (-1, -1, -1)}}


def _kernels(emit: Callable[[Region], Node], name: str) -> dict[str, Kernel]:
    return {"torch": Kernel(f"qompose_xnnpack.{name}", emit), "executorch": DELEGATE}


def _rank_guard(operator: str) -> Guard:
    dims = len(WEIGHTED[operator][1][0])
    return guards.float32 if operator == "linear" else guards.rank("input", dims)


def _weighted(operator: str, *, activation: str | None, padded: bool = False) -> Rule:
    """Return the rule of a static linear or convolution, with the padding and activation around it."""
    transposed = "transpose" in operator
    extra = [guards.spatial_zero_padding] if padded else []
    extra += [guards.one_group, guards.output_padding_below_stride] if transposed else []
    delegated = Kernel(DELEGATE.name, on_executorch.padded) if padded else DELEGATE
    around = ("pad",) * padded, (activation,) if activation else ()
    # A transposed weight has its channels in the other order; bounds would have to grow with channels.
    plain = not transposed and activation != "hardtanh"
    return Rule(
        name="_".join((*around[0], operator, *around[1])),
        drawing=" -> ".join((*around[0], operator, *around[1])),
        patterns=weighted(operator, activation=activation, padded=padded),
        anchor="op",
        weight="weight",
        bias="bias",
        integer_bias=True,
        channels=None if not plain else (-1, -1) if operator == "linear" else (1, 1),
        layout=_OUTPUT_CHANNELS_SECOND if transposed else {},
        accepts=static(_across(WEIGHT) if transposed else WEIGHT),
        guard=(guards.no_overflow, _rank_guard(operator), *extra),
        kernels={**_kernels(in_process.Weighted(operator), operator), "executorch": delegated},
    )


def _grouped_transposed(operator: str, activation: str | None) -> Rule:
    """Return the rule of a transposed convolution in groups, whose weight has one scale."""
    name = "_".join(filter(None, (operator, "grouped", activation)))
    return Rule(
        name=name,
        drawing=f"{operator} in groups" + (f" -> {activation}" if activation else ""),
        patterns=weighted(operator, activation=activation, groups=2),
        anchor="op",
        weight="weight",
        bias="bias",
        integer_bias=True,
        accepts=static(PER_TENSOR),
        guard=(
            guards.no_overflow,
            _rank_guard(operator),
            guards.several_groups,
            guards.output_padding_below_stride,
        ),
        kernels=_kernels(in_process.Weighted(operator), operator),
    )


def _across(weight: TensorConstraint) -> TensorConstraint:
    return replace(weight, ch_axis=1)


def _fusions() -> Iterator[Rule]:
    """Yield the static linears and convolutions: first with padding, then with an activation or alone."""
    operators = tuple(WEIGHTED)
    for activation, operator in product(("relu", "hardtanh", None), ("conv2d", "conv1d")):
        yield _weighted(operator, activation=activation, padded=True)
    for activation, operator in product(("relu", "hardtanh", None), operators):
        yield _weighted(operator, activation=activation)
        if "transpose" in operator:
            yield _grouped_transposed(operator, activation)


def _float_kernel(name: str, emit: Callable[[Region], Node]) -> Kernel:
    return Kernel(f"qompose_xnnpack.{name}", emit, float_output=True)


def _dynamic(operator: str, weight: TensorConstraint, *extra: Guard, name: str = "") -> Rule:
    image = operator != "linear"
    layout: dict[str, Any] = _BY_IMAGE if image else {}
    return Rule(
        name=name or f"{operator}_dynamic",
        drawing=operator,
        patterns=weighted(operator),
        anchor="op",
        weight="weight",
        bias="bias",
        channels=(-1, -1) if operator == "linear" else None,
        output=False,
        modes=frozenset({"dynamic"}),
        layout={**layout, **_OUTPUT_CHANNELS_SECOND} if "transpose" in operator else layout,
        accepts=dynamic(weight, dims=3 if image else 1),
        guard=(guards.no_overflow, _rank_guard(operator), *extra),
        kernels={
            "torch": _float_kernel(f"{operator}_dynamic", in_process.DynamicWeighted(operator)),
            "executorch": Kernel(
                DELEGATE.name,
                on_executorch.dynamic_convolution if image else None,
                float_output=True,
            ),
        },
    )


_WEIGHT_ONLY = Rule(
    name="linear_weight_only",
    drawing="linear",
    patterns=weighted("linear"),
    anchor="op",
    weight="weight",
    bias="bias",
    output=False,
    modes=frozenset({"weight-only"}),
    accepts={"weight": replace(WEIGHT, blocks=True)},
    guard=guards.float32,
    kernels={
        "torch": Kernel(
            "qompose_xnnpack.linear_weight_only", in_process.weight_only_linear, True, True
        ),
        "executorch": Kernel("ExecuTorch's mixed_linear", on_executorch.mixed_linear, True, True),
    },
)


def _binary_relu(operator: str) -> Rule:
    return Rule(
        name=f"{operator}_relu",
        drawing=f"{operator} -> relu",
        patterns=binary(operator, activation="relu"),
        anchor="op",
        activations=("self", "other"),
        condition="no_float",
        accepts=static(),
        guard=(guards.without_alpha, guards.not_scalar),
        kernels=_kernels(in_process.Binary(operator), operator),
    )


def _binary(operator: str) -> Rule:
    return Rule(
        name=operator,
        patterns=(OperatorPattern(tuple(target for _, target in BINARY[operator])),),
        activations=("self", "other"),
        condition="no_float",
        accepts=static(),
        guard=(guards.without_alpha, guards.not_scalar),
        kernels=_kernels(in_process.Binary(operator), operator),
    )


def _shared(
    name: str,
    *patterns: OperatorPattern,
    kernel: Kernel | None = None,
    guard: Guard | Sequence[Guard] = guards.float32,
    activation: str = "self",
    condition: str = "all",
    delegated: Kernel = DELEGATE,
    drawing: str = "",
) -> Rule:
    """Return a rule for an operator whose output has the scale of its input; see `_moved` for `kernel`."""
    return Rule(
        name=name,
        drawing=drawing,
        patterns=patterns,
        activations=(activation,),
        shares=True,
        carries=kernel is IDENTITY,
        condition=condition,
        accepts=static(),
        guard=guard,
        kernels={"torch": kernel or _on_integers(name), "executorch": delegated},
    )


def _on_integers(name: str) -> Kernel:
    return Kernel(f"{name} on integers", on_integers)


def _averaged(
    name: str,
    *patterns: OperatorPattern,
    guard: Guard,
    emit: Callable[[Region], Node],
    delegated: Kernel = DELEGATE,
    drawing: str = "",
) -> Rule:
    """Return a rule for a mean, whose values are closer together than its input's and get their own scale."""
    kernel = Kernel(f"qompose_xnnpack.{name}", emit)
    rule = _shared(
        name, *patterns, kernel=kernel, guard=guard, delegated=delegated, drawing=drawing
    )
    return replace(rule, shares=False)


def _moved(
    name: str,
    *patterns: OperatorPattern,
    delegated: Callable[[Region], None] | None = None,
    **facts: Any,
) -> Rule:
    """Return the rule for an operator that only moves values.

    Args:
        delegated: raises `NotLowerable` if XNNPACK does not take the operator, and may rewrite it into the
            form that it takes; None if it never does. A portable kernel moves the integers then.
    """
    kernel = _on_integers(name)
    if delegated is not None:
        kernel = Kernel(DELEGATE.name, delegated, otherwise=kernel)
    return _shared(name, *patterns, delegated=kernel, **facts)


IMAGE = (1, 2, 4, 4)


def _one(target: Any, *literals: Any, shape: tuple[int, ...] = IMAGE) -> OperatorPattern:
    """Return the pattern of an operator on one image, and the literals of its example."""
    return OperatorPattern((target,), lambda self: target(self, *literals), (shape,))


_MAXIMUM = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_WINDOWS = (
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
_CLAMPS = (
    _one(aten.hardtanh.default),
    _one(aten.hardtanh_.default),
    _one(aten.relu6.default),
    _one(aten.clamp.default, -0.5, 0.5),
    _one(aten.clamp_.default, -0.5, 0.5),
    _one(aten.clip.default, -0.5, 0.5),
    _one(aten.clamp_min.default, -0.5),
    _one(aten.clamp_max.default, 0.5),
)
_VIEWS = (
    _one(aten.view.default, [-1]),
    _one(aten.reshape.default, [-1]),
    _one(aten.flatten.using_ints, 1),
)

RULES: tuple[Rule, ...] = (
    *_fusions(),
    _dynamic("linear", PER_CHANNEL),
    _dynamic("linear", GROUPS, name="linear_dynamic_groups"),
    replace(
        _dynamic("linear", PER_CHANNEL, name="linear_dynamic_per_tensor"),
        accepts=dynamic(PER_CHANNEL, dims=None),
        # XNNPACK would quantize each row by itself: see `graph_passes.keep_per_tensor_scales`.
        kernels={
            "torch": _float_kernel(
                "linear_dynamic_per_tensor", in_process.DynamicWeighted("linear")
            )
        },
    ),
    _dynamic("conv2d", PER_CHANNEL, guards.not_depthwise, guards.not_pointwise),
    _dynamic(
        "conv_transpose2d",
        _across(PER_CHANNEL),
        guards.one_group,
        guards.not_depthwise,
        guards.output_padding_below_stride,
    ),
    _WEIGHT_ONLY,
    _binary_relu("add"),
    *map(_binary, BINARY),
    _averaged(
        "adaptive_avg_pool2d",
        _one(aten.adaptive_avg_pool2d.default, [1, 1]),
        guard=guards.to_one_pixel,
        emit=in_process.Pooling("adaptive_avg_pool2d", ("output_size",)),
    ),
    _averaged(
        "avg_pool2d",
        _one(aten.avg_pool2d.default, [4, 4]),
        drawing="avg_pool2d over the image",
        guard=guards.global_average,
        emit=in_process.Pooling("avg_pool2d", _WINDOWS),
        delegated=Kernel(DELEGATE.name, on_executorch.mean_of_window),
    ),
    _averaged(
        "mean",
        _one(aten.mean.dim, [2, 3], True),
        _one(aten.mean.dim, [2, 3]),
        guard=guards.mean_over_image,
        emit=in_process.Pooling("mean", ("dim", "keepdim")),
        delegated=Kernel(DELEGATE.name, on_executorch.mean),
    ),
    _shared(
        "max_pool2d",
        _one(aten.max_pool2d.default, [3, 3], [2, 2], [1, 1]),
        guard=guards.pooling_window,
        kernel=Kernel("qompose_xnnpack.max_pool2d", in_process.Pooling("max_pool2d", _MAXIMUM)),
    ),
    _shared("relu", OperatorPattern((aten.relu.default, aten.relu_.default)), kernel=CLAMP),
    _shared("clamp", *_CLAMPS, kernel=CLAMP, drawing="hardtanh | relu6 | clamp"),
    _moved(
        "cat",
        OperatorPattern((aten.cat.default,)),
        delegated=on_executorch.cat,
        activation="tensors",
        condition="any",
    ),
    _moved("view", *_VIEWS, delegated=on_executorch.view),
    _shared("permute", _one(aten.permute.default, [0, 2, 3, 1]), _one(aten.transpose.int, 1, 2)),
    _moved("slice", _one(aten.slice.Tensor, 1, 0, 1), delegated=on_executorch.slice_of_known_size),
    _shared(
        "copy",
        _one(aten.clone.default),
        _one(aten.contiguous.default),
        _one(aten.detach.default),
        _one(aten.alias.default),
        kernel=IDENTITY,
        drawing="clone | contiguous | detach",
        delegated=IDENTITY,
    ),
    _shared(
        "dropout",
        OperatorPattern(
            (aten.dropout.default,), lambda input: aten.dropout(input, 0.5, False), (IMAGE,)
        ),
        activation="input",
        guard=(guards.float32, guards.not_training),
        kernel=IDENTITY,
        delegated=IDENTITY,
    ),
    _moved("squeeze", _one(aten.squeeze.dim, 2, shape=(1, 2, 1))),
    _moved("unsqueeze", _one(aten.unsqueeze.default, 1)),
    _moved("select", _one(aten.select.int, 1, 0)),
    _moved("expand", _one(aten.expand.default, [3, 2, 4, 4])),
)
