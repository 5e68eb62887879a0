# SPDX-License-Identifier: Apache-2.0
"""More networks of texts and sound."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import ZooModel, floats, ids, keep_mask, zoo_model

WIDTH = 16
WORDS = 40
LENGTH = 8


class Conformer(nn.Module):
    """Half a feed-forward, attention, a gated depthwise convolution, the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = self._wide(), self._wide()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.out = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.deep = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.batch = nn.BatchNorm1d(WIDTH)

    @staticmethod
    def _wide() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        y = F.glu(self.gate(x.transpose(1, 2)), dim=1)
        x = x + self.out(F.silu(self.batch(self.deep(y)))).transpose(1, 2)
        return self.last(x + 0.5 * self.after(x))


class Decoder(nn.Module):
    """A causal layer as in today's language models: RMS norms, rotary positions, grouped keys, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.second, self.last = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.query, self.key, self.value = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 8, 8))
        self.out, self.head = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, WORDS, bias=False),
        )
        self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
        self.down = nn.Linear(32, WIDTH, bias=False)

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        places = torch.arange(x.shape[-2], device=x.device)[:, None]
        angles = places / 100.0 ** (torch.arange(half, device=x.device) / half)
        one, two = x[..., :half], x[..., half:]
        sine, cosine = angles.sin(), angles.cos()
        return torch.cat([one * cosine - two * sine, two * cosine + one * sine], dim=-1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        y = self.first(x)
        query, key, value = (
            f(y).view(*words.shape, -1, 8).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(
            self.turned(query), self.turned(key), value, is_causal=True, enable_gqa=True
        )
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.second(x)
        return self.head(self.last(x + self.down(F.silu(self.gate(y)) * self.up(y))))


class Experts(nn.Module):
    """Top-1 experts whose weights are gathered for each row, one stacked parameter for all."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(0.3 * torch.randn(4, WIDTH, 32))
        self.down = nn.Parameter(0.3 * torch.randn(4, 32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.route(x).softmax(-1).max(dim=-1)
        hidden = F.gelu(torch.einsum("btd,btdh->bth", x, self.up[expert]))
        return share[..., None] * torch.einsum("bth,bthd->btd", hidden, self.down[expert])


class Recurrent(nn.Module):
    """A recurrent layer of torch's over words, and a classifier of its last step."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = kind(8, 12, batch_first=True, **options)
        self.head = nn.Linear(12 * (1 + self.layer.bidirectional), 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.words(words))[0][:, -1])


class Crnn(nn.Module):
    """Reading text: convolutions, then a two-way LSTM along the line."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d((4, 1))
        )
        self.read, self.head = nn.LSTM(8, 8, bidirectional=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.see(x).squeeze(2).permute(2, 0, 1))[0]).log_softmax(-1)


class Listener(nn.Module):
    """A GRU encoder and a decoder that attends to it at each of three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encode = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.cell, self.score = nn.GRUCell(16, 8), nn.Linear(16, 1)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        seen, last = self.encode(self.words(words))
        state, word, outputs = last[0], self.words(words[:, 0]), []
        for _ in range(3):
            pairs = torch.cat([seen, state[:, None].expand_as(seen)], dim=-1)
            found = (self.score(torch.tanh(pairs)).softmax(1) * seen).sum(1)
            state = self.cell(torch.cat([word, found], dim=-1), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, dim=1)


class StateSpace(nn.Module):
    """A selective state space: decays and inputs from the data, the recurrence as an unrolled loop."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, WIDTH)
        self.local = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.select, self.step = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.rand(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.into(x).chunk(2, dim=-1)
        y = F.silu(self.local(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        write, read = self.select(y).chunk(2, dim=-1)
        step = F.softplus(self.step(y))
        state, outputs = y.new_zeros(x.shape[0], WIDTH, 4), []
        for t in range(x.shape[1]):
            keep = torch.exp(-self.decay * step[:, t, :, None])
            state = keep * state + step[:, t, :, None] * y[:, t, :, None] * write[:, t, None]
            outputs.append((state * read[:, t, None]).sum(-1))
        return self.out(torch.stack(outputs, dim=1) * F.silu(gate))


class Retention(nn.Module):
    """Attention without softmax, under a decay by distance, and group norms of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(WIDTH, 48),
            nn.Linear(WIDTH, WIDTH),
            nn.GroupNorm(2, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        places = torch.arange(x.shape[1], device=x.device)
        apart = (places[:, None] - places).clamp(min=0)
        decay = torch.tril(0.9 ** apart.float())
        y = (query @ key.transpose(1, 2) * decay / 4) @ value
        return self.out(self.norm(y.flatten(0, 1)).view_as(y))


class Timemix(nn.Module):
    """RWKV: mixing with the step before, exponents that sum over the past."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(WIDTH))
        self.key, self.value, self.gate, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        y = x * self.mix + before * (1 - self.mix)
        weight = self.key(y).clamp(-4, 4).exp()
        past = (weight * self.value(y)).cumsum(1) / weight.cumsum(1)
        return self.out(self.gate(y).sigmoid() * past)


class TextCnn(nn.Module):
    """Windows of three widths over words, the maximum of each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=0)
        self.windows = nn.ModuleList(nn.Conv1d(8, 4, n) for n in (2, 3, 4))
        self.head = nn.Linear(12, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words).transpose(1, 2)
        return self.head(torch.cat([F.relu(w(x)).max(-1).values for w in self.windows], dim=-1))


class TorchEncoder(nn.Module):
    """torch's own encoder layers, with padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 32, batch_first=True, norm_first=True, activation="gelu"
        )
        self.words, self.body = (
            nn.Embedding(WORDS, WIDTH),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor, keep: Tensor) -> Tensor:
        seen = self.body(self.words(words), src_key_padding_mask=~keep)
        return self.head((seen * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


_WORDS = ids(WORDS, 2, LENGTH)
_ROWS = floats(2, LENGTH, WIDTH)


def _model(name: str, make: object, *draws: object, dynamic: bool = True) -> ZooModel:
    return zoo_model(name, make, *draws, tags={"further", "linear"}, dynamic=dynamic)  # type: ignore[arg-type]


MODELS: tuple[ZooModel, ...] = (
    _model("conformer", Conformer, _ROWS), _model("modern_decoder", Decoder, _WORDS),
    _model("experts_gathered", Experts, _ROWS),
    _model("bidirectional_lstm", lambda: Recurrent(nn.LSTM, bidirectional=True), _WORDS),
    _model("stacked_gru", lambda: Recurrent(nn.GRU, num_layers=2), _WORDS),
    _model("elman", lambda: Recurrent(nn.RNN, nonlinearity="relu"), _WORDS),
    _model("projected_lstm", lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2), _WORDS),
    _model("crnn", Crnn, floats(2, 1, 8, 24)), _model("listener", Listener, _WORDS),
    _model("state_space", StateSpace, _ROWS), _model("retention", Retention, _ROWS),
    _model("time_mix", Timemix, _ROWS), _model("text_cnn", TextCnn, _WORDS),
    _model("torch_encoder", TorchEncoder, _WORDS, keep_mask(2, LENGTH)),
)  # fmt: skip
