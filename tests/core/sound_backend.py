# SPDX-License-Identifier: Apache-2.0
"""A small backend that keeps the whole contract. Its kernels can be told to go wrong in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from qompose.backend import (
    Kernel,
    Match,
    OperatorPattern,
    Pattern,
    QuantizedTensor,
    Region,
    Rule,
    TensorConstraint,
    on_integers,
)
from torch import Tensor
from torch.fx import Node

from tests.core.toy import ToyBackend

aten = torch.ops.aten

ACTIVATION = TensorConstraint(
    dtypes=frozenset({torch.int8}), qschemes=frozenset({torch.per_tensor_affine})
)
ACCEPTS = {
    "activation": ACTIVATION,
    "output": ACTIVATION,
    "weight": TensorConstraint(
        dtypes=frozenset({torch.int8}),
        qschemes=frozenset({torch.per_channel_symmetric, torch.per_tensor_symmetric}),
        ch_axis=0,
    ),
}

FAULTS = (
    "", "two steps", "no zero point", "saturates", "writes", "writes weight", "float64", "counts",
    "no relu", "one in a batch", "rank", "strides", "few bits", "truncates", "rounds down",
    "one step up", "fake dtype", "fake strides",
)  # fmt: skip
"""What the kernel does wrong, by its number."""

_calls = iter(range(10**9))


@torch.library.custom_op("qompose_sound::linear", mutates_args=())
def sound_linear(
    x: Tensor, scale: Tensor | None, zero_point: Tensor | None, weight: Tensor, scales: Tensor,
    bias: Tensor | None, relu: bool, out_scale: float, out_zero_point: int, low: int, high: int,
    fault: int,
) -> Tensor:  # fmt: skip
    """The product, exactly; float32 where `low == high`, else int8."""
    wrong = FAULTS[fault]
    if wrong == "strides":
        x = x.as_strided(x.shape, torch.empty(x.shape).stride())
    real = x.double()
    if scale is not None and zero_point is not None:
        real = real - (0 if _forgets_zero_point(wrong, x) else zero_point)
    sums = F.linear(real, weight.double())
    if wrong == "saturates":
        sums = sums.clamp(-(2**15), 2**15 - 1)
    if wrong == "few bits":
        sums = sums.clamp(-(2**19), 2**19 - 1)
    y = sums * scales.double() * (1.0 if scale is None else scale.double())
    y = y if bias is None else y + bias
    y = y.clamp(min=0) if relu and wrong != "no relu" else y
    if wrong.startswith("writes"):
        (x if wrong == "writes" else weight).add_(1)
    if low == high:
        return y if wrong == "float64" else y.float()
    to_integers = {"truncates": torch.trunc, "rounds down": torch.floor}.get(wrong, torch.round)
    steps = to_integers(y / out_scale) + out_zero_point
    steps += {"two steps": 2, "one step up": 1}.get(wrong, 0)
    if wrong == "counts":
        steps.view(-1)[0] += next(_calls) % 2
    if wrong == "fake strides":
        steps = steps.t().contiguous().t() if steps.dim() == 2 else steps
    return steps.clamp(low, high).to(torch.int8)


def _forgets_zero_point(wrong: str, x: Tensor) -> bool:
    return (
        wrong == "no zero point"
        or (wrong == "one in a batch" and len(x) == 1)
        or (wrong == "rank" and x.dim() > 2)
    )


@sound_linear.register_fake
def _(x, scale, zero_point, weight, scales, bias, relu, out_scale, zp, low, high, fault) -> Tensor:  # type: ignore[no-untyped-def]
    kind = torch.float32 if low == high or FAULTS[fault] == "fake dtype" else torch.int8
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=kind)


class Linear:
    """Emits the product, with a relu behind it or nothing."""

    def __init__(self, *, relu: bool, fault: str = "") -> None:
        self.relu, self.fault = relu, FAULTS.index(fault)

    def __call__(self, region: Region) -> Node:
        (source,), weight = region.inputs("input"), region.quantized("weight")
        scale, zero_point = None, None
        if region.claim.mode != "weight-only":
            x = region.quantized("input")
            source, scale, zero_point = x.node, *_as_nodes(region, x)
        out = region.output
        result = (1.0, 0, 0, 0) if out is None else (out.scale, out.zero_point, out.low, out.high)
        return region.call(
            torch.ops.qompose_sound.linear.default,
            source, scale, zero_point, weight.node, region.constant("scales", weight.scales),
            region.argument("op", "bias"), self.relu, *result, self.fault,
            dtype=None if out is None else out.dtype,
        )  # fmt: skip


def _as_nodes(region: Region, x: QuantizedTensor) -> tuple[Node, Node]:
    if isinstance(x.scale, Node):
        return x.scale, x.zero_point
    scale = torch.tensor(x.scale, dtype=torch.float64)
    return region.constant("scale", scale), region.constant(
        "zero_point", torch.tensor(x.zero_point)
    )


def float32(match: Match) -> str | None:
    dtype = match.output.meta["val"].dtype
    return None if dtype is torch.float32 else f"the kernel gives float32, not {dtype}"


def linears(act: Callable[[Tensor], Tensor], *operators: tuple[str, Any]) -> tuple[Pattern, ...]:
    named = (("op", aten.linear.default), *operators)
    return (
        Pattern(lambda input, weight: act(F.linear(input, weight)), ((2, 3), (4, 3)), named),
        Pattern(
            lambda input, weight, bias: act(F.linear(input, weight, bias)),
            ((2, 3), (4, 3), (4,)),
            named,
        ),
    )


def weighted(name: str, *, relu: bool, fault: str = "", **facts: Any) -> Rule:
    act = (lambda x: x.relu()) if relu else (lambda x: x)
    known = {
        "patterns": linears(act, *([("act", aten.relu.default)] if relu else [])), "anchor": "op",
        "weight": "weight", "bias": "bias", "modes": frozenset({"static", "dynamic", "weight-only"}),
        "accepts": ACCEPTS, "guard": float32,
        "kernels": {"torch": Kernel("sound.linear", Linear(relu=relu, fault=fault))},
    }  # fmt: skip
    return Rule(name=name, **{**known, **facts})


def moving(name: str, *patterns: OperatorPattern, **facts: Any) -> Rule:
    known = {
        "patterns": patterns, "activations": ("self",), "shares": True, "condition": "all",
        "accepts": {"activation": ACTIVATION}, "kernels": {"torch": Kernel("moves integers", on_integers)},
    }  # fmt: skip
    return Rule(name=name, **{**known, **facts})


FLIP = OperatorPattern((aten.flip.default,), lambda self: self.flip([1]), ((2, 3),))
LINEAR_RELU = weighted("linear_relu", relu=True)
LINEAR = weighted("linear", relu=False)
MOVES = moving("flip", FLIP)
RULES = (LINEAR_RELU, LINEAR, MOVES)


class SoundBackend(ToyBackend):
    """The backend of some rules."""

    def __init__(self, rules: Iterable[Rule] = RULES, **facts: Any) -> None:
        super().__init__(rules, **{"name": "sound", **facts})
