# SPDX-License-Identifier: Apache-2.0
"""Models are trained with the quantizers of the plugins, alone and composed, and run on their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.observers import LearnableFakeQuantize
from qompose_embedding import EmbeddingQuantizer
from qompose_x86_inductor import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torch.nn import functional

from tests.core.toy import sqnr
from tests.sampling import at_once


class Words(nn.Module):
    """A table, its mean over words, and two layers with a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(50, 32), nn.Linear(32, 64)
        self.norm, self.drop, self.last = nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 3)

    def forward(self, words: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.first(self.table(words).mean(1))))
        out: Tensor = self.last(self.drop(hidden))
        return out


class Images(nn.Module):
    """Residual blocks: a depthwise convolution, a sum, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        )
        self.wide = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        )
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, stride=2), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.up(functional.relu(self.wide(x) + x))
        return functional.adaptive_avg_pool2d(x, 1).flatten(1)


def xnnpack(**options: Any) -> XNNPACKQuantizer:
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=True, **options)
    return XNNPACKQuantizer().set_global(config)


def x86(**options: Any) -> X86InductorQuantizer:
    config = get_default_x86_inductor_quantization_config(is_qat=True, **options)
    return X86InductorQuantizer().set_global(config)


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "xnnpack": xnnpack,
    "xnnpack, learned": lambda: xnnpack(fake_quantize="learned"),
    "xnnpack, dynamic": lambda: xnnpack(is_dynamic=True),
    "xnnpack, groups": lambda: xnnpack(is_dynamic=True, group_size=32),
    "xnnpack, weights": lambda: xnnpack(weight_only=True),
    "x86": x86,
    "x86, learned": lambda: x86(fake_quantize="learned"),
    "x86, dynamic": lambda: x86(is_dynamic=True),
    "x86, per token": lambda: x86(is_dynamic=True, per_token=True),
    "x86, groups": lambda: x86(weight_only=True, group_size=32),
}


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


@pytest.mark.parametrize(
    "name", at_once(QUANTIZERS, "xnnpack", "xnnpack, groups", "x86, learned", "x86, per token")
)
def test_words(name: str) -> None:
    torch.manual_seed(0)
    words = torch.randint(50, (12, 7))
    prepared, losses = trained(Words(), words, QUANTIZERS[name]())
    check(prepared, losses, words)
    if "learned" in name:
        scales = [m.scale for m in prepared.modules() if isinstance(m, LearnableFakeQuantize)]
        assert len(scales) > 3 and all(
            s.grad is not None and bool((s.grad != 0).any()) for s in scales
        )


@pytest.mark.parametrize(("name", "order"), [("xnnpack", "tables first"), ("x86", "tables last")])
def test_words_with_tables(name: str, order: str) -> None:
    """Tables are trained too, though their configuration is one of calibration."""
    torch.manual_seed(0)
    words = torch.randint(50, (12, 7))
    members = [EmbeddingQuantizer(), QUANTIZERS[name]()]
    quantizer = qompose.compose(*(members if order == "tables first" else members[::-1]))
    prepared, losses = trained(Words(), words, quantizer)
    check(prepared, losses, words)
    converted = qompose.convert_pt2e(prepared)
    table = prepared.get_parameter("table.weight").detach()
    (row,) = (r for r in qompose.report(converted).rows if r.operator == "aten.embedding")
    assert row.owner == "embedding"
    assert table.abs().max() > 0 and converted.get_buffer("table.weight_q").dtype is torch.uint8


@pytest.mark.parametrize(
    "name",
    at_once(("xnnpack", "xnnpack, learned", "x86", "x86, learned"), "xnnpack, learned", "x86"),
)
def test_images(name: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 3, 8, 8)
    prepared, losses = trained(Images(), batch, QUANTIZERS[name](), steps=60)
    check(prepared, losses, batch)
