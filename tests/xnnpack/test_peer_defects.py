# SPDX-License-Identifier: Apache-2.0
"""What ExecuTorch's XNNPACKQuantizer gets wrong or leaves out without a word, and ours does not."""

from __future__ import annotations

from collections.abc import Callable

import qompose
import torch
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn

STATIC = get_symmetric_quantization_config(is_per_channel=True)
DYNAMIC = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)


def converted(
    model: nn.Module, *inputs: Tensor, quantizer: XNNPACKQuantizer
) -> torch.fx.GraphModule:
    prepared = qompose.prepare_pt2e(torch.export.export(model.eval(), inputs), quantizer)
    prepared(*inputs)
    return qompose.convert_pt2e(prepared)


def rules(model: torch.fx.GraphModule) -> dict[str, str]:
    return {row.name: row.rule for row in qompose.report(model).rows if row.owner}


class Calls(nn.Module):
    """A function of a module and its input."""

    def __init__(
        self, function: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module
    ) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_output_channels_of_a_transposed_convolution() -> None:
    """ExecuTorch's quantizes along the input channels in training, and drops the axis elsewhere."""
    result = converted(
        nn.ConvTranspose2d(3, 5, 3), X, quantizer=XNNPACKQuantizer().set_global(STATIC)
    )
    (scales,) = [b for name, b in result.named_buffers() if name.endswith("weight_scale")]
    assert scales.shape == (5,)


def test_a_convolution_by_its_name() -> None:
    """ExecuTorch's annotates nothing there, since a weight has no module."""
    model = Calls(lambda m, x: m.conv(x).relu(), conv=nn.Conv2d(3, 4, 3))
    result = converted(model, X, quantizer=XNNPACKQuantizer().set_module_name("conv", STATIC))
    assert rules(result)["conv2d"] == "conv2d_relu"


def test_a_configuration_of_one_module_is_not_one_for_every_concatenation() -> None:
    model = Calls(
        lambda m, x: torch.cat([m.conv(x), x[:, :, 1:-1, 1:-1]], 1), conv=nn.Conv2d(3, 4, 3)
    )
    result = converted(model, X, quantizer=XNNPACKQuantizer().set_module_name("conv", STATIC))
    assert "cat" not in rules(result)


def test_a_dynamic_convolution_in_front_of_a_relu() -> None:
    model = Calls(lambda m, x: m.conv(x).relu(), conv=nn.Conv2d(3, 4, 3))
    result = converted(model, X, quantizer=XNNPACKQuantizer().set_global(DYNAMIC))
    assert rules(result) == {"conv2d": "conv2d_dynamic"}


def test_every_call_of_a_convolution() -> None:
    model = Calls(lambda m, x: m.conv(m.conv(x)), conv=nn.Conv2d(3, 3, 3))
    for config, rule in ((STATIC, "conv2d"), (DYNAMIC, "conv2d_dynamic")):
        result = converted(model, X, quantizer=XNNPACKQuantizer().set_global(config))
        assert rules(result) == {"conv2d": rule, "conv2d_1": rule}
        stored = [name for name, _ in result.named_buffers() if name.endswith("weight_q")]
        assert len(stored) == 1


def test_capabilities_of_a_fresh_configuration() -> None:
    config = get_symmetric_quantization_config(is_per_channel=True, range="minmax")
    capabilities = XNNPACKQuantizer().set_global(config).quantization_capabilities()
    patterns = {row.pattern for row in capabilities if row.settings == config}
    assert {"conv2d", "conv2d_relu", "linear_hardtanh", "conv_transpose2d", "sub"} <= patterns
    assert capabilities.supports([nn.Conv2d, nn.ReLU6], config)


def test_weights_alone() -> None:
    """ExecuTorch's raises an AttributeError."""
    config = get_symmetric_quantization_config(is_per_channel=True, weight_only=True)
    model = nn.Sequential(nn.Linear(8, 4))
    x = torch.randn(2, 8)
    result = converted(model, x, quantizer=XNNPACKQuantizer().set_global(config))
    assert rules(result) == {"linear": "linear_weight_only"}
    assert torch.allclose(qompose.lower(result)(x), result(x), atol=1e-6)
