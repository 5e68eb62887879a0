# SPDX-License-Identifier: Apache-2.0
"""Sensitivity of real backends and their compositions is what conversions of one operator each cost."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.diagnosis.brute import cost, expected_costs, observed_costs
from tests.core.toy import Model, plan_of, seeded
from tests.products import x86, xnnpack
from tests.sampling import at_once


def words(m: Any, ids: Tensor) -> Tensor:
    x = m.table(ids)
    return m.head(m.norm(x + m.down(m.up(x).relu())))


def words_model() -> Any:
    layers = {"table": nn.Embedding(20, 8), "norm": nn.LayerNorm(8), "up": nn.Linear(8, 16)}
    return seeded(Model(words, **layers, down=nn.Linear(16, 8), head=nn.Linear(8, 4)))


def pictures(m: Any, x: Tensor) -> Tensor:
    x = m.norm(m.stem(x)).relu()
    x = (m.deep(x) + x).relu()
    return m.head(m.pool(x).flatten(1))


def pictures_model() -> Any:
    layers = {"stem": nn.Conv2d(3, 8, 3, padding=1), "norm": nn.BatchNorm2d(8)}
    deep, pool = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.AdaptiveAvgPool2d(1)
    return seeded(Model(pictures, **layers, deep=deep, pool=pool, head=nn.Linear(8, 4)))


def ids(seed: int) -> Tensor:
    return torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(seed))


def images(seed: int) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


QUANTIZERS = {
    "x86_inductor": lambda: x86(balance=False, algorithms=()),
    "x86_inductor per token": lambda: x86(balance=False, is_dynamic=True, per_token=True),
    "x86_inductor weights": lambda: x86(balance=False, weight_only=True),
    "xnnpack": lambda: xnnpack(balance=False, algorithms=()),
    "xnnpack dynamic": lambda: xnnpack(balance=False, is_dynamic=True),
    "embedding and x86_inductor": lambda: qompose.compose(
        "embedding", x86(balance=False, algorithms=())
    ),
}


def observed(model: nn.Module, batches: list[tuple[Tensor]], quantizer: Any) -> GraphModule:
    program = torch.export.export(model, batches[0])
    return qompose.calibrate(qompose.prepare_pt2e(program, quantizer), batches)


@pytest.mark.parametrize(
    ("make", "data", "name"),
    at_once(
        [(words_model, ids, name) for name in QUANTIZERS]
        + [(pictures_model, images, name) for name in QUANTIZERS if "embedding" not in name],
        (words_model, ids, "x86_inductor weights"),
        (words_model, ids, "embedding and x86_inductor"),
        (words_model, ids, "xnnpack dynamic"),
        (pictures_model, images, "x86_inductor"),
        (pictures_model, images, "xnnpack"),
    ),
)
def test_costs_are_those_of_conversions_of_one_operator(make: Any, data: Any, name: str) -> None:
    batches = [(data(0),), (data(1),)]
    prepared = observed(make(), batches, QUANTIZERS[name]())
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
    module = words_model()
    with torch.no_grad():
        module.norm.weight[3] *= 100
        module.norm.bias[3] *= 100
        module.head.weight[:, 3] /= 100
    make = {"x86_inductor": x86, "xnnpack": xnnpack}[backend]
    prepared = observed(module, batches, make(algorithms=()))
    converted = qompose.convert_pt2e(prepared)
    assert "channels of layer_norm -> linear_2" in str(converted.meta["qompose"].balanced)
    ranking = qompose.sensitivity(prepared, batches, progress=False)
    assert ranking.together == pytest.approx(cost(converted, prepared, batches), rel=1e-3)
    assert ranking["head"].cost < 1e-3  # without factors, 1e-2
