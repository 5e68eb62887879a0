# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with a small residual network: data, training, accuracy.

The data are the 1797 8x8 images of `sklearn.datasets.load_digits`, which ship with scikit-learn.
Training starts from a fixed seed and takes some seconds on one CPU core.

Nothing here knows about quantization: a quantized network is one more callable for `accuracy`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEED = 0
TEST_IMAGES = 450
BATCH_SIZE = 32
EPOCHS = 12
PEAK_LEARNING_RATE = 0.01
BRIGHTEST = 16.0


@dataclass(frozen=True, slots=True)
class Data:
    """Images `(N, 1, 8, 8)` float32 in [0, 1] and their digits `(N,)` int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int = BATCH_SIZE) -> Iterator[tuple[Tensor, Tensor]]:
        """Consecutive `(images, labels)` of `size`; the last one holds what remains."""
        return zip(self.images.split(size), self.labels.split(size), strict=True)


class ResidualBlock(nn.Module):
    """`relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))`; a stride or new width projects `x`."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """Stem, three residual blocks around one max pool, global average pool, linear head.

    `forward(images: (N, 1, 8, 8)) -> (N, 10)` logits.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.block1 = ResidualBlock(width, width)
        self.pool = nn.MaxPool2d(2)
        self.block2 = ResidualBlock(width, 2 * width)
        self.block3 = ResidualBlock(2 * width, 4 * width, stride=2)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.block1(self.stem(images))
        features = self.block3(self.block2(self.pool(features)))
        return self.head(self.average(features).flatten(1))


def load() -> tuple[Data, Data]:
    """Training and test data: one fixed shuffle, the last `TEST_IMAGES` images are the test."""
    from sklearn.datasets import load_digits

    source = load_digits()
    order = torch.randperm(len(source.target), generator=torch.Generator().manual_seed(SEED))
    images = torch.tensor(source.images, dtype=torch.float32).unsqueeze(1)[order] / BRIGHTEST
    labels = torch.tensor(source.target, dtype=torch.int64)[order]
    cut = len(labels) - TEST_IMAGES
    return Data(images[:cut], labels[:cut]), Data(images[cut:], labels[cut:])


def train(
    data: Data,
    epochs: int = EPOCHS,
    seed: int = SEED,
    track: Callable[[range], Iterable[int]] = iter,
    make: Callable[[], nn.Module] = DigitsNet,
) -> nn.Module:
    """What `make` returns, trained on `data`, in eval mode; equal arguments give equal weights.

    `track` sees the epochs go by, for a progress bar. The caller's random state and thread count
    are left as they were.
    """
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        net = make()
        steps = epochs * -(-len(data) // BATCH_SIZE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, steps)
        for _ in track(range(epochs)):
            _train_epoch(net, data, optimizer, schedule)
    return net.eval()


def accuracy(fn: Callable[[Tensor], Tensor], data: Data, size: int = BATCH_SIZE) -> float:
    """Fraction of `data` on which `fn`'s largest logit is the label; `fn` sees `size` at a time."""
    right = 0
    with torch.no_grad():
        for images, labels in data.batches(size):
            right += int((fn(images).argmax(dim=-1) == labels).sum())
    return right / len(data)


def calibration(data: Data, count: int = 8) -> list[tuple[Tensor]]:
    """The first `count` batches of images as argument tuples; the split already shuffled them."""
    return [(images,) for images, _ in list(data.batches())[:count]]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread: with more, the order of additions and so the weights depend on the count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train_epoch(
    net: nn.Module,
    data: Data,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    order = torch.randperm(len(data))
    shuffled = Data(data.images[order], data.labels[order])
    for images, labels in shuffled.batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        schedule.step()
