# SPDX-License-Identifier: Apache-2.0
"""A conformer that names the vowel of each frame, on speech made here: judged on other voices and noise."""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accuracy_tasks.sounds import RATE, formants, sounds
from accuracy_tasks.subject import (
    MOST_BATCHES,
    Inputs,
    Settings,
    Subject,
    batched,
    classes,
    drawer,
    positions,
    source_of,
)

ROWS, FRAMES, HOP, WINDOW, BANDS = 16, 48, 160, 400, 40
SAMPLES = (FRAMES - 1) * HOP + WINDOW
WIDTH, HEADS, BLOCKS, KERNEL = 64, 4, 2, 7
VOWELS = torch.tensor(
    [[310, 2020, 2960], [360, 640, 2500], [530, 1840, 2480], [660, 1720, 2410], [730, 1090, 2440],
     [570, 840, 2410], [440, 1020, 2240], [300, 870, 2240], [640, 1190, 2390]]
)  # fmt: skip
"""Formants in Hz."""
LASTING = 6
"""Frames of a vowel."""
TRAINING_BATCHES, JUDGED_BATCHES = 40, 4
VOICES = {
    "high voices": ((200, 320), 1.18, (20, 40)),
    "loud noise": ((90, 220), 1.0, (-3, 6)),
    "high voices, noise": ((180, 300), 1.12, (5, 15)),
}
"""Bounds of the fundamental in Hz, factor of formants, bounds of decibels over noise."""
USUAL = ((90.0, 180.0), 1.0, (15.0, 40.0))
Voice = tuple[tuple[float, float], float, tuple[float, float]]


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, a gated depthwise convolution, half a feed-forward, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._feed(), self._feed()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before, self.gated = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2, groups=WIDTH)
        self.batch, self.after = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)
        self.last = nn.LayerNorm(WIDTH)

    @staticmethod
    def _feed() -> nn.Sequential:
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        return nn.Sequential(nn.LayerNorm(WIDTH), up, nn.SiLU(), down)

    def _attention(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        qkv = self.qkv(self.norm(x)).view(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.out(mixed.transpose(1, 2).reshape(n, t, c))

    def _convolution(self, x: Tensor) -> Tensor:
        x = F.glu(self.gated(self.before(x).transpose(1, 2)), dim=1)
        return self.after(F.silu(self.batch(self.depthwise(x)))).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self._attention(x)
        x = x + self._convolution(x)
        return self.last(x + 0.5 * self.second(x))


class Conformer(nn.Module):
    """`(N, 1, T, 40)` log energies to `(N, T / 2, 9)` logits: two convolutions, blocks, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, (2, 2), 1), nn.ReLU(), nn.Conv2d(16, 16, 3, (1, 2), 1), nn.ReLU()
        )
        self.entry = nn.Linear(16 * BANDS // 4, WIDTH)
        self.blocks = nn.Sequential(*(ConformerBlock() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, len(VOWELS))

    def forward(self, energies: Tensor) -> Tensor:
        x = self.stem(energies)
        x = self.entry(x.permute(0, 2, 1, 3).flatten(2))
        return self.head(self.blocks(x))


@cache
def _bands() -> Tensor:
    """`(201, 40)`: triangles, as wide as they are far apart, on the mel scale."""
    mel = torch.linspace(0, 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700)).item(), BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, WINDOW // 2 + 1).view(-1, 1)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    sinking = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, sinking).clamp(min=0)


def _energies(wave: Tensor) -> Tensor:
    """`(N, 1, T, 40)`: the logarithm of the energy in each band of each frame."""
    window = torch.hann_window(WINDOW)
    spectrum = torch.stft(wave, WINDOW, HOP, window=window, center=False, return_complex=True)
    power = spectrum.abs().square().transpose(1, 2) @ _bands()
    return (power + 1e-3).log().unsqueeze(1) / 4


def _draw(voice: Voice, generator: torch.Generator) -> tuple[Inputs, Tensor]:
    """Log energies, and the vowel of every second frame."""
    pitches, factor, decibels = voice
    spoken = torch.randint(len(VOWELS), (ROWS, FRAMES // LASTING), generator=generator)
    frames = spoken.repeat_interleave(LASTING, dim=1)
    sample = (torch.arange(SAMPLES) // HOP).clamp(max=FRAMES - 1)
    centres = (factor * VOWELS[frames[:, sample]]).permute(2, 0, 1)
    ends = torch.rand(2, ROWS, 1, generator=generator) * (pitches[1] - pitches[0]) + pitches[0]
    pitch = torch.lerp(ends[0], ends[1], torch.linspace(0, 1, SAMPLES))
    spread = torch.rand(ROWS, generator=generator)
    noise = decibels[0] + spread * (decibels[1] - decibels[0])
    widths = torch.tensor([70.0, 100.0, 150.0]).view(3, 1, 1)
    wave = sounds(pitch, formants(centres, widths), noise, generator)
    return (_energies(wave),), frames[:, ::2]


@cache
def _training() -> list[tuple[Inputs, Tensor]]:
    voices: list[Voice] = [USUAL, *VOICES.values()]
    return [
        _draw(voices[number % len(voices)], drawer(17, number))
        for number in range(TRAINING_BATCHES)
    ]


def _loss(net: nn.Module, step: int) -> Tensor:
    (energies,), vowels = _training()[step % TRAINING_BATCHES]
    energies = energies + 0.1 * torch.randn(energies.shape, generator=drawer(18, step))
    return F.cross_entropy(net(energies).flatten(0, 1), vowels.flatten())


def _judged(number: int, voice: Voice, batch: int) -> tuple[Inputs, Tensor]:
    return _draw(voice, drawer(19, number, batch))


def conformer(settings: Settings) -> Subject:
    """Two blocks of 64, trained on all voices, calibrated with usual ones in little noise."""
    net = settings.trained("conformer", Conformer, _loss, steps=600, rate=2e-3)
    calibration = batched(
        settings.few(MOST_BATCHES), lambda number: _draw(USUAL, drawer(20, number))[0]
    )
    judged = {
        name: source_of(partial(_judged, number, voice), settings.few(JUDGED_BATCHES))
        for number, (name, voice) in enumerate(VOICES.items())
    }
    title = f"Conformer on vowels: calibrated with low voices in little noise; judged on {', '.join(VOICES)}"
    return Subject(title, net, calibration, judged, classes, positions, transformer=True)
