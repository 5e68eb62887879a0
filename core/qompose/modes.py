# SPDX-License-Identifier: Apache-2.0
"""Modules of a program that is trained: operators that differ in training, and fused batch norms.

They have no state: parameters and buffers stay where the model has them and come as arguments, so a state
dict has the model's own names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qompose.numerics import along
from qompose.processes import batch_norm_together, several_processes

_VANISHING = 2.0**-12
"""A factor below it leaves nothing of a channel, neither here nor in integers: it is taken for 1 instead."""


class SwitchedOperator(nn.Module):
    """An operator with an argument that is another one in training: of a dropout, whether it drops.

    Args:
        operator: an `OpOverload`.
        position: which positional argument it is.
        in_training, in_evaluation: the argument.
    """

    def __init__(self, operator: Any, position: int, in_training: Any, in_evaluation: Any) -> None:
        super().__init__()
        self.name, self.position = str(operator), position
        self.in_training, self.in_evaluation = in_training, in_evaluation

    @property
    def operator(self) -> Any:
        """Return the operator; the module has its name, which can be pickled."""
        namespace, packet, overload = self.name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the operator with the arguments before and behind the one that it has itself."""
        own = self.in_training if self.training else self.in_evaluation
        before, behind = arguments[: self.position], arguments[self.position :]
        return self.operator(*before, own, *behind, **keywords)

    def extra_repr(self) -> str:
        """Return what torch prints between the parentheses."""
        return (
            f"{self.operator}, argument {self.position}: {self.in_training} or {self.in_evaluation}"
        )


class BatchNorm(nn.Module):
    """A batch norm by itself; `frozen` keeps its running statistics, and takes them in training too.

    Args:
        momentum: of the running statistics.
        eps: is added to the variance.
        synchronized: whether statistics are those of the batches of all processes that train together.
    """

    frozen = False
    name: str | None = "aten.batch_norm.default"
    """Of the operator that it stands for; None where that is folded."""

    def __init__(self, momentum: float, eps: float, synchronized: bool = False) -> None:
        super().__init__()
        self.momentum, self.eps, self.synchronized = momentum, eps, synchronized

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        tracked: Tensor | None,
    ) -> Tensor:
        """Normalise `x`, shape `(N, C, ...)`; `tracked` counts batches, the others have shape `(C,)`."""
        learning = self.training and not self.frozen
        if learning and tracked is not None:
            tracked.add_(1)
        batch = learning or mean is None
        if batch and self.synchronized and several_processes():
            return batch_norm_together(x, mean, variance, scale, shift, self.momentum, self.eps)
        return functional.batch_norm(
            x, mean, variance, scale, shift, batch, self.momentum, self.eps
        )

    def extra_repr(self) -> str:
        """Return what torch prints between the parentheses."""
        named = {"momentum": self.momentum, "eps": self.eps, "frozen": self.frozen}
        named |= {"synchronized": True} if self.synchronized else {}
        return ", ".join(f"{name}={value}" for name, value in named.items())


class ChannelFactor(nn.Module):
    """What a batch norm multiplies each channel by; computed once, since its variance changes on the way.

    Args:
        eps: of the batch norm.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, scale: Tensor | None, variance: Tensor) -> Tensor:
        """Return `scale / sqrt(variance + eps)`, shape `(C,)`."""
        return channel_factor(scale, variance, self.eps)


class ScaledWeight(nn.Module):
    """The weight that the batch norm behind makes of it once it is folded: what is quantized.

    Args:
        axis: the dimension of the weight's output channels.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return the weight times the factor, along its output channels."""
        kept = _kept_from_zero(factor)
        return weight * along(kept, self.axis, weight.dim()).to(weight.dtype)


class FusedBatchNorm(BatchNorm):
    """The batch norm behind a product with a scaled weight.

    With batch statistics the product is divided by the factor again, so that they are those of the float
    model's; with running ones what is left of the batch norm is its bias, as once it is folded. The
    formula is that of B. Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2018, with one product for their two.
    """

    name = None

    def forward(  # type: ignore[override]
        self,
        product: Tensor,
        true: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        tracked: Tensor | None,
        observed: Tensor | None = None,
    ) -> Tensor:
        """Normalise `product + bias`, shape `(N, C, ...)`, whose weight was scaled by `true`.

        `observed` is the folded bias as its observer returns it, where it has one.
        """
        factor = _kept_from_zero(true)
        if not self.training or self.frozen:
            left = folded_bias(bias, shift, mean, true) if observed is None else observed
            rest = true / factor  # 1 but for channels that vanish
            rest, left = (along(v, 1, product.dim()).to(product.dtype) for v in (rest, left))
            return product * rest + left
        plain = product / along(factor, 1, product.dim()).to(product.dtype)
        if bias is not None:
            plain = plain + along(bias, 1, plain.dim()).to(plain.dtype)
        return super().forward(plain, scale, shift, mean, variance, tracked)


class FoldedBias(nn.Module):
    """The bias that is left of a batch norm once it is folded, for an observer to look at."""

    def forward(
        self, bias: Tensor | None, factor: Tensor, shift: Tensor | None, mean: Tensor
    ) -> Tensor:
        """Return `shift + (bias - mean) * factor`, shape `(C,)`."""
        return folded_bias(bias, shift, mean, factor)


def channel_factor(scale: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    """Return `scale / sqrt(variance + eps)`, shape `(C,)`."""
    factor = torch.rsqrt(variance + eps)
    return factor if scale is None else factor * scale


def _kept_from_zero(factor: Tensor) -> Tensor:
    """Return 1 where a factor vanishes, and the factor elsewhere.

    A channel whose scale starts at zero, as that of the last batch norm of a residual block often does,
    could not be divided by it again, and would never learn another scale.
    """
    return torch.where(factor.abs() < _VANISHING, 1.0, factor)


def folded_bias(bias: Tensor | None, shift: Tensor | None, mean: Tensor, factor: Tensor) -> Tensor:
    """Return `shift + (bias - mean) * factor`, shape `(C,)`."""
    centred = -mean if bias is None else bias - mean
    return centred * factor if shift is None else centred * factor + shift
