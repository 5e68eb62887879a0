# SPDX-License-Identifier: Apache-2.0
"""The rule table of the XNNPACK backend, longest fusion first, operators that only move values last."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from qompose import Kernel, Match, OperatorPattern, Region, Rule, TensorConstraint, on_integers
from torch.fx import Node

from qompose_xnnpack.integer import MAX_DEPTH
from qompose_xnnpack.kernels import Pairwise, Reduction, Weighted, relu, view
from qompose_xnnpack.patterns import pairwise_relu, weighted

aten = torch.ops.aten

# ExecuTorch's serializer drops narrower bounds of activations without a word: they are refused here.
INT8 = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_tensor_affine}),
    quant_range=(-128, 127),
)
ACCEPTS = {
    "activation": INT8,
    "output": INT8,
    "weight": TensorConstraint(
        dtypes=frozenset({torch.int8}),
        qschemes=frozenset({torch.per_channel_symmetric, torch.per_tensor_symmetric}),
        ch_axis=0,
        quant_min_lower_bound=-127,
    ),
}

DELEGATE = Kernel("XNNPACK delegate")
"""On ExecuTorch a region stays as it is: the partitioner recognises it between its Q/DQ operators."""


def _kernels(emit: Callable[[Region], Node], name: str) -> dict[str, Kernel]:
    return {"torch": Kernel(f"qompose_xnnpack.{name}", emit), "executorch": DELEGATE}


def _float32(match: Match) -> str | None:
    dtype = match.output.meta["val"].dtype
    return (
        None
        if dtype is torch.float32
        else f"XNNPACK's int8 operators stand for float32, not {dtype}"
    )


def _rank(name: str, rank: int) -> Callable[[Match], str | None]:
    def guard(match: Match) -> str | None:
        node = match.node(name)
        actual = node.meta["val"].dim() if node is not None else 0
        wrong = f"{name} has {actual} dimensions, and the kernel takes {rank}"
        return _float32(match) or (None if actual == rank else wrong)

    return guard


def _unscaled(match: Match) -> str | None:
    """XNNPACK adds without `alpha`."""
    sums = [node for node in match.nodes if "alpha" in node.kwargs]
    scaled = [node for node in sums if node.kwargs["alpha"] != 1]
    return "the summand is scaled by alpha" if scaled else _float32(match)


def _mean_over_image(match: Match) -> str | None:
    """XNNPACK averages over height and width of an image, and keeps the dimensions."""
    wrong_rank = _rank("self", 4)(match)
    dims: Any = match.captures.get("dim")
    if wrong_rank or not isinstance(dims, (list, tuple)):
        return wrong_rank or "the mean is over everything"
    if {dim % 4 for dim in dims} != {2, 3} or not match.captures.get("keepdim"):
        return "only means over height and width that keep the dimensions run in int8"
    return None


def _to_one(match: Match) -> str | None:
    """ExecuTorch turns an adaptive pooling into a mean only where one value is left per channel."""
    size: Any = match.captures.get("output_size")
    return _rank("self", 4)(match) or (
        None if list(size) in ([1], [1, 1]) else f"adaptive pooling to {size} has no int8 form"
    )


def _shallow(match: Match) -> str | None:
    """More products than this may overflow the 32 bits in which they are added."""
    weight = match.node("weight")
    depth = math.prod(weight.meta["val"].shape[1:]) if weight is not None else 0
    if depth <= MAX_DEPTH:
        return None
    return f"a sum of {depth} products may overflow int32; at most {MAX_DEPTH} are safe"


def _weighted(operator: str, *, relu: bool, guard: Callable[[Match], str | None]) -> Rule:
    return Rule(
        name=f"{operator}_relu" if relu else operator,
        drawing=f"{operator} -> relu" if relu else operator,
        patterns=weighted(operator, relu=relu),
        anchor="op",
        weight="weight",
        bias="bias",
        channels=(-1, -1) if operator == "linear" else (1, 1),
        accepts=ACCEPTS,
        guard=lambda match: _shallow(match) or guard(match),
        kernels=_kernels(Weighted(operator, relu=relu), operator),
    )


def _pairwise_relu(operator: str) -> Rule:
    return Rule(
        name=f"{operator}_relu",
        drawing=f"{operator} -> relu",
        patterns=pairwise_relu(operator),
        anchor="op",
        activations=("self", "other"),
        condition="no_float",
        accepts=ACCEPTS,
        guard=_unscaled,
        kernels=_kernels(Pairwise(operator, relu=True), operator),
    )


def _pairwise(operator: str, *targets: Any) -> Rule:
    return Rule(
        name=operator,
        patterns=(OperatorPattern(targets),),
        activations=("self", "other"),
        condition="no_float",
        accepts=ACCEPTS,
        guard=_unscaled,
        kernels=_kernels(Pairwise(operator, relu=False), operator),
    )


def _shared(
    name: str,
    *targets: Any,
    emit: Callable[[Region], Node] = on_integers,
    guard: Callable[[Match], str | None] = _float32,
    activation: str = "self",
    condition: str = "all",
    delegated: Kernel = DELEGATE,
) -> Rule:
    """Return a rule for an operator whose output has the scale of its input."""
    kernel = name if emit is not on_integers else f"{name} on integers"
    return Rule(
        name=name,
        patterns=(OperatorPattern(targets),),
        activations=(activation,),
        shares=True,
        condition=condition,
        accepts=ACCEPTS,
        guard=guard,
        kernels={**_kernels(emit, kernel), "executorch": delegated},
    )


_MAXIMUM = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

RULES: tuple[Rule, ...] = (
    _weighted("linear", relu=True, guard=_float32),
    _weighted("conv2d", relu=True, guard=_rank("input", 4)),
    _weighted("conv1d", relu=True, guard=_rank("input", 3)),
    _weighted("linear", relu=False, guard=_float32),
    _weighted("conv2d", relu=False, guard=_rank("input", 4)),
    _weighted("conv1d", relu=False, guard=_rank("input", 3)),
    _pairwise_relu("add"),
    _pairwise("add", aten.add.Tensor, aten.add_.Tensor),
    _pairwise("mul", aten.mul.Tensor, aten.mul_.Tensor),
    _shared(
        "adaptive_avg_pool2d",
        aten.adaptive_avg_pool2d.default,
        guard=_to_one,
        emit=Reduction("adaptive_avg_pool2d", ("output_size",)),
    ),
    _shared(
        "mean", aten.mean.dim, guard=_mean_over_image, emit=Reduction("mean", ("dim", "keepdim"))
    ),
    _shared(
        "max_pool2d",
        aten.max_pool2d.default,
        guard=_rank("self", 4),
        emit=Reduction("max_pool2d", _MAXIMUM),
    ),
    _shared("relu", aten.relu.default, aten.relu_.default, emit=relu),
    _shared("cat", aten.cat.default, activation="tensors", condition="any"),
    _shared(
        "view",
        aten.view.default,
        aten.reshape.default,
        aten.flatten.using_ints,
        delegated=Kernel("view on integers", view),
    ),
    _shared("permute", aten.permute.default, aten.transpose.int),
    _shared("squeeze", aten.squeeze.dim),
    _shared("slice", aten.slice.Tensor),
)
