# SPDX-License-Identifier: Apache-2.0
"""What all checks share: failures, random data, small models, comparisons.

Inputs are asymmetric about zero, so that affine zero points are not zero. The first two channels of a
weight are as large, and as small, as quantization allows.

Some rows apply only behind quantized tensors, and kernels return integers only where a consumer wants them.
So copies of tensors (`clone`, which runs on integers unchanged) may surround the row, quantized by a backend
of the suite's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose import QuantizationConfig, QuantizationSpec, RuleQuantizer
from qompose.backend import API_VERSION, Backend, Kernel, OperatorPattern, Rule, on_integers
from qompose.backend.pattern import Shape
from qompose.backend.rule import STATIC
from qompose.observers import activation_spec
from qompose.program.graph import constant_of
from qompose.spec import FixedQParamsQuantizationSpec, qdq
from qompose.spec.qparams import decibels


class ContractError(AssertionError):
    """A backend breaks a promise of its rule table.

    Args:
        subject: the backend, with the row and configuration if it is about one.
        expected: what the contract demands.
        found: what happened.
        remedy: what its author can do.
    """

    def __init__(self, subject: str, *, expected: str, found: str, remedy: str) -> None:
        self.subject, self.expected, self.found, self.remedy = subject, expected, found, remedy
        super().__init__(
            f"{subject}\n  expected: {expected}\n  found:    {found}\n  remedy:   {remedy}"
        )


class NotApplicable(Exception):  # noqa: N818 - it is not an error
    """A check has nothing to look at, with the reason."""


class Blocked(NotApplicable):
    """A check depends on another one that fails, and is skipped."""

    def __init__(self, check: str, subject: str) -> None:
        super().__init__(f"{check} fails for {subject}; fix it first")


@contextmanager
def expecting(subject: str, expected: str, remedy: str) -> Iterator[None]:
    """Make a `ContractError` of an error that is raised inside, unless it is an outcome of a check."""
    try:
        yield
    except (ContractError, NotApplicable):
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ContractError(subject, expected=expected, found=found, remedy=remedy) from error


RANGES = ((-1.0, 2.5), (-1.5, 0.5), (-0.5, 4.0), (-3.0, 2.0))
"""By place, the range of a float input, over which calibration data are evenly spread.

No two inputs have the same scale or zero point, so that a kernel that confuses them is noticed.
"""
BATCH = 4
_FACTORS = (4, 2, 1)
_MOST_ELEMENTS = 4096


def sizes(shapes: Sequence[Shape], stored: Sequence[bool]) -> Iterator[tuple[Shape, ...]]:
    """Yield the shapes of an example, larger ones first, and those that its author gave last.

    Args:
        stored: which of them are parameters; the first dimension of the others may be a batch.
    """
    seen = set()
    for factor, batch in product(_FACTORS, (BATCH, 1)):
        scaled = tuple(
            shape if callable(shape) else _scaled(shape, factor, 1 if is_stored else batch)
            for shape, is_stored in zip(shapes, stored, strict=True)
        )
        too_large = any(not callable(s) and math.prod(s) > _MOST_ELEMENTS for s in scaled)
        if scaled not in seen and (factor == 1 or not too_large):
            seen.add(scaled)
            yield scaled


def _scaled(shape: tuple[int, ...], factor: int, batch: int) -> tuple[int, ...]:
    """Return a shape with all sizes but 1 multiplied, so that what broadcasts goes on broadcasting."""
    larger = [size if size == 1 else size * factor for size in shape]
    if batch > 1 and len(larger) > 1:
        larger[0] = shape[0] * batch
    return tuple(larger)


def parameter(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a parameter with values in [-1, 1]; its first channels are 1 and -1 throughout."""
    if callable(shape):
        return shape()
    values = torch.rand(shape, generator=generator) * 2 - 1
    if values.dim() > 1 and len(values) > 3:
        values[0], values[1] = 1.0, -1.0
    return values.to(dtype)


def random(shape: Shape, dtype: torch.dtype, generator: torch.Generator, place: int = 0) -> Tensor:
    """Return an input that is evenly spread over the range of its place, whose ends occur."""
    if callable(shape):
        return shape()
    lowest, highest = RANGES[place % len(RANGES)]
    values = torch.rand(shape, generator=generator) * (highest - lowest) + lowest
    flat = values.view(-1)
    flat[0], flat[-1] = highest, lowest
    return values.to(dtype)


def extremes(inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return inputs at both ends of the range of `inputs`, alternating between them, and far beyond.

    Where there are several inputs, they are at one end together, and at opposite ends.
    """
    batches = [tuple(fill(x) for x in inputs) for fill in (_high, _low, _beyond)]
    batches += [tuple(_alternating(x, i) for i, x in enumerate(inputs))]
    batches += [tuple((_low, _high)[i % 2](x) for i, x in enumerate(inputs))]
    return batches


def _high(x: Tensor) -> Tensor:
    return torch.full_like(x, float(x.max())) if x.is_floating_point() else x


def _low(x: Tensor) -> Tensor:
    return torch.full_like(x, float(x.min())) if x.is_floating_point() else x


def _beyond(x: Tensor) -> Tensor:
    return x * 8 if x.is_floating_point() else x


def _alternating(x: Tensor, phase: int) -> Tensor:
    if not x.is_floating_point():
        return x
    odd = (torch.arange(x.numel()) + phase) % 2 == 1
    return torch.where(odd.view(x.shape), x.max(), x.min())


def other_layouts(inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return equal inputs in other memory layouts: last dimension first, and every second element."""
    return [tuple(relay(x) for x in inputs) for relay in (_reversed, _strided)]


def _reversed(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def _strided(x: Tensor) -> Tensor:
    return torch.stack((x, -x) if x.is_floating_point() else (x, x), dim=-1)[..., 0]


FRONT, ROW, BEHIND = "front", "row", "behind"
"""Paths of the modules in a model."""


class Copies(nn.Module):
    """Copies float tensors, and passes other inputs on."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return copies."""
        return tuple(x.clone() if x.is_floating_point() else x for x in tensors)


class Row(nn.Module):
    """Applies a function to inputs and to parameters of its own.

    Args:
        names: the function's parameters, in order; those in `parameters` belong to the module.
        state: which of these is a buffer that the function writes to.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        names: Sequence[str],
        parameters: dict[str, Tensor],
        state: str | None = None,
    ) -> None:
        super().__init__()
        self.function, self.names = function, tuple(names)
        for name, value in parameters.items():
            if name == state:
                self.register_buffer(f"own_{name}", value)
            else:
                self.register_parameter(f"own_{name}", nn.Parameter(value, requires_grad=False))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the function's output."""
        rest = iter(inputs)
        own = {**self._parameters, **self._buffers}
        arguments = [own[f"own_{n}"] if f"own_{n}" in own else next(rest) for n in self.names]
        return self.function(*arguments)


class Model(nn.Module):
    """A row between copies.

    Args:
        front, behind: whether its inputs, and its output, are copied.
        witness: return the copied float inputs too, as they are once the row has run.
    """

    def __init__(self, row: Row, *, front: bool, behind: bool, witness: bool) -> None:
        super().__init__()
        self.row = row
        self.front = Copies() if front else None
        self.behind = Copies() if behind else None
        self.witness = witness

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the row's output, followed by the witnesses if requested."""
        values = self.front(*inputs) if self.front is not None else inputs
        output = self.row(*values)
        if self.behind is not None:
            (output,) = self.behind(output)
        return (output, *(x for x in values if self.witness and x.is_floating_point()))


def surroundings(
    config: QuantizationConfig,
    fronts: Sequence[str],
    behinds: Sequence[str],
    targets: Iterable[str],
) -> list[RuleQuantizer]:
    """Return the quantizer of the copies around rows, in a list that is empty if it has nothing to do.

    The copies have the row's own specifications, so that no requantization is in between. Behind a row
    without scales that calibration finds they have eight bits; nothing is quantized in front of it.

    Args:
        fronts, behinds: paths of the modules that copy.
    """
    spec = config.input_activation
    if config.mode != STATIC or spec is None:
        fronts, spec = (), _EIGHT_BITS
    if not (fronts or behinds):
        return []
    quantizer = RuleQuantizer(_Surroundings(targets))
    for path in fronts:
        quantizer.set_module_name(path, _activations(spec, config))
    output = config.output_activation if config.mode == STATIC else None
    for path in behinds:
        quantizer.set_module_name(path, _activations(output or spec, config))
    return [quantizer]


_EIGHT_BITS = activation_spec(torch.int8, -128, 127, range="minmax")


def _activations(
    spec: QuantizationSpec | FixedQParamsQuantizationSpec, config: QuantizationConfig
) -> QuantizationConfig:
    return replace(
        config,
        input_activation=spec,
        output_activation=None,
        weight=None,
        balance=False,
        options=(),
    )


class _Surroundings(Backend):
    """Copies of integers, for every target."""

    name = "contract"
    api_version = API_VERSION

    def __init__(self, targets: Iterable[str]) -> None:
        clone: Any = torch.ops.aten.clone.default
        self.rules = (
            Rule(
                name="copy",
                patterns=(OperatorPattern((clone,)),),
                activations=("self",),
                shares=True,
                kernels={target: Kernel("clone on integers", on_integers) for target in targets},
            ),
        )


ONE_STEP = 1.001
"""A step, with the rounding that float32 adds when integers up to 2**8 are scaled."""
MOST_GAIN = 3e-3
"""By which part of their size float outputs may all be off. Single inputs that round otherwise make 0.001."""
MOST_OFF = 0.25
"""The part of the values that may be a step off: ties and double rounding move some, truncation half."""
ENOUGH_VALUES = 32
"""With fewer values, a few ties decide how many are off."""


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the tensors in a model's outputs, in order."""
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def sqnr(reference: Tensor, actual: Tensor) -> float:
    """Return the signal to quantization noise ratio in decibels, infinite if both are equal."""
    reference, actual = reference.double(), actual.double()
    noise = float((reference - actual).square().sum())
    return decibels(float(reference.square().sum()), noise)


def kinds_of(tensors: Iterable[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each tensor."""
    return [(tuple(x.shape), x.dtype) for x in tensors]


def expect_equal(
    subject: str, expected: str, actual: Sequence[Tensor], wanted: Sequence[Tensor], remedy: str
) -> None:
    """Raise `ContractError` unless two lists of outputs are equal bit for bit."""
    if len(actual) != len(wanted) or not all(map(torch.equal, actual, wanted)):
        found = first_difference(wanted, actual, [None] * len(wanted), 1e-12) or "different values"
        raise ContractError(subject, expected=expected, found=found, remedy=remedy)


def steps_of(converted: GraphModule) -> list[Tensor | None]:
    """Return one quantization step of each output of a Q/DQ model, None for outputs that are floats.

    Channels may have factors behind the dequantize operator (balancing); then so have their steps.
    """
    (output,) = [node for node in converted.graph.nodes if node.op == "output"]
    values = pytree.tree_leaves(output.args[0])
    return [_step(value) if isinstance(value, Node) else None for value in values]


def _step(node: Node) -> Tensor | None:
    factor = torch.tensor(1.0)
    while node.target is torch.ops.aten.mul.Tensor:
        first, second = node.args
        constant = constant_of(second) if isinstance(second, Node) else None
        if constant is None or not isinstance(first, Node):
            return None
        node, factor = first, factor * constant
    if node.target is not qdq.dequantize_per_tensor or isinstance(node.args[1], Node):
        return None
    scale: Any = node.args[1]
    return factor * float(scale)


def difference(reference: Tensor, actual: Tensor, step: Tensor | None, part: float) -> str | None:
    """Return how an output differs too much from its reference, None if it does not.

    Args:
        step: one quantization step of the output, by which it may be off; None for floats.
        part: the part of the largest magnitude in `reference` by which floats may be off.
    """
    if reference.shape != actual.shape:
        return f"shape {tuple(actual.shape)}, but the reference has {tuple(reference.shape)}"
    if reference.dtype != actual.dtype:
        return f"{actual.dtype}, but the reference is {reference.dtype}"
    if not reference.numel():
        return None
    reference, actual = reference.double(), actual.double()
    largest = float(reference.abs().max())
    unit = step.double() if step is not None else torch.tensor(max(largest, 1e-30) * part).double()
    off = ((actual - reference) / unit).abs()
    off = torch.where(torch.isfinite(off), off, torch.inf)
    if float(off.max()) <= ONE_STEP:
        return _gain_fault(reference, actual) if step is None else None
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    where = f"at {list(place)}: {float(actual[place]):.6g} instead of {float(reference[place]):.6g}"
    wrong = f"{int((off > ONE_STEP).sum())} of {off.numel()} values differ"
    if step is not None:
        return f"{wrong}, by up to {float(off.max()):.4g} steps of the output ({where})"
    return f"{wrong}, by up to {float(off.max()) * part:.3g} of the largest value ({where})"


def _gain_fault(reference: Tensor, actual: Tensor) -> str | None:
    """Return how floats are too large or small throughout, None if they are not.

    Inputs that a dynamic rule rounds the other way differ in both directions; a wrong scale does not.
    """
    power = float(reference.square().sum())
    gain = float((reference * actual).sum()) / power if power else 1.0
    if abs(gain - 1) <= MOST_GAIN or reference.numel() < ENOUGH_VALUES:
        return None
    return f"values {gain:.4f} times as large on average"


def first_difference(
    references: Sequence[Tensor],
    actuals: Sequence[Tensor],
    steps: Sequence[Tensor | None],
    part: float,
) -> str | None:
    """Return the difference of the first of several outputs that differs too much, None if none does."""
    if len(references) != len(actuals):
        return f"{len(actuals)} outputs, but the reference has {len(references)}"
    for number, (reference, actual, step) in enumerate(
        zip(references, actuals, steps, strict=True)
    ):
        found = difference(reference, actual, step, part)
        if found is not None:
            return found if len(references) == 1 else f"output {number}: {found}"
    return None


def rounding_fault(
    references: Sequence[Tensor], actuals: Sequence[Tensor], step: Tensor
) -> str | None:
    """Return how the roundings of one output are wrong in sum, None if they are not.

    Values at the ends of the range are left out: a saturated value hides how it was rounded.

    Args:
        references, actuals: the output for several batches, each value within a step.
    """
    offs = []
    for reference, actual in zip(references, actuals, strict=True):
        inside = (reference > reference.min()) & (reference < reference.max())
        offs.append((((actual - reference) / step).double())[inside].round())
    off = torch.cat(offs)
    if off.numel() < ENOUGH_VALUES:
        return None
    share, bias = float((off != 0).double().mean()), float(off.mean())
    if share <= MOST_OFF:
        return None
    return f"{share:.0%} of {off.numel()} values differ by one step, {bias:+.2f} steps on average"
