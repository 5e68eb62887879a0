# SPDX-License-Identifier: Apache-2.0
"""One row of a backend's rule table: patterns, roles, and what each role may be.

The names of `TensorConstraint` and their meaning are those of PyTorch's BackendConfig. What breaks one is
refused with the bound and the value. A bound that only calibration can check is checked when a model
is converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from qompose.backend.kernel import Kernel
from qompose.backend.pattern import Match, OperatorPattern, Pattern
from qompose.errors import (
    ConfigError,
    Kind,
    blaming,
    brief,
    is_kind,
    kind_fault,
    kind_faults,
    near_names,
)
from qompose.observers.make_observer import fixed_parameters, least_scale, make_observer
from qompose.spec.qparams import (
    CASTS,
    PER_CHANNEL,
    SYMMETRIC,
    Bounds,
    quantized_range,
    symmetric_zero_point,
)
from qompose.spec.quantization_spec import (
    FixedQParamsQuantizationSpec,
    QuantizationConfig,
    QuantizationSpec,
    describe_spec,
)

Guard: TypeAlias = Callable[[Match], "str | None"]
"""Returns why a rule cannot take a match, None where it can."""
STATIC, DYNAMIC, WEIGHT_ONLY = "static", "dynamic", "weight-only"
ACTIVATION_ONLY = "activation-only"
"""The mode of a rule with a weight under a configuration that leaves weights in float."""
CONDITIONS = (None, "all", "any", "no_float")
ROLES = ("activation", "weight", "output")
MODES = (STATIC, DYNAMIC, WEIGHT_ONLY, ACTIVATION_ONLY)
LAYOUT = ("ch_axis", "block_size")
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
        ConfigError: a field has a value of the wrong type, or bounds exclude each other.
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
                raise ConfigError(f"{name} must be a non-empty set of {name}, got {given!r}")
            object.__setattr__(self, name, frozenset(given))
        if self.block_sizes is not None:
            object.__setattr__(self, "block_sizes", frozenset(map(tuple, self.block_sizes)))
            object.__setattr__(self, "blocks", True)
        if self.quant_range is not None:
            object.__setattr__(self, "quant_range", tuple(self.quant_range))
        faults = [*_wrong_numbers(self), *_crossed(self)]
        if faults:
            raise ConfigError(f"invalid TensorConstraint: {'; '.join(faults)}")

    @classmethod
    def like(cls, spec: QuantizationSpec) -> TensorConstraint:
        """Return the constraint that takes what is quantized as `spec` is, in its range or a part of it.

        Raises:
            ConfigError: it is not a QuantizationSpec.
        """
        if not isinstance(spec, QuantizationSpec):
            raise ConfigError(f"TensorConstraint.like expects a QuantizationSpec, got {spec!r}")
        scheme: Any = spec.qscheme  # None for a cast, which has no scheme
        integers = spec.dtype not in CASTS
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
        if kind is not None or spec.dtype in CASTS:
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

    def to_dict(self) -> dict[str, Any]:
        """Return what is constrained as JSON data."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("dtypes", "qschemes"):  # a cast has no scheme
            names = (None if v is None else str(v).removeprefix("torch.") for v in data[name])
            data[name] = sorted(names, key=str)
        if self.quant_range is not None:
            data["quant_range"] = list(self.quant_range)
        if self.block_sizes is not None:
            data["block_sizes"] = sorted(map(list, self.block_sizes), key=str)
        standard = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in data.items() if value != standard[name]}

    def _kind_objection(self, spec: RoleSpec) -> str | None:
        """Check type, scheme and granularity."""
        scheme = spec.qscheme
        if scheme is None and isinstance(spec, FixedQParamsQuantizationSpec):
            scheme = torch.per_tensor_affine
        blocks, axis = getattr(spec, "block_size", None), getattr(spec, "ch_axis", None)
        if spec.dtype not in self.dtypes:
            return f"is {spec.dtype}, but the kernel supports {_names(self.dtypes)}"
        if scheme not in self.qschemes:
            return f"is {scheme}, but the kernel supports {_names(self.qschemes)}"
        if blocks is not None and not self.blocks:
            return f"has blocks of {blocks}, but the kernel does not support blocks"
        if self.block_sizes is not None and blocks not in self.block_sizes:
            has = f"blocks of {blocks}" if blocks else "no blocks"
            return f"has {has}, but the kernel supports blocks of {_sizes(self.block_sizes)}"
        if scheme in PER_CHANNEL and blocks is None and self.ch_axis not in (None, axis):
            return f"has channels along {axis}, but the kernel requires {self.ch_axis}"
        return None

    def _range_objections(self, spec: RoleSpec) -> Iterator[str]:
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        least, most = self.quant_min_lower_bound, self.quant_max_upper_bound
        if least is not None and low < least:
            yield f"has quant_min={low}, below the bound {least} (quant_min_lower_bound)"
        if most is not None and high > most:
            yield f"has quant_max={high}, above the bound {most} (quant_max_upper_bound)"
        if self.quant_range not in (None, (low, high)):
            yield f"has the range [{low}, {high}], but the kernel requires {self.quant_range}"

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
                f"gets its zero point from data, but the kernel requires exactly {wanted} "
                "(zero_point_exact_match); use a symmetric qscheme or a "
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
            "gets its scale from data, but the kernel requires exactly "
            f"{bounds.scale_exact_match:g} (scale_exact_match); use a FixedQParamsQuantizationSpec"
        )
    if bound is not None and least is None:
        yield (
            f"has the observer {name} without an eps, so its scale may fall below the bound "
            f"{bound:g} (scale_min_lower_bound)"
        )
    elif bound is not None and bounds.lowest.objections(least, 0):
        yield (
            f"may get the scale {least:g} (the eps of {name}), below the bound {bound:g} "
            f"(scale_min_lower_bound); give the observer eps={bound:g}"
        )
    if bounds.scale_max_upper_bound is not None and spec.is_dynamic:
        yield (
            "gets its scale at run time, which cannot be kept below the bound "
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


def _wrong_numbers(constraint: TensorConstraint) -> Iterator[str]:
    for name in (
        "quant_min_lower_bound",
        "quant_max_upper_bound",
        "zero_point_exact_match",
        "ch_axis",
    ):
        value = getattr(constraint, name)
        if value is not None and (fault := kind_fault(name, value, int)):
            yield fault
    for name in ("scale_min_lower_bound", "scale_max_upper_bound", "scale_exact_match"):
        value = getattr(constraint, name)
        if value is not None and not (is_kind(value, int | float) and 0 < value < math.inf):
            yield f"{name} must be a positive number, got {value!r}"
    integers = constraint.quant_range
    if integers is not None and (len(integers) != 2 or not all(is_kind(n, int) for n in integers)):
        yield f"quant_range must be a pair of integers, got {integers!r}"


def _crossed(constraint: TensorConstraint) -> Iterator[str]:
    pairs = (
        ("quant_min_lower_bound", "quant_max_upper_bound"),
        ("scale_min_lower_bound", "scale_max_upper_bound"),
    )
    for low, high in pairs:
        least, most = getattr(constraint, low), getattr(constraint, high)
        if all(is_kind(bound, int | float) for bound in (least, most)) and least > most:
            yield f"{low}={least} is above {high}={most}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of a backend's table. The order of rows is their priority: longest fusion first.

    Attributes:
        patterns: the variants (bias or none, ranks, in-place forms) in which the operation occurs.
        drawing: the operation in one line, `conv2d -> relu`.
        anchor: the name of the operator whose place in the model decides the configuration.
        activations: names of the float inputs that get `config.input_activation`.
        weight: name of the parameter that gets `config.weight`; it must be a parameter or buffer. In a list
            of parameters, as recurrent layers have, each matrix gets it.
        bias: name of the float parameter that is added to the product, in the variants that have one.
        integer_bias: the kernel adds the bias as an integer, in steps of input scale times weight scale;
            the converted model adds what that integer stands for.
        channels: the (input, output) dimensions that belong to dimensions 1 and 0 of the weight; None
            where the rule is not a plain product (up to a relu). They allow balancing, and SmoothQuant.
        state: name of the buffer that the operation writes to. The rule applies where nothing else writes to
            it and all reads come after; its kernel may keep it in another form (`Region.take_over`).
        output: whether the output gets `config.output_activation`.
        shares: inputs and output have the same scale and zero point (views, pooling, concatenation).
        carries: the rule applies only where something quantized reads its output. In front of a float
            operator, one that computes would only add rounding, and one that computes nothing would keep the
            channels of the product before it from being balanced.
        condition: when the rule applies: "all" or "any" of its inputs must be quantized already, or
            "no_float": none of them may come from an operator that computes in float (model inputs and
            parameters do not). None applies it anywhere.
        modes: the kinds of configuration that apply.
        option: a word that a configuration must have among its `options`, for a rule that costs accuracy or
            helps few; "" applies it without.
        own: by role, the specification that it has whatever the configuration says.
        layout: by role, what the shape of the operator's tensors makes of a specification's `ch_axis` or
            `block_size`, where it has one: `{"weight": {"ch_axis": 1}}` for a transposed convolution, whose
            weight has its output channels there. So one configuration serves operators of any layout.
        accepts: constraints by role: "activation", "weight", "output".
        guard: returns the reason why a match cannot be taken, or None; or several of that kind, of whose
            reasons the first counts.
        kernels: by target name.

    Raises:
        ConfigError: a field has a value of the wrong type, or names what the patterns do not have.
    """

    name: str
    patterns: tuple[Pattern | OperatorPattern, ...]
    drawing: str = ""
    anchor: str = "output"
    activations: tuple[str, ...] = ("input",)
    weight: str | None = None
    bias: str | None = None
    integer_bias: bool = False
    channels: tuple[int, int] | None = None
    state: str | None = None
    output: bool = True
    shares: bool = False
    carries: bool = False
    condition: str | None = None
    modes: frozenset[str] = frozenset({STATIC})
    option: str = ""
    own: Mapping[str, QuantizationSpec] = field(default_factory=lambda: MappingProxyType({}))
    layout: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    accepts: Mapping[str, TensorConstraint] = field(default_factory=lambda: MappingProxyType({}))
    guard: Guard | Sequence[Guard] | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse what would never apply, or never be looked at."""
        faults = [*_kind_faults(self)] or [
            *_word_faults(self),
            *_name_faults(self),
            *_contradictions(self),
        ]
        if faults:
            raise ConfigError(f"rule {self.name}: {'; '.join(faults)}")

    def specs_for(self, config: QuantizationConfig) -> dict[str, RoleSpec]:
        """Return the specification that a configuration gives to each role that this rule quantizes.

        An output that shares the parameters of the inputs has none of its own.
        """
        roles = {
            "activation": config.input_activation if self.activations else None,
            "weight": config.weight if self.weight else None,
            "output": config.output_activation if self.output and not self.shares else None,
            **self.own,
        }
        return {
            role: self._laid_out(role, spec) for role, spec in roles.items() if spec is not None
        }

    def _laid_out(self, role: str, spec: RoleSpec) -> RoleSpec:
        """Return a specification for the shape that tensors of this role have."""
        if not isinstance(spec, QuantizationSpec):
            return spec
        fitted = {
            k: v for k, v in self.layout.get(role, {}).items() if getattr(spec, k) is not None
        }
        return replace(spec, **fitted) if fitted else spec

    def mode_for(self, config: QuantizationConfig) -> str:
        """Return the mode, one of `MODES`, in which this rule would follow a configuration."""
        return ACTIVATION_ONLY if self.weight and config.weight is None else config.mode

    def mode_of_claims(self, config: QuantizationConfig) -> str:
        """Return the mode of the claims under a configuration that fits: that of the rule's own, if any."""
        dynamic = any(spec.is_dynamic for spec in self.own.values())
        return DYNAMIC if dynamic else config.mode

    def objection(self, config: QuantizationConfig) -> str | None:
        """Return why a configuration does not fit this rule, None where it does."""
        mode = self.mode_for(config)
        if mode not in self.modes:
            leaves = f"{config} leaves the weight in float, but " * (mode == ACTIVATION_ONLY)
            return f"{leaves}rule {self.name} does not support {mode} quantization"
        if self.option and self.option not in config.options:
            return f"it stays in float unless the configuration sets the option {self.option!r}"
        if config.bias is not None:
            return f"rule {self.name} leaves biases in float"
        if config.is_qat and not self.trains:
            return f"rule {self.name} does not support training"
        specs = self.specs_for(config)
        if not specs:
            return f"{config} leaves every role of rule {self.name} in float"
        if self.shares and config.input_activation is not None:
            specs["output"] = config.input_activation
        for role, spec in specs.items():
            constraint = self.accepts.get(role)
            objection = constraint.objection(role, spec) if constraint is not None else None
            if objection is not None:
                return f"{objection} (rule {self.name}, {role} {describe_spec(spec)})"
        return None

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Return the functions of `guard`, one or several."""
        if self.guard is None:
            return ()
        return tuple(self.guard) if isinstance(self.guard, Sequence) else (self.guard,)

    @property
    def trains(self) -> bool:
        """Return whether the rule follows configurations for training: not with specifications of its own."""
        return not self.own

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles that the rule has."""
        has = {"activation": self.activations, "weight": self.weight, "output": self.output}
        return tuple(role for role, value in has.items() if value)

    def bounds_for(self, role: str) -> Bounds | None:
        """Return what the kernel asks of a role's scale and zero point, None where it takes any."""
        constraint = self.accepts.get(role)
        return None if constraint is None else constraint.bounds


@contextmanager
def naming(rule: Rule) -> Iterator[None]:
    """Put the name of a rule in front of errors about one of its patterns, which has none."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"rule {rule.name}: {error}") from error


_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("integer_bias", "output", "shares", "carries"), bool),
    **dict.fromkeys(("drawing", "anchor", "option"), str),
    **dict.fromkeys(("weight", "bias", "state"), str | None),
}


def _kind_faults(rule: Any) -> Iterator[str]:
    """Yield the fields that have values of the wrong type."""
    if not isinstance(rule.name, str) or not rule.name:
        yield f"name must be a non-empty string, got {rule.name!r}"
    yield from kind_faults(rule, _KINDS)
    if not isinstance(rule.patterns, tuple) or not rule.patterns:
        yield f"patterns must be a tuple of patterns, got {brief(rule.patterns)}"
        return
    for pattern in rule.patterns:
        known = isinstance(pattern, (Pattern, OperatorPattern))
        unknown = f"patterns must contain Pattern or OperatorPattern objects, got {brief(pattern)}"
        yield from pattern.faults if known else [unknown]
    yield from _mapping_faults(rule)
    if isinstance(rule.modes, str):
        yield f"modes must be a set of modes, got the string {rule.modes!r}; write {{{rule.modes!r}}}"
    elif not isinstance(rule.modes, Collection) or not rule.modes:
        yield f"modes must be a non-empty set of modes, got {rule.modes!r}"
    if isinstance(rule.activations, str):
        yield f"activations must be a tuple of names, got the string {rule.activations!r}"
    channels = rule.channels
    pair = isinstance(channels, tuple) and [type(dim) for dim in channels] == [int, int]
    if channels is not None and not pair:
        yield f"channels must be None or a pair of dimensions such as (1, 1), got {channels!r}"
    if isinstance(rule.guard, str) or not all(map(callable, rule.guards)):
        yield f"guard must be a function of a match, got {rule.guard!r}"


def _mapping_faults(rule: Any) -> Iterator[str]:
    """Yield what is wrong with the fields that are by role or by target."""
    roles = ("accepts", "layout", "own")
    for name, key in (*((name, "role") for name in roles), ("kernels", "target")):
        if not isinstance(getattr(rule, name), Mapping):
            yield f"{name} must be a dict by {key}, got {brief(getattr(rule, name))}"
            return
    for role, constraint in rule.accepts.items():
        if not isinstance(constraint, TensorConstraint):
            yield f"accepts[{role!r}] must be a TensorConstraint, got {brief(constraint)}"
    for role, spec in rule.own.items():
        if not isinstance(spec, QuantizationSpec):
            yield f"own[{role!r}] must be a QuantizationSpec, got {brief(spec)}"
    for target, kernel in rule.kernels.items():
        if not isinstance(kernel, Kernel):
            yield f"kernels[{target!r}] must be a Kernel(name, function), got {kernel!r}"
    yield from target_faults(rule.kernels)


TORCH = "torch"
"""The target that core brings: the process itself."""


def target_faults(targets: Iterable[object], known: Collection[str] = (TORCH,)) -> Iterator[str]:
    """Yield the targets that are a slip away from a known one; others may be those of other packages."""
    for target in targets:
        meant = [name for name in known if isinstance(target, str) and _is_near(target, name)]
        if meant and target not in known:
            near = near_names(str(target).lower(), meant)
            yield f"kernels has an entry for the target {target!r}{near}"


def _is_near(written: str, meant: str) -> bool:
    """Tell whether a name is a slip away from another one, or that with other case or Python's prefix."""
    return one_slip(written, meant) or written.lower() in (meant, f"py{meant}")


def one_slip(written: str, meant: str) -> bool:
    """Tell whether one letter too many, missing, wrong, or swapped with the next, is between two names."""
    short, long = sorted((written, meant), key=len)
    if len(short) < _SHORT or short == long:
        return False
    if len(short) < len(long):
        return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
    first, *others = [i for i in range(len(long)) if short[i] != long[i]]
    swapped = (long[first + 1 : first + 2] + long[first]) == short[first : first + 2]
    return not others or (others == [first + 1] and swapped)


_SHORT = 4


def _word_faults(rule: Rule) -> Iterator[str]:
    """Yield the words that are not among those a field may have."""
    given: tuple[tuple[str, Iterable[object], tuple[str | None, ...]], ...] = (
        ("condition", (rule.condition,), CONDITIONS),
        ("modes", rule.modes, MODES),
        ("accepts", rule.accepts, ROLES),
        ("layout", rule.layout, ROLES),
        ("own", rule.own, ROLES),
        ("layout", (name for given in rule.layout.values() for name in given), LAYOUT),
    )
    for field_name, words, known in given:
        for word in words:
            if word not in known:
                names = [name for name in known if name]
                yield (
                    f"{field_name} must be one of {', '.join(names)}, got {word!r}"
                    f"{near_names(str(word), names)}"
                )


def _name_faults(rule: Rule) -> Iterator[str]:
    """Yield the names that a pattern does not have. A bias may occur in some variants only."""
    named = {rule.anchor, *rule.activations, *filter(None, (rule.weight, rule.state))}
    for pattern in rule.patterns:
        unknown = sorted(named - pattern.names)
        if unknown:
            hints = "".join(near_names(name, pattern.names) for name in unknown)
            known = ", ".join(sorted(pattern.names))
            yield f"unknown name {', '.join(unknown)}{hints}. Its pattern has {known}"
            return
    if rule.bias and not any(rule.bias in pattern.names for pattern in rule.patterns):
        known = ", ".join(sorted(rule.patterns[0].names))
        yield f"no pattern has the bias {rule.bias!r}. The first pattern has {known}"


def _contradictions(rule: Rule) -> Iterator[str]:
    """Yield what cannot be true of one operation at once."""
    fields_of: dict[str, list[str]] = {name: ["activations"] for name in rule.activations}
    for role in ("weight", "bias", "state"):
        name = getattr(rule, role)
        if name:
            fields_of.setdefault(name, []).append(role)
    for name, several in fields_of.items():
        if len(several) > 1:
            yield f"{' and '.join(several)} both name {name!r}; keep it in one of them"
    if rule.shares and "output" in rule.own:
        yield "own['output'] cannot be set with shares=True; leave one of them out"
