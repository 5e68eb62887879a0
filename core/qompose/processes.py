# SPDX-License-Identifier: Apache-2.0
"""Batch norms of several processes that train together: with statistics of all their batches."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from qompose.numerics import along


def several_processes() -> bool:
    """Tell whether `torch.distributed` is initialised."""
    return distributed.is_available() and distributed.is_initialized()


def gathered(x: Tensor) -> list[Tensor]:
    """Return what each process has of a tensor of one shape, on the CPU, by rank."""
    on_gpu = distributed.get_backend() == "nccl"
    own = x.to(torch.device("cuda", torch.cuda.current_device())) if on_gpu else x
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, own)
    return [part.cpu() for part in parts]


def batch_norm_together(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise `x`, shape `(N, C, ...)`, as `functional.batch_norm` would all processes' batches at once.

    Running statistics are updated in place, and gradients are those of the sum of all processes' losses,
    as with `nn.SyncBatchNorm`. Batches may be of different size. Every process has to call this.
    """
    found, spread, count = _statistics(x.float())
    if mean is not None and variance is not None:
        with torch.no_grad():
            mean.lerp_(found.to(mean.dtype), momentum)
            unbiased = spread * (count / (count - 1))
            variance.lerp_(unbiased.to(variance.dtype), momentum)
    factor = torch.rsqrt(spread + eps)
    if scale is not None:
        factor = factor * scale
    out = (x.float() - along(found, 1, x.dim())) * along(factor, 1, x.dim())
    if shift is not None:
        out = out + along(shift, 1, x.dim())
    return out.to(x.dtype)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance by channel, `(C,)`, and the number of values that they are of, `()`."""
    rest = [dim for dim in range(x.dim()) if dim != 1]
    own = torch.full((1,), x.numel() // x.shape[1], dtype=x.dtype, device=x.device)
    total = _summed(torch.cat([x.sum(rest), own]))
    count = total[-1].detach()
    mean = total[:-1] / count
    return mean, _summed((x - along(mean, 1, x.dim())).square().sum(rest)) / count, count


def _summed(x: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """A sum over processes, through which the gradients of all of them pass."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        distributed.all_reduce(total)
        return total
