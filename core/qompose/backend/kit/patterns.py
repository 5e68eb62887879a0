# SPDX-License-Identifier: Apache-2.0
"""Patterns of products with what stands before and after them, in every form that models write them in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from qompose.backend.pattern import Chain, OperatorPattern, Pattern
from qompose.errors import ConfigError, near_names

aten = torch.ops.aten

Form: TypeAlias = "tuple[Callable[..., Tensor], Any]"
"""A function of tensors, and the operator that it is exported as."""

IMAGE: Final = (1, 2, 4, 4)
"""The shape of an example image."""
SEQUENCE: Final = (1, 2, 5)
"""The shape of an example sequence."""


@dataclass(frozen=True)
class Product:
    """A linear or convolution: its forms, and example shapes of input, weight and bias."""

    forms: tuple[Form, ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Step:
    """A function that stands before or after a product.

    Attributes:
        name: of the function, in names of rules: "relu6".
        role: what its operator is called in the pattern: "act", "add", "drop", "pad".
        forms: the ways in which it is written; None among them where it may be absent.
        operand: the name of the tensor that it reads beside the value, None where there is none.
        is_quantized: whether that tensor is quantized; else it stays in float.
        drawing: in drawings of rules, "+ x"; "" where it is "-> " and the name.
    """

    name: str
    role: str
    forms: tuple[Form | None, ...]
    operand: str | None = None
    is_quantized: bool = False
    drawing: str = ""

    @property
    def is_optional(self) -> bool:
        """Return whether it may be absent."""
        return None in self.forms


def _convolution(dims: int) -> Product:
    function, packet = getattr(F, f"conv{dims}d"), getattr(aten, f"conv{dims}d")
    same: Form = (partial(function, padding="same"), packet.padding)
    sizes = (5,) * dims, (3,) * dims
    return Product(((function, packet.default), same), ((1, 2, *sizes[0]), (2, 2, *sizes[1]), (2,)))


def _transposed(dims: int) -> Product:
    function, packet = getattr(F, f"conv_transpose{dims}d"), getattr(aten, f"conv_transpose{dims}d")
    form: Form = (function, packet.default if dims == 1 else packet.input)
    return Product((form,), _convolution(dims).shapes)


PRODUCTS: Final[dict[str, Product]] = {
    "linear": Product(((F.linear, aten.linear.default),), ((2, 64), (2, 64), (2,))),
    **{f"conv{dims}d": _convolution(dims) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _transposed(dims) for dims in (1, 2, 3)},
}
"""The products with a weight, by name."""


def _written(name: str, *literals: Any) -> tuple[Form, ...]:
    """Return an operator of aten and its in-place form."""
    forms = []
    for packet in (getattr(aten, name), getattr(aten, f"{name}_")):
        forms.append((lambda x, packet=packet: packet.default(x, *literals), packet.default))
    return tuple(forms)


def _activation(name: str, *literals: Any) -> Step:
    return Step(name, "act", _written(name, *literals))


RELU: Final = _activation("relu")
"""`relu`, in place or not; so are all functions of one tensor here."""
RELU6: Final = _activation("relu6")
"""`relu6`: a clamp between 0 and 6."""
HARDTANH: Final = _activation("hardtanh")
"""`hardtanh`: a clamp between two numbers."""
CLAMP: Final = Step("clamp", "act", (*_written("clamp", -0.5, 0.5), *_written("clip", -0.5, 0.5)))
"""`clamp` and `clip` with two numbers."""
HARDSWISH: Final = _activation("hardswish")
"""`hardswish`."""
HARDSIGMOID: Final = _activation("hardsigmoid")
"""`hardsigmoid`."""
SILU: Final = _activation("silu")
"""`silu`, also known as swish."""
LEAKY_RELU: Final = _activation("leaky_relu")
"""`leaky_relu`."""
ELU: Final = _activation("elu")
"""`elu`."""
TANH: Final = _activation("tanh")
"""`tanh`."""
SIGMOID: Final = _activation("sigmoid")
"""`sigmoid`."""
GELU: Final = Step("gelu", "act", ((F.gelu, aten.gelu.default),))
"""`gelu`, exact or by tanh; torch has no in-place form."""

DROPOUT: Final = Step(
    "dropout",
    "drop",
    (None, (lambda x: F.dropout(x, 0.5, training=False), aten.dropout.default)),
)
"""A dropout that may be absent; it does nothing once a model is trained (`not_training`)."""

ADD: Final = Step(
    "add",
    "add",
    (
        (torch.add, aten.add.Tensor),
        (lambda result, other: torch.add(other, result), aten.add.Tensor),
        (Tensor.add_, aten.add_.Tensor),
        (lambda result, other: other.add_(result), aten.add_.Tensor),
    ),
    operand="other",
    is_quantized=True,
    drawing="+ x",
)
"""The sum with another tensor, "other", in either order; the last form writes to that tensor."""

ADD_FLOAT: Final = replace(ADD, forms=ADD.forms[:3], is_quantized=False)
"""The sum with a tensor that stays in float; the form that writes to that tensor would write to an input."""

PAD: Final = Step(
    "pad",
    "pad",
    (
        (lambda x: F.pad(x, (1, 1) * (x.dim() - 2)), aten.pad.default),
        (
            lambda x: aten.constant_pad_nd.default(x, [1, 1] * (x.dim() - 2)),
            aten.constant_pad_nd.default,
        ),
    ),
)
"""Padding with a constant before a convolution (`spatial_zero_padding`)."""

BINARY: Final[dict[str, tuple[Form, ...]]] = {
    name: (
        (getattr(torch, name), getattr(aten, name).Tensor),
        (getattr(Tensor, f"{name}_"), getattr(aten, f"{name}_").Tensor),
    )
    for name in ("add", "sub", "mul")
}
"""The functions of two tensors, by name."""


def any_of(name: str, *steps: Step) -> Step:
    """Return one step for several that a kernel treats alike, under a name of its own."""
    return replace(steps[0], name=name, forms=tuple(form for step in steps for form in step.forms))


def product_of(function: str | Callable[..., Tensor]) -> Product:
    """Return a row of `PRODUCTS` by its name or by its function, `F.linear`.

    Raises:
        ConfigError: there is no such product.
    """
    for name, product in PRODUCTS.items():
        if function == name or function is product.forms[0][0]:
            return product
    known = ", ".join(PRODUCTS)
    raise ConfigError(
        f"unknown operator {function!r}{near_names(str(function), PRODUCTS)}. Known: {known}"
    )


def fused(
    name: str,
    function: str | Callable[..., Tensor] | Product,
    *,
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    shapes: tuple[tuple[int, ...], ...] | None = None,
    groups: int = 1,
) -> tuple[Pattern, ...]:
    """Return the variants of a product with what stands before and after it, with a bias and without.

    The names of the patterns are "input", "weight", "bias", those of the steps' operands, `name`, and the
    roles of the steps.

    Args:
        name: what the operator of the product is called.
        function: a function such as `torch.nn.functional.conv2d`, its name in `PRODUCTS`, or a product of
            your own.
        before, after: in the order in which they are called; every combination of their forms is a variant.
        shapes: of the example's input, weight and bias; None: those of the product.
        groups: of the example; matching ignores literals.

    Raises:
        ConfigError: there is no such product, or two steps have one role.
    """
    product = function if isinstance(function, Product) else product_of(function)
    roles = [step.role for step in (*before, *after)]
    if len({name, *roles}) <= len(roles):
        raise ConfigError(f"the operators of a pattern need distinct names, got {[name, *roles]}")
    sizes = product.shapes if shapes is None else shapes
    if groups > 1 and shapes is None:
        sizes = (sizes[0], (sizes[1][0], sizes[1][1] // groups, *sizes[1][2:]), sizes[2])
    return tuple(_variants(name, product, (before, after), sizes, groups))


def _variants(
    name: str,
    product: Product,
    steps: tuple[Sequence[Step], Sequence[Step]],
    shapes: tuple[tuple[int, ...], ...],
    groups: int,
) -> Iterator[Pattern]:
    before, after = steps
    operands = tuple(step.operand for step in (*before, *after) if step.operand is not None)
    choices = [*itertools.product(*(step.forms for step in (*before, *after)))]
    products = [
        (partial(function, groups=groups) if groups > 1 else function, target)
        for function, target in product.forms
    ]
    for bias, form, forms in itertools.product((False, True), products, choices):
        others = [_result_shape(form[0], shapes)] * len(operands) if operands else []
        parameters = ("weight", "bias") if bias else ("weight",)
        parts = [
            *_written_as(before, forms[: len(before)]),
            (name, form, parameters),
            *_written_as(after, forms[len(before) :]),
        ]
        yield Pattern(
            Chain(("input", *parameters, *operands), [(f[0], read) for _, f, read in parts]),
            (*shapes[: 2 + bias], *others),
            tuple((role, f[1]) for role, f, _ in parts),
        )


def _written_as(
    steps: Sequence[Step], forms: Sequence[Form | None]
) -> Iterator[tuple[str, Form, tuple[str, ...]]]:
    """Yield the role of each step that is there, how it is written, and which tensors it reads besides."""
    for step, form in zip(steps, forms, strict=True):
        if form is not None:
            yield step.role, form, () if step.operand is None else (step.operand,)


def _result_shape(
    multiply: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Return the shape of a product's value, which the other tensor of a sum has too."""
    read, weight = (torch.empty(shape, device="meta") for shape in shapes[:2])
    return tuple(multiply(read, weight).shape)


def one(target: Any, *literals: Any, shape: tuple[int, ...] = IMAGE) -> OperatorPattern:
    """Return the pattern of an operator on one tensor, "self".

    Args:
        literals: of the example; matching ignores them.
        shape: of the example.
    """
    return OperatorPattern((target,), lambda self: target(self, *literals), (shape,))


def binary(name: str, *, after: Sequence[Step] = ()) -> tuple[Pattern | OperatorPattern, ...]:
    """Return the patterns of a function of two tensors, "self" and "other".

    Args:
        name: "add", "sub" or "mul". Its operator is called "op" where something stands after it, and
            "output" where nothing does.
        after: the functions of one tensor after it.

    Raises:
        ConfigError: there is no such function.
    """
    if name not in BINARY:
        raise ConfigError(f"expected {', '.join(BINARY)}, got {name!r}{near_names(name, BINARY)}")
    if not after:
        return (OperatorPattern(tuple(target for _, target in BINARY[name])),)
    found = []
    followers = [*itertools.product(*(step.forms for step in after))]
    for form, forms in itertools.product(BINARY[name], followers):
        parts = [("op", form, ("other",)), *_written_as(after, forms)]
        function = Chain(("self", "other"), [(f[0], read) for _, f, read in parts])
        found.append(
            Pattern(function, ((2, 2), (2, 2)), tuple((role, f[1]) for role, f, _ in parts))
        )
    return tuple(found)
