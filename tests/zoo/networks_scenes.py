# SPDX-License-Identifier: Apache-2.0
"""Random inputs with the structure of real ones: images with edges and 1/f spectra, texts by Zipf's law."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

VOCABULARY = 30522
FIRST_WORD = 1000
"""Lower ids of BERT's vocabulary are special and unused ones."""
OPENING, CLOSING = 101, 102
"""The ids that every text of BERT's begins and ends with."""


def images(count: int, size: int = 224, seed: int = 0) -> Tensor:
    """Images `(count, 3, size, size)`, each of mean 0 and deviation 1 but for its own light.

    Two random smooth fields meet along random outlines. The amplitude of a field falls as 1/f, as that of
    photographs does (Field, 1987). The channels share most of what they show.
    """
    return draw_images(count, size, Generator().manual_seed(seed))


def draw_images(count: int, size: int, generator: Generator) -> Tensor:
    """As `images`, from a generator."""
    inside, outside, outline = (_field(count, size, generator) for _ in range(3))
    pixels = torch.where(outline[:, :1] > 0, inside, outside)
    pixels = pixels - pixels.mean(dim=(1, 2, 3), keepdim=True)
    pixels = pixels / pixels.std(dim=(1, 2, 3), keepdim=True)
    light = torch.randn(count, 1, 1, 1, generator=generator)
    return pixels * (1 + 0.2 * light.abs()) + 0.3 * light


def _field(count: int, size: int, generator: Generator) -> Tensor:
    """A sum of octaves: of twice the frequency and half the amplitude each, up to single pixels."""
    total = torch.zeros(count, 3, size, size)
    cells, amplitude = 2, 1.0
    while cells <= size:
        shared = torch.randn(count, 1, cells, cells, generator=generator)
        colour = torch.randn(count, 3, cells, cells, generator=generator)
        octave = F.interpolate(shared + 0.4 * colour, size=(size, size), mode="bilinear")
        total += amplitude * octave
        cells, amplitude = 2 * cells, amplitude / 2
    return total


def tokens(count: int, length: int = 128, seed: int = 0) -> Tensor:
    """Texts of BERT's `(count, length)` int64, without padding; word of rank r has probability ~ 1 / r."""
    return draw_tokens(count, length, Generator().manual_seed(seed))


def draw_tokens(count: int, length: int, generator: Generator) -> Tensor:
    """As `tokens`, from a generator."""
    frequency = 1 / torch.arange(1, VOCABULARY - FIRST_WORD + 1, dtype=torch.float64)
    words = torch.multinomial(frequency, count * length, replacement=True, generator=generator)
    texts = words.view(count, length) + FIRST_WORD
    texts[:, 0], texts[:, -1] = OPENING, CLOSING
    return texts
