# SPDX-License-Identifier: Apache-2.0
"""From a group's specification to the module that observes it, and how such modules are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qompose.balancing import Channels
from qompose.errors import ConfigError, blaming
from qompose.numerics import DEFAULT_EPS, PER_CHANNEL, SYMMETRIC, quantized_range
from qompose.observers import FixedQParamsObserver, PerChannelMinMaxObserver, PlaceholderObserver
from qompose.screening import Screen
from qompose.specs import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
    describe_spec,
)

OBSERVER_PREFIX = "activation_post_process_"
SAMPLE_ROWS, SAMPLE_ROWS_PER_BATCH, SAMPLE_VALUES = 1024, 128, 2**18


def make_observer(spec: QuantizationSpecBase) -> nn.Module:
    """Make the observer or fake-quantizer of a specification.

    The specification's fields, None included, take the place of the factory's own arguments; that is
    the convention of this field.

    Raises:
        ConfigError: the factory does not take them, or what it makes has another granularity.
    """
    if isinstance(spec, FixedQParamsQuantizationSpec):
        arguments = {k: v for k, v in spec.__dict__.items() if v is not None}
        return FixedQParamsObserver(**arguments)
    if isinstance(spec, DerivedQuantizationSpec):
        return DerivedObserver(spec)
    assert isinstance(spec, QuantizationSpec)
    arguments = {k: v for k, v in spec.__dict__.items() if k != "observer_or_fake_quant_ctr"}
    if spec.qscheme not in PER_CHANNEL or spec.block_size is not None:
        del arguments["ch_axis"]
    if spec.block_size is None or spec.is_dynamic:
        del arguments["block_size"]
    try:
        observer = spec.observer_or_fake_quant_ctr(**arguments)
    except TypeError as error:
        raise ConfigError(f"no observer can be made for {describe_spec(spec)}: {error}") from error
    per_channel = getattr(observer, "per_channel", None)
    if per_channel and spec.qscheme not in PER_CHANNEL:
        raise ConfigError(f"{type(observer).__name__} does not estimate {describe_spec(spec)}")
    return observer


class BalancedObserver(nn.Module):
    """An observer of a whole tensor that also keeps the range of each of its channels, and some rows.

    Args:
        tensor_observer: estimates the range of the tensor, if it is not balanced.
        dim: the channel dimension.
    """

    def __init__(self, tensor_observer: nn.Module, dim: int) -> None:
        super().__init__()
        self.tensor_observer = tensor_observer
        self.channel_observer = PerChannelMinMaxObserver(
            dtype=torch.int8, qscheme=torch.per_channel_symmetric, ch_axis=dim
        )
        self.channel_observer.subject = getattr(
            tensor_observer, "subject", self.channel_observer.subject
        )
        self.rows: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x`, of any shape that has `dim`, and return it unchanged."""
        self.channel_observer(x)
        self.tensor_observer(x)
        kept = sum(map(len, self.rows))
        channels = x.shape[self.channel_observer.ch_axis] if x.dim() else 1
        most = min(SAMPLE_ROWS, max(1, SAMPLE_VALUES // max(1, channels)))
        if x.numel() and kept < most:
            rows = x.detach().float().movedim(self.channel_observer.ch_axis, -1)
            rows = rows.reshape(-1, rows.shape[-1])
            step = max(1, len(rows) // SAMPLE_ROWS_PER_BATCH)
            self.rows.append(rows[::step][: most - kept].clone())
        return x

    def calculate_qparams(self) -> Any:
        """Return scale and zero point of the whole tensor."""
        return self.tensor_observer.calculate_qparams()  # type: ignore[operator]

    @property
    def channels(self) -> Channels:
        """Return the exact range of each channel, and some rows of what was seen."""
        observer = self.channel_observer
        return Channels(observer.minimum, observer.maximum, torch.cat(self.rows))

    @property
    def calibrated(self) -> bool:
        """Tell whether any tensor was seen."""
        return self.channel_observer.calibrated

    @property
    def screen(self) -> Screen | None:
        """Return what was seen of mask values."""
        return getattr(self.tensor_observer, "screen", None)


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
        self._sources = tuple(sources)  # in a tuple they are no submodules: others own them

    def observe(self, x: Tensor) -> None:
        self._shape = tuple(x.shape)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point as the specification's function computes them.

        Raises:
            ConfigError: it returns no parameters that the specification allows.
        """
        with blaming(f"derive_qparams_fn of {self.subject}"):
            derived: Any = self.derive_qparams_fn([unscreened(s) for s in self._sources])
        try:
            scale, zero_point = (torch.as_tensor(value) for value in derived)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._says(derived)}: that is no scale and zero point") from error
        if self._axis is None and scale.numel() == zero_point.numel() == 1:
            scale, zero_point = scale.reshape(()), zero_point.reshape(())
        for value, name in ((scale, "scale"), (zero_point, "zero point")):
            if value.shape != self._expected(value):
                wanted = tuple(self._expected(value))
                raise ConfigError(
                    f"{self._says(derived)}: the {name} has shape {tuple(value.shape)}, not {wanted}"
                )
        low, high = quantized_range(self.dtype, self.quant_min, self.quant_max)
        if not bool(((scale > 0) & torch.isfinite(scale)).all()):
            raise ConfigError(f"{self._says(derived)}: a scale is positive and finite")
        if not bool(((zero_point >= low) & (zero_point <= high)).all()):
            raise ConfigError(f"{self._says(derived)}: the zero point is outside [{low}, {high}]")
        return scale.float(), zero_point

    def _expected(self, value: Tensor) -> torch.Size:
        """Return the shape of a parameter: one number, or one for each channel of what was seen."""
        if self._axis is None:
            return torch.Size(())
        return torch.Size((self._shape[self._axis] if self._shape else value.numel(),))

    def _says(self, derived: object) -> str:
        return f"derive_qparams_fn returned {derived!r} for {self.subject}"


class ScreenedObserver(nn.Module):
    """An observer of another engine, to which no mask value comes, and no NaN.

    Args:
        subject: which tensor is observed, for messages.
    """

    def __init__(self, observer: nn.Module, subject: str) -> None:
        super().__init__()
        self.observer, self.subject = observer, subject
        self.screen = Screen()

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x`, and return what the observer makes of it: as a rule `x` itself."""
        if not x.numel():
            return x
        screened = self.screen.clean(x.detach(), self.subject)
        if self.screen.masked:  # the claim will be dropped: the model goes on with its own values
            self.observer(screened)
            return x
        result: Tensor = self.observer(x)
        return result

    def calculate_qparams(self) -> Any:
        """Return scale and zero point, as the observer gives them."""
        return self.observer.calculate_qparams()  # type: ignore[operator]

    @property
    def eps(self) -> float:
        """Return the observer's least scale, 0 where it has none."""
        return float(getattr(self.observer, "eps", 0.0))


def unscreened(observer: nn.Module) -> nn.Module:
    """Return the observer that users and other engines know."""
    if isinstance(observer, BalancedObserver):
        return observer.tensor_observer
    return observer.observer if isinstance(observer, ScreenedObserver) else observer


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
    observer = unscreened(observer)
    inner = getattr(observer, "activation_post_process", observer)  # of a fake-quantizer
    eps = getattr(inner, "eps", None)
    return None if eps is None else float(eps)


def fixed_parameters(observer: object) -> tuple[Any, Any] | None:
    """Return scale and zero point that are known before any data, None where an observer estimates them.

    Those of other engines are known by their name: they are no subclasses of one another.
    """
    if isinstance(observer, nn.Module):
        observer = unscreened(observer)
    inner = getattr(observer, "activation_post_process", observer)
    names = {kind.__name__ for kind in type(inner).__mro__}
    if FixedQParamsObserver.__name__ not in names:
        return None
    return inner.scale, inner.zero_point  # type: ignore[attr-defined]
