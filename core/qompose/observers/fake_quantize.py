# SPDX-License-Identifier: Apache-2.0
"""Fake quantize modules: in training a tensor becomes what its integers will stand for.

The gradient is that of the straight-through estimator: `dx = dy` where the value is within the range, else 0.
Scale and zero point come from the observer inside, by the function that conversion calls too, so what
is trained is what is deployed; only `FusedMovingAvgObsFakeQuantize` rounds as torch's class does. Scales
may be learned with the weights (Esser et al., "Learned Step Size Quantization", 2020), zero points too
where the scheme is affine (Bhalgat et al., "LSQ+", 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from qompose.errors import ConfigError, StatisticsError
from qompose.observers.histogram_observers import HistogramObserver
from qompose.observers.min_max import (
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    Observer,
    ObserverBase,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    RangeObserver,
    several_processes,
)
from qompose.observers.tensor_statistics import Facts
from qompose.observers.value_screening import Screen, TensorScreen
from qompose.spec.qparams import (
    CASTS,
    FLOAT8,
    PER_CHANNEL,
    SYMMETRIC,
    along,
    full_blocks,
    in_blocks,
)
from qompose.spec.quantization_spec import made_by, virtual_subclass_of

_SCHEMES = {*SYMMETRIC, torch.per_tensor_affine, torch.per_channel_affine}


@virtual_subclass_of("torchao.quantization.pt2e.fake_quantize", "FakeQuantizeBase")
@virtual_subclass_of("torch.ao.quantization.fake_quantize", "FakeQuantizeBase")
class FakeQuantizeBase(ObserverBase):
    """What a fake quantizer written from nothing derives from: an observer that may be switched off.

    `forward` takes a tensor of any shape, looks at it while `observer_enabled`, and returns what integers
    make of it while `fake_quant_enabled`.

    Attributes:
        observer_enabled, fake_quant_enabled: uint8 of shape `(1,)`, for the state dict; set by methods.
    """

    observer_enabled: Tensor
    fake_quant_enabled: Tensor

    def __init__(self, dtype: torch.dtype = torch.uint8, **arguments: Any) -> None:
        super().__init__(dtype, **arguments)
        self.register_buffer("observer_enabled", torch.ones(1, dtype=torch.uint8))
        self.register_buffer("fake_quant_enabled", torch.ones(1, dtype=torch.uint8))

    def enable_observer(self, enabled: bool = True) -> None:
        """Go on estimating the range, or keep it as it is."""
        self.observer_enabled.fill_(enabled)

    def disable_observer(self) -> None:
        """Keep the range as it is."""
        self.enable_observer(False)

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Round and clip, or let tensors pass unchanged."""
        self.fake_quant_enabled.fill_(enabled)

    def disable_fake_quant(self) -> None:
        """Let tensors pass unchanged."""
        self.enable_fake_quant(False)


class FakeQuantize(FakeQuantizeBase, Observer):
    """Rounds and clips as the integers will, with an observer inside.

    A tensor that holds an attention mask passes unchanged, because conversion leaves it in float.
    Where `torch.distributed` is initialised, ranges in training are those of all processes' batches together.

    Args:
        observer: the observer, its class, or a factory of it; moving averages where there is none.
        quant_min, quant_max: bounds of the integers, by default those of `dtype`.
        arguments: what else the observer takes.

    Attributes:
        activation_post_process: the observer inside, under the name that this field knows.

    Raises:
        ConfigError: `observer` gives none of qompose's.
    """

    looks = False
    activation_post_process: Any

    def __init__(
        self,
        observer: Any = None,
        quant_min: int | None = None,
        quant_max: int | None = None,
        **arguments: Any,
    ) -> None:
        bounds = {"quant_min": quant_min, "quant_max": quant_max}
        arguments |= {name: bound for name, bound in bounds.items() if bound is not None}
        inner = _observer(observer, arguments)
        self._check_observer(inner)
        super().__init__(
            inner.dtype,
            qscheme=inner.qscheme,
            quant_min=inner._asked[0],
            quant_max=inner._asked[1],
            eps=inner.eps,
            is_dynamic=inner.is_dynamic,
        )
        self.activation_post_process = inner
        self.per_channel, self.estimates = inner.per_channel, inner.estimates
        self.mergeable = inner.mergeable
        if inner.estimates:
            _give_screen(inner, Screen())
        self._observing = self._simulating = True

    def _check_observer(self, inner: Observer) -> None:
        """Raise ConfigError for an observer that the class has no use for."""

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x`, of any shape, and return it with the values of its integers, in its own dtype."""
        if not x.numel():
            return x
        if self._observing and self.estimates:
            self.observe(x.detach())
        if not (self._simulating and self.calibrated):
            return x
        rounded = self._rounded(x)
        if self.constant or not self.estimates:
            return rounded
        # NaN and infinities pass, or the loss would not show them.
        passes = self.activation_post_process.screen.holds_mask() | ~torch.isfinite(x)
        return torch.where(passes, x, rounded)

    def observe(self, x: Tensor) -> None:
        inner, together = self.activation_post_process, self._together()
        if not isinstance(inner, RangeObserver):
            (inner.observe_together if together else inner.observe)(x)
            return
        low, high = inner.extremes(x)
        if self.constant and inner.mergeable:  # what counts of a parameter is what it is now
            inner.minimum, inner.maximum = low, high
            return
        if together:
            ends = torch.stack([-low, high])
            distributed.all_reduce(ends, distributed.ReduceOp.MAX)
            low, high = -ends[0], ends[1].clone()  # a view would keep both from being saved
        inner.widen(low, high)

    def _together(self) -> bool:
        """Return whether all processes observe now, and let the screen know."""
        together = self.training and not self.constant and several_processes()
        screen = self.activation_post_process.screen
        if isinstance(screen, TensorScreen):
            screen.together = together
        return together

    def _rounded(self, x: Tensor) -> Tensor:
        inner = self.activation_post_process
        if self.dtype in CASTS:
            return x.to(self.dtype).to(x.dtype)
        blocks = getattr(inner, "block_size", None)
        if blocks is not None:
            return _in_rows(x, blocks, lambda rows: self._simulated(rows, *self._of_rows(rows), 0))
        if self.is_dynamic:
            qparams = self._qparams(*torch.aminmax(x.detach().float()))
        else:
            qparams = self._trained_qparams()
        return self._simulated(x, *qparams, inner.ch_axis if self.per_channel else None)

    def _simulated(self, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None) -> Tensor:
        assert self.quant_min is not None and self.quant_max is not None
        values = simulate(x, scale, zero_point, self.quant_min, self.quant_max, axis)
        if self.dtype not in FLOAT8:
            return values
        scale = scale.to(x.device) if axis is None else along(scale.to(x.device), axis, x.dim())
        held = torch.round(values.detach().float() / scale).to(self.dtype).float() * scale
        return values + (held.to(values.dtype) - values).detach()

    def _trained_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point to round by in training: those of conversion."""
        return self.calculate_qparams()

    def _of_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_dynamic:
            low, high = torch.aminmax(rows.detach().float(), dim=1)
            return self._qparams(low, high)
        scale, zero_point = self.calculate_qparams()
        return scale.reshape(-1), zero_point.reshape(-1)

    def enable_observer(self, enabled: bool = True) -> None:
        super().enable_observer(enabled)
        self._observing = enabled

    def enable_fake_quant(self, enabled: bool = True) -> None:
        super().enable_fake_quant(enabled)
        self._simulating = enabled

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._observing, self._simulating = (
            bool(self.observer_enabled),
            bool(self.fake_quant_enabled),
        )

    def facts(self) -> Facts:
        inner = self.activation_post_process
        found: Facts = inner.facts()
        return replace(found, screen=self.screen)

    def take(self, facts: Facts) -> None:
        inner = self.activation_post_process
        kept = inner.screen
        del inner.screen  # a module's place takes nothing but modules
        try:
            inner.take(facts)
        except StatisticsError:
            inner.screen = kept
            raise
        _give_screen(inner, inner.screen)

    @property
    def settled(self) -> bool:
        """Tell whether a last look at a parameter would change what was trained."""
        return self.calibrated and not (self._observing and self.mergeable)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point, shape `()` per tensor and `(C,)` per channel."""
        found: tuple[Tensor, Tensor] = self.activation_post_process.calculate_qparams()
        return found

    @property
    def screen(self) -> Screen:
        """Return what the observer inside saw of mask values."""
        screen = self.activation_post_process.screen
        return screen.snapshot() if isinstance(screen, TensorScreen) else screen

    @screen.setter
    def screen(self, screen: Screen) -> None:
        """Leave the observer's own in place of the one that every observer starts with."""

    @property
    def subject(self) -> str:
        """Return which tensor is observed, for messages."""
        return str(self.activation_post_process.subject)

    @subject.setter
    def subject(self, subject: str) -> None:
        self.activation_post_process.subject = subject

    @property
    def calibrated(self) -> bool:
        return self.is_dynamic or bool(self.activation_post_process.calibrated)


class FusedMovingAvgObsFakeQuantize(FakeQuantize):
    """A fake quantizer with moving averages that trains by the numbers of torch's class of this name.

    Its scale in training is that of `torch.fused_moving_avg_obs_fake_quant`, which for symmetric integers
    differs from the one that is converted, most with few bits. `FakeQuantize` has one scale for both.

    Args:
        observer: `MovingAverageMinMaxObserver` or its form per channel; by the scheme where there is none.
        quant_min, quant_max: bounds of the integers, by default those of `dtype`.
        arguments: what else the observer takes.

    Raises:
        ConfigError: the observer has no moving averages.
    """

    def _check_observer(self, inner: Observer) -> None:
        if not isinstance(inner, MovingAverageMinMaxObserver):
            raise ConfigError(f"{type(inner).__name__} has no moving averages; use FakeQuantize")

    def _trained_qparams(self) -> tuple[Tensor, Tensor]:
        """Return what torch's operator makes of the range, by showing it the two ends alone."""
        if self.dtype in FLOAT8 or self.qscheme not in _SCHEMES:
            return super()._trained_qparams()
        inner = self.activation_post_process
        ends = torch.stack([inner.minimum, inner.maximum], dim=-1).float().reshape(-1, 2)
        on = ends.new_ones(1, dtype=torch.long)
        # It writes to these four.
        low, high = (end.clone() for end in ends.unbind(1))
        scale, zero_point = torch.ones_like(low), torch.zeros_like(low, dtype=torch.int32)
        assert self.quant_min is not None and self.quant_max is not None
        torch.fused_moving_avg_obs_fake_quant(
            ends, on, on, low, high, scale, zero_point, 1.0, self.quant_min, self.quant_max, 0,
            per_row_fake_quant=self.per_channel,
            symmetric_quant=self.qscheme in SYMMETRIC,
        )  # fmt: skip
        shape = inner.minimum.shape
        return scale.reshape(shape), zero_point.reshape(shape)


class FixedQParamsFakeQuantize(FakeQuantize):
    """A fake quantizer whose scale and zero point are known beforehand.

    Args:
        arguments: `quant_min`, `quant_max` and `qscheme`.
    """

    def __init__(
        self, scale: float, zero_point: int, dtype: torch.dtype = torch.uint8, **arguments: Any
    ) -> None:
        super().__init__(FixedQParamsObserver(scale, zero_point, dtype=dtype, **arguments))


def _observer(given: Any, arguments: dict[str, Any]) -> Observer:
    if isinstance(given, Observer):
        for name, value in arguments.items():
            if (own := getattr(given, name, value)) != value:
                raise ConfigError(
                    f"{name}={value!r}, but the observer, {type(given).__name__}, has {own!r}; "
                    "give it to the observer instead"
                )
        return given
    if given is None:
        per_channel = arguments.get("qscheme") in PER_CHANNEL
        given = (
            MovingAveragePerChannelMinMaxObserver if per_channel else MovingAverageMinMaxObserver
        )
    made = made_by(given, arguments)
    if not isinstance(made, Observer) or isinstance(made, FakeQuantize):
        raise ConfigError(
            f"observer={given!r} creates an instance of {type(made).__name__}, but qompose's "
            "fake quantizers require a qompose observer"
        )
    return made


def _give_screen(observer: Any, seen: Screen) -> None:
    """Let an observer screen in tensors, going by what was seen."""
    observer.screen = TensorScreen()
    observer.screen.take(seen)


def simulate(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, axis: int | None = None
) -> Tensor:
    """Return `(clamp(round(x / scale) + zero_point, low, high) - zero_point) * scale`, in the dtype of `x`.

    Args:
        scale, zero_point: shape `()`, or `(C,)` along dimension `axis` of `x`.
    """
    scale = scale.to(x.device)
    whole = zero_point if zero_point.is_floating_point() else zero_point.to(torch.int32)
    whole = whole.to(x.device)
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, scale, whole, low, high)
    return torch.fake_quantize_per_channel_affine(x, scale, whole, axis % x.dim(), low, high)


def _in_rows(
    x: Tensor, block_size: tuple[int, ...], function: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return what a function makes of a tensor with one block in each row, back in the tensor's shape."""
    blocks = in_blocks(x, full_blocks(tuple(x.shape), block_size))
    order = [*range(0, blocks.dim(), 2), *range(1, blocks.dim(), 2)]
    together = blocks.permute(order)
    rows = together.reshape(math.prod(together.shape[: x.dim()]), -1)
    back = sorted(range(len(order)), key=order.__getitem__)
    return function(rows).reshape(together.shape).permute(back).reshape(x.shape)


class LearnableFakeQuantize(FakeQuantize):
    """A fake quantizer whose scale, and zero point where it is not symmetric, are parameters.

    They are there from the start, so an optimizer made before the first step has them, and take their
    first values from the first tensor that is seen; `enable_observer` later on estimates nothing anew,
    which would throw away what was learned. With `q` the integer, the gradient of the scale is
    `q - zero_point - x / scale` within the range and `q - zero_point` beyond, that of the zero point 0 and
    `-scale`, each times `1 / sqrt(numel * quant_max)`.

    Args:
        observer: gives the first values; by default the extremes.
        quant_min, quant_max: bounds of the integers, by default those of `dtype`.
        use_grad_scaling: False leaves that last factor out.
        arguments: what else the observer takes.

    Attributes:
        scale, zero_point: parameters of shape `()`, or `(C,)` once the tensor's shape is known; the zero
            point of a symmetric scheme is a buffer.
        started: uint8 of shape `(1,)`: whether they have values of their own.

    Raises:
        ConfigError: there is nothing to learn: dynamic, in blocks, or no integers.
    """

    started: Tensor
    zero_point: Tensor

    def __init__(
        self,
        observer: Any = None,
        quant_min: int | None = None,
        quant_max: int | None = None,
        use_grad_scaling: bool = True,
        **arguments: Any,
    ) -> None:
        if observer is None:
            per_channel = arguments.get("qscheme") in PER_CHANNEL
            observer = PerChannelMinMaxObserver if per_channel else MinMaxObserver
        super().__init__(observer, quant_min, quant_max, **arguments)
        blocks = getattr(self.activation_post_process, "block_size", None) is not None
        if self.is_dynamic or blocks or self.quant_max is None or not self.estimates:
            given = (
                "dynamic quantization" if self.is_dynamic
                else "per-block quantization" if blocks
                else str(self.dtype) if self.quant_max is None
                else type(self.activation_post_process).__name__
            )  # fmt: skip
            raise ConfigError(
                "LearnableFakeQuantize requires static quantization to integers, per tensor or per "
                f"channel, with an observer that estimates ranges, got {given}"
            )
        self.use_grad_scaling = use_grad_scaling
        self.scale = nn.Parameter(torch.ones(()))
        if self.qscheme in SYMMETRIC:  # nor could it be learned by who unfreezes all parameters
            self.register_buffer("zero_point", torch.zeros(()))
        else:
            self.zero_point = nn.Parameter(torch.zeros(()))
        self.register_buffer("started", torch.zeros(1, dtype=torch.uint8))
        self._started = False

    def enable_range_learning(self, enabled: bool = True) -> None:
        """Go on learning scale and zero point, or keep them as they are; they are learned from the start."""
        for parameter in (self.scale, self.zero_point):
            if isinstance(parameter, nn.Parameter):
                parameter.requires_grad_(enabled)

    def disable_range_learning(self) -> None:
        """Keep scale and zero point as they are."""
        self.enable_range_learning(False)

    @property
    def learning_enabled(self) -> Tensor:
        """Return whether scale and zero point are learned: uint8 of shape `(1,)`, as other switches."""
        return torch.tensor([self.scale.requires_grad], dtype=torch.uint8)

    def size_for(self, shape: torch.Size) -> None:
        """Give the parameters the size of a tensor's channels."""
        if self.per_channel:
            channels = shape[self.activation_post_process.ch_axis]
            self.scale.data, self.zero_point.data = torch.ones(channels), torch.zeros(channels)

    def observe(self, x: Tensor) -> None:
        """Take the first values from the first tensor, of any shape; watch for masks from then on."""
        if self._has_started():
            if not self.constant:
                self._together()
                self.activation_post_process.screen.clean(x, self.subject)
            return
        super().observe(x)
        self.start()

    def start(self) -> None:
        """Give the parameters the values that the observer computes."""
        scale, zero_point = super().calculate_qparams()
        for parameter, value in ((self.scale, scale), (self.zero_point, zero_point)):
            # In place: an optimizer may have it.
            parameter.data = value.to(parameter.device, torch.float32, copy=True)
        self.started.fill_(1)
        self._started = True

    def _rounded(self, x: Tensor) -> Tensor:
        assert self.quant_min is not None and self.quant_max is not None
        factor = (x.numel() * self.quant_max) ** -0.5 if self.use_grad_scaling else 1.0
        scale, zero_point = self.scale.abs().clamp(min=self.eps), self._middle()
        if self.per_channel:
            axis = self.activation_post_process.ch_axis
            scale, zero_point = (along(v, axis, x.dim()) for v in (scale, zero_point))
        bounds = self.quant_min, self.quant_max
        arguments = x.float(), scale, zero_point, *bounds, factor
        rounded: Tensor = _LearnedSteps.apply(*arguments)  # type: ignore[no-untyped-call]
        return rounded.to(x.dtype)

    def _middle(self) -> Tensor:
        """Return the zero point within the integers, passing gradients on where it is beyond them too."""
        assert self.quant_min is not None and self.quant_max is not None
        inside = self.zero_point.clamp(self.quant_min, self.quant_max)
        return self.zero_point + (inside - self.zero_point).detach()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the learned scale and the integer next to the learned zero point, `()` or `(C,)`."""
        if not self._has_started():
            return super().calculate_qparams()
        scale = self.scale.detach().abs().clamp(min=self.eps)
        return scale, self._middle().detach().round().to(torch.int64)

    @property
    def calibrated(self) -> bool:
        return self._has_started() or super().calibrated

    def _has_started(self) -> bool:
        if not self._started:  # averages of models copy buffers into one that was not called itself
            self._started = bool(self.started)
        return self._started

    def take(self, facts: Any) -> None:
        super().take(facts)
        self.start()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, own in (("scale", self.scale), ("zero_point", self.zero_point)):
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and saved.shape != own.shape:
                own.data = torch.empty_like(saved, device=own.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._started = bool(self.started)


class _LearnedSteps(torch.autograd.Function):
    """Values of integers, with the gradients of `LearnableFakeQuantize`, in few passes over a tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int, factor: float
    ) -> Tensor:
        middle = zero_point.round()
        steps = x * (1.0 / scale)
        levels = (steps.round() + middle).clamp(low, high) - middle
        ctx.save_for_backward(steps, levels, middle, scale)
        ctx.bounds, ctx.factor = (low, high), factor
        return levels * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        steps, levels, middle, scale = ctx.saved_tensors
        low, high = ctx.bounds
        wanted = steps.round() + middle
        inside = (wanted >= low) & (wanted <= high)
        passed = torch.where(inside, gradient, 0.0)
        of_scale = (gradient * levels - passed * steps).sum_to_size(scale.shape) * ctx.factor
        of_zero_point = None
        if ctx.needs_input_grad[2]:
            of_zero_point = ((passed - gradient) * scale).sum_to_size(scale.shape) * ctx.factor
        return passed, of_scale, of_zero_point, None, None, None


_INT8: dict[str, Any] = {"dtype": torch.int8}
_TENSOR, _CHANNELS = torch.per_tensor_symmetric, torch.per_channel_symmetric
_NARROW: dict[str, Any] = {**_INT8, "quant_min": -127, "quant_max": 127, "eps": 2**-12}
_SEVEN_BITS: dict[str, Any] = {"quant_min": 0, "quant_max": 127}
_EMBEDDING: dict[str, Any] = {"qscheme": torch.per_channel_affine_float_qparams, "ch_axis": 0}
_MOVING, _MOVING_CHANNELS = MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver
_FUSED = FusedMovingAvgObsFakeQuantize
_LATEST: dict[str, Any] = {"averaging_constant": 1.0}
USUAL: dict[str, Any] = {
    "default_observer": MinMaxObserver.with_args(**_SEVEN_BITS),
    "default_histogram_observer": HistogramObserver.with_args(**_SEVEN_BITS),
    "default_placeholder_observer": PlaceholderObserver,
    "default_weight_observer": MinMaxObserver.with_args(**_INT8, qscheme=_TENSOR),
    "default_per_channel_weight_observer": PerChannelMinMaxObserver.with_args(
        **_INT8, qscheme=_CHANNELS
    ),
    "weight_observer_range_neg_127_to_127": MinMaxObserver.with_args(**_NARROW, qscheme=_TENSOR),
    "per_channel_weight_observer_range_neg_127_to_127": PerChannelMinMaxObserver.with_args(
        **_NARROW, qscheme=_CHANNELS
    ),
    "default_dynamic_quant_observer": PlaceholderObserver.with_args(
        dtype=torch.uint8, quant_min=0, quant_max=255, is_dynamic=True
    ),
    "default_float_qparams_observer": PerChannelMinMaxObserver.with_args(**_EMBEDDING),
    "default_fixed_qparams_range_neg1to1_observer": FixedQParamsObserver.with_args(
        scale=2 / 256, zero_point=128
    ),
    "default_fixed_qparams_range_0to1_observer": FixedQParamsObserver.with_args(
        scale=1 / 256, zero_point=0
    ),
    "default_fake_quant": FakeQuantize.with_args(observer=_MOVING, **_SEVEN_BITS),
    "default_histogram_fake_quant": FakeQuantize.with_args(
        observer=HistogramObserver, **_SEVEN_BITS
    ),
    "default_weight_fake_quant": FakeQuantize.with_args(observer=_MOVING, **_INT8, qscheme=_TENSOR),
    "default_per_channel_weight_fake_quant": FakeQuantize.with_args(
        observer=_MOVING_CHANNELS, **_INT8, qscheme=_CHANNELS
    ),
    "default_dynamic_fake_quant": FakeQuantize.with_args(
        observer=_MOVING, is_dynamic=True, **_LATEST
    ),
    "default_embedding_fake_quant": FakeQuantize.with_args(
        observer=_MOVING_CHANNELS, **_EMBEDDING, **_LATEST
    ),
    "default_fixed_qparams_range_neg1to1_fake_quant": FixedQParamsFakeQuantize.with_args(
        scale=2 / 256, zero_point=128
    ),
    "default_fixed_qparams_range_0to1_fake_quant": FixedQParamsFakeQuantize.with_args(
        scale=1 / 256, zero_point=0
    ),
    "default_fused_act_fake_quant": _FUSED.with_args(observer=_MOVING),
    "default_fused_wt_fake_quant": _FUSED.with_args(observer=_MOVING, **_INT8, qscheme=_TENSOR),
    "default_fused_per_channel_wt_fake_quant": _FUSED.with_args(
        observer=_MOVING_CHANNELS, **_INT8, qscheme=_CHANNELS
    ),
    "fused_wt_fake_quant_range_neg_127_to_127": _FUSED.with_args(
        observer=_MOVING, **_NARROW, qscheme=_TENSOR
    ),
    "fused_per_channel_wt_fake_quant_range_neg_127_to_127": _FUSED.with_args(
        observer=_MOVING_CHANNELS, **_NARROW, qscheme=_CHANNELS
    ),
}
"""The factories that recipes of this field have names for, with the arguments that they have there."""
