# SPDX-License-Identifier: Apache-2.0
"""Configurations from the options that users know: static, dynamic and weight-only, groups, bits, ranges.

A backend says once what its kernels take (`ConfigFactory`); the factory checks options, refuses what would
be ignored, and names each configuration after the options that are not usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch

from qompose.backend.rule import DYNAMIC, STATIC, WEIGHT_ONLY, TensorConstraint
from qompose.errors import ConfigError, kind_fault, near_names
from qompose.observers.config import (
    DEFAULT_RANGE,
    activation_spec,
    training_config,
    weight_spec,
)
from qompose.spec.algorithm_choice import AlgorithmChoice
from qompose.spec.quantization_spec import QuantizationConfig, QuantizationSpec

Integers: TypeAlias = "tuple[torch.dtype, int, int]"
"""A type and the inclusive bounds of its integers."""

INT4 = (-8, 7)
"""The integers of four-bit weights."""
_BITS = range(2, 9)
_FEW_BITS = {(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1): bits for bits in (4, 3, 2)}
"""By their bounds, the bits of weights that names tell."""


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """What users choose of a configuration; the options of a `ConfigFactory`.

    Attributes:
        is_qat: for `qompose.prepare_qat_pt2e`: fake quantizers in place of observers.
        is_dynamic: quantize activations when the model runs; outputs stay in float.
        weight_only: quantize weights alone; activations stay in float.
        is_per_channel: give every output channel of a weight its own scale.
        per_token: give each row of a dynamic activation a scale of its own.
        act_qmin, act_qmax: bounds of the activations' integers. None: those of the factory.
        bits: of the weights, 2 to 8: the bounds -2 ** (bits - 1) and 2 ** (bits - 1) - 1.
        weight_qmin, weight_qmax: bounds of the weights' integers. None: those of `bits`, or of the factory.
        group_size: give every `group_size` weights in a row a scale of their own.
        symmetric: whether all zero points of weights are 0. False is for groups alone; None: what is usual.
        scale_dtype: the type to which scales of groups are rounded. None: what is usual.
        range, weight_range: how ranges are estimated (`qompose.observers.observer_for_range`,
            `qompose.observers.weight_observer_for_range`).
        balance: give channels of very different size factors of their own; with static activations.
        algorithms: methods that reduce the error (`qompose.QuantizationConfig`).
        options: words of rules that apply only where they are asked for (`qompose.backend.Rule.option`).
        fake_quantize: with `is_qat`, how scales are found (`qompose.training_config`).

    Raises:
        ConfigError: an option has a value of the wrong type, or options exclude one another.
    """

    is_qat: bool = False
    is_dynamic: bool = False
    weight_only: bool = False
    is_per_channel: bool = True
    per_token: bool = False
    act_qmin: int | None = None
    act_qmax: int | None = None
    bits: int | None = None
    weight_qmin: int | None = None
    weight_qmax: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    scale_dtype: torch.dtype | None = None
    range: str = DEFAULT_RANGE
    weight_range: str = "minmax"
    balance: bool = True
    algorithms: tuple[AlgorithmChoice, ...] | None = None
    options: tuple[str, ...] = ()
    fake_quantize: str = "moving_average"

    def __post_init__(self) -> None:
        """Refuse values that Python or torch would accept for others, and options that exclude others."""
        check_booleans(**self._given("is_qat", "is_dynamic", "weight_only", "is_per_channel"))
        check_booleans(**self._given("per_token", "balance"))
        check_booleans(**({} if self.symmetric is None else self._given("symmetric")))
        check_integers(**self._given("act_qmin", "act_qmax", "weight_qmin", "weight_qmax"))
        check_integers(**self._given("bits", "group_size"))
        if self.weight_only and self.is_dynamic:
            raise ConfigError(
                "weight_only=True leaves activations in float, so it cannot be combined with "
                "is_dynamic=True"
            )
        if self.per_token and not self.is_dynamic:
            raise ConfigError(
                "per_token=True requires is_dynamic=True: tokens are known only at run time"
            )
        if self.bits is not None and self.bits not in _BITS:
            raise ConfigError(f"bits must be between {_BITS[0]} and {_BITS[-1]}, got {self.bits}")
        if self.bits is not None and (self.weight_qmin, self.weight_qmax) != (None, None):
            raise ConfigError(
                f"bits={self.bits} cannot be combined with weight_qmin or weight_qmax"
            )

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @property
    def mode(self) -> str:
        """Return "static", "dynamic" or "weight-only"."""
        return WEIGHT_ONLY if self.weight_only else DYNAMIC if self.is_dynamic else STATIC


@dataclass(frozen=True, kw_only=True)
class ConfigFactory:
    """Makes the configurations of a backend from `ConfigOptions`: `factory(is_dynamic=True)`.

    Weights are symmetric, and their bounds are those of int8 or less; activations are affine.

    Attributes:
        activation: the integers of an activation with one scale. With a scale for each row it is the whole
            of int8.
        weight: the usual bounds of weights; groups have -8 and 7.
        outputs: whether static configurations quantize outputs, too.
        group_sizes: the sizes of groups that the kernels read.
        group_modes: the modes in which they do.
        symmetric_groups: whether groups usually have no zero points.
        scale_dtypes: the types of scales of groups that the kernels read, the usual one first.
        head: returns what a name begins with, of the options and the bits of the weights; other options
            follow it where they are not usual.
    """

    activation: Integers = (torch.int8, -128, 127)
    weight: tuple[int, int] = (-127, 127)
    outputs: bool = True
    group_sizes: tuple[int, ...] = ()
    group_modes: tuple[str, ...] = (WEIGHT_ONLY,)
    symmetric_groups: bool = True
    scale_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    head: Callable[[ConfigOptions, int], str] | None = None

    def __call__(self, **options: Any) -> QuantizationConfig:
        """Return the configuration for options, which are the fields of `ConfigOptions`.

        Raises:
            ConfigError: there is no such option or value, options exclude one another, or one would be
                ignored.
        """
        chosen = _chosen(options)
        self._check(chosen)
        activation = None if chosen.weight_only else self._activation(chosen)
        weight = weight_spec(
            *self._bounds(chosen),
            per_channel=chosen.is_per_channel,
            group_size=chosen.group_size,
            range=chosen.weight_range,
            symmetric=self._is_symmetric(chosen),
            scale_dtype=chosen.scale_dtype or self.scale_dtypes[0],
        )
        _check_sides(*self._bounds(chosen))
        config = QuantizationConfig(
            activation,
            activation if self.outputs and chosen.mode == STATIC else None,
            weight,
            None,
            balance=chosen.balance and chosen.mode == STATIC,
            name=self._name(chosen),
            algorithms=chosen.algorithms,
            options=chosen.options,
        )
        return training_config(config, chosen.fake_quantize, is_qat=chosen.is_qat)

    def _bounds(self, chosen: ConfigOptions) -> tuple[int, int]:
        low, high = INT4 if chosen.group_size is not None else self.weight
        if chosen.bits is not None:
            low, high = -(2 ** (chosen.bits - 1)), 2 ** (chosen.bits - 1) - 1
        return (
            low if chosen.weight_qmin is None else chosen.weight_qmin,
            high if chosen.weight_qmax is None else chosen.weight_qmax,
        )

    def _is_symmetric(self, chosen: ConfigOptions) -> bool:
        if chosen.symmetric is not None:
            return chosen.symmetric
        return chosen.group_size is None or self.symmetric_groups

    def _integers(self, chosen: ConfigOptions) -> Integers:
        """Return the integers that activations have unless bounds are given."""
        return (torch.int8, -128, 127) if chosen.per_token else self.activation

    def _activation(self, chosen: ConfigOptions) -> Any:
        dtype, low, high = self._integers(chosen)
        return activation_spec(
            dtype,
            low if chosen.act_qmin is None else chosen.act_qmin,
            high if chosen.act_qmax is None else chosen.act_qmax,
            range=chosen.range,
            is_dynamic=chosen.is_dynamic,
            per_token=chosen.per_token,
        )

    def _check(self, chosen: ConfigOptions) -> None:
        """Refuse groups that no kernel reads, and options that would have no effect."""
        size = chosen.group_size
        if size is not None and chosen.mode not in self.group_modes:
            needed = " or ".join(_OPTION[mode] for mode in self.group_modes)
            raise ConfigError(
                f"group_size={size} requires {needed}: the kernels do not support groups in "
                f"{chosen.mode} mode"
            )
        if size is not None and size not in self.group_sizes:
            raise ConfigError(self._no_such_group(size))
        self._check_scales(chosen)
        unused = ", ".join(self._of_no_effect(chosen))
        if unused and chosen.weight_only:
            raise ConfigError(
                f"weight_only=True leaves activations in float and cannot be combined with {unused}"
            )
        if unused:
            raise ConfigError(
                "is_dynamic=True computes activation ranges at run time and cannot be combined "
                f"with {unused}"
            )

    def _no_such_group(self, size: int) -> str:
        if not self.group_sizes:
            return f"group_size={size} is not supported by this backend; leave it out"
        return f"group_size must be one of {', '.join(map(str, self.group_sizes))}, got {size}"

    def _check_scales(self, chosen: ConfigOptions) -> None:
        """Refuse types of scales that no kernel reads, or where there are no groups."""
        if chosen.scale_dtype is None:
            return
        if chosen.group_size is None:
            raise ConfigError(f"scale_dtype={chosen.scale_dtype} requires group_size")
        if chosen.scale_dtype not in self.scale_dtypes:
            known = ", ".join(map(str, self.scale_dtypes))
            raise ConfigError(f"scale_dtype must be one of {known}, got {chosen.scale_dtype!r}")

    def _of_no_effect(self, chosen: ConfigOptions) -> Iterator[str]:
        _, low, high = self.activation
        usual: dict[str, Any] = {"act_qmin": low, "act_qmax": high} if chosen.weight_only else {}
        usual |= {"range": DEFAULT_RANGE} if chosen.mode != STATIC else {}
        for name, value in usual.items():
            given = getattr(chosen, name)
            if given not in (None, value):
                yield f"{name}={given!r}"

    def _name(self, chosen: ConfigOptions) -> str:
        bounds, dtype_bounds = self._bounds(chosen), self._integers(chosen)[1:]
        acts = (chosen.act_qmin, chosen.act_qmax)
        given = [a if a is not None else b for a, b in zip(acts, dtype_bounds, strict=True)]
        grouped, spelled = chosen.group_size is not None, _listed(chosen.algorithms)
        bits = _FEW_BITS.get(bounds, chosen.bits or 8)
        kind = "symmetric" if self._is_symmetric(chosen) else "with zero points"
        choices = (
            ("activations", given, given != [*dtype_bounds]),
            ("weights", [*bounds], bits == 8 and (grouped or bounds != self.weight)),
            ("weights", kind, grouped and self._is_symmetric(chosen) != self.symmetric_groups),
            (
                "scales",
                str(chosen.scale_dtype).removeprefix("torch."),
                chosen.scale_dtype not in (None, self.scale_dtypes[0]),
            ),
            ("range", chosen.range, chosen.range != DEFAULT_RANGE),
            ("weight range", chosen.weight_range, chosen.weight_range != "minmax"),
            ("balance", chosen.balance, not chosen.balance),
            ("algorithms", spelled, chosen.algorithms is not None),
            ("with", _listed(chosen.options), bool(chosen.options)),
        )
        head = _head if self.head is None else self.head
        unusual = (f"{what} {choice}" for what, choice, said in choices if said)
        return ", ".join((head(chosen, bits), *unusual))


_OPTION = {
    DYNAMIC: "is_dynamic=True",
    WEIGHT_ONLY: "weight_only=True",
    STATIC: "static quantization",
}
"""How users ask for a mode."""


def _chosen(options: dict[str, Any]) -> ConfigOptions:
    known = [field.name for field in fields(ConfigOptions)]
    for name in options:
        if name not in known:
            close = near_names(name, known) or f"; options: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r}{close}")
    return ConfigOptions(**options)


def _head(chosen: ConfigOptions, bits: int) -> str:
    words = (
        chosen.mode,
        f"int{bits}" if bits != 8 else "",
        f"groups of {chosen.group_size}" if chosen.group_size else "",
        "per token" if chosen.per_token else "",
        "" if chosen.is_per_channel or chosen.group_size else "per-tensor",
    )
    return " ".join(filter(None, words))


def _listed(algorithms: object) -> str:
    if not isinstance(algorithms, (tuple, list)):
        return "" if algorithms is None else str(algorithms)
    return " and ".join(map(str, algorithms)) or "none"


def _check_sides(low: int, high: int) -> None:
    """Refuse bounds of symmetric weights that reach further to one side: the other would be clipped."""
    if high < 1 or -low not in (high, high + 1):
        raise ConfigError(
            "weight_qmin must be -weight_qmax or -weight_qmax - 1, and weight_qmax at least 1, "
            f"got [{low}, {high}]"
        )


def check_booleans(**options: object) -> None:
    """Refuse options that must be True or False and are something else, 0 and 1 among it.

    Raises:
        ConfigError: naming the first of them.
    """
    for name, value in options.items():
        if fault := kind_fault(name, value, bool):
            raise ConfigError(fault)


def check_integers(**options: object) -> None:
    """Refuse options that must be integers, or None, and are something else, True among it.

    Raises:
        ConfigError: naming the first of them.
    """
    for name, value in options.items():
        if value is not None and (fault := kind_fault(name, value, int)):
            raise ConfigError(fault)


def accepts(config: QuantizationConfig, *, exact: bool = False) -> dict[str, TensorConstraint]:
    """Return, for `Rule.accepts`, the constraints of what a configuration gives to each role.

    They admit the same kinds of integers in the same range or a part of it.

    Args:
        config: whose roles have a specification each, or stay in float.
        exact: admit activations and outputs in that range alone, for kernels that have its bounds built in.
    """
    specs = {
        "activation": config.input_activation,
        "weight": config.weight,
        "output": config.output_activation,
    }
    found = {role: s for role, s in specs.items() if isinstance(s, QuantizationSpec)}
    taken = {role: TensorConstraint.like(spec) for role, spec in found.items()}
    if not exact:
        return taken
    return {role: c if role == "weight" else _exactly(c) for role, c in taken.items()}


def _exactly(constraint: TensorConstraint) -> TensorConstraint:
    low, high = constraint.quant_min_lower_bound, constraint.quant_max_upper_bound
    if low is None or high is None:
        return constraint
    return replace(
        constraint, quant_range=(low, high), quant_min_lower_bound=None, quant_max_upper_bound=None
    )


def named(*configs: QuantizationConfig) -> dict[str, QuantizationConfig]:
    """Return configurations by name, for `Backend.configs`; the first is the default.

    Raises:
        ConfigError: two have one name.
    """
    found: dict[str, QuantizationConfig] = {}
    for config in configs:
        if found.setdefault(config.name, config) is not config:
            raise ConfigError(f"two configurations are named {config.name!r}")
    return found
