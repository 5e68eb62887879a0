# SPDX-License-Identifier: Apache-2.0
"""The rule table on small models: what becomes the bounds of a product, in process and on the runtime."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import qompose
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.toy import Model, randn
from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import converted

X = randn(2, 3, 6, 6)
BOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu6": F.relu6, "relu6 in place": lambda x: F.relu6(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.2), "clamp": lambda x: x.clamp(-0.1, 0.2),
    "clamp_": lambda x: x.clamp_(-0.1, 0.2), "clip": lambda x: x.clip(-0.1, 0.2),
    "clip_": lambda x: x.clip_(-0.1, 0.2), "one side": lambda x: x.clamp(max=0.2),
}  # fmt: skip


def model_of(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
    return Model(lambda m, x: m.second(function(m.first(x))), first=first, second=second).eval()


@pytest.mark.parametrize("name", at_once([*BOUNDED], "relu6 in place", "clip_", "one side"))
def test_bounds_behind_a_product_are_part_of_it(name: str) -> None:
    quantized = converted(model_of(BOUNDED[name]), X)
    lowered = qompose.lower(quantized)
    owned = {row.rule for row in qompose.report(lowered).rows}
    assert owned == {"conv2d_hardtanh", "conv2d"}
    qompose.assert_lowered(lowered)
    with torch.no_grad():
        expected, found = quantized(X), lowered(X)
    step = float((expected.max() - expected.min()) / 255)
    assert (expected - found).abs().max() <= 1.01 * step  # one step of the output


def test_clamps_become_the_bounds_of_a_delegated_product() -> None:
    pytest.importorskip("executorch")
    for name in ("clip_", "one side"):
        quantized = converted(model_of(BOUNDED[name]), X)
        program = qompose.lower(quantized, target="executorch")
        report = qompose.report(program)
        assert {row.kernel for row in report.rows} == {"XNNPACK delegate"}
        expected = quantized(X)
        step = float((expected.max() - expected.min()) / 255)
        assert (expected - program(X)).abs().max() <= 1.01 * step  # one step of the output
