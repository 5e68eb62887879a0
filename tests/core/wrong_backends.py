# SPDX-License-Identifier: Apache-2.0
"""Backends that are wrong in one way each, and the checks of the contract that must say so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from qompose import QuantizationConfig, Quantizer, RuleQuantizer
from qompose.backend import (
    Backend,
    Finished,
    Kernel,
    NotLowerable,
    OperatorPattern,
    Region,
    Rule,
    Target,
)
from qompose.observers import FakeQuantize
from qompose.spec.claim import PointSpec
from qompose.spec.quantization_spec import class_of
from torch import Tensor
from torch.fx import GraphModule, Node

from tests.core.private_backend import PrivateBackend
from tests.core.sound_backend import (
    ACCEPTS,
    FLIP,
    LINEAR,
    LINEAR_RELU,
    MOVES,
    RULES,
    Linear,
    SoundBackend,
    moving,
    weighted,
)
from tests.core.sound_products import conv, matmul
from tests.core.toy import DYNAMIC, INT8, STATIC

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


def at_run_time(fault: str = "", **facts: Any) -> Callable[[], Backend]:
    """Return the same for dynamic quantization."""
    facts = {"modes": frozenset({"dynamic"}), **facts}
    rule = weighted("linear", relu=False, fault=fault, **facts)
    return lambda: SoundBackend([rule], configs={"dynamic": DYNAMIC})


def emitting(emit: Callable[[Region], Node | None]) -> dict[str, Kernel]:
    return {"torch": Kernel("sound.linear", emit)}


def refuse(region: Region) -> Node:
    raise NotLowerable("not today")


def crash(*args: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def of_one_size(match: Any) -> str | None:
    """Read the batch size as a number, which it is not where a program takes batches of any size."""
    size = match.node("self").meta["val"].shape[0]
    return None if isinstance(size, int) else crash()


def of_this_export(region: Region) -> Node:
    """Go by what no file keeps."""
    return Linear(relu=False)(region) if region.output_node.stack_trace else refuse(region)


def speechless(region: Region) -> Node:
    """Give no reason, where another quantizer has the name."""
    if "#" in region.claim.owner:
        raise NotLowerable("")
    return Linear(relu=False)(region)


def in_float(region: Region) -> Node:
    """Call the float operator on what the dequantize operators give."""
    node = region.output_node
    output = region.call(node.target, *node.args)  # type: ignore[arg-type]
    return quantized(region, output)


def quantized(region: Region, value: Node) -> Node:
    """Make integers of what is computed in float."""
    out = region.output
    assert out is not None
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    arguments = (out.scale, out.zero_point, out.low, out.high, out.dtype)
    return region.call(quantize, value, *arguments, dtype=out.dtype)


def real(region: Region, x: Any, integers: Node) -> Node:
    """The floats that integers of the tensor `x` stand for."""
    floats = region.call(aten.to.dtype, integers, torch.float32, dtype=torch.float32)
    centred = region.call(aten.sub.Tensor, floats, x.zero_point, dtype=torch.float32)
    return region.call(aten.mul.Tensor, centred, x.scale, dtype=torch.float32)


def in_floats(region: Region) -> Node:
    """Give floats, where integers are wanted too."""
    node = Linear(relu=False)(region)
    return region.call(aten.to.dtype, node, torch.float32, dtype=torch.float32)


def again_in_float(region: Region) -> Node:
    """Make floats of the integers, and call the float operator on those."""
    x, weight = region.quantized("input"), region.quantized("weight")
    table = region.constant("floats", weight.tensor.float() * weight.scales[:, None])
    bias = region.argument("op", "bias")
    floats = real(region, x, x.node)
    return quantized(
        region, region.call(aten.linear.default, floats, table, bias, dtype=torch.float32)
    )


def for_one_batch(region: Region) -> Node:
    """Cut the output to the batch that the example has, 8 where that varies."""
    size = region.output_node.meta["val"].shape[0]
    node = Linear(relu=False)(region)
    rows = size if isinstance(size, int) else 8
    return region.call(aten.slice.Tensor, node, 0, 0, rows, dtype=torch.int8)


def warning(region: Region) -> Node:
    warnings.warn("this one is slow", UserWarning, stacklevel=1)
    return Linear(relu=False)(region)


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
    x, dims = region.quantized("self"), region.argument("output", "dims")
    flipped = region.call(aten.flip.default, x.node, dims, dtype=torch.int8)
    return quantized(region, real(region, x, flipped))


OWN = replace(INT8, quant_min=-127)


class Unsharing(RuleQuantizer):
    """Gives outputs a scale of their own."""

    def propose(self, model: GraphModule, taken: Sequence[Any], on_conflict: str = "error") -> Any:
        proposal = super().propose(model, taken, on_conflict)
        proposal.claims = [replace(c, specs=(*map(unshared, c.specs),)) for c in proposal.claims]
        return proposal


def unshared(point: Any) -> Any:
    return replace(point, spec=OWN, references=()) if point.shared else point


class Idle(FakeQuantize):
    """Rounds nothing in training."""

    def forward(self, x: Tensor) -> Tensor:
        self.observe(x.detach())
        return x


ONE = {"static": STATIC}
IDLE = replace(INT8, observer_or_fake_quant_ctr=Idle, quant_min=-16, quant_max=15)
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


def _trains(wanted: PointSpec) -> bool:
    kind = class_of(getattr(wanted.spec, "observer_or_fake_quant_ctr", None))
    return isinstance(kind, type) and issubclass(kind, FakeQuantize)


class Calibrated(RuleQuantizer):
    """Claims nothing for training."""

    def propose(self, model: GraphModule, taken: Sequence[Any], on_conflict: str = "error") -> Any:
        proposal = super().propose(model, taken, on_conflict)
        proposal.claims = [c for c in proposal.claims if not any(map(_trains, c.specs))]
        return proposal


class Unlisted(RuleQuantizer):
    """Says nothing of what it can do."""

    def quantization_capabilities(self) -> Any:
        return Quantizer.quantization_capabilities(self)


class FirstOnly(RuleQuantizer):
    """Knows of no other quantizer."""

    def propose(self, model: GraphModule, taken: Sequence[Any], on_conflict: str = "error") -> Any:
        if any(claim.rule == "linear" for claim in taken):
            crash()
        return super().propose(model, taken, on_conflict)


class Coarse(RuleQuantizer):
    """Has four steps for an activation beside another quantizer."""

    def propose(self, model: GraphModule, taken: Sequence[Any], on_conflict: str = "error") -> Any:
        proposal = super().propose(model, taken, on_conflict)
        if any(claim.rule.startswith("linear") for claim in taken):
            proposal.claims = [replace(c, specs=(*map(coarse, c.specs),)) for c in proposal.claims]
        return proposal


def coarse(point: Any) -> Any:
    return replace(point, spec=FEW_STEPS) if point.spec == INT8 else point


class Stubborn(RuleQuantizer):
    """Leaves nothing in float that has a name."""

    def set_module_name(self, module_name: str, config: QuantizationConfig | None) -> Any:
        return self if config is None else super().set_module_name(module_name, config)


def quantizer(kind: type[RuleQuantizer], *rules: Rule) -> Callable[[], Backend]:
    rules = tuple(replace(rule, modes=frozenset({"static"})) for rule in rules or (LINEAR,))
    backend = SoundBackend(rules, configs=ONE)
    return lambda: SoundBackend(rules, configs=ONE, quantizer_class=lambda: kind(backend))


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
ROOT = OperatorPattern(
    (aten.flip.default,), lambda self: (y := self.flip([1])) + (y - y).sqrt(), ((2, 3),)
)
TWO_SHAPES = moving(
    "flip", OperatorPattern((aten.flip.default,), lambda self: self.flip([1]), ((2, 3), (2, 3)))
)
OF_ONE_SIZE = moving("flip", FLIP, guard=of_one_size)
NEVER = moving("flip", FLIP, guard=lambda match: "not on a weekday")
UNKNOWN_TARGET = {"torch": LINEAR.kernels["torch"], "moon": Kernel("lunar linear")}


def fails(test: str, make: Callable[[], Backend], message: str) -> Wrong:
    return Wrong(make, (f"test_{test}",), message)


ZERO_POINTS = "zero points"
UNDECLARED = linear(kernels=emitting(for_one_batch))
FEW = {"static": replace(STATIC, input_activation=FEW_STEPS)}
FLOAT64 = weighted("linear", relu=False, fault="float64")
HALF = weighted("linear", relu=False, guard=None)
NO_RELU = weighted("linear_relu", relu=True, fault="no relu")
ON_DEVICE = replace(
    LINEAR, kernels={"device": LINEAR.kernels["torch"]}, modes=frozenset({"static"})
)
DEVICE = Target("device", lambda *_: Finished(SimpleNamespace()))
REQUANTIZED = moving("flip", FLIP, kernels=emitting(requantizing))

WRONG = {
    "two inputs swapped": fails("matches_reference", static(matmul("swapped")), ZERO_POINTS),
    "one input's parameters for both": fails(
        "matches_reference", static(matmul("first for both")), ZERO_POINTS
    ),
    "blind to strides": fails("matches_reference", linear("strides"), "contiguous"),
    "truncation": fails("matches_reference", linear("truncates"), "truncate"),
    "rounding down": fails("matches_reference", linear("rounds down"), "by one step, -0."),
    "one step up": fails("matches_reference", linear("one step up"), "+1.00 steps"),
    "off by two steps": fails("matches_reference", linear("two steps"), "2 steps"),
    "no zero point": fails("matches_reference", linear("no zero point"), ZERO_POINTS),
    "saturating sums": fails("matches_reference", linear("saturates"), "saturation"),
    "another dtype": fails("matches_reference", lambda: SoundBackend([FLOAT64]), "torch.float64"),
    "no relu": fails("matches_reference_for_integers", static(NO_RELU), ZERO_POINTS),
    "floats where integers are read": fails(
        "matches_reference_for_integers", at_run_time(kernels=emitting(in_floats)), "float_output=True"
    ),
    "dynamic, two steps off": fails("matches_reference_for_integers", at_run_time("two steps"), "2 steps"),
    "wrong for one": fails("takes_other_shapes", linear("one in a batch"), "a batch of 1"),
    "wrong for a batch of matrices": fails("takes_other_shapes", linear("rank"), "dimension"),
    "sums of few bits": fails("takes_other_shapes", linear("few bits"), "4096"),
    "padding with the integer zero": fails("takes_other_literals", static(conv("pads zero")), "padding=[1]"),
    "no stride": fails("takes_other_literals", static(conv("stride")), "stride=[2]"),
    "no dilation": fails("takes_other_literals", static(conv("dilation")), "dilation=[2]"),
    "no groups": fails("takes_other_literals", static(conv("groups")), "groups=2"),
    "a fake of another dtype": fails("lowers", linear("fake dtype"), "torch.float32"),
    "a fake of other strides": fails("behaves", linear("fake strides"), "strides ["),
    "counting calls": fails("behaves", linear("counts"), "same outputs"),
    "a fake of another shape": fails("lowers", linear(kernels=emitting(with_wrong_fake)), "register_fake"),
    "integers made floats again": fails("lowers", linear(kernels=emitting(again_in_float)), "aten.linear"),
    "never emitted": fails("lowers", linear(kernels=emitting(refuse)), "not today"),
    "an emit that crashes": fails("lowers", linear(kernels=emitting(crash)), "ZeroDivisionError"),
    "an emit that computes in float": fails("lowers", linear(kernels=emitting(in_float)), "aten.linear"),
    "a target whose model cannot be called": fails(
        "lowers", lambda: SoundBackend([ON_DEVICE], configs=ONE, targets=(DEVICE,)), "callable"
    ),
    "a mode that no config has": fails(
        "has_configs", lambda: SoundBackend([LINEAR], configs=ONE), "dynamic, weight-only"
    ),
    "a config that fits no rule": fails(
        "has_configs", sound(LINEAR, configs={**ONE, "uint4": UINT4}), "a rule that supports"
    ),
    "no quantizer": fails("loads", sound(LINEAR, configs=ONE, quantizer_class=int), "0"),
    "a version of the future": fails("loads", sound(LINEAR, configs=ONE, api_version=99), "api_version = 99"),
    "no name": fails("loads", sound(LINEAR, configs=ONE, name=""), "`name`"),
    "no example": fails("annotates", static(NEEDS_LITERAL), "dims"),
    "an example of something else": fails("annotates", static(ANOTHER_OPERATOR), "aten.permute"),
    "a guard that refuses its own example": fails("annotates", static(NEVER), "not on a weekday"),
    "a guard that raises": fails("annotates", static(moving("flip", FLIP, guard=crash)), "ZeroDivisionError"),
    "a shadowed rule": fails("annotates", static(LINEAR, LINEAR_RELU), "'linear_relu' before 'linear'"),
    "few steps": fails("converts", sound(LINEAR, configs=FEW), "min_sqnr"),
    "writing to weights": fails("keeps_parameters", linear("writes weight"), "own_weight"),
    "writing to inputs": fails("leaves_inputs_alone", linear("writes"), "integers"),
    "one size of batch": fails("takes_any_batch", UNDECLARED, "reference has (13"),
    "a guard for one size of batch": fails("takes_any_batch", static(OF_ONE_SIZE), "ZeroDivisionError"),
    "sharing that is none": fails("shares", quantizer(Unsharing, REQUANTIZED), "2 groups"),
    "accepts too wide": fails("accepts", linear(accepts=WIDE), "accepts['output']"),
    "a missing constraint": fails("accepts", linear(accepts=NO_WEIGHT), "accepts['weight']"),
    "constraints ignored": Wrong(as_rule(Lax), ("test_accepts", "test_refuses"), ""),
    "a refusal without reason": fails("refuses", as_rule(Silent), "reason"),
    "no guard for half precision": fails("half_precision", sound(HALF), "torch."),
    "a target that nobody brings": fails("is_listed", linear(kernels=UNKNOWN_TARGET), "moon"),
    "no kernel": fails("is_listed", linear(kernels={}), "no target"),
    "a capability table without rows": fails("is_listed", quantizer(Unlisted), "0 rows"),
    "no configs": fails("has_configs", sound(LINEAR, configs={}), "0 configurations"),
    "a function for a config": fails(
        "has_configs", sound(LINEAR, configs={"static": lambda: STATIC}), "the configuration itself"
    ),
    "a warning": fails("lowers", linear(kernels=emitting(warning)), "this one is slow"),
    "no training": fails("trains", quantizer(Calibrated), "claims its example"),
    "another model than was trained": fails(
        "trains", sound(LINEAR, configs={"static": replace(STATIC, input_activation=IDLE)}), "40 dB"
    ),
    "gradients that are no numbers": fails("trains", static(moving("flip", ROOT)), "finite"),
    "an example of too many shapes": fails("annotates", static(TWO_SHAPES), "has 2 shape"),
    "an availability that is no text": fails(
        "says_availability", sound(LINEAR, configs=ONE, availability=lambda: False), "False"
    ),
    "two rules of one name": fails("has_rules", static(LINEAR, replace(MOVES, name="linear")), "linear"),
    "private imports": fails(
        "imports_public_names", lambda: PrivateBackend([LINEAR]), "qompose.program.graph"
    ),
    "printing": fails("works_cleanly", linear(kernels=emitting(noisily)), "lowering a linear"),
    "a global setting": fails("works_cleanly", linear(kernels=emitting(deterministically)), "deterministic"),
    "blind to other quantizers": fails("composes", quantizer(FirstOnly), "ZeroDivisionError"),
    "a refusal without reason beside another": fails(
        "composes", linear(kernels=emitting(speechless)), "needs the reason"
    ),
    "no kernel for what was loaded": fails("saves", linear(kernels=emitting(of_this_export)), "simulated"),
    "coarse beside another": fails("composes", quantizer(Coarse, LINEAR_RELU, LINEAR), "min_sqnr"),
    "deaf to selectors": fails("most_specific_wins", quantizer(Stubborn), "set_module_name(None)"),
}  # fmt: skip
