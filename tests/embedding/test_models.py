# SPDX-License-Identifier: Apache-2.0
"""A recommender with 26 bags, composed with either product backend in either order."""

from __future__ import annotations

import itertools
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn

from tests.core.toy import Model
from tests.sampling import at_once

TABLES, DENSE, WIDTH, BATCH, LENGTH = 26, 13, 16, 8, 4
PRODUCTS = [name for name in ("xnnpack", "x86_inductor") if find_spec(f"qompose_{name}")]
ORDERS = [order for name in PRODUCTS for order in itertools.permutations(("embedding", name))]

pytestmark = pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # cat of floats


def dlrm(m: Any, dense: Tensor, sparse: Tensor) -> Tensor:
    """Dense features through a perceptron, sparse ones through bags, and products of all pairs of them."""
    x = m.bottom(dense)
    found = [bag(ids % bag.num_embeddings) for bag, ids in zip(m.bags, sparse, strict=True)]
    features = torch.stack([x, *found], dim=1)
    products = features @ features.transpose(1, 2)
    return m.top(torch.cat([x, products[:, m.rows[0], m.rows[1]]], dim=1)).sigmoid()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(BATCH, DENSE, generator=generator)
    return dense, torch.randint(10_000, (TABLES, BATCH, LENGTH), generator=generator)


@cache
def model() -> Any:
    """The tables have from 10 rows to about 3,000, and the three modes of bags in turn."""
    torch.manual_seed(0)
    modes = itertools.cycle(("sum", "mean", "max"))
    pairs = (TABLES + 1) * TABLES // 2
    return Model(
        dlrm,
        bags=nn.ModuleList(
            nn.EmbeddingBag(int(10 * 1.25**number), WIDTH, mode=mode)
            for number, mode in zip(range(TABLES), modes, strict=False)
        ),
        bottom=nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.ReLU()),
        top=nn.Sequential(nn.Linear(WIDTH + pairs, 32), nn.ReLU(), nn.Linear(32, 1)),
        rows=nn.Buffer(torch.triu_indices(TABLES + 1, TABLES + 1, 1)),
    ).eval()


@cache
def program() -> torch.export.ExportedProgram:
    return torch.export.export(model(), batch(0))


@cache
def quantized(*members: Any) -> qompose.QuantizedModel:
    batches = [batch(seed) for seed in range(4)]
    return qompose.quantize(program(), backends=list(members), calibration=batches)


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    "order",
    at_once([(order,) for order in ORDERS], *[(order,) for order in ORDERS[::3]]),
    ids="-".join,
)
def test_every_bag_has_a_kernel(order: tuple[str, str]) -> None:
    result = quantized(*order)
    bags = [row for row in result.report.rows if row.owner == "embedding"]
    assert len(bags) == TABLES
    assert {(row.state, row.kernel) for row in bags} == {
        ("float kernel on integers", "bag of packed rows")
    }
    dense, sparse = batch(9)
    with torch.no_grad():
        wanted, actual = model()(dense, sparse), result.model(dense, sparse)
        assert relative_error(actual, result.converted(dense, sparse)) < 0.01
    assert relative_error(actual, wanted) < 0.02
    tables = sum(t.nbytes for n, t in result.model.state_dict().items() if n.startswith("bags"))
    assert tables <= (WIDTH + 8) / (4 * WIDTH) * sum(t.nbytes for t in model().bags.parameters())
