# SPDX-License-Identifier: Apache-2.0
"""Branches of `torch.cond` in files: their weights, and what refuses a file names the operator."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.backend import load_backend
from qompose_onnx import get_onnx_quantization_config as config
from qompose_onnx.errors import ONNXTargetError
from torch import Tensor, nn

from tests.onnx.models import sqnr

pytest.importorskip("onnxruntime")
X, YES, NO = torch.randn(4, 16), torch.tensor(True), torch.tensor(False)


class Branches(nn.Module):
    """Two branches; one shares its weight with what is in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, is_first: Tensor) -> Tensor:
        y = self.shared(x).relu()
        first = lambda v: self.shared(v) + v  # noqa: E731
        return torch.cond(is_first, first, lambda v: self.own(v) * v, (y,))


@pytest.mark.parametrize(
    "settings",
    [
        config(weight_only=True),
        config("uint16"),
        pytest.param(config(weight_only=True, group_size=16), marks=pytest.mark.full),
    ],
    ids=["weights alone", "16 bits", "groups"],
)
def test_weights_of_branches_are_constants_of_theirs(settings: Any) -> None:
    """ONNX Runtime refused the files: it fuses MatMulNBits with weights of the branch alone."""
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(settings)
    result = qompose.quantize(
        Branches(), (X, YES), backends=quantizer, calibration=[(X, YES), (X, NO)],
        target="onnxruntime", progress=False, strict=True,
    )  # fmt: skip
    with torch.no_grad():
        for choice in (YES, NO):
            assert sqnr(result.converted(X, choice), result.model(X, choice)) > 60


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16).bfloat16(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.bfloat16()).float())


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.outer = nn.EmbeddingBag(20, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor, starts: Tensor) -> Tensor:
        return self.outer(self.bags(ids, starts))


@pytest.mark.parametrize(
    ("model", "inputs", "runtime", "said"),
    [
        (Halves, (X,), "onnxruntime", r"inner.*bfloat16.*float32"),
        (
            Bags,
            (torch.arange(9), torch.tensor([0, 4])),
            "openvino",
            r"bags.*Reduce.*another target",
        ),
    ],
    ids=["bfloat16", "bags"],
)
def test_a_refusal_names_the_operator_and_the_reason(
    model: type[nn.Module], inputs: tuple[Tensor, ...], runtime: str, said: str
) -> None:
    pytest.importorskip(runtime)
    given: Any = {"calibration": [inputs], "progress": False}
    with pytest.raises(ONNXTargetError, match=said):
        qompose.quantize(model(), inputs, backends=["onnx"], target=runtime, **given)
