# SPDX-License-Identifier: Apache-2.0
"""What XNNPACK or its runtime gets wrong is written otherwise before it is lowered, and runs as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn

pytest.importorskip("executorch")

CONFIG = get_symmetric_quantization_config
STATIC = CONFIG(is_per_channel=True)
aten = torch.ops.aten


class Behind(nn.Module):
    """A layer, and a function of its output and of further inputs."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.function(self.layer(x), *more)


def lowered(
    model: nn.Module, inputs: tuple[Tensor, ...], config: Any = STATIC, sizes: Any = None
) -> tuple[Any, Any]:
    """Return the converted model and its program."""
    exported = torch.export.export(model.eval(), inputs, dynamic_shapes=sizes)
    prepared = qompose.prepare_pt2e(exported, XNNPACKQuantizer().set_global(config))
    prepared(*inputs)
    converted = qompose.convert_pt2e(prepared)
    return converted, qompose.lower(converted, "executorch")


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


KERNELS = {
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), 8),
    "pointwise": (lambda: nn.Conv2d(4, 6, 1, stride=2), 8),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), 8),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), 8),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), None),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3), None),
}


class TestInt4:
    @pytest.mark.parametrize("name", KERNELS)
    def test_convolutions_run_as_int8(self, name: str) -> None:
        make, rows = KERNELS[name]
        torch.manual_seed(0)
        x = image(2, 4, 8) if rows is None else image(2, 4, rows, 8)
        config = CONFIG(is_per_channel=True, weight_qmin=-8, weight_qmax=7)
        converted, program = lowered(make(), (x,), config)
        assert [row.state for row in qompose.report(program).rows] == ["int8 kernel"]
        assert torch.allclose(program.run(x), converted(x), atol=1e-6)

    @pytest.mark.parametrize(
        "layer", [nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3), nn.Linear(8, 4)]
    )
    def test_so_do_dynamic_ones(self, layer: nn.Module) -> None:
        config = CONFIG(is_per_channel=True, is_dynamic=True, weight_qmin=-8, weight_qmax=7)
        x = image(2, 4, 8, 8)
        converted, program = lowered(layer, (x,), config)
        assert [row.state for row in qompose.report(program).rows] == ["int8 kernel"]
        assert torch.allclose(program.run(x), converted(x), atol=1e-5)


@pytest.mark.parametrize(
    "clamp",
    [
        lambda y: y.clamp(0.3, 0.1),
        lambda y: y.clone().clamp_(0.3, 0.1),
        lambda y: torch.clip(y, 0.3, 0.1),
        lambda y: aten.hardtanh(y, 0.3, 0.1),
    ],
)
def test_bounds_in_the_wrong_order_give_the_upper_one_everywhere(clamp: Any) -> None:
    """XNNPACK gave either: 2 images of 7 x 7 pixels end in the middle of a vector."""
    x = image(2, 3, 9, 9)
    model = Behind(nn.Conv2d(3, 8, 3), lambda y: (y, clamp(y)))
    converted, program = lowered(model, (x,))
    for wanted, given in zip(converted(x), program.run(x), strict=True):
        assert torch.allclose(given, wanted, atol=1e-5)


class TestCropping:
    @pytest.mark.parametrize(
        "sizes", [(-1, 2, 0, -1), (-1, -2), (0, 0, -1, 0), (-1, 0, 2, 2, 0, -1)]
    )
    @pytest.mark.parametrize("before", [False, True])
    def test_padding_crops(self, sizes: tuple[int, ...], before: bool) -> None:
        x = image(2, 4, 8, 8)
        if before:
            inner = 3 if len(sizes) == 6 else 4
            model: nn.Module = nn.Sequential(nn.ConstantPad2d(sizes, 0.5), nn.Conv2d(inner, 4, 3))
        else:
            model = Behind(nn.Conv2d(4, 4, 3), lambda y: F.pad(y, sizes))
        converted, program = lowered(model, (x,))
        assert torch.allclose(program.run(x), converted(x), atol=1e-6)

    def test_of_a_batch_known_at_run_time(self) -> None:
        model = nn.Sequential(nn.ZeroPad2d((-1, 2, 0, -1)), nn.Conv2d(4, 4, 3))
        batch = {0: torch.export.Dim("batch", max=4)}
        converted, program = lowered(model, (image(2, 4, 8, 8),), sizes=(batch,))
        x = image(3, 4, 8, 8)
        assert torch.allclose(program.run(x), converted(x), atol=1e-6)


@pytest.mark.parametrize(
    "function", [torch.mul, torch.add, torch.sub, lambda y, t: F.relu(y + t), lambda y, t: t - y]
)
def test_a_number_given_as_a_tensor_leaves_its_operator_in_float(function: Any) -> None:
    inputs = image(3, 8), torch.tensor(0.7)
    converted, program = lowered(Behind(nn.Linear(8, 8), function), inputs)
    rows = {row.rule or row.reason for row in qompose.report(program).rows}
    assert any("has no dimensions, which XNNPACK takes of constants alone" in row for row in rows)
    assert torch.allclose(program.run(*inputs), converted(*inputs), atol=1e-6)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("factor", torch.tensor(0.7))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.factor


def test_a_constant_without_dimensions_is_quantized() -> None:
    x = image(3, 8)
    converted, program = lowered(Scaled(), (x,))
    assert {row.rule for row in qompose.report(program).rows} == {"linear", "mul"}
    assert torch.allclose(program.run(x), converted(x), atol=1e-6)
