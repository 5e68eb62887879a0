# SPDX-License-Identifier: Apache-2.0
"""Repairs on the backends themselves: they help in the kernels, and change nothing where nobody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.testing.fixtures import sqnr
from torch import Tensor, nn

from tests.core.toy import Model
from tests.products import x86, xnnpack

BACKENDS: dict[str, Callable[..., Any]] = {
    "xnnpack": lambda **options: xnnpack(**{"is_per_channel": False, **options}),
    "x86_inductor": x86,
}


def repaired(
    backend: str,
    model: nn.Module,
    batches: list[Tensor],
    repair: str,
    near: int = 35,
    **options: Any,
) -> tuple[float, float, list[str]]:
    """The distances of the kernels from float on the first batch, in dB, without the repair and with it, and
    its lines of the report; its kernels are `near` dB to the simulation."""
    plain, result = (
        qompose.quantize(
            model, (batches[0],),
            backends=BACKENDS[backend](repairs=repairs, **options), calibration=batches,
        )
        for repairs in ((), (repair,))
    )  # fmt: skip
    assert not any(repair in line for line in (*plain.report.rewrites, *plain.report.notes))
    assert result.report.count("int8 kernel") == plain.report.count("int8 kernel") > 0
    with torch.no_grad():
        assert sqnr(result.converted(batches[0]), result.model(batches[0])) > near
        without, gained = (sqnr(model(batches[0]), r.model(batches[0])) for r in (plain, result))
    return without, gained, [line for line in result.report.rewrites if repair in line]


def spread(one: Any, other: Any, seed: int) -> None:
    """Make channels up to 2**5 times as large and as small between two layers; the function stays."""
    exponents = torch.randint(
        -5, 6, one.bias.shape, generator=torch.Generator().manual_seed(seed)
    ).float()
    with torch.no_grad():
        one.weight.mul_(torch.exp2(exponents).view(-1, 1, 1, 1))
        one.bias.mul_(torch.exp2(exponents))
        shape = (-1, 1, 1, 1) if other.groups > 1 else (1, -1, 1, 1)
        other.weight.div_(torch.exp2(exponents).view(shape))


def uneven() -> nn.Module:
    """Pointwise, depthwise, pointwise, as in MobileNet, with channels of very different size."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.ReLU(),
        nn.Conv2d(32, 16, 1),
    ).eval()  # fmt: skip
    spread(model[0], model[2], 0)
    spread(model[2], model[4], 1)
    return model


def images(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, 12, 12, generator=generator) for _ in range(number)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equalization(backend: str) -> None:
    without, gained, lines = repaired(backend, uneven(), images(2), "equalization", near=40)
    assert gained > max(without + 10, 35)
    assert sum("equalization: " in line for line in lines) == 2


WIDTH, LOUD = 32, (3, 11, 20)


def attention(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    scores = m.q(y) @ m.k(y).transpose(-1, -2) / WIDTH**0.5
    x = x + m.out(scores.softmax(-1) @ m.v(y))
    return x + m.down(nn.functional.gelu(m.up(m.second(x))))


def block() -> nn.Module:
    """Attention and two linears, behind layer norms that make three channels far larger than the others."""
    sizes = {**dict.fromkeys(("q", "k", "v", "out"), (1, 1)), "up": (1, 4), "down": (4, 1)}
    linears = {name: nn.Linear(a * WIDTH, b * WIDTH) for name, (a, b) in sizes.items()}
    norms = {name: nn.LayerNorm(WIDTH) for name in ("first", "second")}
    loud = torch.tensor([60.0, 100.0, 80.0])
    with torch.no_grad():
        for norm in norms.values():
            norm.weight[list(LOUD)] *= loud
        for name, linear in linears.items():
            if name in ("out", "down"):
                linear.weight *= 3
            else:
                linear.weight[:, list(LOUD)] /= loud
    return Model(attention, **norms, **linears).eval()


def tokens(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 16, WIDTH, generator=generator) for _ in range(number)]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("xnnpack", {"balance": False}),
        pytest.param(
            "xnnpack", {"is_dynamic": True, "is_per_channel": True}, marks=pytest.mark.full
        ),
        ("x86_inductor", {"balance": False}),
        pytest.param("x86_inductor", {"is_dynamic": True}, marks=pytest.mark.full),
        ("x86_inductor", {"is_dynamic": True, "per_token": True}),
    ],
)
def test_smooth_quant(backend: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    without, gained, lines = repaired(backend, block(), tokens(4), "smooth_quant", **options)
    assert gained > max(without + 10, 33)
    assert "by first.weight and first.bias" in lines[0]


def deep(*, images: bool) -> nn.Module:
    torch.manual_seed(0)
    if images:
        layers = [part for _ in range(3) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
        return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1)).eval()
    gate = Model(lambda m, x: torch.sigmoid(x) + 0.5)  # not zero on average
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), gate)]
    return nn.Sequential(*layers, nn.Linear(64, 64)).eval()


@pytest.mark.parametrize("images", [False, True], ids=["linears", "convolutions"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_correction(backend: str, images: bool) -> None:
    """With weights of four bits, whose rounding moves the means of outputs."""
    shape = (8, 8, 12, 12) if images else (64, 64)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.rand(shape, generator=generator) + 1 for _ in range(3)]
    model, options = deep(images=images), {"weight_qmin": -8, "weight_qmax": 7}
    without, gained, lines = repaired(backend, model, batches, "bias_correction", **options)
    assert gained > without + 2
    assert sum("bias_correction of" in line for line in lines) == (4 if images else 5)
