# SPDX-License-Identifier: Apache-2.0
"""The rule table of the XNNPACK backend, longest fusion first, operators that only move values last."""

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

from qompose_xnnpack import executorch_kernels as portable, guards
from qompose_xnnpack.accepted import GROUPS, PER_CHANNEL, PER_TENSOR, WEIGHT, at_run_time, static
from qompose_xnnpack.kernels import Pairwise, Reduction, Weighted, clamp, unmoved
from qompose_xnnpack.patterns import PAIRWISE, WEIGHTED, pairwise, weighted
from qompose_xnnpack.run_time_kernels import Dynamic, as_runtime_reads, weight_only

aten = torch.ops.aten

DELEGATE = Kernel("XNNPACK delegate")
"""On ExecuTorch a region stays as it is: the partitioner recognises it between its Q/DQ operators."""

CLAMP = Kernel("clamp on integers", clamp)
UNMOVED = Kernel("no operator", unmoved)

_OUTPUT_CHANNELS_SECOND = {"weight": {"ch_axis": 1}}
_BY_IMAGE = {"activation": {"block_size": (-1, -1, -1)}}


def _kernels(emit: Callable[[Region], Node], name: str) -> dict[str, Kernel]:
    return {"torch": Kernel(f"qompose_xnnpack.{name}", emit), "executorch": DELEGATE}


def _ranked(operator: str) -> Guard:
    dims = len(WEIGHTED[operator][1][0])
    return guards.float32 if operator == "linear" else guards.rank("input", dims)


def _weighted(operator: str, *, activation: str | None, padded: bool = False) -> Rule:
    """Return the rule of a static linear or convolution, fused with what stands around it."""
    transposed = "transpose" in operator
    extra = [guards.zeros_around_image] if padded else []
    extra += [guards.ungrouped, guards.padding_below_stride] if transposed else []
    delegated = Kernel(DELEGATE.name, portable.padded) if padded else DELEGATE
    around = ("pad",) * padded, (activation,) if activation else ()
    # A transposed weight has its channels the other way round; bounds would have to grow with channels.
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
        guard=(guards.shallow, _ranked(operator), *extra),
        kernels={**_kernels(Weighted(operator), operator), "executorch": delegated},
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
        guard=(guards.shallow, _ranked(operator), guards.grouped, guards.padding_below_stride),
        kernels=_kernels(Weighted(operator), operator),
    )


def _across(weight: TensorConstraint) -> TensorConstraint:
    return replace(weight, ch_axis=1)


def _fusions() -> Iterator[Rule]:
    """Yield the static linears and convolutions: with padding first, then with what stands behind them."""
    operators = tuple(WEIGHTED)
    for activation, operator in product(("relu", "hardtanh", None), ("conv2d", "conv1d")):
        yield _weighted(operator, activation=activation, padded=True)
    for activation, operator in product(("relu", "hardtanh", None), operators):
        yield _weighted(operator, activation=activation)
        if "transpose" in operator:
            yield _grouped_transposed(operator, activation)


def _run_time_kernel(name: str, emit: Callable[[Region], Node]) -> Kernel:
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
        accepts=at_run_time(weight, dims=3 if image else 1),
        guard=(guards.shallow, _ranked(operator), *extra),
        kernels={
            "torch": _run_time_kernel(f"{operator}_dynamic", Dynamic(operator)),
            "executorch": Kernel(
                DELEGATE.name, as_runtime_reads if image else None, float_output=True
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
        "torch": Kernel("qompose_xnnpack.linear_weight_only", weight_only, True, True),
        "executorch": Kernel("ExecuTorch's mixed_linear", portable.mixed_linear, True, True),
    },
)


def _pairwise_relu(operator: str) -> Rule:
    return Rule(
        name=f"{operator}_relu",
        drawing=f"{operator} -> relu",
        patterns=pairwise(operator, activation="relu"),
        anchor="op",
        activations=("self", "other"),
        condition="no_float",
        accepts=static(),
        guard=(guards.unscaled, guards.with_dimensions),
        kernels=_kernels(Pairwise(operator), operator),
    )


def _pairwise(operator: str) -> Rule:
    return Rule(
        name=operator,
        patterns=(OperatorPattern(tuple(target for _, target in PAIRWISE[operator])),),
        activations=("self", "other"),
        condition="no_float",
        accepts=static(),
        guard=(guards.unscaled, guards.with_dimensions),
        kernels=_kernels(Pairwise(operator), operator),
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
        carries=kernel is UNMOVED,
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
    """Return a rule for a mean: its values are closer together than its input's, so it has a scale."""
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
        delegated: raises `NotLowerable` where XNNPACK does not take the operator, and may write it in the
            form in which it does; None: it never does. What it does not take moves integers elsewhere.
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
        accepts=at_run_time(PER_CHANNEL, dims=None),
        # XNNPACK would quantize each row by itself: see `finishing.keep_one_scale`.
        kernels={"torch": _run_time_kernel("linear_dynamic_per_tensor", Dynamic("linear"))},
    ),
    _dynamic("conv2d", PER_CHANNEL, guards.not_depthwise, guards.not_pointwise),
    _dynamic(
        "conv_transpose2d",
        _across(PER_CHANNEL),
        guards.ungrouped,
        guards.not_depthwise,
        guards.padding_below_stride,
    ),
    _WEIGHT_ONLY,
    _pairwise_relu("add"),
    *map(_pairwise, PAIRWISE),
    _averaged(
        "adaptive_avg_pool2d",
        _one(aten.adaptive_avg_pool2d.default, [1, 1]),
        guard=guards.to_one,
        emit=Reduction("adaptive_avg_pool2d", ("output_size",)),
    ),
    _averaged(
        "avg_pool2d",
        _one(aten.avg_pool2d.default, [4, 4]),
        drawing="avg_pool2d over the image",
        guard=guards.over_whole_image,
        emit=Reduction("avg_pool2d", _WINDOWS),
        delegated=Kernel(DELEGATE.name, portable.mean_of_window),
    ),
    _averaged(
        "mean",
        _one(aten.mean.dim, [2, 3], True),
        _one(aten.mean.dim, [2, 3]),
        guard=guards.mean_over_image,
        emit=Reduction("mean", ("dim", "keepdim")),
        delegated=Kernel(DELEGATE.name, portable.mean),
    ),
    _shared(
        "max_pool2d",
        _one(aten.max_pool2d.default, [3, 3], [2, 2], [1, 1]),
        guard=guards.window,
        kernel=Kernel("qompose_xnnpack.max_pool2d", Reduction("max_pool2d", _MAXIMUM)),
    ),
    _shared("relu", OperatorPattern((aten.relu.default, aten.relu_.default)), kernel=CLAMP),
    _shared("clamp", *_CLAMPS, kernel=CLAMP, drawing="hardtanh | relu6 | clamp"),
    _moved(
        "cat",
        OperatorPattern((aten.cat.default,)),
        delegated=portable.cat,
        activation="tensors",
        condition="any",
    ),
    _moved("view", *_VIEWS, delegated=portable.view),
    _shared("permute", _one(aten.permute.default, [0, 2, 3, 1]), _one(aten.transpose.int, 1, 2)),
    _moved("slice", _one(aten.slice.Tensor, 1, 0, 1), delegated=portable.slice_of_known_size),
    _shared(
        "copy",
        _one(aten.clone.default),
        _one(aten.contiguous.default),
        _one(aten.detach.default),
        _one(aten.alias.default),
        kernel=UNMOVED,
        drawing="clone | contiguous | detach",
        delegated=UNMOVED,
    ),
    _shared(
        "dropout",
        OperatorPattern(
            (aten.dropout.default,), lambda input: aten.dropout(input, 0.5, False), (IMAGE,)
        ),
        activation="input",
        guard=(guards.float32, guards.not_training),
        kernel=UNMOVED,
        delegated=UNMOVED,
    ),
    _moved("squeeze", _one(aten.squeeze.dim, 2, shape=(1, 2, 1))),
    _moved("unsqueeze", _one(aten.unsqueeze.default, 1)),
    _moved("select", _one(aten.select.int, 1, 0)),
    _moved("expand", _one(aten.expand.default, [3, 2, 4, 4])),
)
