# SPDX-License-Identifier: Apache-2.0
"""The walk over delegates sees operators that compute in float between int8 tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# Registers the quantized_decomposed operators.
import torch
import torch.ao.quantization.fx._decomposed
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor, nn
from torch.nn import functional

from tests.xnnpack.executorch_target.delegates import floats_between, handed_over

QD = torch.ops.quantized_decomposed
PARAMETERS = (0.05, 3, -128, 127, torch.int8)


class Between(nn.Module):
    """A function between int8 tensors."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for step in (lambda x: x, self.function, lambda x: x):
            x = QD.quantize_per_tensor.default(step(x), *PARAMETERS)
            x = QD.dequantize_per_tensor.default(x, *PARAMETERS)
        return x


def test_a_batch_norm_behind_a_transposed_convolution_with_groups() -> None:
    """Given to XNNPACK together, they end ExecuTorch's export: it takes the weight for one without groups."""
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
        *(nn.ConvTranspose2d(6, 4, 3), nn.BatchNorm2d(4)),
    ).eval()
    for norm in (model[1], model[3]):
        norm.running_mean.uniform_(-1, 1)
    x = torch.randn(1, 4, 5, 5)
    program = lower_to_executorch(torch.export.export(model, (x,)).module(), (x,))
    torch.testing.assert_close(program.run(x), model(x), rtol=1e-4, atol=1e-5)
    (left,) = program.delegation.portable
    assert left.module == "1" and left.reason


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda x: functional.gelu(x).tanh(), ["XNNGelu", "XNNTanh"], id="two"),
        pytest.param(lambda x: functional.max_pool2d(x, 2), [], id="max_pool2d"),
    ],
)
def test_floats_between_integers_are_seen(
    function: Callable[[Tensor], Tensor], expected: list[str]
) -> None:
    pytest.importorskip("executorch")
    program = torch.export.export(Between(function), (torch.randn(1, 4, 6, 6),))
    with handed_over() as graphs:
        lower_to_executorch(program.module(), (torch.randn(1, 4, 6, 6),))
    found = [name for graph in graphs for name in floats_between(graph)]
    assert [name for name in found if name not in ("XNNStaticTranspose", "XNNCopy")] == expected
