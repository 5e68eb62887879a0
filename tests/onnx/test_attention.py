# SPDX-License-Identifier: Apache-2.0
"""Attention whose queries and keys are int8: one operator of integers in OpenVINO, and right everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose.backend import load_backend
from qompose.errors import ConfigError
from qompose_onnx import get_onnx_quantization_config as config
from torch import Tensor, nn

from tests.onnx.models import sqnr


def written_out(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -1e9)
    return F.dropout(scores.float().softmax(-1), training=False) @ value


def chosen(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    scores = (query @ key.mT).mul_(0.3)
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -1e9)
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def over_queries(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    return (query @ key.mT).softmax(-2) @ value


def as_divisor(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    return (1e-3 * torch.ones(16, 16) / (query @ key.mT)).softmax(-1) @ value


FORMS: dict[str, Callable[..., Tensor]] = {
    "operator": F.scaled_dot_product_attention,
    "written": written_out,
    "chosen": chosen,
}


class Attention(nn.Module):
    """Self-attention of four heads, with a mask or without, by some form of it."""

    def __init__(self, attend: Callable[..., Tensor], *, masked: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)
        self.value, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.masked, self.attend = masked, attend

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            each(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        y = self.attend(*heads, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def quantized(
    target: str,
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention,
    *,
    masked: bool = False,
    **options: Any,
) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    batches = [(torch.randn(3, 16, 32),) for _ in range(4)]
    quantizer = qompose.RuleQuantizer(load_backend("onnx")).set_global(config(**options))
    result = qompose.quantize(
        Attention(attend, masked=masked).eval(), batches[0], backends=quantizer, calibration=batches,
        target=target, progress=False,
    )  # fmt: skip
    return result, torch.randn(3, 16, 32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_queries_and_keys_are_integers(target: str, masked: bool, form: str) -> None:
    pytest.importorskip(target)
    result, x = quantized(target, FORMS[form], masked=masked, attention=True)
    with torch.no_grad():
        assert sqnr(result.converted(x), result.model(x)) > 40
    (row,) = (
        row for row in result.report.rows if row.name in ("matmul", "scaled_dot_product_attention")
    )
    assert row.state == "int8 kernel"
    assert all(row.state == "int8 kernel" for row in result.report.rows if "linear" in row.name)


@pytest.mark.parametrize("form", FORMS)
def test_linears_of_openvino_return_them(form: str) -> None:
    pytest.importorskip("openvino")
    result, _ = quantized("openvino", FORMS[form], attention=True)
    given = [
        facts["outputPrecisions"].astype(str)
        for node in result.model.load().compiled.get_runtime_model().get_ordered_ops()
        if (facts := node.get_rt_info())["layerType"].astype(str) == "FullyConnected"
    ]
    assert sorted(given) == ["f32", "f32", "i8", "i8"]
    kinds = [node.op_type for node in result.model.model.graph]
    assert kinds.count("QuantizeLinear") == 4  # of the input, queries, keys, and what heads give


def test_they_stay_in_float_where_nobody_asks() -> None:
    pytest.importorskip("onnxruntime")
    result, _ = quantized("onnxruntime")
    (row,) = (row for row in result.report.rows if "attention" in row.name)
    assert row.state == "float"


@pytest.mark.parametrize("attend", [over_queries, as_divisor])
def test_other_products_stay_in_float(attend: Callable[..., Tensor]) -> None:
    pytest.importorskip("onnxruntime")
    result, _ = quantized("onnxruntime", attend, attention=True)
    products = [row for row in result.report.rows if row.name.startswith("matmul")]
    assert products
    assert {row.state for row in products} == {"float"}


@pytest.mark.parametrize("other", ["tensorrt", "is_dynamic", "weight_only", "is_qat"])
def test_what_it_cannot_be_combined_with_is_refused(other: str) -> None:
    with pytest.raises(ConfigError):
        config(attention=True, **{other: True})
