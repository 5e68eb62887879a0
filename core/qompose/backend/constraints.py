# SPDX-License-Identifier: Apache-2.0
"""What a role of a rule allows: dtypes, schemes, bounds on scales and zero points.

The names and their meaning are those of PyTorch's BackendConfig. What breaks one is refused with the
bound and the value. A bound on what only calibration tells is checked when a model is converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

from qompose.errors import ConfigError, blaming
from qompose.json_codec import QSCHEME, of_type
from qompose.observers.config_json import CODECS
from qompose.observers.make_observer import fixed_parameters, least_scale, make_observer
from qompose.spec.qparams import (
    PER_CHANNEL,
    SYMMETRIC,
    Bounds,
    quantized_range,
    symmetric_zero_point,
)
from qompose.spec.quantization_spec import (
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    describe_spec,
)

RoleSpec: TypeAlias = "QuantizationSpec | FixedQParamsQuantizationSpec"
"""What a configuration gives to a role."""


@dataclass(frozen=True, kw_only=True)
class TensorConstraint:
    """What one role of a rule may be. Bounds of the integers are in quantized units; all are inclusive.

    `ch_axis` is the only dimension that may have the channels, None any. `blocks` allows a `block_size`,
    and with `block_sizes` there has to be one, one of these.
    A cast to a smaller float has no scheme: its `qschemes` hold None.

    Attributes:
        quant_min_lower_bound, quant_max_upper_bound: between which the integers must lie.
        quant_range: the one range that they may have.
        scale_min_lower_bound: the least scale, in units of the tensor for each step. Observers never give one
            below their `eps`, so that must not be less.
        scale_max_upper_bound: the largest scale. Data decides on it: a region that exceeds it stays in
            float when the model is converted.
        scale_exact_match, zero_point_exact_match: the only ones; for kernels that have them built in.

    Raises:
        ConfigError: a field has a value of another kind, or bounds that exclude each other.
    """

    dtypes: frozenset[torch.dtype]
    qschemes: frozenset[torch.qscheme | None]
    quant_min_lower_bound: int | None = None
    quant_max_upper_bound: int | None = None
    quant_range: tuple[int, int] | None = None
    scale_min_lower_bound: float | None = None
    scale_max_upper_bound: float | None = None
    scale_exact_match: float | None = None
    zero_point_exact_match: int | None = None
    ch_axis: int | None = None
    blocks: bool = False
    block_sizes: frozenset[tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        """Refuse values that no specification could meet, or that would never be compared."""
        for name in ("dtypes", "qschemes"):
            given: Any = getattr(self, name)
            if not isinstance(given, (set, frozenset, tuple, list)) or not given:
                raise ConfigError(f"{name}={given!r} is no set of {name}")
            object.__setattr__(self, name, frozenset(given))
        if self.block_sizes is not None:
            object.__setattr__(self, "block_sizes", frozenset(map(tuple, self.block_sizes)))
            object.__setattr__(self, "blocks", True)
        if self.quant_range is not None:
            object.__setattr__(self, "quant_range", tuple(self.quant_range))
        faults = [*_wrong_numbers(self), *_crossed(self)]
        if faults:
            raise ConfigError(f"this constraint can never be met: {'; '.join(faults)}")

    @classmethod
    def like(cls, spec: QuantizationSpec) -> TensorConstraint:
        """Return the constraint that takes what is quantized as `spec` is, in its range or a part of it."""
        scheme: Any = spec.qscheme  # None for a cast, which has no scheme
        integers = not spec.dtype.is_floating_point
        low, high = (
            quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
            if integers
            else (None, None)
        )
        return cls(
            dtypes=frozenset({spec.dtype}),
            qschemes=frozenset({scheme}),
            quant_min_lower_bound=low,
            quant_max_upper_bound=high,
            ch_axis=spec.ch_axis,
            blocks=spec.block_size is not None,
        )

    @property
    def bounds(self) -> Bounds | None:
        """Return what is asked of scale and zero point, None where nothing is."""
        asked = {field.name: getattr(self, field.name) for field in fields(Bounds)}
        return Bounds(**asked) if any(value is not None for value in asked.values()) else None

    def objection(self, role: str, spec: RoleSpec) -> str | None:
        """Return why `spec` is not allowed, with every bound that it breaks; None where it is."""
        kind = self._kind_objection(spec)
        if kind is not None or spec.dtype.is_floating_point:
            return kind and f"{role} {kind}"
        found = [*self._range_objections(spec), *self._parameter_objections(spec)]
        return "; ".join(f"{role} {objection}" for objection in found) or None

    def describe(self) -> str:
        """Return the constraint in one line: `int8, quant_min at least -127, per_channel_symmetric`."""
        least, most = self.quant_min_lower_bound, self.quant_max_upper_bound
        words = [_or(self.dtypes)]
        words += [f"exactly {list(self.quant_range)}"] if self.quant_range else []
        words += [f"quant_min at least {least}"] if least is not None else []
        words += [f"quant_max at most {most}"] if most is not None else []
        schemes = self.qschemes - {None}  # a cast has none
        words += [_or(schemes)] if schemes else []
        words += [f"channels along {self.ch_axis}"] if self.ch_axis is not None else []
        if self.block_sizes is not None:
            words += [f"blocks of {_sizes(self.block_sizes)}"]
        elif self.blocks:
            words += ["blocks"]
        asked = {} if self.bounds is None else vars(self.bounds)
        words += [f"{name}={value:g}" for name, value in asked.items() if value is not None]
        return ", ".join(words)

    def _kind_objection(self, spec: RoleSpec) -> str | None:
        """Check type, scheme and granularity."""
        scheme = spec.qscheme
        if scheme is None and isinstance(spec, FixedQParamsQuantizationSpec):
            scheme = torch.per_tensor_affine
        blocks, axis = getattr(spec, "block_size", None), getattr(spec, "ch_axis", None)
        if spec.dtype not in self.dtypes:
            return f"is {spec.dtype}, and the kernel takes {_names(self.dtypes)}"
        if scheme not in self.qschemes:
            return f"is {scheme}, and the kernel takes {_names(self.qschemes)}"
        if blocks is not None and not self.blocks:
            return f"has blocks of {blocks}, and the kernel takes none"
        if self.block_sizes is not None and blocks not in self.block_sizes:
            has = f"blocks of {blocks}" if blocks else "no blocks"
            return f"has {has}, and the kernel takes blocks of {_sizes(self.block_sizes)}"
        if scheme in PER_CHANNEL and blocks is None and self.ch_axis not in (None, axis):
            return f"has channels along {axis}, and the kernel takes {self.ch_axis}"
        return None

    def _range_objections(self, spec: RoleSpec) -> Iterator[str]:
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        least, most = self.quant_min_lower_bound, self.quant_max_upper_bound
        if least is not None and low < least:
            yield f"has quant_min={low}, below the bound {least} (quant_min_lower_bound)"
        if most is not None and high > most:
            yield f"has quant_max={high}, above the bound {most} (quant_max_upper_bound)"
        if self.quant_range not in (None, (low, high)):
            yield f"has the range [{low}, {high}], and the kernel takes {self.quant_range}"

    def _parameter_objections(self, spec: RoleSpec) -> Iterator[str]:
        """Check what is known of scale and zero point before data is seen."""
        bounds = self.bounds
        if bounds is None:
            return
        with blaming(f"the observer of {describe_spec(spec)}"):
            observer = make_observer(spec)
        fixed = fixed_parameters(observer)
        if fixed is not None:
            yield from (f"has {objection}" for objection in bounds.objections(*fixed))
            return
        yield from _scale_objections(bounds, spec, observer)
        wanted, known = bounds.zero_point_exact_match, _known_zero_point(spec)
        if wanted is not None and known is None:
            yield (
                f"gets a zero point from its data, and the kernel takes exactly {wanted} "
                "(zero_point_exact_match): a symmetric qscheme has a known one, and so has a "
                "FixedQParamsQuantizationSpec"
            )
        elif known is not None:
            found = Bounds(zero_point_exact_match=wanted).objections(1.0, known)
            yield from (f"has {objection}" for objection in found)


def _scale_objections(bounds: Bounds, spec: RoleSpec, observer: Any) -> Iterator[str]:
    least, bound = least_scale(spec, observer), bounds.scale_min_lower_bound
    name = type(observer).__name__
    if bounds.scale_exact_match is not None:
        yield (
            f"gets a scale from its data, and the kernel takes exactly {bounds.scale_exact_match:g} "
            "(scale_exact_match): use a FixedQParamsQuantizationSpec"
        )
    if bound is not None and least is None:
        yield (
            f"has the observer {name}, which does not say its least scale (eps), and the bound is "
            f"{bound:g} (scale_min_lower_bound)"
        )
    elif bound is not None and bounds.lowest.objections(least, 0):
        yield (
            f"may get the scale {least:g} (the eps of {name}), below the bound {bound:g} "
            f"(scale_min_lower_bound): give the observer eps={bound:g}"
        )
    if bounds.scale_max_upper_bound is not None and spec.is_dynamic:
        yield (
            "gets its scale when the model runs, where nothing keeps it within the bound "
            f"{bounds.scale_max_upper_bound:g} (scale_max_upper_bound)"
        )


def _known_zero_point(spec: RoleSpec) -> int | None:
    if spec.qscheme not in SYMMETRIC:
        return None
    return symmetric_zero_point(spec.dtype, spec.quant_min, spec.quant_max)


def _names(values: frozenset[Any]) -> str:
    return " or ".join(sorted(str(value) for value in values))


def _sizes(block_sizes: Iterable[tuple[int, ...]]) -> str:
    return " or ".join(map(str, sorted(block_sizes)))


def _or(values: frozenset[Any]) -> str:
    return _names(values).replace("torch.", "")


CONSTRAINT = of_type(TensorConstraint, {torch.dtype: CODECS["dtype"], torch.qscheme: QSCHEME})
"""How constraints are written as data."""


def _wrong_numbers(constraint: TensorConstraint) -> Iterator[str]:
    for name in (
        "quant_min_lower_bound",
        "quant_max_upper_bound",
        "zero_point_exact_match",
        "ch_axis",
    ):
        value = getattr(constraint, name)
        if value is not None and type(value) is not int:
            yield f"{name}={value!r} is no whole number"
    for name in ("scale_min_lower_bound", "scale_max_upper_bound", "scale_exact_match"):
        value = getattr(constraint, name)
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
            yield f"{name}={value!r} is no positive number"
    integers = constraint.quant_range
    if integers is not None and (len(integers) != 2 or any(type(n) is not int for n in integers)):
        yield f"quant_range={integers!r} is no pair of whole numbers"


def _crossed(constraint: TensorConstraint) -> Iterator[str]:
    pairs = (
        ("quant_min_lower_bound", "quant_max_upper_bound"),
        ("scale_min_lower_bound", "scale_max_upper_bound"),
    )
    for low, high in pairs:
        least, most = getattr(constraint, low), getattr(constraint, high)
        numbers = isinstance(least, (int, float)) and isinstance(most, (int, float))
        if numbers and least > most:
            yield f"{low}={least} is above {high}={most}"
