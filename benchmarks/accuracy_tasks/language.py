# SPDX-License-Identifier: Apache-2.0
"""A language model of bytes, trained here on code and prose: calibrated with code, judged on others."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accuracy_tasks.images import EncoderBlock
from accuracy_tasks.subject import (
    MOST_BATCHES,
    Figures,
    Inputs,
    Settings,
    Source,
    Subject,
    drawer,
    positions,
    share,
    spread,
)
from accuracy_tasks.texts import sources, texts

ROWS, LENGTH, BYTES = 16, 96, 256
WIDTH, HEADS, DEPTH = 96, 4, 3
TRAINED_ON = ("collections", "concurrent.futures", "ctypes", "importlib", "multiprocessing",
              "unittest", "urllib", "wsgiref", "xml.dom", "xml.etree", "argparse", "ast")  # fmt: skip
CALIBRATED = ("asyncio", "email", "http", "json", "logging", "tarfile", "zipfile", "typing")
JUDGED = ("licences", "prose", "scikit-learn", "other languages")
JUDGED_BATCHES = 4


class GPT(nn.Module):
    """`(N, T)` bytes to `(N, T, 256)` logits of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        blocks = (EncoderBlock(WIDTH, HEADS, causal=True) for _ in range(DEPTH))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


@cache
def _training() -> Tensor:
    """Code of the standard library, docstrings of numpy, and every fourth of the other languages' texts."""
    read = [*sources(TRAINED_ON), *texts("numpy"), *texts("other languages")[::4]]
    return _bytes("\n".join(read))


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode("utf-8")), dtype=torch.uint8).long()


def _loss(net: nn.Module, step: int) -> Tensor:
    data = _training()
    starts = torch.randint(len(data) - LENGTH - 1, (ROWS, 1), generator=drawer(12, step))
    rows = data[starts + torch.arange(LENGTH + 1)]
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _windows(data: Tensor, batches: int) -> Tensor:
    """`(batches, 16, 97)` bytes, windows evenly spread over the data, in an order of chance."""
    last = len(data) - LENGTH - 1
    starts = spread(range(last), batches * ROWS)
    return torch.stack([data[s : s + LENGTH + 1] for s in starts]).view(-1, ROWS, LENGTH + 1)


def _source(name: str, batches: int) -> Source:
    unread = [text for number, text in enumerate(texts(name)) if number % 4]
    rows = _windows(_bytes("\n\n".join(unread)), batches)
    return Source([(part[:, :-1],) for part in rows], rows[:, :, 1:].flatten(0, 1))


def _figures(expected: Tensor, found: Tensor, truth: Tensor | None) -> Figures:
    assert truth is not None
    loss = F.cross_entropy(found.double().flatten(0, 1), truth.flatten())
    same = share(found.argmax(-1), expected.argmax(-1))
    return {"bits per byte": float(loss) / math.log(2), "same next byte": same}


def gpt(settings: Settings) -> Subject:
    """Three blocks of 96, causal."""
    net = settings.trained("gpt", GPT, _loss, steps=900)
    rows = _windows(_bytes("\n".join(sources(CALIBRATED))), settings.few(MOST_BATCHES))
    calibration: list[Inputs] = [(part[:, :-1],) for part in rows]
    judged = {name: _source(name, settings.few(JUDGED_BATCHES)) for name in JUDGED}
    title = (
        f"Language model of bytes, {ROWS} x {LENGTH}: calibrated with source code; "
        f"judged on {', '.join(JUDGED)}"
    )
    return Subject(
        title, net, calibration, judged, _figures, positions, transformer=True, tables=True
    )
