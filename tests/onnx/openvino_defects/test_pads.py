# SPDX-License-Identifier: Apache-2.0
"""Padding of one dimension, which OpenVINO is to read as padding of two."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from qompose_onnx import get_onnx_quantization_config as config
from qompose_onnx.openvino_defects import settle
from torch import Tensor, nn

from tests.onnx.models import sqnr
from tests.onnx.openvino_defects.programs import X, lowered

pytest.importorskip("openvino")


class Padded(nn.Module):
    """Two convolutions with padding between them, of integers whose zero point is not 0."""

    def __init__(self, pads: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 1), nn.Conv2d(channels, 3, 1)
        self.pads = pads

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(F.pad(self.first(x), self.pads))


@pytest.mark.parametrize(
    ("pads", "channels"), [((2, 0), 4), ((0, 0, 1, 1), 4), ((0, 0, 0, 0, 1, 0), 5)], ids=str
)
def test_padding_of_one_dimension_pads_with_the_zero_point(
    pads: tuple[int, ...], channels: int
) -> None:
    torch.manual_seed(0)
    program, wanted = lowered(Padded(pads, channels), "openvino", config(bits=7))
    found = program(*X)
    assert found.shape == wanted.shape
    assert sqnr(wanted, found) > 45


CHOSEN = """<ir_version: 9, opset_import: ["" : 20]>
padded (float[2, 3, 4] x) => (float[2, 3, A] y) <
    float scale = {0.1}, uint8 zero = {7}, int64[AXES] axes = {CHOSEN}, int64[ENDS] ends = {AMOUNTS}
> {
    q = QuantizeLinear(x, scale, zero)
    d = DequantizeLinear(q, scale, zero)
    y = Pad(d, ends, , axes)
}"""


@pytest.mark.parametrize(
    ("axes", "amounts", "wanted"),
    [
        ((-1,), (2, 0), [0, 0, 2, 0, 1, 0]),
        ((1, 2), (0, 1, 0, 0), [0, 0, 1, 0, 1, 0]),
        ((2, 1), (0, 2, 0, 0), [0, 2, 0, 0, 0, 1]),
        ((1, 2), (1, 1, 0, 0), None),
    ],
    ids=str,
)
def test_axes_may_be_chosen(
    axes: tuple[int, ...], amounts: tuple[int, ...], wanted: list[int] | None
) -> None:
    """The dimension that is padded is that of the axes, and the other is added to all."""
    text = CHOSEN.replace("AXES", str(len(axes))).replace("ENDS", str(len(amounts)))
    text = text.replace("{CHOSEN}", f"{{{', '.join(map(str, axes))}}}")
    text = text.replace("{AMOUNTS}", f"{{{', '.join(map(str, amounts))}}}")
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert settle(model) is (wanted is not None)
    pad = next(node for node in model.graph if node.op_type == "Pad")
    if wanted is not None:
        ends = ir.convenience.get_const_tensor(pad.inputs[1])
        assert ends is not None and ends.numpy().tolist() == wanted
        assert pad.inputs[3] is None
        assert [node.op_type for node in model.graph][-1] == "Slice"
