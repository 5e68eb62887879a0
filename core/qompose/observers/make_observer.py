# SPDX-License-Identifier: Apache-2.0
"""The module that observes a tensor, made from the tensor's specification."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.errors import ConfigError, blaming
from qompose.observers.channel_ranges import base_observer
from qompose.observers.fake_quantize import FakeQuantize
from qompose.observers.foreign_observer import Rebinding, guard_of
from qompose.observers.min_max import FixedQParamsObserver, Observer, PlaceholderObserver
from qompose.program.control_flow import nodes_in
from qompose.program.graph import get_attribute, owner_of
from qompose.program.meta import GROUP_TAG, tag_of
from qompose.spec.qdq import QParams, axis_of
from qompose.spec.qparams import (
    DEFAULT_EPS,
    FLOAT_ZERO_POINT,
    PER_CHANNEL,
    SYMMETRIC,
    quantized_range,
    symmetric_zero_point,
)
from qompose.spec.quantization_spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    class_of,
    converts_itself,
    describe_spec,
    made_by,
    takes_axis,
)


def observer_nodes(model: GraphModule) -> list[tuple[Node, int]]:
    """Return the nodes of a prepared model that call observers, each with the number of its group."""
    return [
        (node, number)
        for node in nodes_in(model)
        if (number := tag_of(node, GROUP_TAG)) is not None
    ]


def observers_of(nodes: Iterable[tuple[Node, int]]) -> dict[int, Any]:
    """Return the observer of each group that has one among the nodes."""
    return {number: get_attribute(owner_of(node), str(node.target)) for node, number in nodes}


def make_observer(
    spec: QuantizationSpecBase, rebind: Rebinding | None = None, *, simulate: bool = False
) -> nn.Module:
    """Make the observer or fake quantizer of a specification.

    The specification's fields, None included, take the place of the factory's own arguments; that is
    the convention of this field.

    Args:
        rebind: replaces what a foreign factory holds of another graph; None leaves it as it is.
        simulate: make a fake quantizer around an observer of qompose's.

    Raises:
        ConfigError: the factory does not take them, or does not make an observer of the specification.
    """
    if isinstance(spec, DerivedQuantizationSpec):
        return DerivedObserver(spec)
    made = _made(spec, rebind)
    wraps = simulate and isinstance(made, Observer) and not isinstance(made, FakeQuantize)
    return FakeQuantize(made) if wraps else made


def _made(spec: QuantizationSpecBase, rebind: Rebinding | None) -> nn.Module:
    if isinstance(spec, FixedQParamsQuantizationSpec):
        arguments = {k: v for k, v in spec.__dict__.items() if v is not None}
        return FixedQParamsObserver(**arguments)
    assert isinstance(spec, QuantizationSpec)
    factory: Any = spec.observer_or_fake_quant_ctr
    try:
        factory = factory if rebind is None else rebind(factory)
        observer = made_by(factory, _arguments(spec))
    except TypeError as error:
        raise ConfigError(
            f"cannot create an observer for {describe_spec(spec)}: {error}"
        ) from error
    check_observer(observer, spec)
    return observer  # type: ignore[no-any-return]


def _arguments(spec: QuantizationSpec) -> dict[str, Any]:
    """Return what the factory of a specification is called with."""
    factory = spec.observer_or_fake_quant_ctr
    arguments = {k: v for k, v in vars(spec).items() if k != "observer_or_fake_quant_ctr"}
    kind = class_of(factory)
    channels = spec.qscheme in PER_CHANNEL and spec.block_size is None
    if not (isinstance(kind, type) and issubclass(kind, Observer)):
        channels = takes_axis(factory, channels)
    if not channels:
        del arguments["ch_axis"]
    if spec.block_size is None or spec.is_dynamic:
        del arguments["block_size"]
    return arguments


def check_observer(observer: Any, spec: QuantizationSpec) -> None:
    """Check that something is an observer of what a specification says.

    Raises:
        ConfigError: it is not.
    """
    kind = type(observer).__name__
    if not isinstance(observer, nn.Module):
        raise ConfigError(f"its observer must be a torch.nn.Module, got {observer!r}")
    if converts_itself(observer):
        return
    if not callable(getattr(observer, "calculate_qparams", None)):
        raise ConfigError(f"its observer {kind} has no calculate_qparams")
    if isinstance(observer, Observer):
        if observer.per_channel and spec.qscheme not in PER_CHANNEL:
            raise ConfigError(f"{kind} requires a per-channel qscheme, got {describe_spec(spec)}")
        return
    dtype = getattr(observer, "dtype", spec.dtype)
    if _UNDERLYING.get(dtype, dtype) != spec.dtype:
        raise ConfigError(
            f"its observer {kind} has dtype {dtype}, but the specification is {describe_spec(spec)}"
        )
    if spec.qscheme in FLOAT_ZERO_POINT and integer_bounds(spec, observer)[0] != 0:
        raise ConfigError(
            f"its observer {kind} assumes quant_min=0 for {spec.qscheme}, but the "
            f"specification is {describe_spec(spec)}. Set quant_min=0, or use an "
            "observer from qompose.observers"
        )


_UNDERLYING = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


class UnitScaleObserver(nn.Module):
    """Stands for an observer that saw nothing: a scale of 1, and the zero point of zeros.

    That is 0, and for unsigned integers of a symmetric scheme their middle, as with data. Integers and
    channels are those of the observer in whose place it is.

    Args:
        example: the tensor, of which shape and device are read.

    Raises:
        ConfigError: there is a scale for each channel, and their number is open.
    """

    calibrated = False

    def __init__(self, spec: Any, observer: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.dtype, self.qscheme = spec.dtype, spec.qscheme
        self.quant_min, self.quant_max = integer_bounds(spec, observer)
        shape: tuple[Any, ...] = ()
        if (axis := channel_axis(spec, observer)) is not None:
            self.ch_axis, shape = axis, (example.shape[axis],)
        if not all(isinstance(size, int) for size in shape):  # to ask for its value adds a guard
            raise ConfigError(
                f"it has a scale for each of {shape[0]} channels, whose number is open"
            )
        middle = symmetric_zero_point(self.dtype, self.quant_min, self.quant_max)
        middle = middle if self.qscheme in SYMMETRIC else 0
        whole = torch.float32 if self.qscheme in FLOAT_ZERO_POINT else torch.int64
        self._scale = torch.ones(shape, device=example.device)
        self._zero_point = torch.full(shape, middle, dtype=whole, device=example.device)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point, shape `()` per tensor and `(C,)` per channel."""
        return self._scale, self._zero_point


class DerivedObserver(PlaceholderObserver):
    """Looks at nothing: its parameters are computed from those of other observers."""

    def __init__(self, spec: DerivedQuantizationSpec) -> None:
        super().__init__(dtype=spec.dtype, quant_min=spec.quant_min, quant_max=spec.quant_max)
        self._axis = spec.ch_axis if spec.qscheme in PER_CHANNEL else None
        self._shape: tuple[int, ...] = ()
        self.derive_qparams_fn = spec.derive_qparams_fn
        self._sources: tuple[nn.Module, ...] = ()

    def derive_from(self, sources: Sequence[nn.Module]) -> None:
        """Name the observers that the parameters are computed from, in the specification's order."""
        self._sources = tuple(sources)  # in a tuple they are not submodules: others own them

    def observe(self, x: Tensor) -> None:
        self._shape = tuple(x.shape)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point as the specification's function computes them.

        Raises:
            ConfigError: it returns no parameters that the specification allows.
        """
        with blaming(f"derive_qparams_fn of {self.subject}"):
            derived: Any = self.derive_qparams_fn([base_observer(s) for s in self._sources])
        try:
            scale, zero_point = (torch.as_tensor(value) for value in derived)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._says(derived)}; expected a scale and a zero point"
            ) from error
        if scale.numel() == zero_point.numel() == 1 and self._has_one_scale():
            shape = self._expected(scale)
            scale, zero_point = (value.reshape(()).expand(shape) for value in (scale, zero_point))
        for value, name in ((scale, "scale"), (zero_point, "zero point")):
            if value.shape != self._expected(value):
                wanted = tuple(self._expected(value))
                raise ConfigError(
                    f"{self._says(derived)}: the {name} has shape {tuple(value.shape)}, "
                    f"expected {wanted}"
                )
        low, high = quantized_range(self.dtype, self.quant_min, self.quant_max)
        if not bool(((scale > 0) & torch.isfinite(scale)).all()):
            raise ConfigError(f"{self._says(derived)}: a scale must be positive and finite")
        if not bool(((zero_point >= low) & (zero_point <= high)).all()):
            raise ConfigError(
                f"{self._says(derived)}: the zero point must be within [{low}, {high}]"
            )
        return scale.float(), zero_point

    def _has_one_scale(self) -> bool:
        """Tell whether one scale is what there is: also for channels, of what has one for all of them."""
        if self._axis is None:
            return True
        return bool(self._sources) and all(map(_has_one_number, self._sources))

    def _expected(self, value: Tensor) -> torch.Size:
        """Return the shape of a parameter: one number, or one for each channel of what was seen."""
        if self._axis is None:
            return torch.Size(())
        return torch.Size((self._shape[self._axis] if self._shape else value.numel(),))

    def _says(self, derived: object) -> str:
        return f"derive_qparams_fn returned {derived!r} for {self.subject}"


def _has_one_number(observer: nn.Module) -> bool:
    if isinstance(observer, DerivedObserver):
        return observer._axis is None
    return getattr(base_observer(observer), "qscheme", None) not in {None, *PER_CHANNEL}


def was_fed(observer: nn.Module) -> bool:
    """Tell whether calibration has shown an observer its parameters too, and once is enough.

    A second look could change what it estimates. One of qompose's own knows that it is a second look, but
    for a fake quantizer: what is deployed is what was trained.
    """
    if isinstance(observer, FakeQuantize):
        return observer.settled
    guard = guard_of(observer)
    return guard is not None and guard.screen.values > 0


def has_data(observer: Any) -> bool:
    """Tell whether an observer saw anything, as far as it says so.

    Those of other packages keep bounds that are empty or infinite until then, or do not know the size of
    their blocks.
    """
    observer = getattr(observer, "activation_post_process", observer)
    if hasattr(observer, "calibrated"):
        return bool(observer.calibrated)
    if getattr(observer, "block_size", observer) is None:
        return False
    bound = getattr(observer, "min_val", None)
    if not isinstance(bound, Tensor):
        return True
    return bound.numel() > 0 and bool(torch.isfinite(bound).all())


def integer_bounds(spec: Any, observer: nn.Module) -> tuple[int, int]:
    """Return the least and the largest integer of a tensor.

    Observers of other engines fill in what a specification leaves open, and may take fewer steps.

    Raises:
        ConfigError: they do not fit the specification's type.
    """
    observer, low, high = base_observer(observer), spec.quant_min, spec.quant_max
    if not isinstance(observer, Observer):
        least, most = getattr(observer, "quant_min", None), getattr(observer, "quant_max", None)
        low, high = low if least is None else int(least), high if most is None else int(most)
    return quantized_range(spec.dtype, low, high)


def channel_axis(spec: Any, observer: nn.Module) -> int | None:
    """Return the dimension along which a tensor has a scale for each channel, None where it has none.

    Observers of other engines have the last word: they may not have been given the specification's.
    """
    observer = base_observer(observer)
    scheme = None if isinstance(observer, Observer) else getattr(observer, "qscheme", None)
    if scheme is None:
        return axis_of(spec)
    axis = getattr(observer, "ch_axis", spec.ch_axis)
    return int(axis) if scheme in PER_CHANNEL else None


def qparams_of(spec: Any, observer: nn.Module, scale: Tensor, zero_point: Tensor) -> QParams:
    """Return quantization parameters with an observer's scales and zero points, in the form of its scheme.

    Raises:
        ConfigError: the observer's integers do not fit the specification's type.
    """
    low, high = integer_bounds(spec, observer)
    axis, blocks = channel_axis(spec, observer), getattr(spec, "block_size", None) is not None
    if axis is not None:
        scale, zero_point = scale.reshape(-1), zero_point.reshape(-1)
    return QParams(scale, zero_point, low, high, spec.dtype, axis, blocks)


_PER_TOKEN_EPS = 1e-5 / 127
"""The least scale of torch's symmetric operator per token, which takes no eps; the affine one has torch's."""


def least_scale(spec: Any, observer: Any) -> float | None:
    """Return the least scale that a tensor can get, None where its observer does not say.

    Args:
        spec: of the tensor, whose scale at run time an operator computes where it is dynamic.
        observer: what was made for it.
    """
    if spec.is_dynamic and getattr(spec, "block_size", None) is not None:
        return _PER_TOKEN_EPS if spec.qscheme in SYMMETRIC else DEFAULT_EPS
    return eps_of(observer)


def eps_of(observer: Any) -> float | None:
    """Return an observer's least scale, None where it does not say."""
    eps = getattr(base_observer(observer, inside_fake_quantize=True), "eps", None)
    return None if eps is None else float(eps)


def fixed_parameters(observer: object) -> tuple[Any, Any] | None:
    """Return scale and zero point that are known before any data, None where an observer estimates them.

    Those of other engines are known by their name: they are not subclasses of one another.
    """
    inner = base_observer(observer, inside_fake_quantize=True)
    names = {kind.__name__ for kind in type(inner).__mro__}
    if FixedQParamsObserver.__name__ not in names:
        return None
    return inner.scale, inner.zero_point
