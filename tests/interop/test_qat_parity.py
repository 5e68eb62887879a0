# SPDX-License-Identifier: Apache-2.0
"""Training by torchao's engine and by qompose's, with the same quantizers of other packages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao warns about itself while it is imported
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

from tests.interop.peers import THEIR_WARNINGS

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def block(bias: bool, *behind: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias), *behind)


class Residual(nn.Module):
    """Two convolutions with batch norms, and what went into the second added to what came out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = block(False, nn.BatchNorm2d(6), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(torch.relu(self.second(x) + x).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "no bias": lambda: block(False, nn.ReLU()),
    "batch norm": lambda: block(True, nn.BatchNorm2d(6)),
    "residual": Residual,
}


def of_x86() -> Any:
    config = x86.get_default_x86_inductor_quantization_config(is_qat=True)
    return x86.X86InductorQuantizer().set_global(config)


def of_xnnpack() -> Any:
    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    return xnnpack.XNNPACKQuantizer().set_global(config)


def step(prepared: GraphModule) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of one step of training, and the gradients of the model's own parameters."""
    out = prepared(X)
    out.square().mean().backward()
    grads = {n: p.grad for n, p in prepared.named_parameters() if p.grad is not None}
    return out.detach(), grads


@pytest.mark.parametrize("quantizer", [of_x86, of_xnnpack])
@pytest.mark.parametrize("name", MODELS)
def test_training_computes_what_theirs_computes(name: str, quantizer: Callable[[], Any]) -> None:
    """Outputs, gradients and the converted model, to the rounding of float32."""
    module = torch.export.export(MODELS[name]().train(), (X,), strict=True).module()
    theirs = prepare_qat_pt2e(copy.deepcopy(module), quantizer())
    ours = qompose.prepare_qat_pt2e(module, quantizer())
    (wanted, wanted_grads), (given, grads) = step(theirs), step(ours)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
    assert wanted_grads.keys() == grads.keys()
    for parameter, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[parameter], rtol=1e-3, atol=1e-5)
    move_exported_model_to_eval(theirs)
    wanted, given = convert_pt2e(theirs)(X), qompose.convert_pt2e(ours)(X)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
