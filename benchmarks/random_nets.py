# SPDX-License-Identifier: Apache-2.0
"""What the default algorithms are worth on small networks drawn at random, in dB.

    python benchmarks/random_nets.py
    python benchmarks/random_nets.py --without-biases

Weights are as torch makes them. Images are noise, plain in even draws and smooth with a mean in odd ones;
sequences have twelve channels that correlate. Eight batches of calibration; 128 unseen examples for the SQNR
of outputs, which many networks here pool.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import qompose
import torch
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn

WIDTHS, SIZE = (8, 16, 24, 32), 16
CHANNELS, WIDE = 12, 32
Data: TypeAlias = Callable[[int, int], Tensor]
"""Makes a number of examples by a seed."""
Words: TypeAlias = tuple[str, ...] | None


def _xnnpack(words: Words, **options: Any) -> qompose.Quantizer:
    config = get_symmetric_quantization_config(is_per_channel=True, algorithms=words, **options)
    return XNNPACKQuantizer().set_global(config)


def _x86(words: Words) -> qompose.Quantizer:
    config = get_default_x86_inductor_quantization_config(algorithms=words)
    return X86InductorQuantizer().set_global(config)


_int4 = partial(_xnnpack, weight_qmin=-8, weight_qmax=7)
KINDS: Mapping[str, Callable[[Words], qompose.Quantizer]] = {
    "XNNPACK, dynamic int4": partial(_int4, is_dynamic=True),
    "XNNPACK, static int4": _int4,
    "XNNPACK, static int8": _xnnpack,
    "x86, static int8": _x86,
}


def images(number: int, seed: int, *, smooth: bool) -> Tensor:
    """Noise, `(N, 3, 16, 16)`; if smooth, the mean of its neighbours and one for each image and channel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 3, SIZE, SIZE, generator=generator)
    if not smooth:
        return x
    mean = torch.randn(number, 3, 1, 1, generator=generator)
    around = nn.functional.pad(x, (2, 2, 2, 2), mode="reflect")
    return 5 * nn.functional.avg_pool2d(around, 5, 1) + 0.5 * mean + 0.5


def sequences(number: int, seed: int, *, draw: int) -> Tensor:
    """Steps of channels that a draw mixes and moves, `(N, 20, 12)`."""
    fixed, generator = (torch.Generator().manual_seed(one) for one in (draw, seed))
    mix = torch.randn(CHANNELS, CHANNELS, generator=fixed)
    mean = torch.randn(CHANNELS, generator=fixed)
    return torch.randn(number, 20, CHANNELS, generator=generator) @ mix + mean


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


def _convolutional() -> dict[str, list[nn.Module]]:
    a, b, c = (WIDTHS[int(torch.randint(len(WIDTHS), ()))] for _ in range(3))
    plain, normed = ([*_conv(3, a, norm=n), *_conv(a, b, norm=n)] for n in (False, True))
    apart = [*_conv(3, a, stride=2, norm=True), *_conv(a, a, groups=a, norm=True)]
    apart += [*_conv(a, b, 1, norm=True), *_conv(b, c, norm=True)]
    flat = [*_conv(3, a), nn.MaxPool2d(2), *_conv(a, b), nn.Flatten()]
    return {
        "pooled": [*plain, nn.AdaptiveAvgPool2d(1)],
        "pooled, linear": [*plain, *_pooled(b)],
        "batch norm, pooled, linear": [*normed, *_pooled(b)],
        "depthwise, pooled, linear": [*apart, *_pooled(c)],
        "flattened, two linears": [*flat, nn.Linear(64 * b, 32), nn.ReLU(), nn.Linear(32, 10)],
        "convolutions": [*plain, nn.Conv2d(b, c, 3, padding=1)],
    }


class _States(nn.Module):
    """The states of a recurrent layer, without those at the end."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.layer(x)[0]
        return states


def _of_sequences(*, bias: bool) -> dict[str, list[nn.Module]]:
    linear = partial(nn.Linear, bias=bias)
    lstm = _States(nn.LSTM(CHANNELS, WIDE, 2, batch_first=True, bias=bias))
    encoder = nn.TransformerEncoderLayer(
        WIDE, 4, 2 * WIDE, activation="gelu", batch_first=True, bias=bias
    )
    return {
        "linears": [
            linear(CHANNELS, 2 * WIDE), nn.ReLU(), linear(2 * WIDE, 2 * WIDE), nn.GELU(), linear(2 * WIDE, 6),
        ],
        "LSTM": [lstm, linear(WIDE, WIDE), nn.ReLU(), linear(WIDE, 6)],
        "transformer": [linear(CHANNELS, WIDE), encoder, linear(WIDE, 6)],
    }  # fmt: skip


def networks(draw: int, *, bias: bool) -> Iterator[tuple[str, nn.Sequential, Data]]:
    """One of each kind, with widths and weights of a draw; without biases, none with batch norms."""
    torch.manual_seed(draw)
    pixels, steps = partial(images, smooth=bool(draw % 2)), partial(sequences, draw=draw)
    for kinds, data in ((_convolutional(), pixels), (_of_sequences(bias=bias), steps)):
        for name, layers in kinds.items():
            model = nn.Sequential(*layers).eval().requires_grad_(False)
            if not bias and any(isinstance(layer, nn.BatchNorm2d) for layer in layers):
                continue
            for layer in layers:
                if not bias and isinstance(layer, nn.Conv2d | nn.Linear):
                    layer.bias = None
            yield name, model, data


def gain(
    model: nn.Module, data: Data, draw: int, quantizer: Callable[[Words], qompose.Quantizer]
) -> float:
    """How many dB the default is ahead of no algorithms."""
    seen = [(data(8, 10_000 * draw + number),) for number in range(8)]
    unseen, found = data(128, 777_777 + draw), []
    exact, sizes = model(unseen), ({0: torch.export.Dim("n")},)
    for words in ((), None):
        program = torch.export.export(model, seen[0], dynamic_shapes=sizes)
        prepared = qompose.prepare_pt2e(program, quantizer(words))
        converted = qompose.convert_pt2e(qompose.calibrate(prepared, seen, progress=False))
        off = converted(unseen) - exact
        found.append(10 * math.log10(float(exact.square().sum() / off.square().sum())))
    return found[1] - found[0]


def _cell(each: list[float]) -> str:
    lost = sum(one < -0.3 for one in each)
    return f"{sum(each) / len(each):+.1f} · {min(each):+.1f} · {lost}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=24)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--without-biases", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Of torch's export of an LSTM, and of its first states, which are zero.
    warnings.simplefilter("ignore")
    found: dict[str, list[list[float]]] = {}
    for draw in range(options.draws):
        for name, model, data in networks(draw, bias=not options.without_biases):
            row = [gain(model, data, draw, KINDS[kind]) for kind in options.kinds]
            found.setdefault(name, []).append(row)
    print("Gain over no algorithms: mean, the worst, and how many lose more than 0.3 dB.\n")
    print(f"| network | {' | '.join(options.kinds)} |")
    print(f"|---{'|---:' * len(options.kinds)}|")
    found["all"] = [each for one in found.values() for each in one]
    for name, each in found.items():
        print(f"| {name} | {' | '.join(_cell([*one]) for one in zip(*each, strict=True))} |")


if __name__ == "__main__":
    main()
