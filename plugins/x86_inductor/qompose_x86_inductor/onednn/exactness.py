# SPDX-License-Identifier: Apache-2.0
"""Whether oneDNN's int8 arithmetic is exact on this machine, found out by running it once per process.

Without VNNI, oneDNN adds pairs of 8-bit products in 16 bits and saturates silently: 64
products of 255 and 127 come out far too small. CPU flags do not settle the question, because
``ONEDNN_MAX_CPU_ISA`` and the choice of kernel matter as much, so the kernels themselves run.

=============  ==========================  ==============================
arithmetic     weights oneDNN may be given  recommended weight range
=============  ==========================  ==============================
exact          all of int8                 -128 .. 127
saturating     -64 .. 63                   -64 .. 63
unusable       none                        -64 .. 63
=============  ==========================  ==============================

Two products of 255 and -64 sum to -32640, which fits in 16 bits: 7-bit weights are safe.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from qompose_x86_inductor.onednn import calls
from qompose_x86_inductor.onednn.arguments import FLOAT32, ONE_PIXEL, Product

FULL: Final = (-128, 127)
NARROW: Final = (-64, 63)

_PIXELS: Final = 9


class _Arithmetic(NamedTuple):
    """``exact_range``: weights that oneDNN multiplies exactly, or None; ``reason``: why not all."""

    exact_range: tuple[int, int] | None
    reason: str


def vnni_exact() -> bool:
    """Return whether oneDNN multiplies all of int8 exactly in this process."""
    return _arithmetic().exact_range == FULL


def reason() -> str:
    """Return why `vnni_exact` is false, in words for people; empty when it is true."""
    return _arithmetic().reason


def recommended_weight_range() -> tuple[int, int]:
    """Return the inclusive range of weights for which oneDNN is both exact and used."""
    return FULL if vnni_exact() else NARROW


def admits(weight: Tensor) -> bool:
    """Return whether oneDNN multiplies this int8 weight exactly; reads it only where that matters."""
    allowed = _arithmetic().exact_range
    return allowed is not None and is_within(weight, allowed)


def is_within(weight: Tensor, allowed: tuple[int, int]) -> bool:
    """Return whether an int8 weight is in a range, ends included; reads it only where that matters."""
    if allowed == FULL or weight.numel() == 0:
        return True
    low, high = torch.aminmax(weight)
    return allowed[0] <= int(low) and int(high) <= allowed[1]


@functools.cache
def _arithmetic() -> _Arithmetic:
    # The answer is kept for the process, so it must not come from a tracer's fake tensors.
    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        try:
            if _is_exact(FULL):
                return _Arithmetic(FULL, "")
            narrow = _is_exact(NARROW)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            return _Arithmetic(None, f"oneDNN's int8 kernels do not run here: {first_line}")
    cause = "oneDNN's int8 sums saturate at 16 bits (no VNNI, or disabled by ONEDNN_MAX_CPU_ISA)"
    if narrow:
        return _Arithmetic(NARROW, f"{cause}; weights outside {NARROW} use the slow exact kernel")
    return _Arithmetic(
        None, f"{cause}, even for weights in {NARROW}; all weights use the slow exact kernel"
    )


def _is_exact(weights: tuple[int, int]) -> bool:
    """Return whether worst-case and mixed sums of products agree with 64-bit integers in every kernel."""
    return all(
        _kernels_agree(activation, weight, unsigned)
        for unsigned, extremes in ((True, (255,)), (False, (127, -128)))
        for activation in (
            *(torch.full((_PIXELS, 64), value) for value in extremes),
            _mixed(unsigned),
        )
        for weight in (
            torch.full((16, 64), weights[0]),
            torch.full((16, 64), weights[1]),
            # Odd values matter: oneDNN may halve weights to make room, which only odd ones reveal.
            torch.arange(16 * 64)
            .mul(37)
            .remainder(weights[1] - weights[0] + 1)
            .add(weights[0])
            .reshape(16, 64),
        )
    )


def _mixed(unsigned: bool) -> Tensor:
    values = torch.arange(_PIXELS * 64).mul(91).remainder(256).reshape(_PIXELS, 64)
    return values if unsigned else values - 128


def _kernels_agree(activation: Tensor, weight: Tensor, unsigned: bool) -> bool:
    """Return whether int64 ``activation`` (M, 64) times ``weight`` (16, 64) is exact in every kernel."""
    truth = (activation @ weight.T).float()
    x = activation.to(torch.uint8 if unsigned else torch.int8)
    results = [_linear(x, weight.to(torch.int8))]
    if unsigned:
        results.append(_convolution(x, weight.to(torch.int8)))
    return all(torch.equal(result, truth) for result in results)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    ones, zeros = _unit_qparams(weight.shape[0])
    packed = calls.Packed(calls.prepack_linear(weight), zeros)
    return calls.linear(Product(x, 1.0, 0, weight, ones, None), packed, FLOAT32)


def _convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the same product as `_linear`, as a 1 x 1 convolution over one row of pixels."""
    ones, zeros = _unit_qparams(weight.shape[0])
    image = x.T.reshape(1, x.shape[1], 1, x.shape[0])
    product = Product(image, 1.0, 0, weight.reshape(*weight.shape, 1, 1), ones, None)
    packed = calls.Packed(calls.prepack_convolution(product, ONE_PIXEL, None), zeros)
    result = calls.convolution(product, ONE_PIXEL, packed, FLOAT32)
    return result.reshape(weight.shape[0], x.shape[0]).T


def _unit_qparams(channels: int) -> tuple[Tensor, Tensor]:
    return torch.ones(channels), torch.zeros(channels, dtype=torch.int32)
