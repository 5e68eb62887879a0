# SPDX-License-Identifier: Apache-2.0
"""Backends that are wrong in one way each, and the checks of the contract that must say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from qompose import QuantizationConfig, RuleQuantizer
from qompose.backend import Backend, Kernel, NotLowerable, OperatorPattern, Region, Rule
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.core.private_backend import PrivateBackend
from tests.core.sound_backend import (
    ACCEPTS,
    FLIP,
    INT8,
    LINEAR,
    LINEAR_RELU,
    MOVES,
    RULES,
    STATIC,
    Linear,
    SoundBackend,
    moving,
    weighted,
)
from tests.core.sound_products import conv, matmul

aten = torch.ops.aten


@dataclass(frozen=True)
class Wrong:
    """A backend, the tests that fail for it, and words of every message."""

    make: Callable[[], Backend]
    failing: tuple[str, ...]
    message: str


def linear(fault: str = "", **facts: Any) -> Callable[[], Backend]:
    """Return a backend of one linear rule, for static quantization alone unless told otherwise."""
    facts = {"modes": frozenset({"static"}), **facts}
    return lambda: SoundBackend([weighted("linear", relu=False, fault=fault, **facts)], configs=ONE)


def emitting(emit: Callable[[Region], Node | None]) -> dict[str, Kernel]:
    return {"torch": Kernel("sound.linear", emit)}


def refuse(region: Region) -> Node:
    raise NotLowerable("not today")


def crash(*args: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def in_float(region: Region) -> Node:
    """Call the float operator on what the dequantize operators give."""
    node = region.output_node
    output = region.call(node.target, *node.args)  # type: ignore[arg-type]
    out = region.output
    assert out is not None
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    arguments = (out.scale, out.zero_point, out.low, out.high, out.dtype)
    return region.call(quantize, output, *arguments, dtype=out.dtype)


def again_in_float(region: Region) -> Node:
    """Make floats of the integers, and call the float operator on those."""
    x, weight, out = region.quantized("input"), region.quantized("weight"), region.output
    assert out is not None
    floats = region.call(aten.to.dtype, x.node, torch.float32, dtype=torch.float32)
    centred = region.call(aten.sub.Tensor, floats, x.zero_point, dtype=torch.float32)
    real = region.call(aten.mul.Tensor, centred, x.scale, dtype=torch.float32)
    table = region.constant("floats", weight.tensor.float() * weight.scales[:, None])
    bias = region.argument("op", "bias")
    output = region.call(aten.linear.default, real, table, bias, dtype=torch.float32)
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    arguments = (out.scale, out.zero_point, out.low, out.high, out.dtype)
    return region.call(quantize, output, *arguments, dtype=out.dtype)


def for_one_batch(region: Region) -> Node:
    """Cut the output to the batch that the example has, 8 where that varies."""
    size = region.output_node.meta["val"].shape[0]
    node = Linear(relu=False)(region)
    rows = size if isinstance(size, int) else 8
    return region.call(aten.slice.Tensor, node, 0, 0, rows, dtype=torch.int8)


def noisily(region: Region) -> Node:
    print("lowering a linear")
    return Linear(relu=False)(region)


def deterministically(region: Region) -> Node:
    torch.use_deterministic_algorithms(True)
    return Linear(relu=False)(region)


@torch.library.custom_op("qompose_sound::wrong_fake", mutates_args=())
def wrong_fake(x: Tensor) -> Tensor:
    """Copy a tensor; the fake has a dimension more."""
    return x.clone()


@wrong_fake.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((1, *x.shape))


def with_wrong_fake(region: Region) -> Node:
    node = Linear(relu=False)(region)
    return region.call(torch.ops.qompose_sound.wrong_fake.default, node, dtype=torch.int8)


def requantizing(region: Region) -> Node:
    """Flip from one scale to another."""
    x, out = region.quantized("self"), region.output
    assert out is not None
    dims = region.argument("output", "dims")
    flipped = region.call(aten.flip.default, x.node, dims, dtype=torch.int8)
    floats = region.call(aten.to.dtype, flipped, torch.float32, dtype=torch.float32)
    centred = region.call(aten.sub.Tensor, floats, x.zero_point, dtype=torch.float32)
    real = region.call(aten.mul.Tensor, centred, x.scale, dtype=torch.float32)
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    arguments = (out.scale, out.zero_point, out.low, out.high, out.dtype)
    return region.call(quantize, real, *arguments, dtype=out.dtype)


OWN = replace(INT8, quant_min=-127)


class Unsharing(RuleQuantizer):
    """Gives outputs a scale of their own."""

    def propose(self, model: GraphModule, taken: Sequence[Any], on_conflict: str = "error") -> Any:
        proposal = super().propose(model, taken, on_conflict)
        proposal.claims = [
            replace(
                claim,
                specs=tuple(
                    s if not s.shared else replace(s, spec=OWN, references=()) for s in claim.specs
                ),
            )
            for claim in proposal.claims
        ]
        return proposal


ONE = {"static": STATIC}
ANY_INT = frozenset({torch.int8, torch.uint8, torch.int16})
WIDE = {**ACCEPTS, "output": replace(ACCEPTS["output"], dtypes=ANY_INT)}
NO_WEIGHT = {role: ACCEPTS[role] for role in ("activation", "output")}
FEW_STEPS = replace(INT8, quant_min=-2, quant_max=1)
UINT4 = QuantizationConfig(
    replace(INT8, dtype=torch.uint8, quant_min=0, quant_max=15), None, None, name="uint4"
)


class Lax(Rule):
    """Takes whatever it is given."""

    def objection(self, config: QuantizationConfig) -> str | None:
        return None


class Silent(Rule):
    """Refuses without a word."""

    def objection(self, config: QuantizationConfig) -> str | None:
        return "" if super().objection(config) else None


class FirstOnly(RuleQuantizer):
    """Knows of no other quantizer."""

    def propose(self, model: GraphModule, taken: Sequence[Any], on_conflict: str = "error") -> Any:
        if any(claim.rule == "linear" for claim in taken):
            crash()
        return super().propose(model, taken, on_conflict)


class Stubborn(RuleQuantizer):
    """Leaves nothing in float that has a name."""

    def set_module_name(self, module_name: str, config: QuantizationConfig | None) -> Any:
        return self if config is None else super().set_module_name(module_name, config)


def quantizer(kind: type[RuleQuantizer], rule: Rule = LINEAR) -> Callable[[], Backend]:
    rule = replace(rule, modes=frozenset({"static"}))
    backend = SoundBackend([rule], configs=ONE)
    return lambda: SoundBackend([rule], configs=ONE, quantizer_class=lambda: kind(backend))


def as_rule(kind: type[Rule]) -> Callable[[], Backend]:
    facts = {**vars(LINEAR), "modes": frozenset({"static"})}
    return lambda: SoundBackend([kind(**facts)], configs=ONE)


def sound(*rules: Rule, **facts: Any) -> Callable[[], Backend]:
    """Return a backend of rules, in the modes of its configurations."""
    if "configs" in facts:
        rules = tuple(replace(rule, modes=rule.modes & {"static"}) for rule in rules or RULES)
    return lambda: SoundBackend(rules or RULES, **facts)


def static(*rules: Rule) -> Callable[[], Backend]:
    return sound(*rules, configs=ONE)


NEEDS_LITERAL = moving("flip", OperatorPattern((aten.flip.default,)))
ANOTHER_OPERATOR = moving(
    "flip", OperatorPattern((aten.flip.default,), lambda self: self.permute(1, 0), ((2, 3),))
)
NEVER = moving("flip", FLIP, guard=lambda match: "not on a weekday")
UNKNOWN_TARGET = {"torch": LINEAR.kernels["torch"], "moon": Kernel("lunar linear")}


def with_relu(fault: str) -> Callable[[], Backend]:
    return static(weighted("linear_relu", relu=True, fault=fault))


SHAPES, LITERALS = ("test_takes_other_shapes",), ("test_takes_other_literals",)
REFERENCE, FOR_INTEGERS = ("test_matches_reference",), ("test_matches_reference_for_integers",)
UNDECLARED = weighted("linear", relu=False, bias=None, kernels=emitting(for_one_batch))

WRONG = {
    "two inputs swapped": Wrong(static(matmul("swapped")), REFERENCE, "see zero points"),
    "one input's parameters for both": Wrong(
        static(matmul("first for both")), REFERENCE, "see zero points"
    ),
    "no relu": Wrong(with_relu("no relu"), FOR_INTEGERS, "see zero points"),
    "wrong for one": Wrong(linear("one in a batch"), SHAPES, "a batch of 1"),
    "wrong for a batch of matrices": Wrong(linear("rank"), SHAPES, "a dimension more"),
    "sums of few bits": Wrong(linear("few bits"), SHAPES, "sums of 4096 products"),
    "blind to strides": Wrong(linear("strides"), REFERENCE, "not contiguous in memory"),
    "truncation": Wrong(linear("truncates"), REFERENCE, "do not truncate"),
    "rounding down": Wrong(linear("rounds down"), REFERENCE, "values are off by a step, -0."),
    "one step up": Wrong(linear("one step up"), REFERENCE, "+1.00 steps on average"),
    "a fake of another dtype": Wrong(
        linear("fake dtype"), ("test_behaves",), "torch.float32, shape"
    ),
    "a fake of other strides": Wrong(linear("fake strides"), ("test_behaves",), "strides ["),
    "integers made floats again": Wrong(
        linear(kernels=emitting(again_in_float)), ("test_lowers",), "aten.linear"
    ),
    "padding with the integer zero": Wrong(static(conv("pads zero")), LITERALS, "padding=[1]"),
    "no stride": Wrong(static(conv("stride")), LITERALS, "stride=[2]"),
    "no dilation": Wrong(static(conv("dilation")), LITERALS, "dilation=[2]"),
    "no groups": Wrong(static(conv("groups")), LITERALS, "groups=2"),
    "a mode that no config has": Wrong(
        lambda: SoundBackend([LINEAR], configs=ONE), ("test_has_configs",), "dynamic, weight-only"
    ),
    "no quantizer": Wrong(
        sound(LINEAR, configs=ONE, quantizer_class=int), ("test_loads",), "it makes 0"
    ),
    "no example": Wrong(
        static(NEEDS_LITERAL), ("test_annotates",), "flip needs dims besides tensors"
    ),
    "an example of something else": Wrong(
        static(ANOTHER_OPERATOR), ("test_annotates",), "it calls aten.permute"
    ),
    "a guard that refuses its own example": Wrong(
        static(NEVER), ("test_annotates",), "not on a weekday"
    ),
    "a guard that raises": Wrong(
        static(moving("flip", FLIP, guard=crash)), ("test_annotates",), "ZeroDivisionError"
    ),
    "a shadowed rule": Wrong(
        static(LINEAR, LINEAR_RELU), ("test_annotates",), "put 'linear_relu' before 'linear'"
    ),
    "few steps": Wrong(
        sound(LINEAR, configs={"static": replace(STATIC, input_activation=FEW_STEPS)}),
        ("test_converts",),
        "min_sqnr",
    ),
    "never emitted": Wrong(linear(kernels=emitting(refuse)), ("test_lowers",), "not today"),
    "an emit that crashes": Wrong(
        linear(kernels=emitting(crash)), ("test_lowers",), "ZeroDivisionError"
    ),
    "an emit that computes in float": Wrong(
        linear(kernels=emitting(in_float)), ("test_lowers",), "aten.linear"
    ),
    "off by two steps": Wrong(linear("two steps"), ("test_matches_reference",), "up to 2 steps"),
    "no zero point": Wrong(linear("no zero point"), ("test_matches_reference",), "see zero points"),
    "saturating sums": Wrong(
        linear("saturates"), ("test_matches_reference",), "saturation of sums"
    ),
    "another dtype": Wrong(
        lambda: SoundBackend([weighted("linear", relu=False, fault="float64")]),
        ("test_matches_reference",),
        "torch.float64, and the reference is torch.float32",
    ),
    "counting calls": Wrong(linear("counts"), ("test_behaves",), "the same outputs each time"),
    "writing to weights": Wrong(
        linear("writes weight"), ("test_keeps_parameters",), "other values in row.own_weight"
    ),
    "writing to inputs": Wrong(
        linear("writes"), ("test_leaves_inputs_alone",), "integers that the kernel read"
    ),
    "a wrong fake": Wrong(
        linear(kernels=emitting(with_wrong_fake)), ("test_behaves",), "fake tensors"
    ),
    "one size of batch": Wrong(
        linear(kernels=emitting(for_one_batch)), ("test_takes_any_batch",), "a batch of"
    ),
    "sharing that is none": Wrong(
        quantizer(Unsharing, moving("flip", FLIP, kernels=emitting(requantizing))),
        ("test_shares",),
        "2 groups",
    ),
    "accepts too wide": Wrong(linear(accepts=WIDE), ("test_accepts",), "narrow accepts['output']"),
    "a missing constraint": Wrong(
        linear(accepts=NO_WEIGHT), ("test_accepts",), "narrow accepts['weight']"
    ),
    "constraints ignored": Wrong(as_rule(Lax), ("test_accepts", "test_refuses"), ""),
    "a refusal without reason": Wrong(
        as_rule(Silent), ("test_refuses",), "the reason of a refusal as text"
    ),
    "no guard for half precision": Wrong(
        sound(weighted("linear", relu=False, guard=None)),
        ("test_half_precision",),
        "outputs of torch.",
    ),
    "a target that nobody brings": Wrong(
        linear(kernels=UNKNOWN_TARGET), ("test_is_listed",), "kernels for moon, torch"
    ),
    "no kernel": Wrong(linear(kernels={}), ("test_is_listed",), "kernels for no target"),
    "a version of the future": Wrong(
        sound(LINEAR, configs=ONE, api_version=99), ("test_loads",), "api_version = 99"
    ),
    "no name": Wrong(
        sound(LINEAR, configs=ONE, name=""), ("test_loads",), "set the attribute `name`"
    ),
    "an availability that is no text": Wrong(
        sound(LINEAR, configs=ONE, availability=lambda: False), ("test_says_availability",), "False"
    ),
    "two rules of one name": Wrong(
        static(LINEAR, replace(MOVES, name="linear")),
        ("test_has_rules",),
        "several rules of one name: linear",
    ),
    "a config that fits no rule": Wrong(
        sound(LINEAR, configs={**ONE, "uint4": UINT4}), ("test_has_configs",), "config 'uint4'"
    ),
    "private imports": Wrong(
        lambda: PrivateBackend([LINEAR]),
        ("test_imports_public_names",),
        "import qompose.program.graph",
    ),
    "printing": Wrong(
        linear(kernels=emitting(noisily)), ("test_works_cleanly",), "it prints 'lowering a linear"
    ),
    "a global setting": Wrong(
        linear(kernels=emitting(deterministically)),
        ("test_works_cleanly",),
        "deterministic algorithms was False",
    ),
    "blind to other quantizers": Wrong(
        quantizer(FirstOnly), ("test_composes",), "ZeroDivisionError"
    ),
    "deaf to selectors": Wrong(
        quantizer(Stubborn), ("test_most_specific_wins",), "set_module_name(None) over"
    ),
}
