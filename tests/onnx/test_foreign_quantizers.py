# SPDX-License-Identifier: Apache-2.0
"""Quantizers of torchao and ExecuTorch, which have no kernels, in programs for ONNX."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_onnx.errors import ONNXTargetError
from qompose_onnx.runtimes import sums_are_exact_here
from torch import Tensor, nn

from tests.onnx.models import sqnr

pytest.importorskip("onnxruntime")
pytest.importorskip("torchao")
pytest.importorskip("executorch")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)  # of what both packages call


class Small(nn.Module):
    """A convolution with a relu, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.classes = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.classes(F.adaptive_avg_pool2d(x, 1).flatten(1))


def batches(count: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(4, 3, 8, 8, generator=generator),) for _ in range(count)]


def converted_by(*members: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Small().eval()
    program = torch.export.export(model, batches(1)[0])
    prepared = qompose.prepare_pt2e(program, qompose.compose(*members))
    qompose.calibrate(prepared, batches(3), progress=False)
    return model, qompose.convert_pt2e(prepared)


def executorchs_xnnpack() -> Any:
    from tests.ecosystem import makers  # costs seconds

    return makers.xnnpack(is_per_channel=True)


def torchaos_x86() -> Any:
    from tests.ecosystem import makers

    return makers.inductor("x86")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (executorchs_xnnpack, {"conv2d": "QLinearConv", "linear": "QGemm"}),
        # it leaves outputs in float, which ONNX Runtime fuses with no product
        (torchaos_x86, dict.fromkeys(("conv2d", "linear"), "ONNX Runtime computes")),
    ],
    ids=["XNNPACKQuantizer", "X86InductorQuantizer"],
)
@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # of what is not fused
def test_what_it_annotates_is_left_to_the_runtime_which_says_what_it_fused(
    make: Any, said: dict[str, str]
) -> None:
    model, converted = converted_by(make(), "onnx")
    lowered = qompose.lower(converted, "onnxruntime")
    rows = {row.name: row for row in qompose.report(lowered).rows}
    for name, start in said.items():
        assert rows[name].owner.endswith("Quantizer")
        assert (rows[name].kernel or rows[name].reason).startswith(start)
        assert rows[name].state == ("int8 kernel" if start[0] == "Q" else "simulated (Q/DQ)")
    (x,) = batches(7)[0]
    with torch.no_grad():
        wanted, simulated, found = model(x), converted(x), lowered(x)
    assert sqnr(simulated, found) > (40 if sums_are_exact_here() else 25)
    assert sqnr(wanted, found) > 25


def test_dynamic_int8_is_refused_by_name() -> None:
    from tests.ecosystem import makers

    _, converted = converted_by(makers.xnnpack(is_dynamic=True), "onnx")
    with pytest.raises(ONNXTargetError, match="uint8 in"):
        qompose.lower(converted, "onnx")
