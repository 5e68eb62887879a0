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
from qompose_xnnpack.kernels import Pairwise, Reduction, Weighted, relu
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


def _known_size(match: Match) -> str | None:
    unknown = "its size is known only at run time, and XNNPACK takes no such view"
    return unknown if _varies(match) else _float32(match)


def _size_known_later(match: Match) -> str | None:
    return _float32(match) if _varies(match) else "its size is known: see rule view"


def _varies(match: Match) -> bool:
    return any(isinstance(size, torch.SymInt) for size in match.output.meta["val"].shape)


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
    *patterns: OperatorPattern,
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
        patterns=patterns,
        activations=(activation,),
        shares=True,
        condition=condition,
        accepts=ACCEPTS,
        guard=guard,
        kernels={**_kernels(emit, kernel), "executorch": delegated},
    )


def _one(target: Any, *literals: Any) -> OperatorPattern:
    """Return the pattern of an operator on one image, and the literals of its example."""
    return OperatorPattern((target,), lambda self: target(self, *literals), (IMAGE,))


IMAGE = (1, 2, 4, 4)
VIEWS = (
    _one(aten.view.default, [-1]),
    _one(aten.reshape.default, [-1]),
    _one(aten.flatten.using_ints, 1),
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
        _one(aten.adaptive_avg_pool2d.default, [1, 1]),
        guard=_to_one,
        emit=Reduction("adaptive_avg_pool2d", ("output_size",)),
    ),
    _shared(
        "mean",
        _one(aten.mean.dim, [2, 3], True),
        guard=_mean_over_image,
        emit=Reduction("mean", ("dim", "keepdim")),
    ),
    _shared(
        "max_pool2d",
        _one(aten.max_pool2d.default, [3, 3], [2, 2], [1, 1]),
        guard=_rank("self", 4),
        emit=Reduction("max_pool2d", _MAXIMUM),
    ),
    _shared("relu", OperatorPattern((aten.relu.default, aten.relu_.default)), emit=relu),
    _shared(
        "cat",
        OperatorPattern((aten.cat.default,)),
        activation="tensors",
        condition="any",
    ),
    _shared("view", *VIEWS, guard=_known_size),
    _shared(
        "view_any_batch",
        *VIEWS,
        guard=_size_known_later,
        delegated=Kernel("view on integers", on_integers),
    ),
    _shared("permute", _one(aten.permute.default, [0, 2, 3, 1]), _one(aten.transpose.int, 1, 2)),
    _shared(
        "squeeze",
        OperatorPattern((aten.squeeze.dim,), lambda self: self.squeeze(2), ((1, 2, 1),)),
        delegated=Kernel("squeeze on integers", on_integers),
    ),
    _shared("slice", _one(aten.slice.Tensor, 1, 0, 1)),
)
