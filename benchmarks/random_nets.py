# SPDX-License-Identifier: Apache-2.0
"""What the default algorithms are worth at int4 on small networks drawn at random, in dB.

    python benchmarks/random_nets.py

Dynamic activations on XNNPACK, weights of four bits per channel. Weights are as torch makes them, and
images noise, plain in even draws and smooth with a mean in odd ones. Eight batches of calibration; 128 unseen
images for the SQNR of outputs, which many networks here pool.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import qompose
import torch
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn

WIDTHS, SIZE = (8, 16, 24, 32), 16


def images(number: int, smooth: bool, seed: int) -> Tensor:
    """Noise, `(N, 3, 16, 16)`; if smooth, the mean of its neighbours and one for each image and channel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 3, SIZE, SIZE, generator=generator)
    if not smooth:
        return x
    mean = torch.randn(number, 3, 1, 1, generator=generator)
    around = nn.functional.pad(x, (2, 2, 2, 2), mode="reflect")
    return 5 * nn.functional.avg_pool2d(around, 5, 1) + 0.5 * mean + 0.5


def _conv(
    inputs: int,
    outputs: int,
    size: int = 3,
    *,
    stride: int = 1,
    groups: int = 1,
    norm: bool = False,
) -> Iterator[nn.Module]:
    yield nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups)
    if norm:
        made = nn.BatchNorm2d(outputs)
        for values, low, high in (
            (made.running_mean, -0.5, 0.5), (made.running_var, 0.3, 2.0), (made.weight, 0.5, 1.5),
            (made.bias, -0.5, 0.5),
        ):  # fmt: skip
            nn.init.uniform_(values, low, high)
        yield made
    yield nn.ReLU()


def _pooled(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]


def networks() -> Iterator[tuple[str, nn.Sequential]]:
    """One of each kind, with widths and weights by torch's seed."""
    a, b, c = (WIDTHS[int(torch.randint(len(WIDTHS), ()))] for _ in range(3))
    plain, normed = ([*_conv(3, a, norm=n), *_conv(a, b, norm=n)] for n in (False, True))
    apart = [*_conv(3, a, stride=2, norm=True), *_conv(a, a, groups=a, norm=True)]
    apart += [*_conv(a, b, 1, norm=True), *_conv(b, c, norm=True)]
    flat = [*_conv(3, a), nn.MaxPool2d(2), *_conv(a, b), nn.Flatten()]
    kinds = {
        "pooled": [*plain, nn.AdaptiveAvgPool2d(1)],
        "pooled, linear": [*plain, *_pooled(b)],
        "batch norm, pooled, linear": [*normed, *_pooled(b)],
        "depthwise, pooled, linear": [*apart, *_pooled(c)],
        "flattened, two linears": [*flat, nn.Linear(64 * b, 32), nn.ReLU(), nn.Linear(32, 10)],
        "convolutions": [*plain, nn.Conv2d(b, c, 3, padding=1)],
    }
    for name, layers in kinds.items():
        yield name, nn.Sequential(*layers).eval().requires_grad_(False)


CHOICES: tuple[tuple[str, ...] | None, ...] = ((), ("scale_search",), None)


def gains(model: nn.Module, seed: int) -> list[float]:
    """How many dB scale search alone and the default are ahead of no algorithms."""
    smooth = bool(seed % 2)
    seen = [(images(8, smooth, 10_000 * seed + number),) for number in range(8)]
    unseen, found = images(128, smooth, 777_777 + seed), []
    exact, sizes = model(unseen), ({0: torch.export.Dim("n")},)
    for words in CHOICES:
        config = get_symmetric_quantization_config(
            is_per_channel=True, is_dynamic=True, weight_qmin=-8, weight_qmax=7, algorithms=words
        )
        quantizer = XNNPACKQuantizer().set_global(config)
        program = torch.export.export(model, seen[0], dynamic_shapes=sizes)
        prepared = qompose.prepare_pt2e(program, quantizer)
        converted = qompose.convert_pt2e(qompose.calibrate(prepared, seen, progress=False))
        off = converted(unseen) - exact
        found.append(10 * math.log10(float(exact.square().sum() / off.square().sum())))
    return [one - found[0] for one in found[1:]]


def _cell(each: tuple[float, ...]) -> str:
    lost = sum(one < -0.5 for one in each)
    return f"{sum(each) / len(each):+.1f} · {min(each):+.1f} · {lost}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=24)
    draws = parser.parse_args().draws
    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = {}
    for seed in range(draws):
        torch.manual_seed(seed)
        for name, model in networks():
            found.setdefault(name, []).append(gains(model, seed))
    print(f"Gain of {draws} draws: mean, the worst, and how many lose more than 0.5 dB.\n")
    print("| network | scale search alone | default |")
    print("|---|---:|---:|")
    found["all"] = [each for one in found.values() for each in one]
    for name, each in found.items():
        print(f"| {name} | {' | '.join(map(_cell, zip(*each, strict=True)))} |")


if __name__ == "__main__":
    main()
