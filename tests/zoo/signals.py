# SPDX-License-Identifier: Apache-2.0
"""Networks of audio, time series and video: one and three dimensions, causal padding, spectra."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import ZooModel, floats, ids, net, zoo_model

CHANNELS = 4
SAMPLES = 32
WORDS = 30


class CausalConv(nn.Conv1d):
    """Padded on the left alone, so that no output sees a later input."""

    def forward(self, x: Tensor) -> Tensor:
        reach = self.dilation[0] * (self.kernel_size[0] - 1)
        return super().forward(F.pad(x, (reach, 0)))


@net(
    layers=lambda: nn.ModuleList(
        CausalConv(CHANNELS, CHANNELS, 3, dilation=rate) for rate in (1, 2, 4)
    ),
    head=lambda: nn.Linear(CHANNELS, 3),
)
def temporal_conv_net(m: Any, x: Tensor) -> Tensor:
    """Causal convolutions of growing dilation with residuals."""
    for layer in m.layers:
        x = F.relu(x + F.relu(layer(x)))
    return m.head(x[:, :, -1])


@net(
    gated=lambda: nn.ModuleList(
        CausalConv(CHANNELS, 2 * CHANNELS, 2, dilation=rate) for rate in (1, 2, 4)
    ),
    skips=lambda: nn.ModuleList(nn.Conv1d(CHANNELS, 6, 1) for _ in range(3)),
    mixes=lambda: nn.ModuleList(nn.Conv1d(CHANNELS, CHANNELS, 1) for _ in range(3)),
    head=lambda: nn.Conv1d(6, 8, 1),
)
def wave_net(m: Any, x: Tensor) -> Tensor:
    """Gated causal convolutions whose skip connections are summed up."""
    total = 0
    for gated, skip, mix in zip(m.gated, m.skips, m.mixes, strict=True):
        signal, gate = gated(x).chunk(2, dim=1)
        y = torch.tanh(signal) * torch.sigmoid(gate)
        total = total + skip(y)
        x = x + mix(y)
    return m.head(F.relu(total))


@net(
    norm=lambda: nn.LayerNorm(CHANNELS),
    expand=lambda: nn.Conv1d(CHANNELS, 2 * CHANNELS, 1),
    depthwise=lambda: nn.Conv1d(CHANNELS, CHANNELS, 5, padding=2, groups=CHANNELS, bias=False),
    batch_norm=lambda: nn.BatchNorm1d(CHANNELS),
    reduce=lambda: nn.Conv1d(CHANNELS, CHANNELS, 1),
)
def conv_glu(m: Any, x: Tensor) -> Tensor:
    """A conformer's convolution module: `glu`, depthwise convolution, batch norm, SiLU."""
    y = m.norm(x.transpose(1, 2)).transpose(1, 2)
    y = m.depthwise(F.glu(m.expand(y), dim=1))
    return x + m.reduce(F.silu(m.batch_norm(y)))


@net(before=lambda: nn.Linear(8, 8), after=lambda: nn.Linear(8, 8), norm=lambda: nn.LayerNorm(8))
def spectrum_mixer(m: Any, x: Tensor) -> Tensor:
    """FNet's mixing, real from end to end: the real part of a Fourier transform, then linear."""
    mixed = torch.fft.fft(torch.fft.fft(m.before(x), dim=-1), dim=-2).real
    return m.after(F.gelu(m.norm(x + mixed)))


@net(
    window=lambda: nn.Buffer(torch.hann_window(16)),
    filters=lambda: nn.Buffer(torch.rand(9, 6), persistent=False),
    conv=lambda: nn.Conv2d(1, 4, 3, padding=1),
    head=lambda: nn.Linear(4, 3),
)
def spectrogram(m: Any, samples: Tensor) -> Tensor:
    """Framing by `unfold`, a power spectrum, mel filters in a buffer, convolutions on the log."""
    frames = samples.unfold(-1, 16, 8) * m.window
    power = torch.view_as_real(torch.fft.rfft(frames)).square().sum(dim=-1)
    features = torch.log(torch.matmul(power, m.filters) + 1e-3)
    return m.head(F.relu(m.conv(features.unsqueeze(1))).mean(dim=(2, 3)))


@net(
    embedding=lambda: nn.Embedding(WORDS, 8, padding_idx=0),
    convs=lambda: nn.ModuleList(nn.Conv1d(8, 4, width) for width in (2, 3, 4)),
    head=lambda: nn.Linear(12, 3),
)
def character_conv(m: Any, words: Tensor) -> Tensor:
    """Embedded characters under convolutions of several widths, each pooled over time."""
    x = m.embedding(words).transpose(1, 2)
    return m.head(torch.cat([F.relu(c(x)).amax(dim=-1) for c in m.convs], dim=1))


@net(cell=lambda: nn.GRUCell(CHANNELS, 8), head=lambda: nn.Linear(8, CHANNELS))
def gru_forecaster(m: Any, x: Tensor) -> Tensor:
    """A GRU cell stepped by hand: over the past, then on its own forecasts."""
    state = x.new_zeros(x.shape[0], 8)
    for step in range(3):
        state = m.cell(x[:, step], state)
    forecasts = [m.head(state)]
    for _ in range(2):
        state = m.cell(forecasts[-1], state)
        forecasts.append(m.head(state))
    return torch.stack(forecasts, dim=1)


@net(gates=lambda: nn.Conv2d(3 + CHANNELS, 4 * CHANNELS, 3, padding=1))
def conv_lstm(m: Any, frames: Tensor) -> Tensor:
    """A convolutional LSTM over three frames: gates from one convolution used at every step."""
    hidden = cell = frames.new_zeros(frames.shape[0], CHANNELS, *frames.shape[3:])
    for frame in frames.unbind(1):
        gates = m.gates(torch.cat([frame, hidden], dim=1))
        let_in, forget, out, update = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + let_in.sigmoid() * update.tanh()
        hidden = out.sigmoid() * cell.tanh()
    return hidden


def factorised_video() -> nn.Module:
    """R(2+1)D: a spatial, then a temporal convolution, each with a batch norm."""
    return nn.Sequential(
        nn.Conv3d(3, 6, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False), nn.BatchNorm3d(6), nn.ReLU(),
        nn.Conv3d(6, 8, (3, 1, 1), 1, (1, 0, 0), bias=False), nn.BatchNorm3d(8), nn.ReLU(),
        nn.AdaptiveAvgPool3d((1, 1, 1)), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def transposed_1d_bn() -> nn.Module:
    """A decoder of samples: transposed convolutions, grouped too, under batch norms."""
    return nn.Sequential(
        nn.ConvTranspose1d(CHANNELS, 6, 4, 2, 1, bias=False), nn.BatchNorm1d(6), nn.LeakyReLU(0.1),
        nn.ConvTranspose1d(6, 4, 3, 2, groups=2), nn.BatchNorm1d(4), nn.Tanh(),
    )  # fmt: skip


def transposed_3d_bn() -> nn.Module:
    """A decoder of volumes, its transposed convolution dilated."""
    return nn.Sequential(
        nn.ConvTranspose3d(2, 4, 2, 2), nn.BatchNorm3d(4), nn.ReLU(),
        nn.ConvTranspose3d(4, 1, 3, padding=1, dilation=2), nn.Sigmoid(),
    )  # fmt: skip


_SERIES = floats(2, CHANNELS, SAMPLES)

MODELS: tuple[ZooModel, ...] = (
    zoo_model("temporal_conv", temporal_conv_net, _SERIES, tags={"conv", "residual"}),
    zoo_model("wavenet", wave_net, _SERIES, tags={"conv", "residual"}),
    zoo_model("conv_glu", conv_glu, _SERIES, tags={"conv", "bn", "depthwise", "residual"}),
    zoo_model("spectrum_mixer", spectrum_mixer, floats(2, 6, 8), tags={"linear", "fft"}),
    zoo_model("spectrogram", spectrogram, floats(2, 64), tags={"conv", "fft", "matmul"}),
    zoo_model("character_conv", character_conv, ids(WORDS, 2, 12), tags={"conv", "embedding", "cat"}),
    zoo_model("gru_cell", gru_forecaster, floats(2, 3, CHANNELS), tags={"recurrent", "linear", "shared"}),
    zoo_model("conv_lstm", conv_lstm, floats(2, 3, 3, 6, 6), tags={"conv", "recurrent", "cat", "shared"}),
    zoo_model("factorised_video", factorised_video, floats(2, 3, 4, 8, 8), tags={"conv", "bn"}),
    zoo_model("transposed_1d_bn", transposed_1d_bn, floats(2, CHANNELS, 8),
              tags={"conv", "bn", "transposed"}),
    zoo_model("transposed_3d_bn", transposed_3d_bn, floats(2, 2, 2, 3, 3), tags={"conv", "bn", "transposed"}),
)  # fmt: skip
