# SPDX-License-Identifier: Apache-2.0
"""Sensitivity of real backends and their compositions is what conversions of one operator each cost."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.diagnosis.brute import cost, expected_costs, observed_costs
from tests.core.toy import plan_of, seeded
from tests.sampling import at_once


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.norm(x + self.down(self.up(x).relu()))
        return self.head(x)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (self.deep(x) + x).relu()
        return self.head(self.pool(x).flatten(1))


def ids(seed: int) -> Tensor:
    return torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(seed))


def images(seed: int) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def x86(**options: Any) -> X86InductorQuantizer:
    config = get_default_x86_inductor_quantization_config(balance=False, **options)
    return X86InductorQuantizer().set_global(config)


def xnnpack(**options: Any) -> XNNPACKQuantizer:
    config = get_symmetric_quantization_config(is_per_channel=True, balance=False, **options)
    return XNNPACKQuantizer().set_global(config)


QUANTIZERS = {
    "x86_inductor": x86,
    "x86_inductor per token": lambda: x86(is_dynamic=True, per_token=True),
    "x86_inductor weights": lambda: x86(weight_only=True),
    "xnnpack": xnnpack,
    "xnnpack dynamic": lambda: xnnpack(is_dynamic=True),
    "embedding and x86_inductor": lambda: qompose.compose("embedding", x86()),
}


def observed(make: type[nn.Module], batches: list[tuple[Tensor]], quantizer: Any) -> GraphModule:
    program = torch.export.export(seeded(make()), batches[0])
    prepared = qompose.prepare_pt2e(program, quantizer)
    for batch in batches:
        prepared(*batch)
    return prepared


@pytest.mark.parametrize(
    ("make", "data", "name"),
    at_once(
        [(Words, ids, name) for name in QUANTIZERS]
        + [(Pictures, images, name) for name in QUANTIZERS if "embedding" not in name],
        (Words, ids, "x86_inductor weights"),
        (Words, ids, "embedding and x86_inductor"),
        (Words, ids, "xnnpack dynamic"),
        (Pictures, images, "x86_inductor"),
        (Pictures, images, "xnnpack"),
    ),
)
def test_costs_are_those_of_conversions_of_one_operator(make: Any, data: Any, name: str) -> None:
    batches = [(data(0),), (data(1),)]
    prepared = observed(make, batches, QUANTIZERS[name]())
    ranking = qompose.sensitivity(prepared, batches, progress=False)
    assert ranking.notes == ()
    assert len(ranking) == len(plan_of(prepared).claims) > 0
    assert observed_costs(ranking) == pytest.approx(expected_costs(prepared, batches), rel=1e-6)
    assert ranking.together == pytest.approx(
        cost(qompose.convert_pt2e(prepared), prepared, batches), rel=1e-6
    )


@pytest.mark.parametrize("backend", ["x86_inductor", "xnnpack"])
def test_balanced_channels_keep_their_factors(backend: str) -> None:
    """In float they cost a rounding at most, and quantized what the whole conversion makes of them."""
    batches = [(torch.cat([ids(seed) for seed in range(n, n + 10)]),) for n in (0, 10)]
    module = seeded(Words())
    with torch.no_grad():
        module.norm.weight[3] *= 100
        module.norm.bias[3] *= 100
        module.head.weight[:, 3] /= 100
    prepared = qompose.prepare_pt2e(
        torch.export.export(module, batches[0]), qompose.compose(backend)
    )
    for batch in batches:
        prepared(*batch)
    converted = qompose.convert_pt2e(prepared)
    assert "channels of layer_norm -> linear_2" in str(converted.meta["qompose"].balanced)
    ranking = qompose.sensitivity(prepared, batches, progress=False)
    assert ranking.together == pytest.approx(cost(converted, prepared, batches), rel=1e-3)
    assert ranking["head"].cost < 1e-3  # without factors, 1e-2
