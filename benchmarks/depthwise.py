# SPDX-License-Identifier: Apache-2.0
"""What equalization is worth on depthwise convolutions, in dB, with a scale per channel and one per weight.

    python benchmarks/depthwise.py

Three small networks trained on textures of ten frequencies and directions, as they are and with channels
made uneven 64-fold, XNNPACK's static int8, eight batches of calibration, as many unseen ones for the SQNR of
logits. No other algorithm is applied.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable

import qompose
import torch
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn

CLASSES, SIZE, BATCH = 10, 16, 32


def textures(seed: int) -> tuple[Tensor, Tensor]:
    """A batch of noisy waves, `(N, 1, 16, 16)`, and the class of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    phase, noise = torch.rand(BATCH, 1, 1, generator=generator) * math.tau, 0.5
    angle, speed = (labels % 5) * math.pi / 5, 0.5 + 0.7 * (labels // 5)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    waves = (along * speed[:, None, None] + phase).sin()
    return (waves + noise * torch.randn(waves.shape, generator=generator)).unsqueeze(1), labels


def _conv(inputs: int, outputs: int, size: int = 1, *, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


def separable(width: int = 24, layers: int = 4) -> list[nn.Module]:
    """MobileNet 1: depthwise, then pointwise."""
    pairs = (_conv(width, width, 3, groups=width) + _conv(width, width) for _ in range(layers))
    return _conv(1, width, 3) + [layer for pair in pairs for layer in pair]


class _Residual(nn.Module):
    """MobileNet 2: wide in the middle, where it is depthwise, and added to what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        layers = _conv(width, wide) + _conv(wide, wide, 3, groups=wide) + _conv(wide, width)[:-1]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def inverted(width: int = 16) -> list[nn.Module]:
    return [*_conv(1, width, 3), *(_Residual(width) for _ in range(3))]


def large_windows(width: int = 24) -> list[nn.Module]:
    """Windows of 7 x 7, and a wide pair behind each, as in ConvNeXt, but with relu."""
    layers = _conv(1, width, 3)
    for _ in range(2):
        layers += _conv(width, width, 7, groups=width) + _conv(width, 3 * width)
        layers += _conv(3 * width, width)
    return layers


def trained(make: Callable[[], list[nn.Module]], steps: int) -> nn.Module:
    """A network of some layers, a mean over places and a classifier."""
    torch.manual_seed(0)
    layers = make()
    width = [
        m.num_features for m in nn.Sequential(*layers).modules() if isinstance(m, nn.BatchNorm2d)
    ]
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width[-1], CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        x, labels = textures(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def uneven(model: nn.Module, most: float) -> nn.Module:
    """Scale channels between two layers up or down by up to `most`, and the next weight the other way.

    In float that changes nothing; it is what equalization can undo.
    """
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    for stack in [m for m in model.modules() if isinstance(m, nn.Sequential)]:
        for norm, relu, conv in zip(stack, [*stack][1:], [*stack][2:], strict=False):
            if isinstance(norm, nn.BatchNorm2d) and isinstance(conv, nn.Conv2d):
                assert isinstance(relu, nn.ReLU)
                factors = most ** (2 * torch.rand(norm.num_features) - 1)
                norm.weight.mul_(factors)
                norm.bias.mul_(factors)
                conv.weight.div_(factors.view((1, -1, 1, 1) if conv.groups == 1 else (-1, 1, 1, 1)))
    return model


def sqnr(model: nn.Module, *, is_per_channel: bool, words: tuple[str, ...]) -> float:
    """Signal over noise of logits of unseen textures."""
    config = get_symmetric_quantization_config(is_per_channel=is_per_channel, algorithms=words)
    seen = [(textures(10_000 + number)[0],) for number in range(8)]
    found = qompose.quantize(
        model,
        seen[0],
        backends=XNNPACKQuantizer().set_global(config),
        calibration=seen,
        progress=False,
    )
    signal = noise = 0.0
    for number in range(8):
        x, _ = textures(20_000 + number)
        exact = model(x)
        signal += float(exact.square().sum())
        noise += float((found.converted(x) - exact).square().sum())
    return 10 * math.log10(signal / noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| network | unseen accuracy | per channel, without · with | per weight, without · with |"
    )
    print("|---|---:|---:|---:|")
    for make in (separable, inverted, large_windows):
        model = trained(make, given.steps)
        x, labels = textures(30_000)
        right = float((model(x).argmax(1) == labels).float().mean())
        for name, each in (("", model), (", uneven", uneven(model, 8.0))):
            pairs = [_pair(each, is_per_channel=of_channels) for of_channels in (True, False)]
            row = f"{make.__name__}{name}", f"{right:.2f}", *pairs
            print(f"| {' | '.join(row)} |", flush=True)


def _pair(model: nn.Module, *, is_per_channel: bool) -> str:
    words: tuple[tuple[str, ...], ...] = (), ("equalization",)
    return " · ".join(f"{sqnr(model, is_per_channel=is_per_channel, words=w):.1f}" for w in words)


if __name__ == "__main__":
    main()
