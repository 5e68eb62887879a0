# SPDX-License-Identifier: Apache-2.0
"""Models are trained with the quantizers of the plugins, alone and composed, and run on their kernels."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose_embedding import EmbeddingQuantizer
from torch import Tensor, nn
from torch.nn import functional

from tests.core.toy import Model, sqnr
from tests.products import x86, xnnpack
from tests.sampling import at_once


def words_model() -> Model:
    """A table, its mean over words, and two layers with a batch norm between them."""

    def forward(m: Any, words: Tensor) -> Tensor:
        hidden = functional.relu(m.norm(m.first(m.table(words).mean(1))))
        out: Tensor = m.last(m.drop(hidden))
        return out

    layers = {"table": nn.Embedding(50, 32), "first": nn.Linear(32, 64)}
    layers |= {"norm": nn.BatchNorm1d(64), "drop": nn.Dropout(0.2), "last": nn.Linear(64, 3)}
    return Model(forward, **layers)


def images_model() -> Model:
    """Residual blocks: a depthwise convolution, a sum, and a transposed convolution."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = m.up(functional.relu(m.wide(x) + x))
        return functional.adaptive_avg_pool2d(x, 1).flatten(1)

    wide = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    return Model(
        forward,
        stem=nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        ),
        wide=nn.Sequential(wide, nn.BatchNorm2d(8)),
        up=nn.Sequential(nn.ConvTranspose2d(8, 4, 2, stride=2), nn.BatchNorm2d(4), nn.ReLU()),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "xnnpack": {}, "xnnpack, learned": {"fake_quantize": "learned"}, "xnnpack, dynamic": {"is_dynamic": True},
    "xnnpack, groups": {"is_dynamic": True, "group_size": 32}, "xnnpack, weights": {"weight_only": True},
    "x86": {}, "x86, learned": {"fake_quantize": "learned"}, "x86, dynamic": {"is_dynamic": True},
    "x86, per token": {"is_dynamic": True, "per_token": True},
    "x86, groups": {"weight_only": True, "group_size": 32},
}  # fmt: skip


def quantizer(name: str) -> Any:
    make = xnnpack if name.startswith("xnnpack") else x86
    return make(is_qat=True, **OPTIONS[name])


def trained(model: nn.Module, batch: Tensor, quantizer: Any, steps: int = 40) -> Any:
    """Learn to tell the batch's rows apart, and return the model in evaluation, and the losses."""
    torch.manual_seed(0)
    prepared = qompose.prepare_qat_pt2e(torch.export.export(model.train(), (batch,)), quantizer)
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = prepared(batch)
        loss = functional.cross_entropy(out, torch.arange(len(batch)) % out.shape[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, parameter in prepared.named_parameters():
        if parameter.requires_grad and not name.endswith("zero_point"):
            assert parameter.grad is not None, name
    prepared.eval().apply(qompose.training.disable_observer)
    return prepared, losses


def check(prepared: Any, losses: list[float], batch: Tensor) -> None:
    """One of 32 outputs that is a step off, for a sum that ends between two, is 39 dB."""
    assert losses[-1] < 0.85 * losses[0]
    simulated = prepared(batch)
    converted = qompose.convert_pt2e(prepared)
    assert sqnr(simulated, converted(batch)) > 34
    left = [n for n in converted.graph.nodes if "batch_norm" in str(n.target)]
    assert all("conv_transpose" in str(n.args[0].target) for n in left), "x86 has no kernel for it"
    lowered = qompose.lower(converted)
    assert sqnr(converted(batch), lowered(batch)) > 30
    report = qompose.report(lowered)
    assert report.count("int8 kernel") + report.count("float kernel on integers") >= 2
    assert not report.count("simulated (Q/DQ)")


IMAGES = ["xnnpack", "xnnpack, learned", "x86", "x86, learned"]


@pytest.mark.parametrize(
    ("make", "name"),
    at_once(
        [*((words_model, name) for name in OPTIONS), *((images_model, name) for name in IMAGES)],
        *(
            (words_model, n)
            for n in ("xnnpack", "xnnpack, groups", "x86, learned", "x86, per token")
        ),
        *((images_model, name) for name in ("xnnpack, learned", "x86")),
    ),
)
def test_alone(make: Any, name: str) -> None:
    images = make is images_model
    batch = torch.randn(8, 3, 8, 8) if images else torch.randint(50, (12, 7))
    prepared, losses = trained(make(), batch, quantizer(name), steps=60 if images else 40)
    check(prepared, losses, batch)


@pytest.mark.parametrize(("name", "order"), [("xnnpack", "tables first"), ("x86", "tables last")])
def test_words_with_tables(name: str, order: str) -> None:
    """Tables are trained too, though their configuration is one of calibration."""
    words = torch.randint(50, (12, 7))
    members = [EmbeddingQuantizer(), quantizer(name)]
    composed = qompose.compose(*(members if order == "tables first" else members[::-1]))
    prepared, losses = trained(words_model(), words, composed)
    check(prepared, losses, words)
    converted = qompose.convert_pt2e(prepared)
    table = prepared.get_parameter("table.weight").detach()
    (row,) = (r for r in qompose.report(converted).rows if r.operator == "aten.embedding")
    assert row.owner == "embedding"
    assert table.abs().max() > 0 and converted.get_buffer("table.weight_q").dtype is torch.uint8
