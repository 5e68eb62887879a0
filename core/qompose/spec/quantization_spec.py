# SPDX-License-Identifier: Apache-2.0
"""Specifications of how one tensor is quantized, which annotations and configurations hold.

torchao asks `isinstance` of classes of its own. Those are abstract base classes, so qompose's are registered
as virtual subclasses: the answer changes for objects of qompose and for nothing else. It is done when such
an object is made, and only where the other package was imported already: qompose imports none of it.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from qompose.errors import ConfigError, kind_faults
from qompose.spec.algorithm_choice import (
    BIAS_CORRECTION,
    GPTQ,
    SCALE_SEARCH,
    SMOOTH_QUANT,
    AlgorithmChoice,
    checked_algorithms,
)
from qompose.spec.qparams import (
    CASTS,
    DEFAULT_EPS,
    FLOAT8,
    FLOAT_ZERO_POINT,
    PER_CHANNEL,
    SYMMETRIC,
    quantized_range,
)


@dataclass(frozen=True)
class ObserverFactory:
    """An observer class with some of its arguments; compares by value, unlike functools.partial.

    Args:
        observer: the class; or, as the `PartialWrapper` of this field takes it, a `functools.partial` of it.

    Raises:
        ConfigError: a partial has positional arguments.
    """

    observer: type[nn.Module]
    arguments: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        given: Any = self.observer
        while isinstance(given, functools.partial):
            if given.args:
                raise ConfigError(f"observer arguments must be passed by name, got {given!r}")
            own = {**given.keywords, **dict(self.arguments)}
            object.__setattr__(self, "arguments", tuple(own.items()))
            given = given.func
        object.__setattr__(self, "observer", given)
        ordered = sorted(self.arguments, key=lambda item: item[0])
        object.__setattr__(self, "arguments", tuple(ordered))

    @property
    def __name__(self) -> str:
        """Return the observer's name, by which other engines know whether it takes `ch_axis`."""
        return self.observer.__name__

    def with_args(self, **arguments: Any) -> ObserverFactory:
        """Return a factory with more arguments; a later value for a name replaces the earlier one."""
        merged = {**dict(self.arguments), **arguments}
        return ObserverFactory(self.observer, tuple(merged.items()))

    def __call__(self, **arguments: Any) -> nn.Module:
        return self.observer(**{**dict(self.arguments), **arguments})

    @property
    def p(self) -> functools.partial[nn.Module]:
        """Return the same as a `functools.partial`, under the name by which other packages ask for it."""
        return functools.partial(self.observer, **dict(self.arguments))


_PER_CHANNEL = "PerChannel"


def class_of(factory: Any) -> Any:
    """Return the class whose instances a factory makes; of a function, the function."""
    while not isinstance(factory, type):
        if isinstance(factory, functools.partial):
            factory = factory.func
        elif isinstance(factory, ObserverFactory):
            factory = factory.observer
        elif isinstance(getattr(factory, "p", None), functools.partial):
            factory = factory.p
        else:
            break
    return factory


def takes_axis(factory: Any, per_channel: bool) -> bool:
    """Tell whether a factory of another engine is given `ch_axis`.

    Engines of this field go by the name of its class alone, and so lose the axis of others that have
    channels. Here those get it too, if they take such an argument.
    """
    kind = class_of(factory)
    if _PER_CHANNEL in getattr(kind, "__name__", ""):
        return True
    parameters = inspect.signature(kind).parameters if per_channel and callable(kind) else {}
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "ch_axis" in parameters or any_keyword


def converts_itself(maker: Any) -> bool:
    """Tell whether an observer, or what a factory makes, replaces its own node when it is converted."""
    if isinstance(maker, nn.Module) and callable(vars(maker).get("convert")):
        return True
    # Of the class, not the instance: qompose's own have a property that is for other engines.
    kind = type(maker) if isinstance(maker, nn.Module) else class_of(maker)
    return callable(getattr(kind, "convert", None))


def made_by(factory: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a factory with arguments that take the place of its own, in the way of this field."""
    with_args = getattr(factory, "with_args", None)
    return factory(**arguments) if with_args is None else with_args(**arguments)()


Class = TypeVar("Class", bound=type)
_PT2E = "torchao.quantization.pt2e"
QUANTIZERS, OBSERVERS = f"{_PT2E}.quantizer.quantizer", f"{_PT2E}.observer"
"""The modules of the other package that define quantizers with their vocabulary, and observers."""
_unregistered: dict[tuple[str, str], type] = {}
"""qompose's classes that are not registered yet, by module and name of the class that each goes with."""


def virtual_subclass_of(module: str, name: str) -> Callable[[Class], Class]:
    """Return a class decorator: objects of the class count as ones of the class `name` of another package.

    Args:
        module: the module that defines the other class. It is never imported from here.
    """

    def note(cls: Class) -> Class:
        _unregistered[module, name] = cls
        return cls

    return note


def register_virtual_subclasses() -> None:
    """Register qompose's classes with those of other packages that were imported since the last call."""
    for (module, name), cls in list(_unregistered.items()):
        other = getattr(sys.modules.get(module), name, None)  # none while it is being imported
        if isinstance(other, ABCMeta):
            other.register(cls)
            _unregistered.pop((module, name), None)


if TYPE_CHECKING:
    from dataclasses import Field


EdgeOrNode: TypeAlias = "tuple[Node, Node] | Node"
"""An edge (producer, consumer), or a node standing for its output."""
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
"""The integer types of torch's quantize operators."""


@virtual_subclass_of(QUANTIZERS, "QuantizationSpecBase")
class QuantizationSpecBase:
    """Base of the four kinds of specification."""

    def __post_init__(self) -> None:
        register_virtual_subclasses()


@virtual_subclass_of(QUANTIZERS, "QuantizationSpec")
@dataclass(frozen=True)
class QuantizationSpec(QuantizationSpecBase):
    """How one tensor is quantized, and which observer or fake quantizer estimates its parameters.

    A `dtype` of float16 or bfloat16 is a cast without parameters. float32, which PT2E tutorials use for
    biases, leaves the tensor in float. float8_e4m3fn and float8_e5m2 have a scale and the zero point 0.

    `quant_min` and `quant_max` are the bounds of the integers, in integer units (None: the whole dtype).
    `ch_axis` is the channel dimension of a per-channel `qscheme` (None: the observer's, else 0).
    `is_dynamic` computes scale and zero point from each tensor when the model runs.

    `block_size` gives each block of a tensor its own scale. It has the block's sizes along the last
    dimensions, with -1 for the whole dimension; along all others, a block has size 1. `qscheme` must then be
    per channel, and `ch_axis` is ignored. `(32,)` means groups of 32 in each row of a weight and `(16, 16)`
    squares; with `is_dynamic`, `(-1,)` is one scale per token and `(-1, -1, -1)` one per image of a batch.

    Raises:
        ConfigError: bounds outside `dtype`; blocks whose sizes are not positive; a dynamic scheme other
            than per tensor, token or item.
    """

    dtype: torch.dtype
    observer_or_fake_quant_ctr: Callable[..., nn.Module]
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False
    block_size: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.observer_or_fake_quant_ctr):
            raise ConfigError(
                "observer_or_fake_quant_ctr must be a class or function that makes observers, got "
                f"{self.observer_or_fake_quant_ctr!r}"
            )
        if converts_itself(self.observer_or_fake_quant_ctr):  # it alone knows what the bounds mean
            _fill_axis(self, self.observer_or_fake_quant_ctr)
            return
        low, high = _check_range(self.dtype, self.quant_min, self.quant_max)
        if self.block_size is not None:
            _check_blocks(self.block_size, self.qscheme)
            object.__setattr__(self, "block_size", tuple(self.block_size))
        else:
            _fill_axis(self, self.observer_or_fake_quant_ctr)
        if self.is_dynamic and self.dtype not in CASTS:
            _check_dynamic(self, low, high)


class _FieldsInUse:
    """The fields of a specification, as `dataclasses` asks for them: without blocks where there are none.

    Other engines make the observer from `dataclasses.asdict` of the specification, and their observers do
    not take `block_size`.
    """

    def __init__(self, fields: dict[str, Field[Any]]) -> None:
        self.all = fields
        self.common = {name: fields[name] for name in fields if name != "block_size"}

    def __get__(self, spec: QuantizationSpec | None, owner: type) -> dict[str, Field[Any]]:
        return self.common if spec is not None and spec.block_size is None else self.all


QuantizationSpec.__dataclass_fields__ = _FieldsInUse(QuantizationSpec.__dataclass_fields__)  # type: ignore[assignment]


@virtual_subclass_of(QUANTIZERS, "FixedQParamsQuantizationSpec")
@dataclass(frozen=True)
class FixedQParamsQuantizationSpec(QuantizationSpecBase):
    """A tensor whose scale and zero point are known beforehand, as for the output of a sigmoid.

    `scale` is in units of the tensor for each step, `zero_point` one of the integers; both are per tensor.

    Raises:
        ConfigError: bounds outside `dtype`, a `zero_point` outside the bounds or not an integer, a `scale`
            that is not positive, a per-channel `qscheme`, or `is_dynamic`.
    """

    dtype: torch.dtype
    scale: float
    zero_point: int
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = _check_range(self.dtype, self.quant_min, self.quant_max)
        for fault in kind_faults(self, dict.fromkeys(("scale", "zero_point"), Real)):
            raise ConfigError(fault)
        if not 0 < self.scale < math.inf:
            raise ConfigError(f"scale must be positive, got {self.scale}")
        if not low <= self.zero_point <= high:
            raise ConfigError(f"zero_point={self.zero_point} must be within [{low}, {high}]")
        if self.zero_point != int(self.zero_point):
            raise ConfigError(f"zero_point must be an integer, got {self.zero_point}")
        if self.qscheme in PER_CHANNEL:
            raise ConfigError(
                f"fixed quantization parameters must be per tensor, got {self.qscheme}"
            )
        if self.is_dynamic:
            raise ConfigError("fixed quantization parameters cannot be dynamic")
        _fill_range(self, low, high)


@virtual_subclass_of(QUANTIZERS, "SharedQuantizationSpec")
@dataclass(frozen=True)
class SharedQuantizationSpec(QuantizationSpecBase):
    """A tensor that has the quantization parameters of another edge or output.

    `edge_or_node` is quantized itself, or shares with something that is; `prepare_pt2e` raises SharingError
    where it is not.
    """

    edge_or_node: EdgeOrNode


@virtual_subclass_of(QUANTIZERS, "DerivedQuantizationSpec")
@dataclass(frozen=True)
class DerivedQuantizationSpec(QuantizationSpecBase):
    """A tensor whose parameters are computed from those of others, as a bias from activation and weight.

    `derive_qparams_fn` takes the observers of `derived_from`, in order, and returns (scale, zero point), of
    shape `()` or `(1,)` per tensor and `(C,)` per channel.

    Raises:
        ConfigError: bounds outside `dtype`, or `is_dynamic`.
    """

    derived_from: list[EdgeOrNode]
    derive_qparams_fn: Callable[[list[nn.Module]], tuple[Tensor, Tensor]]
    dtype: torch.dtype
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = _check_range(self.dtype, self.quant_min, self.quant_max)
        _fill_axis(self)
        if self.is_dynamic:
            raise ConfigError("derived quantization parameters cannot be dynamic")
        _fill_range(self, low, high)


def channel_axis(spec: Any, factory: Any = None) -> int | None:
    """Return the channel dimension of a specification: where it says none, that of its observer.

    Observers per channel have 0 as their default, and quantizers of this field rely on that.
    """
    axis: int | None = spec.ch_axis
    if axis is not None and type(axis) is not int:
        raise ConfigError(f"ch_axis must be an integer or None, got {axis!r}")
    if axis is not None or spec.qscheme not in PER_CHANNEL:
        return axis
    arguments = getattr(getattr(factory, "p", factory), "keywords", {})
    return int(arguments.get("ch_axis") or 0)


def _fill_axis(spec: Any, factory: Any = None) -> None:
    object.__setattr__(spec, "ch_axis", channel_axis(spec, factory))


def _check_blocks(block_size: tuple[int, ...], qscheme: torch.qscheme | None) -> None:
    sizes = block_size if isinstance(block_size, (tuple, list)) else ()
    if not sizes or any(type(n) is not int or (n < 1 and n != -1) for n in sizes):
        raise ConfigError(
            "block_size must be a non-empty tuple of positive integers (-1: whole dimension), got "
            f"{block_size!r}"
        )
    if qscheme not in PER_CHANNEL:
        raise ConfigError(f"block_size requires a per-channel qscheme, got {qscheme}")


def _check_dynamic(spec: QuantizationSpec, low: int, high: int) -> None:
    if spec.qscheme in SYMMETRIC and low == 0 and (spec.dtype, high) != (torch.uint8, 255):
        raise ConfigError(
            f"dynamic symmetric quantization to [{low}, {high}] is not supported: for quant_min=0, "
            "torch's operator requires the full range of uint8. Use an affine "
            "qscheme, or int8 with a negative quant_min."
        )
    if spec.dtype in FLOAT8:
        raise ConfigError(
            "dynamic quantization requires an integer dtype: choose_qparams does not support "
            f"{spec.dtype}"
        )
    if spec.qscheme in FLOAT_ZERO_POINT:
        raise ConfigError(
            f"{spec.qscheme} has float zero points, which dynamically quantized activations "
            "do not support"
        )
    if spec.block_size is None and spec.qscheme not in PER_CHANNEL:
        return
    if spec.block_size is None or set(spec.block_size) != {-1}:
        raise ConfigError(
            "dynamic quantization must be per tensor or use block_size=(-1,) (per token) or "
            f"(-1, -1, -1) (per image), got {spec.qscheme} with block_size={spec.block_size}"
        )
    if (spec.dtype, low, high) != (torch.int8, -128, 127):
        raise ConfigError(
            f"dynamic quantization with block_size={spec.block_size} must be int8 "
            f"[-128, 127], got {spec.dtype} [{low}, {high}]"
        )


def _check_range(dtype: object, low: int | None, high: int | None) -> tuple[int, int]:
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype must be a torch.dtype such as torch.int8, got {dtype!r}")
    if dtype in CASTS:
        if low is not None or high is not None:
            raise ConfigError(f"quant_min and quant_max do not apply to {dtype}")
        return 0, 0
    if dtype.is_floating_point and dtype not in FLOAT8:
        raise ConfigError(
            "dtype must be an integer type, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, "
            f"got {dtype}"
        )
    if dtype not in (*INTEGERS, *FLOAT8):
        names = ", ".join(str(_short(integer)) for integer in INTEGERS)
        raise ConfigError(
            f"dtype {dtype} is not supported; integer dtypes are {names}. For fewer bits, use "
            "int8 with quant_min and quant_max"
        )
    return quantized_range(dtype, low, high)


def _fill_range(spec: Any, low: int, high: int) -> None:
    """Write out the bounds of parameters that no observer estimates: other engines do not fill them in."""
    if spec.dtype not in CASTS:
        object.__setattr__(spec, "quant_min", low)
        object.__setattr__(spec, "quant_max", high)


@dataclass
class QuantizationAnnotation:
    """What a quantizer asks of one node: a specification per input edge and one for the output.

    `allow_implicit_sharing` lets an edge share the observer of its producer's output, or of another
    edge from that producer, where both specifications are alike.
    """

    input_qspec_map: dict[Node, QuantizationSpecBase | None] = field(default_factory=dict)
    output_qspec: QuantizationSpecBase | None = None
    allow_implicit_sharing: bool = True
    _annotated: bool = False

    def __post_init__(self) -> None:
        register_virtual_subclasses()


@dataclass(frozen=True)
class QuantizationConfig:
    """A specification for each role of an operator; None leaves that role in float.

    `balance` allows channels of very different size to be scaled separately between two layers, and at the
    border to float operators (`algorithms.smooth_quant`).

    `algorithms` is a tuple or list of names ("equalization", "smooth_quant", "awq", "scale_search", "gptq",
    "gptq_sequential", "sign_round", "bias_correction", or one that an installed package offers) and
    `qompose.algorithms.Algorithm` objects, such as `SmoothQuant(alpha=...)`; their order does not matter.
    `()` applies none. With None, static configurations apply what is free at run time: SmoothQuant after a
    layer norm and GPTQ, each where it reduces the error on held-out calibration data, and bias correction of
    layers that have a bias. In every mode, scales of weights of six bits or fewer are searched and biases of
    their layers corrected if there is calibration data; scales of embedding tables are always searched. QAT
    configurations apply none. The report lists what was applied.

    `options` names rules that apply only on request (`qompose.backend.Rule.option`), for example because
    they cost accuracy; each backend has its own.

    `name` appears in reports and is ignored by comparisons.

    Raises:
        ConfigError: `algorithms` has an unknown name or object, one that cannot be applied with these
            specifications, or one twice; a role is not a specification; one of input and output is
            dynamic and the other static (beside a dynamic input, a dynamic output, as torchao's own
            configurations have it, becomes None); `options` is not a tuple of strings.
    """

    input_activation: QuantizationSpec | FixedQParamsQuantizationSpec | None
    output_activation: QuantizationSpec | FixedQParamsQuantizationSpec | None
    weight: QuantizationSpec | FixedQParamsQuantizationSpec | None
    bias: QuantizationSpec | FixedQParamsQuantizationSpec | None = None
    is_qat: bool = False
    balance: bool = False
    name: str = field(default="", compare=False)
    algorithms: tuple[AlgorithmChoice, ...] | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for role in ("input_activation", "output_activation", "weight", "bias"):
            spec: object = getattr(self, role)
            if spec is not None and not isinstance(spec, QuantizationSpecBase):
                raise ConfigError(
                    f"{role} must be a quantization specification or None, got {spec!r}"
                )
        self._settle_output()
        given: Any = self.options
        if isinstance(given, str) or not all(isinstance(word, str) for word in given):
            raise ConfigError(f"options must be a tuple of strings, got {given!r}")
        for fault in kind_faults(self, {"is_qat": bool, "balance": bool, "name": str}):
            raise ConfigError(fault)
        object.__setattr__(self, "options", tuple(sorted(set(given))))
        if self.algorithms is not None:
            asked = (
                checked_algorithms(self.algorithms, self.mode, self.weight)
                if self.algorithms
                else ()
            )
            object.__setattr__(self, "algorithms", asked)

    def _settle_output(self) -> None:
        """Take a dynamic output beside a dynamic input for none, as torchao's own configurations mean it."""
        given = self.output_activation
        if given is None or self.input_activation is None:
            return
        dynamic = getattr(given, "is_dynamic", False)
        if self.input_activation.is_dynamic and dynamic:
            object.__setattr__(self, "output_activation", None)
        elif self.input_activation.is_dynamic:
            raise ConfigError(
                "output_activation must be None where input_activation is dynamic, since operators "
                f"give floats then, got {given!r}"
            )
        elif dynamic:
            raise ConfigError(
                "output_activation cannot be dynamic where input_activation is static: no operator "
                f"gives such integers. Pass a static specification or None, got {given!r}"
            )

    @property
    def unasked(self) -> tuple[str, ...]:
        """Return the names of the algorithms that apply where they help if the configuration names none."""
        if self.algorithms is not None or self.is_qat or self.weight is None:
            return ()
        if self.weight.dtype in FLOAT8:  # whose steps differ
            return ()
        low = (SCALE_SEARCH,) if fits_bits(self.weight, 6) else ()
        static = (SMOOTH_QUANT, GPTQ) if self.mode == "static" else ()
        return (*low, *static, *([BIAS_CORRECTION] if low or static else []))

    def without(self, *roles: str) -> QuantizationConfig:
        """Return this configuration with roles left in float: "activation" (inputs and outputs), "weight".

        `without("activation")` quantizes weights alone, `without("weight")` activations alone.

        Raises:
            ConfigError: there is no such role.
        """
        parts = {
            "activation": ("input_activation", "output_activation"),
            "weight": ("weight", "bias"),
        }
        for role in roles:
            if not isinstance(role, str) or role not in parts:
                raise ConfigError(f"roles must be 'activation' or 'weight', got {role!r}")
        left = {name: None for role in roles for name in parts[role]}
        changes = any(getattr(self, name) is not None for name in left)
        name = f"{self.name} without {' and '.join(roles)}" if self.name and changes else self.name
        return replace(self, **left, name=name)  # type: ignore[arg-type]

    @property
    def mode(self) -> str:
        """Return "static", "dynamic" or "weight-only"."""
        if self.input_activation is None:
            return "weight-only"
        return "dynamic" if self.input_activation.is_dynamic else "static"

    def __str__(self) -> str:
        return self.name or f"{self.mode} {granularity(self.weight)}".strip()


def fits_bits(spec: QuantizationSpecBase, bits: int) -> bool:
    """Tell whether the integers have at most so many bits, and an observer estimates their scale."""
    if not isinstance(spec, QuantizationSpec) or spec.dtype in CASTS:
        return False
    try:
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
    except ConfigError:  # bounds outside the type are the affair of another engine's observer
        return False
    return high - low < 1 << bits


def granularity(spec: QuantizationSpecBase | None) -> str:
    """Return "per-tensor", "per-channel", "per-block (32,)", or "" for a role left in float.

    What is dynamic may be "per-token", or "per-item" where the scale is that of several last dimensions.
    """
    if spec is None:
        return ""
    blocks = getattr(spec, "block_size", None)
    if blocks is not None and getattr(spec, "is_dynamic", False):
        return "per-token" if len(blocks) == 1 else "per-item"
    if blocks is not None:
        return f"per-block {blocks}"
    return "per-channel" if getattr(spec, "qscheme", None) in PER_CHANNEL else "per-tensor"


def spec_to_dict(spec: QuantizationSpecBase | None) -> dict[str, Any] | None:
    """Return a specification as JSON data: names of dtype, scheme and observer, and the bounds."""
    if spec is None:
        return None
    names = "quant_min quant_max ch_axis is_dynamic block_size scale zero_point"
    facts = {
        "dtype": _short(getattr(spec, "dtype", None)),
        "qscheme": _short(getattr(spec, "qscheme", None)),
        **{name: getattr(spec, name, None) for name in names.split()},
        "observer": observer_name(spec),
    }
    return {key: value for key, value in facts.items() if value is not None}


def describe_spec(spec: QuantizationSpecBase | None) -> str:
    """Return a specification in one line: `int8 [-127, 127] per_channel_symmetric axis 0`."""
    facts = spec_to_dict(spec)
    if facts is None:
        return "float"
    words = [facts.get("dtype", type(spec).__name__)]
    if "quant_min" in facts and "quant_max" in facts:
        words.append(f"[{facts['quant_min']}, {facts['quant_max']}]")
    words += [facts["qscheme"]] if "qscheme" in facts else []
    if "block_size" in facts:
        words.append(granularity(spec))
    elif facts.get("qscheme", "").startswith("per_channel"):
        words.append(f"axis {facts['ch_axis']}")
    words += ["dynamic"] if facts.get("is_dynamic") else []
    if "scale" in facts:
        words.append(f"scale {facts['scale']} zero point {facts['zero_point']}")
    return " ".join(words)


def _short(value: object) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def observer_name(spec: QuantizationSpecBase) -> str | None:
    """Return the name of the observer or fake quantizer that a specification asks for."""
    return factory_name(getattr(spec, "observer_or_fake_quant_ctr", None))


def factory_name(factory: object) -> str | None:
    """Return the name of what an observer factory makes; it may be wrapped, with its arguments."""
    return None if factory is None else getattr(class_of(factory), "__name__", str(factory))


def integer_range_key(spec: QuantizationSpecBase) -> object:
    """Return what must agree for two points to share: all but how the range is estimated."""
    facts = {k: v for k, v in vars(spec).items() if k != "observer_or_fake_quant_ctr"}
    factory = getattr(spec, "observer_or_fake_quant_ctr", None)
    # What an observer makes that converts itself is read by those alone who asked for it.
    own = class_of(factory) if converts_itself(factory) else None
    # Run-time parameters are not estimated, but their scales are at least the observer's `eps`.
    least = _least_scale(spec) if getattr(spec, "is_dynamic", False) else None
    return tuple((key, str(value)) for key, value in facts.items()), own, least


def _least_scale(spec: Any) -> float | None:
    """Return the least scale of a dynamic tensor, None per token and of a cast, where none applies."""
    blocks = getattr(spec, "block_size", None) is not None
    return None if blocks or spec.dtype in CASTS else eps_made(spec)


def eps_made(spec: Any) -> float:
    """Return the `eps` of what the factory of a dynamic specification makes, which conversion reads.

    A class or function may set it in any way, so one is made. What cannot be made is refused later, by name.
    """
    factory = spec.observer_or_fake_quant_ctr
    left = {"observer_or_fake_quant_ctr", "block_size"}
    try:
        left |= set() if takes_axis(factory, False) else {"ch_axis"}
        made = made_by(factory, {k: v for k, v in vars(spec).items() if k not in left})
        return float(getattr(made, "eps", DEFAULT_EPS))
    except Exception:  # of another engine's observer, or of a user's
        return DEFAULT_EPS


def sharing_key(spec: QuantizationSpecBase) -> object:
    """Return what two specifications agree in that ask for the same, estimated in the same way."""
    return integer_range_key(spec), _factory_key(getattr(spec, "observer_or_fake_quant_ctr", None))


def _factory_key(factory: object) -> object:
    """Return what makes two observer factories the same; partial functions compare by identity only."""
    partial = getattr(factory, "p", factory)  # torch.ao's PartialWrapper holds a functools.partial
    if isinstance(factory, ObserverFactory) or not isinstance(partial, functools.partial):
        return factory
    arguments = tuple((k, _factory_key(v)) for k, v in sorted(partial.keywords.items()))
    key = partial.func, partial.args, arguments
    try:
        hash(key)
    except TypeError:  # arguments of other packages need not be hashable
        return partial.func, repr(partial.args), repr(arguments)
    return key
