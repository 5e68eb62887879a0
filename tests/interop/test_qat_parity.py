# SPDX-License-Identifier: Apache-2.0
"""Training by torchao's engine and by qompose's, with the same quantizers of other packages."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao warns about itself while it is imported
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

from tests.interop.peers import THEIR_WARNINGS

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Convolutions with and without a batch norm or a bias, an addition and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.second, self.other_norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.third, self.head = nn.Conv2d(6, 4, 1, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.other_norm(self.second(x)) + x)
        return self.head(torch.relu(self.third(x)).mean((2, 3)))


def of_x86() -> Any:
    config = x86.get_default_x86_inductor_quantization_config(is_qat=True)
    return x86.X86InductorQuantizer().set_global(config)


def step(prepared: GraphModule) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of one step of training, and the gradients of the model's own parameters."""
    out = prepared(X)
    out.square().mean().backward()
    grads = {n: p.grad for n, p in prepared.named_parameters() if p.grad is not None}
    return out.detach(), grads


@pytest.mark.full  # half a minute
def test_training_computes_what_theirs_computes() -> None:
    """Outputs, gradients and the converted model, to the rounding of float32."""
    module = torch.export.export(Net().train(), (X,), strict=True).module()
    theirs = prepare_qat_pt2e(copy.deepcopy(module), of_x86())
    ours = qompose.prepare_qat_pt2e(module, of_x86())
    (wanted, wanted_grads), (given, grads) = step(theirs), step(ours)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
    assert wanted_grads.keys() == grads.keys()
    for parameter, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[parameter], rtol=1e-3, atol=1e-5)
    move_exported_model_to_eval(theirs)
    wanted, given = convert_pt2e(theirs)(X), qompose.convert_pt2e(ours)(X)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
