# SPDX-License-Identifier: Apache-2.0
"""Sounds made here: harmonics of a fundamental, under an envelope, with noise of a level."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

RATE = 16000
"""Samples per second."""
HARMONICS = 24
Envelope = Callable[[Tensor, Tensor], Tensor]
"""The amplitudes of harmonics, of their numbers `(K, 1, 1)` and frequencies `(K, N, L)` in Hz."""


def sounds(
    pitch: Tensor, envelope: Envelope, decibels: Tensor, generator: torch.Generator
) -> Tensor:
    """`(N, L)` samples of unit power before noise.

    Args:
        pitch: `(N, L)`, the fundamental at each sample in Hz.
        decibels: `(N,)`, the power of the sound over that of white noise.
    """
    numbers = torch.arange(1, HARMONICS + 1, dtype=torch.float32).view(-1, 1, 1)
    start = torch.rand(HARMONICS, len(pitch), 1, generator=generator) * 2 * math.pi
    phase = torch.cumsum(2 * math.pi * pitch / RATE, dim=-1)
    frequency = numbers * pitch
    amplitude = envelope(numbers, frequency) * (frequency < RATE / 2)
    wave = (amplitude * torch.sin(numbers * phase + start)).sum(0)
    wave = wave / wave.square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(wave.shape, generator=generator)
    return wave + noise * 10 ** (-decibels.view(-1, 1) / 20)


def falling(numbers: Tensor, frequency: Tensor) -> Tensor:
    """A plucked string's: the k-th harmonic is a k-th as strong."""
    return 1 / numbers


def odd(numbers: Tensor, frequency: Tensor) -> Tensor:
    """A clarinet's: odd harmonics alone."""
    return (numbers % 2) / numbers.sqrt()


def bright(numbers: Tensor, frequency: Tensor) -> Tensor:
    """A reed's: all harmonics nearly as strong."""
    return numbers**-0.25


def formants(centres: Tensor, widths: Tensor) -> Envelope:
    """A voice's: resonances at `(F, N or 1, L or 1)` Hz, of such widths."""

    def envelope(numbers: Tensor, frequency: Tensor) -> Tensor:
        total = torch.zeros_like(frequency)
        for number, (centre, width) in enumerate(zip(centres, widths, strict=True)):
            total = total + 0.7**number / (1 + ((frequency - centre) / width) ** 2)
        return total / numbers.sqrt()

    return envelope


def between(low: float, high: float, count: int, generator: torch.Generator) -> Tensor:
    """So many numbers, `(count,)`, evenly spread on a logarithmic scale."""
    drawn = torch.rand(count, generator=generator)
    return torch.exp(math.log(low) + drawn * math.log(high / low))
