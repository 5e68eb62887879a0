# SPDX-License-Identifier: Apache-2.0
"""A fake-quantizer whose scale is learned with the weights.

Esser et al., "Learned Step Size Quantization", 2020; the zero point too where the scheme is affine
(Bhalgat et al., "LSQ+", 2020).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qompose.errors import ConfigError
from qompose.fake_quantize import FakeQuantize
from qompose.numerics import PER_CHANNEL, SYMMETRIC, along
from qompose.observers import MinMaxObserver, PerChannelMinMaxObserver


class LearnableFakeQuantize(FakeQuantize):
    """A fake-quantizer whose scale, and zero point where it is not symmetric, are parameters.

    They are there from the start, so an optimizer made before the first step has them, and take their
    first values from the first tensor that is seen. With `q` the integer, the gradient of the scale is
    `q - zero_point - x / scale` within the range and `q - zero_point` beyond, that of the zero point 0 and
    `-scale`, each times `1 / sqrt(numel * quant_max)`.

    Args:
        observer: gives the first values; by default the extremes.
        use_grad_scaling: False leaves that last factor out.
        arguments: what the observer takes.

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
        self, observer: Any = None, *, use_grad_scaling: bool = True, **arguments: Any
    ) -> None:
        if observer is None:
            per_channel = arguments.get("qscheme") in PER_CHANNEL
            observer = PerChannelMinMaxObserver if per_channel else MinMaxObserver
        super().__init__(observer, **arguments)
        blocks = getattr(self.activation_post_process, "block_size", None) is not None
        if self.is_dynamic or blocks or self.quant_max is None or not self.estimates:
            raise ConfigError(
                f"LearnableFakeQuantize learns the scale of integers per tensor or per channel, and this is "
                f"{'dynamic' if self.is_dynamic else 'in blocks' if blocks else str(self.dtype)}"
            )
        self.use_grad_scaling = use_grad_scaling
        self.scale = nn.Parameter(torch.ones(()))
        if self.qscheme in SYMMETRIC:  # nor could it be learned by who unfreezes all parameters
            self.register_buffer("zero_point", torch.zeros(()))
        else:
            self.zero_point = nn.Parameter(torch.zeros(()))
        self.register_buffer("started", torch.zeros(1, dtype=torch.uint8))
        self._started = False

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
            parameter.data = value.to(
                parameter.device, torch.float32, copy=True
            )  # an optimizer may have it
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
        if (
            not self._started
        ):  # averages of models copy buffers into a model that was not called itself
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
